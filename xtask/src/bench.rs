//! Builds `sd-bench`, the benchmarks as one program, and runs it.
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::Workspace;

/// How it is built, and what it is told.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Features that concern ggml, such as `dynamic-backends`, with commas between them.
    #[arg(long, default_value = "")]
    features: String,
    /// Build without optimisation of Rust code, as tests are; ggml is optimised all the same.
    #[arg(long)]
    dev: bool,
    /// Only build, and print where the program is: it runs on machines without Rust.
    #[arg(long)]
    build: bool,
    /// What `sd-bench` is told; `-- --help` lists it.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

/// Builds and runs.
pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> Result<()> {
    let program = build(workspace, arguments)?;
    if arguments.build {
        println!("{}", program.display());
        return Ok(());
    }
    let status = Command::new(&program).args(&arguments.rest).status();
    let status = status.with_context(|| program.display().to_string())?;
    ensure!(status.success(), "sd-bench failed: {status}");
    Ok(())
}

/// Builds it, with the revision in it, and returns where it is.
fn build(workspace: &Workspace, arguments: &Arguments) -> Result<PathBuf> {
    let mut command = Command::new(&workspace.cargo);
    command.current_dir(&workspace.root);
    command.args(["build", "--package", "sd-benches", "--bin", "sd-bench"]);
    command.args(["--features", &arguments.features]);
    command.arg("--message-format=json-render-diagnostics");
    if !arguments.dev {
        command.arg("--release");
    }
    if let Some(revision) = revision(workspace) {
        command.env("SD_BENCH_REVISION", revision);
    }
    let output = command.stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "cargo build failed");
    let text = String::from_utf8(output.stdout)?;
    let messages = text
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let mut programs = messages.filter_map(|message| Some(message["executable"].as_str()?.into()));
    programs.next_back().context("cargo named no program")
}

/// What git says of the working tree, where there is a git.
fn revision(workspace: &Workspace) -> Option<String> {
    let mut command = Command::new("git");
    command.current_dir(&workspace.root);
    command.args(["describe", "--always", "--dirty", "--abbrev=12"]);
    let output = command.output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
