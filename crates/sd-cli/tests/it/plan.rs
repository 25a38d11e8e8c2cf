//! `sd plan`: its word is kept by `sd generate`.

use std::path::Path;

use crate::run::{assert_refused, sd};

#[test]
fn the_smallest_budget_does_and_one_byte_less_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-qwen-image-2.1");
    let tiny = tiny.to_str().unwrap();
    // The prompt below has 16 tokens, its negative, the empty one, fewer.
    let planned = sd(
        folder.path(),
        &["plan", tiny, "-W", "96", "--tokens", "16", "--json"],
    );
    assert_eq!(planned.code, Some(0), "{planned:?}");
    let plan: serde_json::Value = serde_json::from_str(&planned.out).unwrap();
    assert_eq!(
        (
            plan["width"].as_u64(),
            plan["height"].as_u64(),
            plan["fits"].as_bool()
        ),
        (Some(96), Some(96), Some(true))
    );
    let smallest = plan["devices"][0]["smallest_budget"].as_u64().unwrap();
    let peak = plan["devices"][0]["peak"].as_u64().unwrap();
    // With everything loaded at once it takes more than with parts that come and go.
    assert!(smallest < peak, "{smallest} {peak}");

    let generate = |budget: u64| {
        let budget = budget.to_string();
        let prompt = "a large red circle on a blue background";
        let arguments = [
            "generate",
            "-p",
            prompt,
            "-m",
            tiny,
            "-W",
            "96",
            "--steps",
            "2",
            "-g",
            "2",
            "--memory-budget",
            &budget,
        ];
        sd(folder.path(), &arguments)
    };
    let made = generate(smallest);
    assert_eq!(made.code, Some(0), "{made:?}");
    let roomy = std::fs::read(folder.path().join("output.png")).unwrap();
    let refused = generate(smallest - 1);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.err.contains("would do"), "{}", refused.err);

    // A budget changes speed, never the picture.
    let made = generate(1 << 30);
    assert_eq!(made.code, Some(0), "{made:?}");
    assert_eq!(
        std::fs::read(folder.path().join("output.png")).unwrap(),
        roomy
    );
}

#[test]
fn a_plan_reads_like_a_plan() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-qwen-image-2.1");
    let tiny = tiny.to_str().unwrap();
    let planned = sd(
        folder.path(),
        &["plan", tiny, "--memory-budget", "cpu=4MiB"],
    );
    assert_eq!(planned.code, Some(0), "{planned:?}");
    for part in [
        "a picture of 128x128",
        "diffusion      CPU        disk",
        "text-encoder",
        "to keep it",
        "CPU: holds up to",
        "does not fit: 4.00 MiB may be used",
    ] {
        assert!(planned.out.contains(part), "`{part}` in {}", planned.out);
    }
    assert_refused(
        folder.path(),
        &["plan", tiny, "-W", "5"],
        &["5x5", "multiples of 32"],
    );
    assert_refused(folder.path(), &["plan", "nowhere"], &["nowhere"]);
}
