//! `sd generate --ref-image` and `sd plan --reference`.

use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use crate::run::{assert_refused, sd};

fn tiny() -> String {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-qwen-image-2.1");
    tiny.to_str().unwrap().to_owned()
}

/// A red circle on a blue background, 128x128.
fn circle() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../sd-models/tests/fixtures/tiny-qwen-image-2.1-reference")
        .join("edit_128_cfg.reference.png")
}

/// Size, and the pixel at a quarter of the width and half of the height, where the circle is, and in the lower right corner.
fn seen(path: &Path) -> ((u32, u32), [u8; 3], [u8; 3]) {
    let mut reader = png::Decoder::new(BufReader::new(File::open(path).unwrap()))
        .read_info()
        .unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    let (width, height) = (reader.info().width, reader.info().height);
    let at = |x: u32, y: u32| {
        let start = ((y * width + x) * 4) as usize;
        pixels[start..start + 3].try_into().unwrap()
    };
    (
        (width, height),
        at(width * 3 / 10, height / 2),
        at(width - 3, height - 3),
    )
}

#[test]
fn what_is_asked_for_changes_and_the_rest_stays() {
    let folder = tempfile::tempdir().unwrap();
    let (tiny, circle) = (tiny(), circle());
    let mut arguments = vec!["generate", "-m", &tiny, "-p", "make the circle yellow"];
    arguments.extend(["--ref-image", circle.to_str().unwrap(), "-s", "2", "--json"]);
    let ended = sd(folder.path(), &arguments);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let report: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(report["references"], serde_json::json!([[128, 128]]));
    assert!(report["seconds"]["read_references"].as_f64().unwrap() > 0.0);
    let (size, middle, corner) = seen(&folder.path().join("output.png"));
    assert_eq!(size, (128, 128));
    assert!(
        middle[0] > 180 && middle[1] > 150 && middle[2] < 120,
        "{middle:?}"
    );
    assert!(corner[2] > 150 && corner[0] < 100, "{corner:?}");
    let (_, before, _) = seen(&circle);
    assert!(before[0] > 180 && before[1] < 100, "{before:?}");

    // Smaller references, and as large a picture as was asked for.
    let smaller = [
        &arguments[..],
        &["--ref-size", "64", "-W", "96", "-H", "64"],
    ]
    .concat();
    let ended = sd(folder.path(), &[&smaller[..], &["--steps", "1"]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let report: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(report["references"], serde_json::json!([[64, 64]]));
    assert_eq!(seen(&folder.path().join("output.png")).0, (96, 64));
}

#[test]
fn pictures_that_cannot_be_read_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("text.png"), "no picture").unwrap();
    fs::copy(circle(), folder.path().join("circle.png")).unwrap();
    let tiny = tiny();
    let many = ["-r", "circle.png"].repeat(5);
    let cases: [(&[&str], &[&str]); 6] = [
        (
            &["-r", "none.png"],
            &["none.png", "cannot be read as a picture"],
        ),
        (&["-r", "text.png"], &["text.png", "no PNG, JPEG or WebP"]),
        (&["-r", "."], &["cannot be read as a picture"]),
        (&many, &["--ref-image", "5 pictures", "at most 4"]),
        (
            &["-r", "circle.png", "--ref-size", "31"],
            &["--ref-size 31", "from 32 to 2048"],
        ),
        (
            &["-r", "circle.png", "--ref-size", "2048"],
            &["reference picture 1, 128x128", "2048x2048"],
        ),
    ];
    for (arguments, parts) in cases {
        let all = [&["generate", "-m", &tiny, "-p", "x"], arguments].concat();
        assert_refused(folder.path(), &all, parts);
    }
    for (size, part) in [
        ("128", "1200x800"),
        ("0x4", "no pixels"),
        ("9000x3", "200 times"),
    ] {
        let arguments = ["plan", &tiny, "--reference", size];
        assert_refused(folder.path(), &arguments, &[part]);
    }
}

#[test]
fn the_planned_budget_edits_and_a_quarter_of_it_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let (tiny, circle) = (tiny(), circle());
    let plan = |references: &[&str]| -> serde_json::Value {
        let ended = sd(
            folder.path(),
            &[&["plan", &tiny, "--tokens", "24", "--json"], references].concat(),
        );
        assert_eq!(ended.code, Some(0), "{ended:?}");
        serde_json::from_str(&ended.out).unwrap()
    };
    let (with, without) = (plan(&["--reference", "128x128"]), plan(&[]));
    let kept = |plan: &serde_json::Value| plan["prefix_cache"]["bytes"].as_u64().unwrap();
    // Keys and values of 64 latents of 192 channels in 7 blocks, and of what the template says of a picture.
    let more = kept(&with) - kept(&without);
    assert!((64 * 10_752..96 * 10_752).contains(&more), "{more}");
    let names: Vec<_> = with["readers"].as_array().unwrap().iter().collect();
    assert_eq!(names.len(), 2);
    assert_eq!(with["references"], serde_json::json!([[128, 128]]));

    let smallest = with["devices"][0]["smallest_budget"].as_u64().unwrap();
    let edit = |budget: u64| {
        let budget = budget.to_string();
        let mut arguments = vec!["generate", "-m", &tiny, "-p", "make the circle yellow"];
        arguments.extend(["-r", circle.to_str().unwrap(), "--steps", "2", "-g", "1"]);
        arguments.extend(["--memory-budget", &budget]);
        sd(folder.path(), &arguments)
    };
    let made = edit(smallest);
    assert_eq!(made.code, Some(0), "{made:?}");
    let tight = fs::read(folder.path().join("output.png")).unwrap();
    let refused = edit(smallest / 4);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.err.contains("would do"), "{}", refused.err);
    let made = edit(1 << 30);
    assert_eq!(made.code, Some(0), "{made:?}");
    assert_eq!(fs::read(folder.path().join("output.png")).unwrap(), tight);
}
