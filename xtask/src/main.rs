//! Development tasks of the workspace: `cargo xtask --help`.

mod bench;
mod bindgen;
mod shared;
mod vendor;

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
    /// Regenerates the committed bindings of ggml (needs libclang and rustfmt).
    Bindgen {
        /// Only checks that the committed bindings are current.
        #[arg(long)]
        check: bool,
    },
    /// Copies ggml's source, our patches and ggml's licence into sd-ggml-sys, before it is packaged.
    Vendor,
    /// Builds the benchmarks as one program and runs it: loading, planning, steps, decoding, streaming.
    Bench(bench::Arguments),
    /// Pins the source that the stub manifest now names, after an upgrade of it.
    Pin,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let workspace = Workspace::find()?;
    match arguments.task {
        Task::Bindgen { check } => bindgen::run(&workspace, check),
        Task::Bench(arguments) => bench::run(&workspace, &arguments),
        Task::Vendor => vendor::copy(&workspace),
        Task::Pin => vendor::pin(&workspace),
    }
}

/// Where things are.
struct Workspace {
    root: PathBuf,
    cargo: PathBuf,
}

impl Workspace {
    fn find() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("xtask lies in the workspace")?;
        let cargo = env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from);
        Ok(Self {
            root: root.to_path_buf(),
            cargo,
        })
    }

    /// The crate that builds and binds ggml.
    fn sys_crate(&self) -> PathBuf {
        self.root.join("crates/sd-ggml-sys")
    }

    /// The package that pins ggml's source.
    fn stub(&self) -> PathBuf {
        self.root.join("vendor/ggml-source")
    }

    /// ggml's source as fetched by cargo.
    fn ggml(&self) -> Result<PathBuf> {
        Ok(shared::source::from_stub(&self.cargo, &self.stub())?)
    }
}
