//! Where ggml's source comes from, and which files of it are used.
//!
//! In the repository a stub package (`vendor/ggml-source`) pins one package that carries ggml's tree: cargo fetches it,
//! checks it against the checksum in the stub's lock file, and says where it lies. A published crate cannot reach
//! outside itself, so there the tree is shipped inside it.
//!
//! `xtask` compiles this file too: it copies the tree for a release and generates the bindings from it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::failure::{Failure, Result};

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
    let json = match metadata(cargo, &manifest, true) {
        Ok(json) => json,
        Err(_) => metadata(cargo, &manifest, false).map_err(|error| {
            Failure::new(format!(
                "ggml's source is not fetched yet and cannot be fetched now; run `cargo fetch --locked --manifest-path \
                 {}` while online ({error})",
                manifest.display()
            ))
        })?,
    };
    let json = String::from_utf8_lossy(&json);
    let folder = carrier_folder(&json)
        .ok_or_else(|| Failure::new(format!("`cargo metadata` does not say where {CARRIER} is")))?;
    let root = folder.join(TREE_IN_CARRIER);
    if is_tree(&root) {
        Ok(root)
    } else {
        Err(Failure::new(format!(
            "{CARRIER} carries no ggml at {}",
            root.display()
        )))
    }
}

/// Whether a folder looks like ggml's tree.
pub(crate) fn is_tree(root: &Path) -> bool {
    root.join("include/ggml.h").is_file() && root.join("CMakeLists.txt").is_file()
}

fn metadata(cargo: &Path, manifest: &Path, offline: bool) -> Result<Vec<u8>> {
    let mut command = Command::new(cargo);
    command
        .args([
            "metadata",
            "--format-version=1",
            "--locked",
            "--manifest-path",
        ])
        .arg(manifest);
    if offline {
        command.arg("--offline");
    }
    // The outer cargo's wrappers and job server are meant for the outer build only.
    for variable in [
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_MAKEFLAGS",
        "CARGO_TARGET_DIR",
        "MAKEFLAGS",
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTC_WRAPPER",
    ] {
        command.env_remove(variable);
    }
    let output = command
        .output()
        .map_err(|error| Failure::io("run", cargo, &error))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text
        .lines()
        .find(|line| line.starts_with("error"))
        .unwrap_or("cargo metadata failed");
    Err(Failure::new(line.trim()))
}

/// The folder of [`CARRIER`] in the answer of `cargo metadata`.
///
/// Two fields of one object are wanted, so this looks for them in place of reading the document: a JSON library here
/// would be compiled by everybody who builds this crate. Cargo writes a package as `{"name":...,"version":...,` and its
/// `manifest_path` later in the same object; a mere dependency has no version after its name.
fn carrier_folder(json: &str) -> Option<PathBuf> {
    let package = json
        .split_once(&format!("{{\"name\":\"{CARRIER}\",\"version\":"))?
        .1;
    let text = package.split_once("\"manifest_path\":\"")?.1;
    let mut manifest = String::new();
    let mut characters = text.chars();
    loop {
        match characters.next()? {
            '"' => break,
            '\\' => match characters.next()? {
                escaped @ ('"' | '\\' | '/') => manifest.push(escaped),
                // Control characters: not in a path that a build survives.
                _ => return None,
            },
            character => manifest.push(character),
        }
    }
    Path::new(&manifest).parent().map(Path::to_path_buf)
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
        let kind = entry
            .file_type()
            .map_err(|error| Failure::io("look at", &entry.path(), &error))?;
        let relative = folder.join(entry.file_name());
        if kind.is_file() {
            found.push(relative);
        } else if kind.is_dir() && deep {
            list(root, &relative, deep, found)?;
        }
    }
    Ok(())
}
