//! Regenerates the committed bindings of `sd-ggml-sys`, or checks that they are current.

use std::fs;

use anyhow::{Context, Result, bail};

use crate::Workspace;
use crate::shared::{bindings, quietly};

/// Generates the bindings; with `check` only compares them with the committed ones.
pub(crate) fn run(workspace: &Workspace, check: bool) -> Result<()> {
    let ggml = workspace.ggml()?;
    let wrapper = workspace.sys_crate().join("src/wrapper.h");
    let builder = bindings::builder(&[ggml.join("include"), ggml.join("src")], &wrapper)
        // One reference target, so that the result is the same on every machine.
        .clang_arg("--target=x86_64-unknown-linux-gnu")
        .formatter(bindgen::Formatter::Rustfmt)
        .rustfmt_configuration_file(Some(workspace.root.join("xtask/bindings.rustfmt.toml")));
    let text = quietly::run(|| builder.generate())
        .map_err(anyhow::Error::msg)
        .context("install libclang (Debian: libclang-dev), or set LIBCLANG_PATH to its folder")?
        .context("bindgen could not read ggml's headers")?
        .to_string();
    let path = workspace.sys_crate().join("src/bindings.rs");
    if !check {
        return fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()));
    }
    let committed =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    if committed != text {
        bail!(
            "{} is not current: run `cargo xtask bindgen`",
            path.display()
        );
    }
    Ok(())
}
