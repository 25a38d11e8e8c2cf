//! Finding the tiny checkpoint that the repository carries.

use std::path::{Path, PathBuf};

use crate::error::Error;

const FOLDER: &str = "models/tiny-qwen-image-2.1";

/// The folder of the tiny checkpoint: in the current folder or one above it, else in one above the program.
pub(crate) fn find() -> Result<PathBuf, Error> {
    let current = std::env::current_dir().ok();
    let program = std::env::current_exe().ok();
    [current, program]
        .iter()
        .flatten()
        .flat_map(|start| start.ancestors())
        .map(|folder| folder.join(FOLDER))
        .find(|folder| is_model(folder))
        .ok_or(Error::NoModel)
}

fn is_model(folder: &Path) -> bool {
    folder.join("model_index.json").is_file()
}
