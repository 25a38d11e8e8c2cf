//! From the files of a transformer to what is declared against them.

use std::path::Path;

use sd_graph::Checkpoint;
use serde_json::{Value, json};

use super::config::TransformerConfig;
use super::names::{QkvOrder, TRANSFORMER, select};
use crate::config::{from_json, read_json};
use crate::error::{Error, Result};
use crate::families::config_of;
use crate::shapes::Shapes;

/// A transformer as its files have it.
#[derive(Debug)]
pub(super) struct Source {
    /// Its tensors, under the model's names.
    pub(super) checkpoint: Checkpoint,
    pub(super) config: TransformerConfig,
}

/// The class that writes `config.json`.
const CLASS: &str = "MiniMaxH3Transformer3DModel";

impl Source {
    /// Opens a folder of diffusers', of the model's authors or any other, or a file. Its `config.json` is believed where it is one of
    /// diffusers'; else the metadata, or the shapes, tell.
    ///
    /// # Errors
    /// Everything that can be wrong with files; see [`Error`].
    pub(super) fn open(path: &Path, order: QkvOrder) -> Result<Source> {
        let checkpoint = select(&Checkpoint::open(path)?, order)?;
        let folder = if path.is_dir() {
            Some(path)
        } else {
            path.parent()
        };
        let beside = folder.map(|folder| folder.join("config.json"));
        if let Some(beside) = beside.filter(|beside| beside.is_file()) {
            let told: Result<Value> = read_json(&beside);
            let is_ours = |told: &Value| told["_class_name"] == CLASS;
            match told {
                Ok(told) if is_ours(&told) => {
                    let config = checked(told, &checkpoint, &beside);
                    // What stands beside a single file may be about another.
                    if path.is_dir() || config.is_ok() {
                        let config = config?;
                        return Ok(Source { checkpoint, config });
                    }
                }
                Err(error) if path.is_dir() => return Err(error),
                _ => {}
            }
        }
        let derived = config_of(&TRANSFORMER, &checkpoint).map_err(|reason| Error::Config {
            path: path.to_owned(),
            reason,
        })?;
        let config = checked(derived, &checkpoint, path)?;
        Ok(Source { checkpoint, config })
    }
}

/// The configuration in `value`, with what no `config.json` says: whether there is a table of times.
fn checked(mut value: Value, checkpoint: &Checkpoint, path: &Path) -> Result<TransformerConfig> {
    if let Ok([rows, _]) = Shapes::of(checkpoint).matrix("adaln_t_table") {
        value["time_table"] = json!(rows);
    }
    TransformerConfig::checked(from_json(path, value)?, path)
}
