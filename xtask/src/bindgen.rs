//! Regenerates the committed bindings of `sd-ggml-sys`, or checks that they are current.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::shared::{bindings, source};

/// Generates the bindings; with `check` only compares them with the committed ones.
pub(crate) fn run(root: &Path, cargo: &Path, check: bool) -> Result<()> {
    let ggml = source::from_stub(cargo, &root.join("vendor/ggml-source"))?;
    let crate_folder = root.join("crates/sd-ggml-sys");
    let text = bindings::builder(&ggml, &crate_folder.join("src/wrapper.h"))
        // One reference target, so that the result is the same on every machine.
        .clang_arg("--target=x86_64-unknown-linux-gnu")
        .formatter(bindgen::Formatter::Rustfmt)
        .generate()
        .context("bindgen needs libclang: install it (Debian: libclang-dev) or set LIBCLANG_PATH")?
        .to_string();
    let path = crate_folder.join("src/bindings.rs");
    if !check {
        return fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()));
    }
    let committed = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    if committed != text {
        bail!("{} is not current: run `cargo xtask bindgen`", path.display());
    }
    Ok(())
}
