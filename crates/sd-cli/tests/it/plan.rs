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
    // Keys and values of 16 tokens, 192 channels and 7 blocks, in single precision.
    let prefix = &plan["prefix_cache"];
    let bytes = prefix["bytes"].as_u64().unwrap();
    assert!((172_032..172_032 + 4096).contains(&bytes), "{prefix}");
    assert_eq!(
        (prefix["type"].as_str(), prefix["fits"].as_bool()),
        (Some("f32"), Some(true))
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

#[test]
fn weights_are_counted_in_the_types_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-qwen-image-2.1");
    let tiny = tiny.to_str().unwrap();
    let plan = |arguments: &[&str]| -> serde_json::Value {
        let ended = sd(
            folder.path(),
            &[&["plan", tiny, "--json"], arguments].concat(),
        );
        assert_eq!(ended.code, Some(0), "{ended:?}");
        serde_json::from_str(&ended.out).unwrap()
    };
    let bytes = |plan: &serde_json::Value, part: &str| {
        let mut parts = plan["parts"].as_array().unwrap().iter();
        let named = parts.find(|found| found["name"] == part);
        named.unwrap()["weights"].as_u64().unwrap()
    };
    let single = plan(&["--weight-type", "f32"]);
    let short = plan(&["--weight-type", "Q8_0"]);
    let ruled = plan(&[
        "--tensor-type",
        r"^transformer\.=q8_0",
        "--tensor-type",
        ".*=f32",
    ]);
    let transformer = |plan| bytes(plan, "diffusion");
    // 34 bytes for 32 numbers of 4, but for what is no matrix.
    assert!(transformer(&short) * 10 < transformer(&single) * 3);
    assert_eq!(transformer(&ruled), transformer(&short));
    for part in ["text-encoder", "vae"] {
        assert_eq!(bytes(&ruled, part), bytes(&single, part), "{part}");
    }
    assert!(single.get("fallbacks").is_none());
    let blocks = plan(&["--weight-type", "q4_K"]);
    let fallback = &blocks["fallbacks"][0];
    assert_eq!(fallback["asked"], "q4_K");
    assert!(
        fallback["name"]
            .as_str()
            .unwrap()
            .starts_with("text_encoder."),
        "{fallback}"
    );
    let told = sd(folder.path(), &["plan", tiny, "--weight-type", "q4_K"]);
    assert!(
        told.out
            .contains("weights cannot be given the type asked for: text_encoder."),
        "{told:?}"
    );

    for (arguments, parts) in [
        (
            ["--weight-type", "q9"],
            ["--weight-type", "`q9` is no type", "q8_0, q2_K"],
        ),
        (
            ["--weight-type", "i32"],
            ["--weight-type", "`i32` is no type", "mxfp4"],
        ),
        (
            ["--tensor-type", "attn"],
            ["--tensor-type", "PATTERN=TYPE", "attn=q8_0"],
        ),
        (
            ["--tensor-type", "a[=q8_0"],
            ["--tensor-type", "`a[`", "unclosed character class"],
        ),
        (
            ["--tensor-type", "a=f16,b=f8"],
            ["--tensor-type", "`f8` is no type", "bf16"],
        ),
    ] {
        assert_refused(
            folder.path(),
            &[&["plan", tiny], &arguments[..]].concat(),
            &parts,
        );
    }
}
