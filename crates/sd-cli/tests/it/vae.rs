//! `sd vae`: pictures and folders of frames to latents and back.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::run::{assert_refused, sd};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn tiny() -> String {
    let folder = repository().join("models/tiny-qwen-image-2.1/vae");
    folder.to_str().unwrap().to_owned()
}

fn wan() -> String {
    let folder = repository().join("crates/sd-models/tests/fixtures/wan21_vae");
    folder.to_str().unwrap().to_owned()
}

/// A blue ground with a red square that lies further right by `moved`.
fn picture(path: &Path, width: u32, height: u32, moved: u32) {
    let mut encoder = png::Encoder::new(File::create(path).unwrap(), width, height);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header().unwrap();
    let mut bytes = Vec::new();
    for (y, x) in (0..height).flat_map(|y| (0..width).map(move |x| (y, x))) {
        let x = x.wrapping_sub(moved);
        let inside =
            (width / 4..width * 3 / 4).contains(&x) && (height / 4..height * 3 / 4).contains(&y);
        bytes.extend(if inside { [220, 40, 40] } else { [40, 70, 200] });
    }
    writer.write_image_data(&bytes).unwrap();
    writer.finish().unwrap();
}

/// Width, height and the pixels red, green, blue, alpha.
fn read(path: &Path) -> (u32, u32, Vec<u8>) {
    let mut reader = png::Decoder::new(std::io::BufReader::new(File::open(path).unwrap()))
        .read_info()
        .unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let frame = reader.next_frame(&mut pixels).unwrap();
    (frame.width, frame.height, pixels)
}

#[test]
fn a_picture_goes_in_and_comes_out() {
    let folder = tempfile::tempdir().unwrap();
    picture(&folder.path().join("in.png"), 128, 96, 0);
    let vae = tiny();
    for tile in [None, Some("64"), Some("auto")] {
        let mut encode = vec![
            "vae",
            "encode",
            "in.png",
            "--vae",
            &vae,
            "-o",
            "z.safetensors",
        ];
        let mut decode = vec![
            "vae",
            "decode",
            "z.safetensors",
            "--vae",
            &vae,
            "-o",
            "out.png",
        ];
        for arguments in [&mut encode, &mut decode] {
            arguments.extend(tile.map(|tile| ["--tile", tile]).into_iter().flatten());
            let ended = sd(folder.path(), arguments);
            assert_eq!(ended.code, Some(0), "{ended:?}");
        }
        let (width, height, pixels) = read(&folder.path().join("out.png"));
        assert_eq!((width, height), (128, 96));
        for (x, y, should) in [(64, 48, [220, 40, 40]), (8, 8, [40, 70, 200])] {
            let at = (y * 128 + x) * 4;
            let near = |(is, should): (&u8, u8)| is.abs_diff(should) < 24;
            let is = &pixels[at..at + 4];
            assert!(is.iter().zip(should).all(near), "{is:?}, not {should:?}");
            assert!(is[3] > 240, "{is:?}");
        }
    }
}

#[test]
fn a_folder_of_frames_goes_in_and_comes_out() {
    let folder = tempfile::tempdir().unwrap();
    let frames = folder.path().join("frames");
    std::fs::create_dir(&frames).unwrap();
    for index in 0..7 {
        picture(&frames.join(format!("{index}.png")), 24, 16, index);
    }
    std::fs::write(frames.join("notes.txt"), "no picture").unwrap();
    let vae = wan();
    let encode = [
        "vae",
        "encode",
        "frames",
        "--vae",
        &vae,
        "-o",
        "z.safetensors",
    ];
    let ended = sd(folder.path(), &encode);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(
        ended.err.contains("the last 2 of 7 frames are left out"),
        "{ended:?}"
    );
    let bytes = std::fs::read(folder.path().join("z.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("latents").unwrap().shape(), [2, 4, 2, 3]);

    let decode = ["vae", "decode", "z.safetensors", "--vae", &vae, "-o", "out"];
    let ended = sd(folder.path(), &decode);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let mut names: Vec<_> = std::fs::read_dir(folder.path().join("out"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(
        names,
        [1, 2, 3, 4, 5].map(|index| format!("{index:05}.png"))
    );
    let (width, height, pixels) = read(&folder.path().join("out/00005.png"));
    assert_eq!((width, height), (24, 16));
    assert!(
        pixels
            .as_chunks::<4>()
            .0
            .iter()
            .all(|pixel| pixel[3] == 255)
    );
    assert_refused(folder.path(), &decode, &["out", "it is there already"]);
    let one = [
        "vae",
        "decode",
        "z.safetensors",
        "--vae",
        &vae,
        "-o",
        "one.png",
    ];
    assert_refused(folder.path(), &one, &["5 frames need a folder"]);
}

#[test]
fn what_cannot_be_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    picture(&folder.path().join("odd.png"), 24, 20, 0);
    picture(&folder.path().join("even.png"), 24, 16, 0);
    std::fs::create_dir(folder.path().join("none")).unwrap();
    std::fs::create_dir(folder.path().join("mixed")).unwrap();
    for (name, width) in [
        ("1.png", 16),
        ("2.png", 24),
        ("3.png", 16),
        ("4.png", 16),
        ("5.png", 16),
    ] {
        picture(&folder.path().join("mixed").join(name), width, 16, 0);
    }
    std::fs::write(folder.path().join("bad.png"), b"no picture").unwrap();
    let (wan, tiny) = (wan(), tiny());
    let encode = |input: &'static str, vae: &'static str| {
        vec!["vae", "encode", input, "--vae", vae, "-o", "z.safetensors"]
    };
    let (wan, tiny): (&str, &str) = (wan.leak(), tiny.leak());
    for (arguments, parts) in [
        (
            encode("odd.png", wan),
            vec!["24x20", "multiples of 8 pixels"],
        ),
        (
            encode("even.png", tiny),
            vec!["24x16", "multiples of 16 pixels"],
        ),
        (encode("none", wan), vec!["no PNG files"]),
        (encode("mixed", wan), vec!["24 columns instead of 16"]),
        (
            encode("mixed", tiny),
            vec!["5 frames for a VAE of pictures instead of 1"],
        ),
        (
            encode("bad.png", wan),
            vec!["bad.png", "cannot be read as a picture"],
        ),
        (encode("missing.png", wan), vec!["missing.png"]),
        (encode("even.png", "nowhere"), vec!["nowhere"]),
        (
            vec!["vae", "decode", "bad.png", "--vae", wan, "-o", "x.png"],
            vec!["bad.png", "holds no latents"],
        ),
        (
            vec![
                "vae", "encode", "even.png", "--vae", wan, "-o", "z", "--tile", "8",
            ],
            vec!["--tile 8", "at least 16 pixels"],
        ),
    ] {
        assert_refused(folder.path(), &arguments, &parts);
    }
}
