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

/// The VAE of MiniMax H3: of 8 frames a clip of 5 stays, in tiles and not.
#[test]
fn frames_go_through_the_vae_of_minimax_h3() {
    let folder = tempfile::tempdir().unwrap();
    let frames = folder.path().join("frames");
    std::fs::create_dir(&frames).unwrap();
    for index in 0..8 {
        picture(&frames.join(format!("{index}.png")), 24, 16, index);
    }
    let vae = repository().join("crates/sd-models/tests/fixtures/minimax_h3_vae_long");
    let vae = vae.to_str().unwrap();
    let (latents, out) = ("z.safetensors", "out");
    let encode = ["vae", "encode", "frames", "--vae", vae, "-o", latents];
    let ended = sd(folder.path(), &encode);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let told = "of 8 frames the latents hold 5";
    assert!(ended.err.contains(told), "{ended:?}");
    let bytes = std::fs::read(folder.path().join(latents)).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("latents").unwrap().shape(), [2, 6, 4, 6]);

    for (tile, told) in [("auto", "at once"), ("12", "in squares of 12 pixels")] {
        let decode = [
            "vae", "decode", latents, "--vae", vae, "-o", out, "--tile", tile,
        ];
        let ended = sd(folder.path(), &decode);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.out.contains(told), "{ended:?}");
        let names = std::fs::read_dir(folder.path().join(out)).unwrap();
        assert_eq!(names.count(), 5);
        let (width, height, _) = read(&folder.path().join("out/00005.png"));
        assert_eq!((width, height), (24, 16));
        std::fs::remove_dir_all(folder.path().join(out)).unwrap();
    }
    let decode = ["vae", "decode", latents, "--vae", vae, "-o", out];
    let with = |more: [&'static str; 2]| [&decode[..], &more[..]].concat();
    assert_refused(
        folder.path(),
        &with(["--circular", "x"]),
        &["circular", "cannot join"],
    );
    assert_refused(
        folder.path(),
        &with(["--tile", "6"]),
        &["tiles of 6 pixels"],
    );
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

    // As one file: an animation, which is a clip again, at the rate that was asked for.
    let frames = |path: &str| {
        let file = File::open(folder.path().join(path)).unwrap();
        let reader = png::Decoder::new(std::io::BufReader::new(file)).read_info();
        let reader = reader.unwrap();
        let delay = reader.info().frame_control().unwrap();
        let count = reader.info().animation_control().unwrap().num_frames;
        (count, (delay.delay_num, delay.delay_den))
    };
    let one = [
        "vae",
        "decode",
        "z.safetensors",
        "--vae",
        &vae,
        "-o",
        "one.png",
    ];
    let ended = sd(
        folder.path(),
        &[&one[..], &["--frame-rate", "23.976"]].concat(),
    );
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(frames("one.png"), (5, (125, 2997)));
    let again = [
        "vae",
        "encode",
        "one.png",
        "--vae",
        &vae,
        "-o",
        "again.safetensors",
    ];
    let report = json(folder.path(), &again);
    assert_eq!(
        (&report["frames"], &report["width"]),
        (&5.into(), &24.into())
    );
    assert_eq!(report["frame_rate"], "2997/125");
    assert!(report["tile"].is_null() && report["peak_bytes"].as_u64().unwrap() > 1000);
    // The rate stays with the latents.
    let last = [
        "vae",
        "decode",
        "again.safetensors",
        "--vae",
        &vae,
        "-o",
        "last.apng",
    ];
    assert_eq!(json(folder.path(), &last)["frames"], 5);
    assert_eq!(frames("last.apng"), (5, (125, 2997)));
    let as_folder = [
        "vae",
        "encode",
        "out",
        "--vae",
        &vae,
        "-o",
        "folder.safetensors",
    ];
    assert_eq!(json(folder.path(), &as_folder)["frames"], 5);
    assert_eq!(
        latents(&folder.path().join("folder.safetensors")),
        latents(&folder.path().join("again.safetensors"))
    );
}

/// The report of a run that ends well.
#[track_caller]
fn json(folder: &Path, arguments: &[&str]) -> serde_json::Value {
    let ended = sd(folder, &[arguments, &["--json"]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    serde_json::from_str(&ended.out).unwrap()
}

fn latents(path: &Path) -> Vec<u8> {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.tensor("latents").unwrap().data().to_vec()
}

/// What memory is granted decides in how large squares frames are worked on, and the report says so.
#[test]
fn squares_are_as_large_as_memory_allows() {
    let folder = tempfile::tempdir().unwrap();
    picture(&folder.path().join("in.png"), 192, 128, 0);
    let vae = wan();
    let encode = [
        "vae",
        "encode",
        "in.png",
        "--vae",
        &vae,
        "-o",
        "z.safetensors",
        "--threads",
        "2",
    ];
    let decode = [
        "vae",
        "decode",
        "z.safetensors",
        "--vae",
        &vae,
        "-o",
        "out.png",
        "--threads",
        "2",
    ];
    for command in [encode, decode] {
        let whole = json(folder.path(), &command);
        assert!(whole["tile"].is_null(), "{whole}");
        let less = (whole["peak_bytes"].as_u64().unwrap() - 1).to_string();
        let budget = ["--memory-budget", less.as_str()];
        let cut = json(folder.path(), &[&command[..], &budget].concat());
        assert!(cut["tile"].as_u64().unwrap() < 192, "{cut}");
        assert!(
            cut["peak_bytes"].as_u64() < whole["peak_bytes"].as_u64(),
            "{cut}"
        );
        let said = sd(folder.path(), &[&command[..], &budget].concat());
        assert!(said.out.contains("in squares of "), "{said:?}");
        // What was asked for is done, or refused.
        let asked = json(folder.path(), &[&command[..], &["--tile", "64"]].concat());
        assert_eq!(asked["tile"], 64);
        let insists = [&command[..], &budget, &["--tile", "whole"]].concat();
        assert_refused(folder.path(), &insists, &["memory"]);
        let nothing = [&command[..], &["--memory-budget", "1000"]].concat();
        assert_refused(folder.path(), &nothing, &["a budget of ", " would do"]);
    }
}

/// Sides join where that is asked for. What comes of it is tested in the library.
#[test]
fn sides_may_join() {
    let folder = tempfile::tempdir().unwrap();
    picture(&folder.path().join("in.png"), 32, 16, 0);
    let vae = wan();
    let encode = ["vae", "encode", "in.png", "--vae", &vae, "-o"];
    let joined = ["joined", "--circular", "x"];
    for arguments in [&["plain"][..], &joined] {
        json(folder.path(), &[&encode[..], arguments].concat());
    }
    let path = |name: &str| folder.path().join(name);
    assert_ne!(latents(&path("plain")), latents(&path("joined")));
}

/// A program that behaves as ffmpeg does where it is called here, and writes down what it was told.
#[cfg(unix)]
fn stand_in(folder: &Path, script: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path = folder.join("stand-in");
    let text = format!("#!/bin/sh\necho \"$*\" >> told\nfor last; do :; done\n{script}\n");
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

/// How videos go through pipes, and what happens where ffmpeg is not there, fails, or says something else.
#[cfg(unix)]
#[test]
fn videos_go_through_pipes() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("in.mp4"), "a video").unwrap();
    std::fs::write(folder.path().join("told"), "").unwrap();
    let vae = wan();
    let header = "*yuv4mpegpipe*) printf 'YUV4MPEG2 W16 H8 F30000:1001 Ip\\nFRAME\\n';;";
    let well = format!(
        "case \"$*\" in {header} *rawvideo\\ pipe:1) head -c 3584 /dev/zero;; *) cat > \"${{last#file:}}\";; esac"
    );
    let program = stand_in(folder.path(), &well);
    let encode = [
        "vae", "encode", "in.mp4", "--vae", &vae, "-o", "z", "--ffmpeg",
    ];
    let decode = [
        "vae", "decode", "z", "--vae", &vae, "-o", "out.mp4", "--ffmpeg",
    ];
    let with = |command: &[&'_ str; 8], program: &str| -> Vec<String> {
        let words = command.iter().chain([&program]);
        words.map(|&word| word.to_owned()).collect()
    };
    fn words(arguments: &[String]) -> Vec<&str> {
        arguments.iter().map(String::as_str).collect()
    }
    // Seven frames, of which two make no whole chunk.
    let report = json(folder.path(), &words(&with(&encode, &program)));
    assert_eq!(
        (&report["frames"], &report["height"]),
        (&5.into(), &8.into())
    );
    assert_eq!(report["frame_rate"], "30000/1001");
    let ended = sd(folder.path(), &with(&encode, &program));
    assert!(
        ended.err.contains("the last 2 of 7 frames are left out"),
        "{ended:?}"
    );
    json(folder.path(), &words(&with(&decode, &program)));
    let written = std::fs::read(folder.path().join("out.mp4")).unwrap();
    assert_eq!(written.len(), 5 * 16 * 8 * 4);
    let told = std::fs::read_to_string(folder.path().join("told")).unwrap();
    assert!(told.contains("-i file:in.mp4 "), "{told}");
    assert!(
        told.contains("-pix_fmt rgba -s 16x8 -r 30000/1001 -i pipe:0 "),
        "{told}"
    );

    let nowhere = "no/such/program";
    for command in [&encode, &decode] {
        let parts = [".mp4", "need the program ffmpeg", nowhere, "--ffmpeg"];
        assert_refused(folder.path(), &words(&with(command, nowhere)), &parts);
    }
    for (script, of_encode, of_decode) in [
        (
            "echo Moov atom >&2; exit 1",
            "ffmpeg: Moov atom",
            "ffmpeg: Moov atom",
        ),
        (
            "exit 3",
            "ffmpeg: it ended with exit status: 3",
            "it ended with exit status: 3",
        ),
        ("exec cat", "it does not say what the video is", ""),
        (
            "case \"$*\" in *yuv4mpegpipe*) printf 'YUV4MPEG2 W16 H8 F25:1\\n';; *pipe:1) echo short;; *) exec false;; esac",
            "ends within a picture",
            "it ended with exit status: 1",
        ),
    ] {
        let program = stand_in(folder.path(), script);
        assert_refused(
            folder.path(),
            &words(&with(&encode, &program)),
            &["in.mp4", of_encode],
        );
        if !of_decode.is_empty() {
            assert_refused(
                folder.path(),
                &words(&with(&decode, &program)),
                &["out.mp4", of_decode],
            );
        }
    }
    let missing = ["vae", "encode", "none.mp4", "--vae", &vae, "-o", "z"];
    assert_refused(folder.path(), &missing, &["none.mp4", "no video file"]);
}

/// The same with the program itself.
#[test]
#[ignore = "needs ffmpeg"]
fn ffmpeg_reads_what_it_wrote() {
    let folder = tempfile::tempdir().unwrap();
    let frames = folder.path().join("frames");
    std::fs::create_dir(&frames).unwrap();
    for index in 0..5 {
        picture(&frames.join(format!("{index}.png")), 64, 48, 4 * index);
    }
    let vae = wan();
    let encode = [
        "vae",
        "encode",
        "frames",
        "--vae",
        &vae,
        "-o",
        "z",
        "--frame-rate",
        "24000/1001",
    ];
    json(folder.path(), &encode);
    for video in [
        "clip.mp4",
        "clip.mkv",
        "clip.mov",
        "clip.avi",
        "-odd name.mp4",
    ] {
        let output = format!("--output={video}");
        let decode = ["vae", "decode", "z", "--vae", &vae, output.as_str()];
        assert_eq!(json(folder.path(), &decode)["frames"], 5);
        let again = ["vae", "encode", "--vae", &vae, "-o", "again", "--", video];
        let again = [&["vae", "encode", "--json"], &again[2..]].concat();
        let ended = sd(folder.path(), &again);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let report: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
        assert_eq!(
            (&report["frames"], &report["width"], &report["height"]),
            (&5.into(), &64.into(), &48.into())
        );
        assert_eq!(report["frame_rate"], "24000/1001", "{video}");
    }
    std::fs::write(folder.path().join("bad.mp4"), "no video").unwrap();
    let bad = ["vae", "encode", "bad.mp4", "--vae", &vae, "-o", "x"];
    assert_refused(folder.path(), &bad, &["bad.mp4", "ffmpeg: "]);
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
