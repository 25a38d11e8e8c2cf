//! Makes `sd-ggml-sys` complete for a package, and pins the source it is built from.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::Workspace;
use crate::shared::{digest, source};

/// Fills `crates/sd-ggml-sys/vendor` (which git ignores) with everything that lies outside the crate.
pub(crate) fn copy(workspace: &Workspace) -> Result<()> {
    let ggml = workspace.ggml()?;
    let pin = workspace.stub().join("digest");
    let pinned =
        fs::read_to_string(&pin).with_context(|| format!("cannot read {}", pin.display()))?;
    if digest::of(&ggml)? != pinned.trim() {
        bail!(
            "{} is not the pinned source: its files were changed, or run `cargo xtask pin`",
            ggml.display()
        );
    }
    let target = workspace.sys_crate().join("vendor");
    if target.exists() {
        fs::remove_dir_all(&target)
            .with_context(|| format!("cannot remove {}", target.display()))?;
    }
    for file in source::files(&ggml)? {
        copy_file(&ggml.join(&file), &target.join("ggml").join(&file))?;
    }
    let licence = ggml
        .parent()
        .context("ggml lies in a folder")?
        .join("LICENSE");
    copy_file(&licence, &target.join("LICENSE-ggml"))?;
    copy_file(&pin, &target.join("digest"))?;
    let patches = workspace.root.join("vendor/patches");
    for entry in
        fs::read_dir(&patches).with_context(|| format!("cannot list {}", patches.display()))?
    {
        let entry = entry?;
        if entry
            .path()
            .extension()
            .is_some_and(|extension| extension == "patch")
        {
            copy_file(
                &entry.path(),
                &target.join("patches").join(entry.file_name()),
            )?;
        }
    }
    Ok(())
}

fn copy_file(from: &Path, to: &Path) -> Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
    }
    // Not `fs::copy`: cargo keeps its sources read-only at times, and the copy must be removable.
    let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    fs::write(to, content).with_context(|| format!("cannot write {}", to.display()))
}

/// Writes the fingerprint of the source that cargo now fetches.
pub(crate) fn pin(workspace: &Workspace) -> Result<()> {
    let digest = digest::of(&workspace.ggml()?)?;
    let path = workspace.stub().join("digest");
    fs::write(&path, format!("{digest}\n"))
        .with_context(|| format!("cannot write {}", path.display()))
}
