//! What becomes of results: files, tables, drawings, and the times of other programs. Nothing here measures.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use sd_benches::results::{Results, Seconds};
use sd_benches::{plot, table};

fn committed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/bench/h200.json")
}

#[test]
fn a_file_that_is_read_and_written_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("again.json");
    let results = Results::read(&committed()).unwrap();
    results.write(&path).unwrap();
    assert_eq!(Results::read(&path).unwrap(), results);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"schema\": 1", "\"schema\": 2")).unwrap();
    let error = Results::read(&path).unwrap_err().to_string();
    assert!(error.contains("has schema 2"), "{error}");
}

#[test]
fn ratios_are_to_the_baseline_and_to_peers_of_the_same_case() {
    let results = Results::read(&committed()).unwrap();
    let mut baseline = results.clone();
    let case = &mut baseline.cases[0];
    case.seconds.median *= 4.0;
    let changed = format!("| {}: {} |", case.group, case.name);
    let lost = baseline.cases.remove(1);
    let lost = format!("| {}: {} |", lost.group, lost.name);
    let table = table::markdown(&results, Some(&baseline));
    let line = |start: &str| table.lines().find(|line| line.starts_with(start)).unwrap();
    let cell = |start: &str, from_end: usize| {
        let cells: Vec<&str> = line(start).trim_matches('|').split('|').collect();
        cells[cells.len() - 1 - from_end].trim().to_owned()
    };
    // From the right: ratio to diffusers, its seconds, ratio to the baseline.
    assert_eq!(cell(&changed, 2), "0.25");
    assert_eq!(cell(&lost, 2), "");
    assert_eq!(cell("| step: 1024, bf16 |", 2), "1.00");
    let ours = results.cases.iter().find(|case| case.name == "1024, bf16");
    let peer = results.peers.iter().find(|peer| peer.name == "1024, bf16");
    let (ours, theirs) = (ours.unwrap().seconds.median, peer.unwrap().seconds);
    assert_eq!(cell("| step: 1024, bf16 |", 1), format!("{theirs:.4}"));
    let ratio = format!("{:.2}", ours / theirs);
    assert_eq!(cell("| step: 1024, bf16 |", 0), ratio);
    assert_eq!(cell("| stream: 1024, 10 % from host |", 0), "");
    // As many cells in each line as there are in the head.
    let cells = |line: &str| line.matches('|').count();
    let lines: Vec<&str> = table.lines().filter(|line| line.starts_with('|')).collect();
    assert_eq!(lines.len(), results.cases.len() + 2);
    assert!(lines.iter().all(|line| cells(line) == cells(lines[0])));
}

#[test]
fn drawings_have_a_line_for_each_series() {
    let folder = tempfile::tempdir().unwrap();
    let mut results = Results::read(&committed()).unwrap();
    let files = plot::draw(&results, "h200", folder.path()).unwrap();
    let names = [
        &[
            "sd bf16",
            "sd q8_0",
            "sd bf16, prefix kept, 512",
            "diffusers, prefix kept, 1024",
        ][..],
        &["other weights on host"],
    ];
    for (file, names) in files.iter().zip(names) {
        let text = std::fs::read_to_string(file).unwrap();
        for name in names {
            let said = text.lines().any(|line| line.trim() == *name);
            assert!(said, "{} has no {name}", file.display());
        }
    }
    // What is committed is drawn from these results.
    for file in &files {
        let committed = committed().with_file_name(file.file_name().unwrap());
        let (found, wanted) = (std::fs::read(file), std::fs::read(committed));
        assert!(found.unwrap() == wanted.unwrap(), "{}", file.display());
    }
    results.cases.clear();
    assert!(plot::draw(&results, "none", folder.path()).is_err());
}

#[test]
fn the_middle_run_counts() {
    assert_eq!(Seconds::of(&[]), None);
    let seconds = Seconds::of(&[3.0, 1.0, 2.0]).unwrap();
    let Seconds {
        median,
        low,
        high,
        runs,
    } = seconds;
    assert_eq!((median, low, high, runs), (2.0, 1.0, 3.0, 3));
}

/// A program that logs as stable-diffusion.cpp does, one that fails, and one that logs nothing.
#[cfg(unix)]
#[test]
fn steps_of_stable_diffusion_cpp_are_read_from_its_log() {
    use std::os::unix::fs::PermissionsExt;

    use sd_benches::peers::{Diffusers, Peers, sd_cpp};
    use serde_json::json;

    let folder = tempfile::tempdir().unwrap();
    let told = folder.path().join("told");
    let case = |size: usize, dtype: &str| json!({"size": size, "type": dtype, "references": 0, "prefix": "off"});
    let cases = [case(512, "bf16"), case(1024, "bf16"), case(512, "q8_0")];
    let run = |end: &str| {
        let path = folder.path().join("program");
        let text = format!("#!/bin/sh\necho \"$@\" >> {}\n{end}\n", told.display());
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        let peers = Peers {
            diffusers: Diffusers {
                peers: false,
                python: PathBuf::new(),
                peer_type: None,
            },
            sd_cpp: Some(path),
            sd_cpp_model: Some("--diffusion-model a.gguf".to_owned()),
        };
        sd_cpp(&peers, folder.path(), 2, &cases)
    };
    let found =
        run("echo '[INFO ] stable-diffusion.cpp:1466 - sampling completed, taking 4.00s' >&2")
            .unwrap();
    let found: Vec<(&str, f64)> = found
        .iter()
        .map(|peer| (&*peer.name, peer.seconds))
        .collect();
    assert_eq!(found, [("512, bf16", 0.5), ("1024, bf16", 0.5)]);
    let told = std::fs::read_to_string(&told).unwrap();
    assert!(told.starts_with("--diffusion-model a.gguf "), "{told}");
    assert!(told.contains("-W 1024 -H 1024 --steps 8 -t 2"), "{told}");
    for (end, why) in [("echo no >&2; exit 1", "no"), ("true", "told no time")] {
        let error = format!("{:#}", run(end).unwrap_err());
        assert!(error.contains(why), "{error}");
    }
}
