//! Results as a table in Markdown, beside a baseline and beside peers.

use std::fmt::Write;

use sd_backend::Bytes;

use crate::results::{Case, Results};

/// A table of all cases of `results`, with ratios of medians to those of `baseline` and to those of the peers: below 1 is faster.
pub fn markdown(results: &Results, baseline: Option<&Results>) -> String {
    let mut programs: Vec<&str> = Vec::new();
    for peer in &results.peers {
        if !programs.contains(&&*peer.program) {
            programs.push(&peer.program);
        }
    }
    let mut text = about(results);
    if let Some(baseline) = baseline {
        text.push_str("\nBaseline: ");
        text.push_str(&about(baseline));
    }
    text.push_str("\n| case | median s | fastest to slowest | held at most | of it weights |");
    if baseline.is_some() {
        text.push_str(" to baseline |");
    }
    for program in &programs {
        let _ = write!(text, " {program} s | ratio |");
    }
    text.push_str("\n|---|---:|---:|---:|---:|");
    if baseline.is_some() {
        text.push_str("---:|");
    }
    text.push_str(&"---:|---:|".repeat(programs.len()));
    text.push('\n');
    for case in &results.cases {
        let seconds = case.seconds;
        let bytes = |kinds: &[&str]| {
            let held = kinds.iter().filter_map(|&kind| case.peak_bytes.get(kind));
            match held.sum() {
                0 => String::new(),
                held => Bytes(held).to_string(),
            }
        };
        let _ = write!(
            text,
            "| {}: {} | {} | {} to {} | {} | {} |",
            case.group,
            case.name,
            short(seconds.median),
            short(seconds.low),
            short(seconds.high),
            bytes(&["total"]),
            // In place or copied.
            bytes(&["weights", "mapping"]),
        );
        if let Some(baseline) = baseline {
            let other = baseline.case(&case.group, &case.name);
            let ratio = other.map(|other| seconds.median / other.seconds.median);
            let _ = write!(text, " {} |", ratio.map_or(String::new(), ratio_text));
        }
        for program in &programs {
            match peer(results, program, case) {
                Some(peer) => {
                    let ratio = ratio_text(seconds.median / peer);
                    let _ = write!(text, " {} | {ratio} |", short(peer));
                }
                None => text.push_str(" | |"),
            }
        }
        text.push('\n');
    }
    for line in &results.skipped {
        let _ = write!(text, "\nLeft out: {line}\n");
    }
    text
}

/// Build and machine in a line.
fn about(results: &Results) -> String {
    let (build, machine) = (&results.build, &results.machine);
    let mut text = format!(
        "sd-bench {} ({}, {}, {}, features {}) on {} ({}), {} threads of {}\n",
        build.version,
        build.revision.as_deref().unwrap_or("revision unknown"),
        build.profile,
        build.target,
        build.features.join(" "),
        machine.device,
        machine.description,
        machine.threads,
        machine.processor,
    );
    if let Some(note) = &results.note {
        let _ = writeln!(text, "{note}");
    }
    text
}

/// Seconds of a peer for a case.
pub(crate) fn peer(results: &Results, program: &str, case: &Case) -> Option<f64> {
    let mut peers = results.peers.iter().filter(|peer| peer.program == program);
    let found = peers.find(|peer| peer.group == case.group && peer.name == case.name);
    found.map(|peer| peer.seconds)
}

fn ratio_text(ratio: f64) -> String {
    format!("{ratio:.2}")
}

/// Four digits, whatever the size.
fn short(seconds: f64) -> String {
    let digits = match seconds {
        _ if seconds >= 100.0 => 1,
        _ if seconds >= 10.0 => 2,
        _ if seconds >= 1.0 => 3,
        _ if seconds >= 1e-3 => 4,
        _ => 7,
    };
    format!("{seconds:.digits$}")
}
