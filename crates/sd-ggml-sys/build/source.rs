//! Where ggml's source comes from.
//!
//! In the repository a stub package (`vendor/ggml-source`) pins one package that carries ggml's tree; cargo fetches it,
//! checks its checksum and says where it lies. A published crate cannot reach outside itself, so there the tree is
//! shipped in `vendor/ggml`.
//!
//! This file is also compiled into `xtask`, which copies the tree for a release and generates the bindings from it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::failure::{Failure, Result};

/// The package that carries ggml's tree, and where in it the tree lies.
const CARRIER: &str = "llama-cpp-sys-2";
const TREE_IN_CARRIER: &str = "llama.cpp/ggml";

/// Folders of ggml's tree that this crate can build; backends outside this list are neither copied nor shipped.
const FOLDERS: [&str; 8] = [
    "cmake",
    "include",
    "src/ggml-blas",
    "src/ggml-cpu",
    "src/ggml-cuda",
    "src/ggml-metal",
    "src/ggml-rpc",
    "src/ggml-vulkan",
];

/// Asks cargo where the pinned package of the stub manifest lies, fetching it if it is not there yet.
///
/// `--offline` comes first, so a machine that fetched once never touches the network again.
pub(crate) fn from_stub(cargo: &Path, stub: &Path) -> Result<PathBuf> {
    let manifest = stub.join("Cargo.toml");
    let offline = metadata(cargo, &manifest, true);
    let json = match offline {
        Ok(json) => json,
        Err(_) => metadata(cargo, &manifest, false).map_err(|error| {
            Failure::new(format!(
                "ggml's source could not be fetched (run `cargo fetch --locked --manifest-path {}` while online): {error}",
                manifest.display()
            ))
        })?,
    };
    let root = carrier_folder(&json)?.join(TREE_IN_CARRIER);
    if root.join("include/ggml.h").is_file() {
        Ok(root)
    } else {
        Err(Failure::new(format!("{CARRIER} no longer carries ggml at {}", root.display())))
    }
}

fn metadata(cargo: &Path, manifest: &Path, offline: bool) -> Result<Vec<u8>> {
    let mut command = Command::new(cargo);
    command.args(["metadata", "--format-version=1", "--locked", "--manifest-path"]).arg(manifest);
    if offline {
        command.arg("--offline");
    }
    // The outer cargo's wrappers and job server are meant for the outer build only.
    for variable in [
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_TARGET_DIR",
        "CARGO_MAKEFLAGS",
        "MAKEFLAGS",
    ] {
        command.env_remove(variable);
    }
    let output = command.output().map_err(|error| Failure::io("run", cargo, &error))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find(|line| line.contains("error")).unwrap_or("cargo metadata failed");
    Err(Failure::new(line.trim()))
}

fn carrier_folder(json: &[u8]) -> Result<PathBuf> {
    let unreadable = || Failure::new("cargo metadata gave an answer that names no source package");
    let metadata: serde_json::Value = serde_json::from_slice(json).map_err(|_| unreadable())?;
    let manifest = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|package| package["name"] == CARRIER)
        .and_then(|package| package["manifest_path"].as_str())
        .ok_or_else(unreadable)?;
    Path::new(manifest).parent().map(Path::to_path_buf).ok_or_else(unreadable)
}

/// All files of the tree that this crate uses, relative to its root, sorted.
pub(crate) fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = vec![PathBuf::from("CMakeLists.txt")];
    list(root, Path::new("src"), false, &mut found)?;
    for folder in FOLDERS {
        list(root, Path::new(folder), true, &mut found)?;
    }
    found.sort();
    Ok(found)
}

fn list(root: &Path, folder: &Path, deep: bool, found: &mut Vec<PathBuf>) -> Result<()> {
    let path = root.join(folder);
    let entries = fs::read_dir(&path).map_err(|error| Failure::io("list", &path, &error))?;
    for entry in entries {
        let entry = entry.map_err(|error| Failure::io("list", &path, &error))?;
        let kind = entry.file_type().map_err(|error| Failure::io("look at", &entry.path(), &error))?;
        let relative = folder.join(entry.file_name());
        if kind.is_file() {
            found.push(relative);
        } else if kind.is_dir() && deep {
            list(root, &relative, deep, found)?;
        }
    }
    Ok(())
}
