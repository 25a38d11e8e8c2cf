//! `model_index.json`, or `modular_model_index.json` of modular pipelines: what a folder in the diffusers layout holds.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::config::read_json;
use crate::error::{Error, Result};

/// Pipeline classes that [`Pipeline::open`](crate::Pipeline::open) knows.
pub(crate) const SUPPORTED: &[&str] = &["QwenImage21Pipeline"];

/// Names of the file; the first that is there counts.
const FILES: [&str; 2] = ["model_index.json", "modular_model_index.json"];

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
        if !folder.is_dir() {
            return Err(Error::Missing {
                path: folder.to_owned(),
                what: "model folder",
            });
        }
        let mut paths = FILES.iter().map(|file| folder.join(file));
        match paths.find(|path| path.is_file()) {
            Some(path) => read_json(&path),
            None => Err(Error::Missing {
                path: folder.to_owned(),
                what: FILES[0],
            }),
        }
    }

    /// Whether `folder` has one.
    pub fn is_in(folder: &Path) -> bool {
        FILES.iter().any(|file| folder.join(file).is_file())
    }

    /// Class of the pipeline: `QwenImage21Pipeline`.
    pub fn class_name(&self) -> &str {
        &self.class_name
    }

    /// Whether [`Pipeline::open`](crate::Pipeline::open) knows it.
    pub fn is_supported(&self) -> bool {
        SUPPORTED.contains(&self.class_name.as_str())
    }

    /// Folder and class of each part: `("vae", "AutoencoderKLQwenImage21")`.
    pub fn components(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries
            .iter()
            .filter_map(|(name, value)| match value.as_array()?.as_slice() {
                [_library, Value::String(class), ..] => Some((name.as_str(), class.as_str())),
                // Of a modular pipeline, not loaded when the index was written.
                [Value::Null, Value::Null, told] => {
                    let class = told.get("type_hint")?.get(1)?.as_str()?;
                    Some((name.as_str(), class))
                }
                _ => None,
            })
    }
}
