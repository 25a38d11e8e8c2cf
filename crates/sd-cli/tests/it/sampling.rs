//! `sd generate`: how steps are taken, from which noise, and what is said meanwhile.

use std::fs;
use std::path::Path;

use crate::generate::{copy_of_tiny, picture, tiny};
use crate::run::{Ended, assert_refused, sd};

/// Runs `sd generate` for a small picture with `more` arguments.
fn generate(folder: &Path, model: &Path, more: &[&str]) -> Ended {
    let model = model.to_str().unwrap();
    let mut arguments = vec!["generate", "-p", "a red circle", "-m", model];
    arguments.extend(["-W", "64", "-H", "64", "-t", "1"]);
    arguments.extend(more);
    sd(folder, &arguments)
}

/// The report of a run that ends well.
#[track_caller]
fn report(ended: &Ended) -> serde_json::Value {
    assert_eq!(ended.code, Some(0), "{ended:?}");
    serde_json::from_str(&ended.out).unwrap()
}

fn parameters(path: &Path) -> String {
    picture(path).texts[0].1.clone()
}

#[test]
fn a_quiet_run_says_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let ended = generate(folder.path(), &tiny(), &["--steps", "1", "-q"]);
    assert_eq!(
        (ended.code, ended.out.as_str(), ended.err.as_str()),
        (Some(0), "", "")
    );
    assert!(folder.path().join("output.png").is_file());
}

#[test]
fn samplers_and_schedules_are_chosen_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("output.png");
    let mut pictures = Vec::new();
    for (more, calls, text) in [
        (
            &["--steps", "3", "-g", "1"][..],
            3,
            "Steps: 3, Sampler: Euler, CFG scale: 1",
        ),
        (
            &[
                "--steps",
                "3",
                "-g",
                "2",
                "--sampler",
                "heun",
                "--schedule",
                "karras",
            ],
            5,
            "Steps: 3, Sampler: Heun, CFG scale: 2",
        ),
        (
            &["-g", "1", "--sampler", "dpm++_2m", "--sigmas", "1,0.8,0.5"],
            3,
            "Steps: 3, Sampler: DPM++ 2M, CFG scale: 1",
        ),
    ] {
        let ended = generate(folder.path(), &tiny(), more);
        assert_eq!(ended.code, Some(0), "{more:?}: {ended:?}");
        // Calls of the model are counted, a guided one as one.
        let last = format!("denoise {calls}/{calls}");
        assert!(ended.err.contains(&last), "{more:?}: {}", ended.err);
        let found = parameters(&output);
        assert!(found.contains(text), "{found}");
        let schedule = found.split("Schedule type: ").nth(1);
        let wanted = match more.len() {
            4 => None,
            8 => Some("Karras"),
            _ => Some("Exact"),
        };
        assert_eq!(schedule, wanted, "{found}");
        pictures.push(fs::read(&output).unwrap());
    }
    assert!(pictures[0] != pictures[1] && pictures[1] != pictures[2]);

    let tiny = tiny();
    let tiny = tiny.to_str().unwrap();
    let cases: &[(&[&str], &[&str])] = &[
        (
            &["--sampler", "euler_b"],
            &["--sampler", "euler, heun, dpm++_2m, unipc, res_multistep"],
        ),
        (
            &["--schedule", "exact"],
            &[
                "--schedule",
                "model, simple, sgm_uniform, beta, karras, exponential",
            ],
        ),
        (
            &["--sigmas", "1,0.5,0"],
            &["noise level of 0 at position 3", "the final 0 is implied"],
        ),
        (
            &["--sigmas", "0.5,0.7"],
            &["position 2", "below the one before"],
        ),
        (&["--sigmas", "1,-0.5"], &["position 2"]),
        (&["--sigmas", "1,,0.5"], &["--sigmas"]),
        (
            &["--sigmas", "1,0.5", "--steps", "2"],
            &["--sigmas", "--steps"],
        ),
        (
            &["--sigmas", "1,0.5", "--schedule", "beta"],
            &["--sigmas", "--schedule"],
        ),
    ];
    fs::remove_file(&output).unwrap();
    for (arguments, parts) in cases {
        let mut all = vec!["generate", "-p", "a circle", "-m", tiny];
        all.extend(*arguments);
        assert_refused(folder.path(), &all, parts);
    }
}

#[test]
fn what_an_author_fixed_is_kept_or_replaced_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let model = copy_of_tiny(folder.path());
    let index = model.join("model_index.json");
    let text = fs::read_to_string(&index).unwrap();
    let fixed = text.replacen(
        "\"sample_sigmas\": null",
        "\"sample_sigmas\": [1.0, 0.7]",
        1,
    );
    assert_ne!(text, fixed);
    fs::write(&index, fixed).unwrap();

    // Steps are the author's, whatever is asked for.
    let own = report(&generate(
        folder.path(),
        &model,
        &["-g", "1", "--steps", "9", "--json"],
    ));
    assert_eq!(own["steps"], 2);
    let given = ["-g", "1", "--sigmas", "1,0.9,0.4", "--json"];
    let given = report(&generate(folder.path(), &model, &given));
    assert_eq!(
        (&given["steps"], &given["schedule"]),
        (&3.into(), &"exact".into())
    );
    let ended = generate(folder.path(), &model, &["--schedule", "karras"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(
        ended.err.contains("author fixed its noise levels"),
        "{}",
        ended.err
    );
}

#[test]
fn several_pictures_compute_the_prompt_once() {
    let folder = tempfile::tempdir().unwrap();
    let batch = [
        "--steps", "2", "-g", "2", "-s", "5", "--count", "3", "--json",
    ];
    let batch = report(&generate(folder.path(), &tiny(), &batch));
    let pictures = batch["pictures"].as_array().unwrap();
    assert_eq!(pictures.len(), 3);
    for (index, picture) in pictures.iter().enumerate() {
        let output = format!("output-{}.png", index + 1);
        assert_eq!(
            (&picture["output"], &picture["seed"]),
            (&output.clone().into(), &(5 + index).into())
        );
        // The prompt and the empty one, once; two steps read both, but for the one that stored them.
        let (stores, reads) = if index == 0 { (2, 2) } else { (0, 4) };
        let found = (&picture["prefix_stores"], &picture["prefix_reads"]);
        assert_eq!(found, (&stores.into(), &reads.into()), "{index}");
        assert_eq!(picture["calls"], 2);

        // Each is the picture that its seed gives alone.
        let seed = (5 + index).to_string();
        let alone = [
            "--steps",
            "2",
            "-g",
            "2",
            "-s",
            &seed,
            "-o",
            "alone-{seed}.png",
            "--json",
        ];
        let alone = report(&generate(folder.path(), &tiny(), &alone));
        assert_eq!(alone["pictures"][0]["output"], format!("alone-{seed}.png"));
        let read = |name: &str| picture_of(&folder.path().join(name));
        assert!(
            read(&output) == read(&format!("alone-{seed}.png")),
            "{index}"
        );
    }

    let cached = ["--steps", "12", "-g", "1", "--step-cache", "0.1", "--json"];
    let cached = report(&generate(folder.path(), &tiny(), &cached));
    let left_out = cached["pictures"][0]["skipped_calls"].as_u64().unwrap();
    assert!((1..=9).contains(&left_out), "{left_out}");
    assert!(parameters(&folder.path().join("output.png")).contains(", Step cache: 0.1"));

    // Another generator, other pictures; no more threads than numbers change nothing.
    let cuda = |rng: &str| {
        let more = ["--steps", "1", "-g", "1", "--rng", rng, "-o", "cuda.png"];
        assert_eq!(generate(folder.path(), &tiny(), &more).code, Some(0));
        picture_of(&folder.path().join("cuda.png"))
    };
    let all = cuda("cuda");
    assert!(cuda("cpu") != all && cuda("cuda:64") != all && cuda("cuda:65536") == all);
    assert!(parameters(&folder.path().join("cuda.png")).contains(", RNG: cuda:65536"));
}

fn picture_of(path: &Path) -> Vec<u8> {
    picture(path).pixels
}

#[test]
fn pictures_before_one_that_fails_are_written_and_reported() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("p-1.png")).unwrap();
    let more = [
        "--steps",
        "1",
        "--count",
        "3",
        "-o",
        "p-{seed}.png",
        "--json",
    ];
    let ended = generate(folder.path(), &tiny(), &more);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(
        ended.err.contains("p-1.png cannot be written"),
        "{}",
        ended.err
    );
    let report: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(report["pictures"].as_array().unwrap().len(), 1);
    assert!(folder.path().join("p-0.png").is_file());
    assert!(!folder.path().join("p-2.png").exists());

    let last = u64::MAX.to_string();
    let tiny = tiny();
    let tiny = tiny.to_str().unwrap();
    for (arguments, part) in [
        (&["--count", "0"][..], "at least 1 picture"),
        (&["--count", "-1"], "--count"),
        (&["--count", "2", "-s", &last], "not so many seeds"),
        (&["--rng", "gpu"], "cpu, cuda, cuda:THREADS"),
        (&["--step-cache", "-0.1"], "--step-cache -0.1"),
        (&["--step-cache", "NaN"], "--step-cache NaN"),
    ] {
        let mut all = vec!["generate", "-p", "a circle", "-m", tiny];
        all.extend(arguments);
        assert_refused(folder.path(), &all, &[part]);
    }
}

#[test]
fn previews_are_written_over_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("now.png");
    for (by, previews, size) in [("2", 2, (256, 256)), ("1:decoder", 4, (256, 256))] {
        let more = [
            "--steps",
            "5",
            "-g",
            "1",
            "--preview",
            by,
            "--preview-file",
            "now.png",
            "--json",
        ];
        let report = report(&generate(folder.path(), &tiny(), &more));
        assert_eq!(report["pictures"][0]["previews"], previews, "{by}");
        let preview = picture(&file);
        assert_eq!((preview.width, preview.height), size, "{by}");
        fs::remove_file(&file).unwrap();
    }
    // A file that cannot be written takes nothing from the picture.
    fs::create_dir(&file).unwrap();
    let more = [
        "--steps",
        "3",
        "--preview",
        "1",
        "--preview-file",
        "now.png",
    ];
    let ended = generate(folder.path(), &tiny(), &more);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(
        ended
            .err
            .matches("previews are not written any more")
            .count(),
        1
    );
    // Standard error is no terminal: nothing to show, and nothing is computed.
    let ended = generate(folder.path(), &tiny(), &["--steps", "3", "--preview", "1"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.err.contains("nobody would see previews") && !ended.err.contains('\x1b'));

    let tiny = tiny();
    let tiny = tiny.to_str().unwrap();
    for (arguments, part) in [
        (&["--preview", "0"][..], "a number of steps is expected"),
        (&["--preview", "2:vae"], "`:linear` or `:decoder`"),
        (&["--preview-file", "a.png"], "--preview"),
        (
            &["--preview", "1", "--preview-file", "a.jpg"],
            "--preview-file a.jpg",
        ),
        (
            &["--preview", "1", "--preview-file", "no/a.png"],
            "no folder no",
        ),
    ] {
        let mut all = vec!["generate", "-p", "a circle", "-m", tiny];
        all.extend(arguments);
        assert_refused(folder.path(), &all, &[part]);
    }
}
