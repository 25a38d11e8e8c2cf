//! Other programs with the same shapes in the same run: diffusers by the scripts in `peers/`, which this program carries with it,
//! and stable-diffusion.cpp by its command line.
#![allow(clippy::print_stdout)]

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use sd_backend::Device;
use serde_json::Value;

use crate::groups::{Group, step_name};
use crate::results::{Peer, median};

/// What peers took, or why that is not known.
pub type Found = Result<Vec<Peer>>;

/// Whether to measure diffusers, and by which Python.
#[derive(Debug, Clone, Args)]
pub struct Diffusers {
    /// Measure diffusers too, where it has the same: groups step, prefix, decode.
    #[arg(long)]
    pub peers: bool,
    /// A Python with diffusers, for --peers.
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    pub python: PathBuf,
    /// Type that diffusers computes in: float32, bfloat16, float16. What suits the device unless given.
    #[arg(long, value_name = "TYPE")]
    pub peer_type: Option<String>,
}

/// Which other programs there are.
#[derive(Debug, Clone, Args)]
pub struct Peers {
    /// diffusers.
    #[command(flatten)]
    pub diffusers: Diffusers,
    /// The command of stable-diffusion.cpp, for the group step.
    #[arg(long, value_name = "PROGRAM")]
    pub sd_cpp: Option<PathBuf>,
    /// What it is told of its model, such as "--diffusion-model A --llm B --vae C".
    #[arg(
        long,
        value_name = "ARGUMENTS",
        requires = "sd_cpp",
        allow_hyphen_values = true
    )]
    pub sd_cpp_model: Option<String>,
}

const STEP: &str = include_str!("../peers/step.py");
const H3_STEP: &str = include_str!("../peers/h3_step.py");
const VAE: &str = include_str!("../peers/vae.py");

/// Runs a script of ours on what was left in `folder`, and returns what it printed.
fn script(peers: &Diffusers, text: &str, folder: &Path, device: Device) -> Result<String> {
    let path = folder.join("peer.py");
    std::fs::write(&path, text)?;
    let on_cuda = device.to_string().starts_with("CUDA");
    let (torch, dtype) = match on_cuda {
        true => ("cuda", "bfloat16"),
        false => ("cpu", "float32"),
    };
    let mut command = Command::new(&peers.python);
    command.arg(&path).arg("--folder").arg(folder);
    command.args(["--device", torch, "--type"]);
    command.arg(peers.peer_type.as_deref().unwrap_or(dtype));
    output(&mut command)
}

/// What a command prints to either stream.
fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().display().to_string();
    let output = command.output().with_context(|| program.clone())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    if !output.status.success() {
        bail!(
            "{program} failed: {}",
            err.lines().last().unwrap_or("it said nothing")
        );
    }
    Ok(out + &err)
}

/// What diffusers takes for what `step` left in `folder`.
///
/// # Errors
/// A Python or packages that are not there, or that fail.
pub fn step(peers: &Diffusers, folder: &Path, group: Group, device: Device) -> Found {
    if !peers.peers {
        return Ok(Vec::new());
    }
    calls(peers, STEP, folder, device, (group.name(), step_name))
}

/// What diffusers takes for what `h3-step` left in `folder`.
///
/// # Errors
/// As for [`step`].
pub fn h3_step(peers: &Diffusers, folder: &Path, device: Device) -> Found {
    if !peers.peers {
        return Ok(Vec::new());
    }
    let name = |case: &Value| case["name"].as_str().unwrap_or_default().to_owned();
    calls(
        peers,
        H3_STEP,
        folder,
        device,
        (crate::h3_step::GROUP, name),
    )
}

/// Runs a script that compares calls, and returns those of its `peer.json`.
fn calls(
    peers: &Diffusers,
    text: &str,
    folder: &Path,
    device: Device,
    (group, name): (&str, fn(&Value) -> String),
) -> Found {
    let what = || format!("{group}, diffusers");
    print!(
        "{}",
        script(peers, text, folder, device).with_context(what)?
    );
    let text = std::fs::read_to_string(folder.join("peer.json")).with_context(what)?;
    let found: Value = serde_json::from_str(&text)?;
    let peer = |case: &Value| {
        Ok(Peer {
            program: "diffusers".to_owned(),
            group: group.to_owned(),
            name: name(case),
            dtype: found["type"].as_str().map(str::to_owned),
            seconds: case["peer_seconds"].as_f64().context("peer_seconds")?,
            processor_seconds: case["peer_processor_seconds"].as_f64(),
            peak_bytes: case["peer_bytes"].as_u64().filter(|&bytes| bytes > 0),
            error: case["error"].as_f64(),
        })
    };
    let cases = found["cases"].as_array().context("cases")?;
    cases.iter().map(peer).collect()
}

/// What diffusers takes for what `vae` left in `folder`, which is case `name` of the group decode.
///
/// # Errors
/// As for [`step`].
pub fn vae(peers: &Diffusers, folder: &Path, device: Device, name: &str) -> Found {
    if !peers.peers {
        return Ok(Vec::new());
    }
    let what = || format!("decode, {name}, diffusers");
    let text = script(peers, VAE, folder, device).with_context(what)?;
    let line = text.lines().find(|line| line.starts_with('{'));
    let found: Value = serde_json::from_str(line.with_context(what)?)?;
    Ok(vec![Peer {
        program: "diffusers".to_owned(),
        group: "decode".to_owned(),
        name: name.to_owned(),
        dtype: found["type"].as_str().map(str::to_owned),
        seconds: found["seconds"].as_f64().with_context(what)?,
        processor_seconds: found["processor_seconds"].as_f64(),
        peak_bytes: found["peak_bytes"].as_u64(),
        error: found["error_of_sd"].as_f64(),
    }])
}

/// Steps of a picture that stable-diffusion.cpp is asked for. Its first call is in the time that it tells.
const STEPS: usize = 8;

/// What stable-diffusion.cpp takes for one of `STEPS` steps of pictures as large as those of `cases`, in the type that its own files
/// have: it stands beside the first of our types.
///
/// # Errors
/// A program that is not there, or that does not tell its time.
pub fn sd_cpp(peers: &Peers, folder: &Path, threads: usize, cases: &[Value]) -> Found {
    let Some(program) = &peers.sd_cpp else {
        return Ok(Vec::new());
    };
    let mut found: Vec<Peer> = Vec::new();
    let mut sizes: Vec<&Value> = Vec::new();
    for case in cases {
        let size = &case["size"];
        if sizes.contains(&size) {
            continue;
        }
        sizes.push(size);
        let mut command = Command::new(program);
        let model = peers.sd_cpp_model.as_deref().unwrap_or_default();
        command.args(model.split_whitespace());
        command.args(["-p", "a red circle", "--cfg-scale", "1", "--seed", "1"]);
        command.args(["-W", &size.to_string(), "-H", &size.to_string()]);
        command.args(["--steps", &STEPS.to_string(), "-t", &threads.to_string()]);
        command.arg("-o").arg(folder.join("sd-cpp.png"));
        let what = || format!("step, {size}, stable-diffusion.cpp");
        let text = output(&mut command).with_context(what)?;
        let runs = sampling_seconds(&text);
        ensure!(!runs.is_empty(), "{}: it told no time of sampling", what());
        found.push(Peer {
            program: "stable-diffusion.cpp".to_owned(),
            group: "step".to_owned(),
            name: step_name(case),
            dtype: None,
            seconds: median(&runs) / STEPS as f64,
            processor_seconds: None,
            peak_bytes: None,
            error: None,
        });
    }
    Ok(found)
}

/// Seconds of all lines that say how long sampling took.
fn sampling_seconds(text: &str) -> Vec<f64> {
    let said = text.lines().filter_map(|line| {
        let (_, said) = line.split_once("sampling completed, taking ")?;
        said.trim().strip_suffix('s')?.parse().ok()
    });
    said.collect()
}
