//! `sd generate`: a picture, its texts, its report, and everything that is refused.

use std::fs;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use crate::run::{assert_refused, sd};

/// The tiny checkpoint of the repository.
pub(crate) fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-qwen-image-2.1")
}

/// A copy of the tiny checkpoint that a test may damage.
pub(crate) fn copy_of_tiny(into: &Path) -> PathBuf {
    fn copy(from: &Path, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            let target = to.join(entry.file_name());
            if entry.path().is_dir() {
                copy(&entry.path(), &target);
            } else {
                fs::copy(entry.path(), target).unwrap();
            }
        }
    }
    let folder = into.join("model");
    copy(&tiny(), &folder);
    folder
}

pub(crate) struct Picture {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) pixels: Vec<u8>,
    pub(crate) texts: Vec<(String, String)>,
}

pub(crate) fn picture(path: &Path) -> Picture {
    let mut reader = png::Decoder::new(BufReader::new(fs::File::open(path).unwrap()))
        .read_info()
        .unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    let info = reader.info();
    let texts = info
        .utf8_text
        .iter()
        .map(|chunk| (chunk.keyword.clone(), chunk.get_text().unwrap()))
        .collect();
    Picture {
        width: info.width,
        height: info.height,
        pixels,
        texts,
    }
}

/// Red, green, blue and alpha in the middle of a picture and in its upper left corner.
fn middle_and_corner(picture: &Picture) -> ([u8; 4], [u8; 4]) {
    let at = |x: u32, y: u32| {
        let start = ((y * picture.width + x) * 4) as usize;
        picture.pixels[start..start + 4].try_into().unwrap()
    };
    (at(picture.width / 2, picture.height / 2), at(2, 2))
}

#[test]
fn the_picture_shows_what_the_prompt_says() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = tiny();
    let arguments = [
        "generate",
        "--prompt",
        "a large red circle on a blue background",
        "--model",
        tiny.to_str().unwrap(),
    ];
    let ended = sd(folder.path(), &arguments);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(
        ended
            .out
            .starts_with("output.png: 128x128, 20 steps, seed 0"),
        "{}",
        ended.out
    );
    assert!(ended.err.contains("denoise 20/20"), "{}", ended.err);

    let picture = picture(&folder.path().join("output.png"));
    assert_eq!((picture.width, picture.height), (128, 128));
    let ([r, g, b, a], [cr, cg, cb, ca]) = middle_and_corner(&picture);
    assert!(
        r > 150 && g < 100 && b < 100 && a > 250,
        "middle {r} {g} {b} {a}"
    );
    assert!(
        cb > 150 && cr < 100 && cg < 150 && ca > 250,
        "corner {cr} {cg} {cb} {ca}"
    );

    let (key, text) = &picture.texts[0];
    assert_eq!(key, "parameters");
    assert!(
        text.starts_with("a large red circle on a blue background\n"),
        "{text}"
    );
    assert!(
        text.contains("Steps: 20, Sampler: Euler, CFG scale: 3, Seed: 0, Size: 128x128"),
        "{text}"
    );
    assert_eq!(picture.texts[1].0, "Software");
}

#[test]
fn the_report_is_json_and_the_same_seed_gives_the_same_picture() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = tiny();
    let run = |output: &str, seed: &str, options: &[&str]| {
        let mut arguments = vec![
            "generate",
            "-p",
            "a green star ⭐, transparent background",
            "-n",
            "blue",
            "-m",
            tiny.to_str().unwrap(),
            "-W",
            "70",
            "-H",
            "100",
            "--steps",
            "2",
            "-g",
            "2",
            "-s",
            seed,
            "-t",
            "1",
            "-o",
            output,
            "--json",
        ];
        arguments.extend(options);
        let ended = sd(folder.path(), &arguments);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let report: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
        (
            report,
            fs::read(folder.path().join(output)).unwrap(),
            ended.err,
        )
    };
    let (report, first, err) = run("one.png", "7", &[]);
    assert_eq!(
        (report["width"].as_u64(), report["height"].as_u64()),
        (Some(64), Some(96))
    );
    assert_eq!(
        (report["steps"].as_u64(), report["threads"].as_u64()),
        (Some(2), Some(1))
    );
    assert!(report["bytes"]["weights"].as_u64().unwrap() > 5_000_000);
    assert!(report["seconds"]["denoise"].as_f64().unwrap() > 0.0);
    if let Some(peak) = report["bytes"]["peak_resident"].as_u64() {
        // Twice the weights, what plans compute in, and 48 MiB for the program itself, its tokenizer and the 16 MiB that
        // ggml's convolution works in.
        let bytes = |key: &str| report["bytes"][key].as_u64().unwrap();
        let limit = 2 * bytes("weights") + bytes("compute") + (48 << 20);
        assert!(peak <= limit, "{peak} bytes at the peak, {limit} allowed");
    }
    assert!(err.contains("70x100 is rounded down to 64x96"), "{err}");
    assert_eq!(run("two.png", "7", &[]).1, first);
    assert_ne!(run("three.png", "8", &[]).1, first);
    // What is kept of the prompt is less in another type, and may be nothing.
    let kept = |report: &serde_json::Value| report["bytes"]["prefix_cache"].as_u64().unwrap();
    let args = "qwen_image_2_1_prefix_cache_type=q8_0";
    let (blocks, ..) = run("four.png", "7", &["--model-args", args]);
    assert!(kept(&blocks) > 0 && kept(&blocks) * 3 < kept(&report));
    let (none, ..) = run(
        "five.png",
        "7",
        &["--model-args", "qwen_image_2_1_prefix_cache=false"],
    );
    assert_eq!(kept(&none), 0);
}

#[test]
fn numbers_that_make_no_picture_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = tiny();
    let tiny = tiny.to_str().unwrap();
    let cases: &[(&[&str], &[&str])] = &[
        (&["--width", "0"], &["--width 0", "multiples of 32"]),
        (&["--height", "31"], &["--height 31", "multiples of 32"]),
        (&["--width", "-64"], &["--width", "-64"]),
        (&["--width", "many"], &["--width", "many"]),
        (
            &["--width", "1000000000"],
            &["1000000000x1000000000", "32 to 16384"],
        ),
        (&["--width", "99999999999999999999999"], &["--width"]),
        (&["--steps", "0"], &["--steps 0"]),
        (&["--circular", "z"], &["--circular", "x, y, xy"]),
        (&["--vae-tile", "63"], &["--vae-tile 63", "64"]),
        (&["--steps", "1001"], &["1001 steps", "1000"]),
        (&["--steps", "-1"], &["--steps"]),
        (&["--guidance", "0"], &["--guidance 0"]),
        (&["--guidance", "NaN"], &["--guidance NaN"]),
        (&["--guidance", "-2"], &["--guidance -2"]),
        (&["--threads", "0"], &["--threads <N>", "at least 1 thread"]),
        (&["--seed", "-1"], &["--seed"]),
        (
            &["--device", "quantum0"],
            &["no device fits `quantum0`", "CPU"],
        ),
        (
            &["--output", "no/such/folder/a.png"],
            &["--output no/such/folder/a.png", "no folder no/such/folder"],
        ),
        (
            &["--output", "picture.jpg"],
            &["--output picture.jpg", ".png"],
        ),
        (
            &["--memory-budget", "lots"],
            &["--memory-budget", "lots", "8GiB"],
        ),
        (
            &["--memory-budget", "1MiB"],
            &["out of memory on CPU", "budget of 1.00 MiB", "would do"],
        ),
        (
            &["--memory-budget", "5MiB"],
            &["out of memory on CPU", "budget of 5.00 MiB", "would do"],
        ),
        (
            &["--model-args", "qwen_image_2_1_prefix_cache=maybe"],
            &[
                "qwen_image_2_1_prefix_cache=maybe",
                "qwen_image_2_1_prefix_cache=true|false",
                "qwen_image_2_1_prefix_cache_type=f32|f16|q8_0",
            ],
        ),
        (
            &["--model-args", "chroma_use_dit_mask=true"],
            &["chroma_use_dit_mask", "qwen_image_2_1_prefix_cache"],
        ),
        (&["--nonsense"], &["--nonsense"]),
    ];
    for (arguments, parts) in cases {
        let all: Vec<&str> = ["generate", "--prompt", "a circle", "--model", tiny]
            .iter()
            .chain(*arguments)
            .copied()
            .collect();
        assert_refused(folder.path(), &all, parts);
    }
    assert_refused(folder.path(), &["generate"], &["--prompt"]);
    assert_refused(folder.path(), &[], &["Usage"]);
}

#[test]
fn sides_join_and_tiles_are_decoded_apart() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = tiny();
    let run = |more: &[&str], output: &str| {
        let mut arguments = vec![
            "generate",
            "-p",
            "a red circle",
            "-m",
            tiny.to_str().unwrap(),
        ];
        arguments.extend(["-W", "96", "-H", "64", "--steps", "2", "-g", "1", "--json"]);
        arguments.extend(["-o", output]);
        arguments.extend(more);
        let ended = sd(folder.path(), &arguments);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let report: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
        (report, picture(&folder.path().join(output)))
    };
    let (report, plain) = run(&[], "plain.png");
    assert_eq!(report["circular"], "none");
    assert!(report["vae_tile"].is_null());
    let (report, joined) = run(&["--circular", "xy"], "joined.png");
    assert_eq!(report["circular"], "xy");
    let (report, tiled) = run(&["--circular", "xy", "--vae-tile", "70"], "tiled.png");
    assert_eq!(report["vae_tile"], 64);
    let (_, whole) = run(&["--circular", "xy", "--vae-tile", "128"], "whole.png");
    assert!(plain.pixels != joined.pixels && joined.pixels != tiled.pixels);
    assert!(joined.pixels == whole.pixels);
    let parameters = |picture: &Picture| picture.texts[0].1.clone();
    assert!(
        parameters(&joined).contains(", Circular: xy"),
        "{}",
        parameters(&joined)
    );
    assert!(!parameters(&plain).contains("Circular"));
}

#[test]
fn a_huge_picture_is_refused_before_memory_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = tiny();
    let arguments = [
        "generate",
        "-p",
        "a circle",
        "-m",
        tiny.to_str().unwrap(),
        "-W",
        "16384",
        "-H",
        "16384",
        // Not what this machine has: a large one would begin.
        "--memory-budget",
        "512MiB",
        "--steps",
        "1",
    ];
    assert_refused(
        folder.path(),
        &arguments,
        &["out of memory on CPU", "budget of 512.00 MiB", "would do"],
    );
}

#[test]
fn prompts_of_every_kind_are_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = tiny();
    let tiny = tiny.to_str().unwrap();
    let long = "a red circle and ".repeat(50);
    for prompt in ["", " ", "🔴🔵 круг 円", "\n\t", "<|im_end|>", long.as_str()] {
        let ended = sd(
            folder.path(),
            &[
                "generate", "-p", prompt, "-m", tiny, "-W", "32", "-H", "32", "--steps", "1",
            ],
        );
        assert_eq!(ended.code, Some(0), "{prompt:?}: {ended:?}");
    }
    fs::remove_file(folder.path().join("output.png")).unwrap();
    let endless = "circle ".repeat(10_000);
    assert_refused(
        folder.path(),
        &["generate", "-p", &endless, "-m", tiny],
        &["the prompt has", "at most 4096"],
    );
    assert_refused(
        folder.path(),
        &["generate", "-p", "<|image_pad|>", "-m", tiny],
        &["<|image_pad|>"],
    );
}

#[cfg(unix)]
#[test]
fn a_prompt_that_is_no_text_is_refused() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let ended = sd(
        folder.path(),
        &[
            OsStr::new("generate"),
            OsStr::new("-p"),
            OsStr::from_bytes(b"\xff\xfe"),
        ],
    );
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.err.contains("UTF-8"), "{}", ended.err);
}

#[test]
fn damaged_models_are_refused_by_name() {
    type Damage = fn(&Path);
    fn cut(path: PathBuf) {
        let bytes = fs::read(&path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    }
    fn edit(path: PathBuf, from: &str, to: &str) {
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{from}");
        fs::write(path, text.replacen(from, to, 1)).unwrap();
    }
    let cases: &[(&str, Damage, &[&str])] = &[
        (
            "no folder",
            |m| fs::remove_dir_all(m).unwrap(),
            &["model: no model folder here"],
        ),
        (
            "no index",
            |m| fs::remove_file(m.join("model_index.json")).unwrap(),
            &["no model_index.json"],
        ),
        (
            "broken index",
            |m| fs::write(m.join("model_index.json"), "{ \"_class").unwrap(),
            &["model_index.json", "line 1"],
        ),
        (
            "no class",
            |m| fs::write(m.join("model_index.json"), "{}").unwrap(),
            &["model_index.json", "_class_name"],
        ),
        (
            "another class",
            |m| {
                edit(
                    m.join("model_index.json"),
                    "QwenImage21Pipeline",
                    "FluxPipeline",
                )
            },
            &["`FluxPipeline` is not supported", "QwenImage21Pipeline"],
        ),
        (
            "no transformer",
            |m| fs::remove_dir_all(m.join("transformer")).unwrap(),
            &["transformer", "config.json"],
        ),
        (
            "no weights",
            |m| fs::remove_file(m.join("vae/diffusion_pytorch_model.safetensors")).unwrap(),
            &["vae"],
        ),
        (
            "no tokenizer",
            |m| fs::remove_file(m.join("processor/tokenizer.json")).unwrap(),
            &["processor/tokenizer.json"],
        ),
        (
            "broken tokenizer",
            |m| fs::write(m.join("processor/tokenizer.json"), "{}").unwrap(),
            &["tokenizer.json"],
        ),
        (
            "cut weights",
            |m| cut(m.join("transformer/diffusion_pytorch_model.safetensors")),
            &["transformer/diffusion_pytorch_model.safetensors", "cut off"],
        ),
        (
            "empty weights",
            |m| fs::write(m.join("text_encoder/model.safetensors"), "").unwrap(),
            &["text_encoder/model.safetensors", "empty"],
        ),
        (
            "more layers than there are",
            |m| {
                edit(
                    m.join("transformer/config.json"),
                    "\"num_layers\": 7",
                    "\"num_layers\": 8",
                )
            },
            &["transformer", "missing: transformer_blocks.7.attn"],
        ),
        (
            "fewer layers than there are",
            |m| {
                edit(
                    m.join("transformer/config.json"),
                    "\"num_layers\": 7",
                    "\"num_layers\": 6",
                )
            },
            &["unknown: transformer_blocks.6.attn"],
        ),
        (
            "wider than it is",
            |m| {
                edit(
                    m.join("transformer/config.json"),
                    "\"num_attention_heads\": 3",
                    "\"num_attention_heads\": 4",
                )
            },
            &["of another shape", "[192, 192] instead of [256, 256]"],
        ),
        (
            "no heads",
            |m| {
                edit(
                    m.join("transformer/config.json"),
                    "\"num_attention_heads\": 3",
                    "\"num_attention_heads\": 0",
                )
            },
            &["transformer/config.json", "num_attention_heads > 0"],
        ),
        (
            "heads beyond memory",
            |m| {
                edit(
                    m.join("transformer/config.json"),
                    "\"num_attention_heads\": 3",
                    "\"num_attention_heads\": 9223372036854775807",
                )
            },
            &["transformer"],
        ),
        (
            "an unknown schedule",
            |m| {
                edit(
                    m.join("scheduler/scheduler_config.json"),
                    "\"stochastic_sampling\": false",
                    "\"stochastic_sampling\": true",
                )
            },
            &["scheduler_config.json", "stochastic_sampling"],
        ),
        (
            "another activation",
            |m| {
                edit(
                    m.join("text_encoder/config.json"),
                    "\"hidden_act\": \"silu\"",
                    "\"hidden_act\": \"relu\"",
                )
            },
            &["text_encoder/config.json", "hidden_act"],
        ),
        (
            "parts of two models",
            |m| edit(m.join("vae/config.json"), "\"z_dim\": 16", "\"z_dim\": 15"),
            &["latents_mean has z_dim entries"],
        ),
        (
            "odd defaults",
            |m| fs::write(m.join("sd-defaults.json"), "{\"widht\": 3}").unwrap(),
            &["sd-defaults.json", "widht"],
        ),
    ];
    for (name, damage, parts) in cases {
        let folder = tempfile::tempdir().unwrap();
        let model = copy_of_tiny(folder.path());
        damage(&model);
        println!("{name}");
        assert_refused(
            folder.path(),
            &["generate", "-p", "a circle", "-m", "model"],
            parts,
        );
    }
}

#[cfg(unix)]
#[test]
fn a_folder_that_may_not_be_written_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let locked = folder.path().join("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(locked.join("probe"), "").is_ok() {
        // The superuser may write anywhere; a file that stands where the folder should be stops it too.
        fs::set_permissions(&locked, fs::Permissions::from_mode(0o755)).unwrap();
        fs::remove_dir_all(&locked).unwrap();
        fs::write(&locked, "").unwrap();
    }
    let tiny = tiny();
    let arguments = [
        "generate",
        "-p",
        "a circle",
        "-m",
        tiny.to_str().unwrap(),
        "-W",
        "32",
        "-H",
        "32",
        "--steps",
        "1",
        "-o",
        "locked/a.png",
    ];
    assert_refused(folder.path(), &arguments, &["locked/a.png"]);
}
