//! Finding the tiny checkpoints that the repository carries.

use std::path::{Path, PathBuf};

use sd_models::ModelIndex;

use crate::error::Error;

/// The one of pictures.
pub(crate) const PICTURES: &str = "models/tiny-qwen-image-2.1";

/// The one of clips with sound.
pub(crate) const CLIPS: &str = "models/tiny-minimax-h3";

/// The folder of a tiny checkpoint: in the current folder or one above it, else in one above the program.
pub(crate) fn find(model: &'static str) -> Result<PathBuf, Error> {
    let current = std::env::current_dir().ok();
    let program = std::env::current_exe().ok();
    [current, program]
        .iter()
        .flatten()
        .flat_map(|start| start.ancestors())
        .map(|folder| folder.join(model))
        .find(|folder| is_model(folder))
        .ok_or(Error::NoModel { model })
}

fn is_model(folder: &Path) -> bool {
    ModelIndex::is_in(folder)
}
