//! Our changes to ggml: unified diffs under `vendor/patches`, each with a header that gives its reason.

use std::fs;
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Result};

/// One patch of one file.
pub(crate) struct Patch {
    /// The patch's own file name, for messages.
    name: String,
    /// The file it changes or adds, relative to ggml's root.
    pub(crate) file: PathBuf,
    /// Whether it adds that file.
    pub(crate) is_new: bool,
    diff: String,
}

impl Patch {
    /// The file's content with this patch applied.
    pub(crate) fn apply(&self, content: &[u8]) -> Result<Vec<u8>> {
        let text =
            std::str::from_utf8(content).map_err(|_| self.misfit("that file is not text"))?;
        let patch =
            diffy::Patch::from_str(&self.diff).map_err(|error| self.misfit(&error.to_string()))?;
        let patched =
            diffy::apply(text, &patch).map_err(|error| self.misfit(&error.to_string()))?;
        Ok(patched.into_bytes())
    }

    pub(crate) fn misfit(&self, reason: &str) -> Failure {
        Failure::new(format!(
            "the patch {} does not fit {} of this ggml: {reason}; adapt it or drop it, see the upgrade checklist",
            self.name,
            self.file.display()
        ))
    }
}

/// All patches of a folder, in the order of their names.
pub(crate) fn read(folder: &Path) -> Result<Vec<Patch>> {
    let entries = fs::read_dir(folder).map_err(|error| Failure::io("list", folder, &error))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "patch")
    });
    paths.sort();
    let mut patches = Vec::new();
    for path in &paths {
        patches.extend(parse(path)?);
    }
    Ok(patches)
}

/// Splits a patch file at its `--- a/...` lines, or `--- /dev/null` where it adds a file; what stands before the first one
/// is the reason, for people.
fn parse(path: &Path) -> Result<Vec<Patch>> {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let text = fs::read_to_string(path).map_err(|error| Failure::io("read", path, &error))?;
    let mut patches: Vec<Patch> = Vec::new();
    let mut lines = text.split_inclusive('\n').peekable();
    while let Some(line) = lines.next() {
        let next = lines.peek().copied().unwrap_or_default();
        let added = match line.trim_end() {
            "--- /dev/null" => next.strip_prefix("+++ b/"),
            _ => None,
        };
        if let Some(file) = line.strip_prefix("--- a/").or(added) {
            patches.push(Patch {
                name: name.clone(),
                file: PathBuf::from(file.trim_end()),
                is_new: added.is_some(),
                diff: String::new(),
            });
        }
        if let Some(patch) = patches.last_mut() {
            patch.diff.push_str(line);
        }
    }
    if patches.is_empty() {
        return Err(Failure::new(format!(
            "the patch {name} has no line that begins with `--- a/`"
        )));
    }
    Ok(patches)
}
