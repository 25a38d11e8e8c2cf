//! Development tasks.

mod bindgen;
#[path = "../../crates/sd-ggml-sys/build/failure.rs"]
mod failure;
mod shared;

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

/// Development tasks of the workspace.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Regenerates the committed bindings of ggml.
    Bindgen {
        /// Only checks that the committed bindings are current.
        #[arg(long)]
        check: bool,
    },
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the workspace")?;
    let cargo = env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from);
    match arguments.task {
        Task::Bindgen { check } => bindgen::run(root, &cargo, check),
    }
}
