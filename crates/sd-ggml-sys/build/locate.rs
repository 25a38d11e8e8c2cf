//! Chooses the source tree of this build and makes the copy of it that is compiled.

use std::fs;
use std::path::{Path, PathBuf};

use crate::env::Settings;
use crate::failure::{Failure, Result};
use crate::{cargo, copy, digest, source};

/// The version of ggml that the committed bindings describe; `VERSION` in `src/lib.rs` says the same.
pub(crate) const BOUND: &str = "0.26.0";

/// The compiled copy: patched, in `OUT_DIR`.
pub(crate) struct Tree {
    pub(crate) root: PathBuf,
    pub(crate) version: String,
}

/// Finds the source, checks it, copies it to `OUT_DIR` and patches the copy.
pub(crate) fn tree(settings: &Settings) -> Result<Tree> {
    let original = match &settings.source {
        Some(root) => own(root)?,
        None => pinned(settings)?,
    };
    let root = settings.out.join("ggml");
    copy::patched(&original.root, &root, original.patches.as_deref())?;
    Ok(Tree {
        version: version(&root)?,
        root,
    })
}

struct Original {
    root: PathBuf,
    patches: Option<PathBuf>,
}

/// A tree of the user's own: neither checked nor patched.
fn own(root: &Path) -> Result<Original> {
    if !source::is_tree(root) {
        return Err(Failure::new(format!(
            "SD_GGML_SOURCE={} holds no ggml (no include/ggml.h)",
            root.display()
        )));
    }
    cargo::rerun_if_changed(root);
    let found = version(root)?;
    if found != BOUND && !cfg!(feature = "bindgen") {
        cargo::warning(format!(
            "SD_GGML_SOURCE is ggml {found} and the bindings are for {BOUND}: add the feature `bindgen`"
        ));
    }
    Ok(Original {
        root: root.to_path_buf(),
        patches: None,
    })
}

fn pinned(settings: &Settings) -> Result<Original> {
    let repository = settings
        .manifest
        .ancestors()
        .nth(2)
        .unwrap_or(&settings.manifest)
        .join("vendor");
    let stub = repository.join("ggml-source");
    // Cargo puts `Cargo.toml.orig` into every package it makes: there the shipped copy is the source.
    let packaged = settings.manifest.join("Cargo.toml.orig").exists() || !stub.exists();
    let (root, vendor, pin) = if packaged {
        let vendor = settings.manifest.join("vendor");
        let root = vendor.join("ggml");
        if !source::is_tree(&root) {
            return Err(Failure::new(
                "this package lacks vendor/ggml: it was packaged without `cargo xtask vendor`",
            ));
        }
        cargo::rerun_if_changed(&vendor);
        (root, vendor.clone(), vendor.join("digest"))
    } else {
        cargo::rerun_if_changed(&stub);
        cargo::rerun_if_changed(&repository.join("patches"));
        (
            source::from_stub(&settings.cargo, &stub)?,
            repository,
            stub.join("digest"),
        )
    };
    check(&root, &pin)?;
    Ok(Original {
        root,
        patches: Some(vendor.join("patches")),
    })
}

fn check(root: &Path, pin: &Path) -> Result<()> {
    let expected = fs::read_to_string(pin).map_err(|error| Failure::io("read", pin, &error))?;
    let found = digest::of(root)?;
    if found == expected.trim() {
        return Ok(());
    }
    Err(Failure::new(format!(
        "{} is not the ggml that is pinned ({found} in place of {}): its files were changed; remove that folder and \
         build again, or set SD_GGML_SOURCE to build changed files on purpose",
        root.display(),
        expected.trim()
    )))
}

/// The version that the tree states in its `CMakeLists.txt`, such as `0.26.0`.
fn version(root: &Path) -> Result<String> {
    let path = root.join("CMakeLists.txt");
    let text = fs::read_to_string(&path).map_err(|error| Failure::io("read", &path, &error))?;
    let part = |name: &str| {
        let rest = text.split(&format!("set(GGML_VERSION_{name} ")).nth(1)?;
        rest.split(')').next()
    };
    match (part("MAJOR"), part("MINOR"), part("PATCH")) {
        (Some(major), Some(minor), Some(patch)) => Ok(format!("{major}.{minor}.{patch}")),
        _ => Err(Failure::new(format!(
            "{} states no version of ggml",
            path.display()
        ))),
    }
}
