//! `sd video`, with a tiny model of random weights: what it writes, reads and refuses.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::run::{Ended, assert_refused, sd};

fn repository(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path);
    path.to_str().unwrap().to_owned()
}

/// The command with a model, a prompt and few steps.
fn command(more: &[&str]) -> Vec<String> {
    let model = repository("crates/sd-models/tests/fixtures/minimax_h3_pipeline");
    let encoder = repository("models/tiny-qwen-image-2.1/text_encoder");
    let tokenizer = repository("models/tiny-qwen-image-2.1/processor");
    let words = ["video", "-p", "a red circle moves right", "-m", &model];
    let parts = ["--text-encoder", &encoder, "--tokenizer", &tokenizer];
    let words = words.iter().chain(&parts).chain(&["--steps", "3"]);
    words.chain(more).map(|&word| word.to_owned()).collect()
}

fn run(folder: &Path, more: &[&str]) -> Ended {
    let ended = sd(folder, &command(more));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended
}

fn json(folder: &Path, more: &[&str]) -> Value {
    let more = [more, &["--json"]].concat();
    serde_json::from_str(&run(folder, &more).out).unwrap()
}

const SMALL: [&str; 6] = ["-W", "64", "-H", "32", "-f", "5"];

fn small<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&SMALL[..], more].concat()
}

/// A picture of one colour.
fn picture(path: &Path, width: u32, height: u32, shade: u8) {
    let pixels = [shade, 90, 200].repeat((width * height) as usize);
    let file = std::fs::File::create(path).unwrap();
    let mut encoder = png::Encoder::new(file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(&pixels).unwrap();
}

/// A WAV file of 16-bit samples of one channel.
fn wav(path: &Path, rate: u32, samples: u32) {
    let body: Vec<u8> = (0..samples)
        .flat_map(|at| (((at * 37) % 2000) as i16 - 1000).to_le_bytes())
        .collect();
    let mut bytes = b"RIFF".to_vec();
    bytes.extend((36 + body.len() as u32).to_le_bytes());
    bytes.extend(b"WAVEfmt ");
    for value in [16, 1 | 1 << 16, rate, 2 * rate, 2 | 16 << 16] {
        bytes.extend(u32::to_le_bytes(value));
    }
    bytes.extend(b"data");
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body);
    std::fs::write(path, bytes).unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Frames and bytes of samples of an AVI file, counted by its index.
fn streams(path: &PathBuf) -> (usize, usize) {
    let bytes = std::fs::read(path).unwrap();
    assert_eq!((&bytes[..4], &bytes[8..12]), (&b"RIFF"[..], &b"AVI "[..]));
    let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let movie = 20 + number(16);
    let index = movie + 8 + number(movie + 4);
    let (mut frames, mut heard) = (0, 0);
    for entry in (index + 8..bytes.len()).step_by(16) {
        match &bytes[entry..entry + 4] {
            b"00dc" => frames += 1,
            b"01wb" => heard += number(entry + 12),
            other => panic!("{other:?}"),
        }
    }
    (frames, heard)
}

/// The same clip as a file that plays, as an animation and as pictures; with what was asked for and what became of it.
#[test]
fn a_clip_is_written_as_its_name_says() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let report = json(folder.path(), &["-W", "70", "-H", "40", "-f", "4"]);
    let text = report.to_string();
    for (key, value) in [
        ("output", Value::from("output.avi")),
        ("width", 64.into()),
        ("height", 32.into()),
        ("frames", 5.into()),
        ("frame_rate", "24".into()),
        ("steps", 3.into()),
        ("calls", 2.into()),
        ("seed", 0.into()),
    ] {
        assert_eq!(report[key], value, "{key} in {text}");
    }
    let adjustments = report["adjustments"].to_string();
    for part in ["70x40 becomes 64x32", "4 frames become 5"] {
        assert!(adjustments.contains(part), "{part} in {adjustments}");
    }
    assert_eq!(
        (&report["sound"]["rate"], &report["sound"]["channels"]),
        (&32_000.into(), &2.into())
    );
    assert_eq!(report["sound_output"], Value::Null);
    // Eight latents of sound, 0.2 seconds of two channels of two bytes, beside 5/24 of a second of pictures.
    assert_eq!(streams(&at("output.avi")), (5, 8 * 800 * 4));

    let report = json(folder.path(), &small(&["-o", "clip.png", "-q"]));
    assert_eq!(report["sound_output"], "clip.wav");
    let report = json(folder.path(), &small(&["-o", "frames"]));
    assert_eq!(
        report["sound_output"],
        Path::new("frames").join("sound.wav").to_str().unwrap()
    );
    let expected = [
        "00001.png",
        "00002.png",
        "00003.png",
        "00004.png",
        "00005.png",
        "sound.wav",
    ];
    assert_eq!(names(&at("frames")), expected);
    assert_eq!(
        names(folder.path()),
        ["clip.png", "clip.wav", "frames", "output.avi"]
    );
    assert_eq!(
        std::fs::read(at("clip.wav")).unwrap(),
        std::fs::read(at("frames/sound.wav")).unwrap()
    );

    let ended = run(folder.path(), &small(&["-o", "again.avi"]));
    assert!(
        ended
            .out
            .starts_with("again.avi: 5 frames of 64x32, 3 steps, seed 0, "),
        "{ended:?}"
    );
    // What becomes of the request is said before anything is computed.
    let mut said = ended.err.as_str();
    for part in [
        "load",
        "5 frames are 0.2 seconds",
        "encode",
        "denoise 2/2",
        "decode sound 1/1",
        "decode 1/1",
        "save",
    ] {
        let at = said.find(part);
        assert!(at.is_some(), "{part} in {ended:?}");
        said = &said[at.unwrap_or(0)..];
    }
    assert_eq!(
        std::fs::read(at("output.avi")).unwrap(),
        std::fs::read(at("again.avi")).unwrap()
    );
    json(folder.path(), &small(&["-o", "again.avi", "-s", "7"]));
    assert_ne!(
        std::fs::read(at("output.avi")).unwrap(),
        std::fs::read(at("again.avi")).unwrap()
    );
}

/// The trained tiny model: what was asked for is seen and heard in the files.
#[test]
fn a_red_circle_moves_right_with_a_tone() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = "a red circle moves right on a black background with a tone of 440 hertz";
    let words = [
        "video", "-q", "-p", prompt, "-W", "128", "-H", "128", "-f", "22",
    ];
    let model = repository("models/tiny-minimax-h3");
    let more = ["--steps", "21", "-s", "1", "-o", "clip", "-m", &model];
    let words = [&words[..], &more].concat();
    let ended = sd(folder.path(), &words);
    assert_eq!((ended.code, ended.out.as_str()), (Some(0), ""), "{ended:?}");
    // The middle of what is red, from the left.
    let middle = |name: &str| {
        let file = std::fs::File::open(folder.path().join("clip").join(name)).unwrap();
        let mut reader = png::Decoder::new(std::io::BufReader::new(file))
            .read_info()
            .unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        let red = (pixels.chunks_exact(4).enumerate())
            .filter(|(_, rgba)| rgba[0] > 150 && rgba[1] < 90 && rgba[2] < 90);
        let columns: Vec<usize> = red.map(|(at, _)| at % 128).collect();
        assert!(columns.len() > 200, "{name}: {} red pixels", columns.len());
        columns.iter().sum::<usize>() as f64 / columns.len() as f64
    };
    let (first, last) = (middle("00001.png"), middle("00022.png"));
    assert!(last > first + 15.0, "from {first} to {last}");
    // Each turn from below zero to above is one of the tone's.
    let bytes = std::fs::read(folder.path().join("clip/sound.wav")).unwrap();
    let samples = bytes[44..].chunks_exact(4);
    let left: Vec<i16> = samples
        .map(|both| i16::from_le_bytes([both[0], both[1]]))
        .collect();
    let turns = left
        .windows(2)
        .filter(|pair| pair[0] < 0 && pair[1] >= 0)
        .count();
    let pitch = turns as f64 * 32_000.0 / left.len() as f64;
    assert!((pitch - 440.0).abs() < 10.0, "{pitch} hertz");
}

/// Keyframes and references change the clip, each in its way.
#[test]
fn pictures_clips_and_sounds_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    picture(&at("first.png"), 64, 32, 10);
    picture(&at("last.png"), 40, 40, 240);
    wav(&at("voice.wav"), 44_100, 20_000);
    std::fs::create_dir(at("clip")).unwrap();
    for frame in 0..16 {
        picture(&at("clip").join(format!("{frame}.png")), 64, 48, 15 * frame);
    }
    wav(&at("clip/sound.wav"), 16_000, 5_000);
    let mut clips: Vec<Vec<u8>> = Vec::new();
    for given in [
        &[][..],
        &["--first-frame", "first.png"],
        &["--last-frame", "last.png"],
        &["--first-frame", "first.png", "--last-frame", "last.png"],
        &["-r", "first.png"],
        &["-r", "first.png", "--ref-audio", "voice.wav"],
        &["--ref-video", "clip"],
        &[
            "-r",
            "first.png",
            "--ref-video",
            "clip",
            "--ref-audio",
            "voice.wav",
        ],
    ] {
        // Of clips as much is read as is made, and 13 frames at least.
        let frames = match given.contains(&"--ref-video") {
            true => "22",
            false => "5",
        };
        let size = ["-W", "64", "-H", "32", "-o", "out.avi", "-f", frames];
        let report = json(folder.path(), &[given, &size[..]].concat());
        assert_eq!(
            (&report["width"], report["frames"].to_string().as_str()),
            (&64.into(), frames),
            "{given:?}"
        );
        let clip = std::fs::read(at("out.avi")).unwrap();
        assert!(!clips.contains(&clip), "{given:?} changes nothing");
        clips.push(clip);
    }
    // As large as follows from the first picture where nothing is said.
    let report = json(
        folder.path(),
        &["-f", "5", "--first-frame", "last.png", "-o", "out.avi"],
    );
    assert_eq!(report["width"], report["height"]);
}

#[test]
fn what_cannot_be_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    picture(&at("a.png"), 64, 32, 10);
    std::fs::write(at("bad.wav"), b"RIFF, but no sound").unwrap();
    std::fs::write(at("song.mp3"), b"ID3").unwrap();
    wav(&at("empty.wav"), 16_000, 0);
    std::fs::create_dir(at("there")).unwrap();
    let ten = ["-r", "a.png"].repeat(10);
    for (more, parts) in [
        (&["-f", "0"][..], &["--frames 0"][..]),
        (&["--steps", "1"], &["--steps 1", "from 2"]),
        (&["-W", "0"], &["--width 0"]),
        (
            &["-o", "no/clip.avi"],
            &["--output", "there is no folder no"],
        ),
        (&["-o", "there"], &["there", "it is there already"]),
        (
            &["-o", "x.mp4", "--ffmpeg", "no/such"],
            &["x.mp4", "need the program ffmpeg", "no/such"],
        ),
        (&["--first-frame", "none.png"], &["none.png"]),
        (
            &["--ref-audio", "bad.wav", "-r", "a.png"],
            &["bad.wav", "cannot be read as sound"],
        ),
        (
            &[
                "--ref-audio",
                "song.mp3",
                "-r",
                "a.png",
                "--ffmpeg",
                "no/such",
            ],
            &["song.mp3", "no/such"],
        ),
        (
            &["--ref-audio", "none.wav"],
            &["--ref-audio none.wav", "--ref-image", "beside it"],
        ),
        (
            &["--ref-audio", "empty.wav", "-r", "a.png"],
            &["empty.wav", "it has no samples"],
        ),
        (&["--ref-video", "none.mp4"], &["none.mp4", "no video file"]),
        (
            &["--first-frame", "a.png", "-r", "a.png"],
            &["--first-frame", "cannot be used with"],
        ),
        (&ten, &["--ref-image (10 files)", "at most 9"]),
    ] {
        let more = match more.contains(&"-f") || more.contains(&"--steps") || more.contains(&"-W") {
            true => more.to_vec(),
            false => small(more),
        };
        let mut words = command(&[]);
        // Later options of the same name are mistakes.
        if more.contains(&"--steps") {
            words.truncate(words.len() - 2);
        }
        words.extend(more.iter().map(|&word| word.to_owned()));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        assert_refused(folder.path(), &words, parts);
    }
}

/// What the plan says a clip needs is enough.
#[test]
fn the_smallest_budget_of_a_clip_does() {
    let folder = tempfile::tempdir().unwrap();
    let words = command(&[]);
    let planned: Vec<&str> = ["plan", &words[4]]
        .into_iter()
        .chain(words[5..9].iter().map(String::as_str))
        .chain([
            "-W", "64", "-H", "32", "--frames", "5", "--tokens", "16", "--json",
        ])
        .collect();
    let ended = sd(folder.path(), &planned);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let plan: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(
        (&plan["frames"], &plan["width"], &plan["fits"]),
        (&5.into(), &64.into(), &true.into())
    );
    let names: Vec<&str> = plan["readers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|part| part["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["preparation", "sound-decoder"]);
    let smallest = plan["devices"][0]["smallest_budget"].to_string();
    json(folder.path(), &small(&["--memory-budget", &smallest]));
    // Of a clip that refers to a picture too.
    picture(&folder.path().join("a.png"), 64, 32, 10);
    let referring = [&planned[..], &["--reference", "64x32"]].concat();
    let ended = sd(folder.path(), &referring);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let plan: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(plan["references"], serde_json::json!([[128, 64]]));
    let smallest = plan["devices"][0]["smallest_budget"].to_string();
    json(
        folder.path(),
        &small(&["-r", "a.png", "--memory-budget", &smallest]),
    );
    let both = [&referring[..], &["--keyframes", "1"]].concat();
    assert_refused(folder.path(), &both, &["cannot be had together"]);
    let scaled = [&planned[..], &["--ref-size", "64"]].concat();
    assert_refused(folder.path(), &scaled, &["--ref-size 64", "model of clips"]);
    // A model of pictures has no frames.
    let tiny = repository("models/tiny-qwen-image-2.1");
    assert_refused(
        folder.path(),
        &["plan", &tiny, "--frames", "5"],
        &["--frames 5", "model of pictures"],
    );
    assert_refused(
        folder.path(),
        &["video", "-m", &tiny, "-p", "x"],
        &["model of pictures", "sd generate"],
    );
    let clips = repository("models/tiny-minimax-h3");
    // One without a transformer for references says so before it is loaded.
    let none = "no transformer for references";
    let asks = ["video", "-m", &clips, "-p", "x", "-r", "a.png"];
    assert_refused(folder.path(), &asks, &[none, "--reference-transformer"]);
    assert!(!sd(folder.path(), &asks).err.contains("load"));
    let plans = ["plan", &clips, "--reference", "64x32"];
    assert_refused(folder.path(), &plans, &[none]);
    assert_refused(
        folder.path(),
        &["generate", "-m", &clips, "-p", "x"],
        &["model of clips", "sd video"],
    );
}

/// Ctrl-C in each stage: a reason, the shells' code, and no file or folder.
#[cfg(unix)]
#[test]
fn interrupted_clips_leave_nothing() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    let model = repository("models/tiny-minimax-h3");
    let prompt = "a red circle moves right";
    for (stage, output, steps, frames) in [
        ("encode", "clip.avi", "500", "22"),
        ("denoise 1/", "clip.avi", "500", "22"),
        ("decode sound", "clip.avi", "2", "90"),
        ("decode 2/", "clip.avi", "2", "90"),
        ("decode 2/", "clip.png", "2", "90"),
        ("decode 2/", "clip", "2", "90"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_sd"))
            .args(["video", "-m", &model, "-p", prompt, "-o", output])
            .args(["-W", "64", "-H", "64", "--steps", steps, "-f", frames])
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = Vec::new();
        let mut is_asked = false;
        for line in lines.map(Result::unwrap) {
            if line.starts_with(stage) && !is_asked {
                is_asked = true;
                let id = child.id().to_string();
                let sent = Command::new("kill").args(["-INT", &id]).status();
                assert!(sent.unwrap().success());
            }
            said.push(line);
        }
        let code = child.wait().unwrap().code();
        assert_eq!(code, Some(130), "{stage} of {output}: {said:?}");
        assert_eq!(said.last().unwrap(), "error: interrupted", "{said:?}");
        assert_eq!(names(folder.path()), [""; 0], "{stage} of {output}");
    }
}

/// Videos with sound through the program itself, both ways, and our own file read by it.
#[test]
#[ignore = "needs ffmpeg"]
fn ffmpeg_writes_and_reads_clips_with_sound() {
    let folder = tempfile::tempdir().unwrap();
    let long = |more: &[&str]| {
        let size = ["-W", "64", "-H", "32", "-f", "22"];
        json(folder.path(), &[&size[..], more].concat())
    };
    for output in ["clip.mp4", "clip.mkv", "clip.webm", "clip.avi", "clip.gif"] {
        let report = long(&["-o", output]);
        assert!(report["bytes"]["file"].as_u64().unwrap() > 0, "{output}");
        long(&["--ref-video", output, "-o", "again.avi"]);
        if output != "clip.gif" {
            long(&[
                "--ref-video",
                output,
                "--ref-audio",
                output,
                "-o",
                "heard.avi",
            ]);
            let at = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
            assert_ne!(at("again.avi"), at("heard.avi"), "{output}");
        }
    }
    // Beside a clip, since a sound alone is refused before it is read.
    let words = command(&small(&[
        "--ref-video",
        "clip.avi",
        "--ref-audio",
        "clip.gif",
    ]));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    assert_refused(folder.path(), &words, &["clip.gif", "there is none in it"]);
    std::fs::write(folder.path().join("bad.mp4"), "no video").unwrap();
    let bad = command(&small(&["--ref-video", "bad.mp4"]));
    let bad: Vec<&str> = bad.iter().map(String::as_str).collect();
    assert_refused(folder.path(), &bad, &["bad.mp4", "ffmpeg: "]);
}
