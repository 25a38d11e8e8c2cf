//! `model_index.json`: what a folder in the diffusers layout holds.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::config::read_json;
use crate::error::{Error, Result};

/// Pipeline classes that [`Pipeline::open`](crate::Pipeline::open) knows.
pub(crate) const SUPPORTED: &[&str] = &["QwenImage21Pipeline"];

/// The index of a model folder: the pipeline's class and its parts.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ModelIndex {
    #[serde(rename = "_class_name")]
    class_name: String,
    #[serde(flatten)]
    entries: BTreeMap<String, Value>,
}

impl ModelIndex {
    /// Reads the index of `folder`.
    ///
    /// # Errors
    /// [`Error::Missing`] if it is no such folder, [`Error::Io`], [`Error::Config`].
    pub fn read(folder: &Path) -> Result<ModelIndex> {
        let path = folder.join("model_index.json");
        if !folder.is_dir() {
            return Err(Error::Missing {
                path: folder.to_owned(),
                what: "model folder",
            });
        }
        if !path.is_file() {
            return Err(Error::Missing {
                path: folder.to_owned(),
                what: "model_index.json",
            });
        }
        read_json(&path)
    }

    /// Class of the pipeline: `QwenImage21Pipeline`.
    pub fn class_name(&self) -> &str {
        &self.class_name
    }

    /// Whether this version can run it.
    pub fn is_supported(&self) -> bool {
        SUPPORTED.contains(&self.class_name.as_str())
    }

    /// Folder and class of each part: `("vae", "AutoencoderKLQwenImage21")`.
    pub fn components(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries
            .iter()
            .filter_map(|(name, value)| match value.as_array()?.as_slice() {
                [_library, Value::String(class)] => Some((name.as_str(), class.as_str())),
                _ => None,
            })
    }
}
