//! A private copy of ggml's tree in `OUT_DIR`, patched, so that the fetched source stays as it is.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Result};
use crate::{patches, source};

/// Copies the files this crate uses from `from` to `to`, with the patches of `patch_folder` applied.
///
/// A file is written only when its content changes and a file that is no longer wanted is removed, so that a later
/// incremental build compiles only what is new.
pub(crate) fn patched(from: &Path, to: &Path, patch_folder: Option<&Path>) -> Result<()> {
    let patches = match patch_folder {
        Some(folder) => patches::read(folder)?,
        None => Vec::new(),
    };
    let mut wanted = source::files(from)?;
    let mut added = Vec::new();
    for patch in &patches {
        match (patch.is_new, wanted.contains(&patch.file)) {
            (false, false) => return Err(patch.misfit("that file is not in the source")),
            (true, true) => return Err(patch.misfit("that file is in the source already")),
            (true, false) => added.push(patch.file.clone()),
            (false, true) => {}
        }
    }
    wanted.extend(added.iter().cloned());
    for file in &wanted {
        let path = from.join(file);
        let mut content = match added.contains(file) {
            true => Vec::new(),
            false => fs::read(&path).map_err(|error| Failure::io("read", &path, &error))?,
        };
        for patch in patches.iter().filter(|patch| &patch.file == file) {
            content = patch.apply(&content)?;
        }
        write_if_new(&to.join(file), &content)?;
    }
    remove_others(to, Path::new(""), &wanted.into_iter().collect())
}

/// Writes `content` unless the file already has it.
pub(crate) fn write_if_new(path: &Path, content: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|present| present == content) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|error| Failure::io("create", folder, &error))?;
    }
    fs::write(path, content).map_err(|error| Failure::io("write", path, &error))
}

fn remove_others(root: &Path, folder: &Path, wanted: &BTreeSet<PathBuf>) -> Result<()> {
    let path = root.join(folder);
    let entries = fs::read_dir(&path).map_err(|error| Failure::io("list", &path, &error))?;
    for entry in entries.flatten() {
        let relative = folder.join(entry.file_name());
        if entry.path().is_dir() {
            remove_others(root, &relative, wanted)?;
        } else if !wanted.contains(&relative) {
            fs::remove_file(entry.path())
                .map_err(|error| Failure::io("remove", &entry.path(), &error))?;
        }
    }
    Ok(())
}
