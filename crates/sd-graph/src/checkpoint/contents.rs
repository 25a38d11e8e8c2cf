//! Putting a checkpoint together from its files.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::{CheckpointError, shown};
use super::file::WeightFile;
use super::gguf;
use super::gguf_metadata::MetadataValue;
use super::index_json::{self, ShardIndex};
use super::safetensors;
use super::tensor_info::TensorInfo;

/// A checkpoint's files and tensors while they are put together, and after.
#[derive(Debug, Default)]
pub(super) struct Contents {
    pub(super) path: PathBuf,
    /// Shared with the checkpoints that are selections of this one.
    pub(super) files: Vec<Arc<WeightFile>>,
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) bytes: u64,
    pub(super) parameters: u64,
    /// Where the values of metadata lie that were not kept as they are, and of which file.
    pub(super) values: BTreeMap<String, (usize, MetadataValue)>,
}

impl Contents {
    /// Adds one file and all its tensors.
    pub(super) fn add_file(&mut self, path: &Path) -> Result<(), CheckpointError> {
        let file = WeightFile::open(path)?;
        let list = if gguf::is_gguf(&file)? {
            gguf::list
        } else {
            safetensors::list
        };
        let listing = list(&file, self.files.len())?;
        for (name, info) in listing.tensors {
            match self.tensors.entry(name) {
                Entry::Vacant(place) => {
                    place.insert(info);
                }
                Entry::Occupied(taken) => {
                    let other = taken.get().location.and_then(|at| self.files.get(at.file));
                    let other = other
                        .and_then(|file| file.path().file_name())
                        .unwrap_or_default();
                    let reason =
                        format!("the shard {} has it too", shown(&other.to_string_lossy()));
                    return Err(CheckpointError::tensor(path, taken.key(), reason));
                }
            }
        }
        for (key, value) in listing.values {
            if !self.metadata.contains_key(&key) {
                self.values.insert(key, (self.files.len(), value));
            }
        }
        for (key, text) in listing.metadata {
            self.metadata.entry(key).or_insert(text);
        }
        self.files.push(Arc::new(file));
        Ok(())
    }

    /// Adds the shards of the index at `self.path`, and holds what they contain against it.
    pub(super) fn add_shards(&mut self) -> Result<(), CheckpointError> {
        let index = self.path.clone();
        let ShardIndex { weight_map } = ShardIndex::read(&index)?;
        let folder = index.parent().unwrap_or(Path::new(""));
        let shards: BTreeSet<&Path> = weight_map.values().map(PathBuf::as_path).collect();

        let is_missing = |shard: &Path| {
            std::fs::metadata(folder.join(shard))
                .is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        };
        let missing: Vec<&Path> = shards
            .iter()
            .copied()
            .filter(|shard| is_missing(shard))
            .collect();
        if !missing.is_empty() {
            return Err(index_json::missing_shards(&index, &missing, shards.len()));
        }

        let mut numbers = BTreeMap::new();
        for &shard in &shards {
            numbers.insert(shard, self.files.len());
            self.add_file(&folder.join(shard))?;
        }
        for (name, shard) in &weight_map {
            let location = self.tensors.get(name).and_then(|info| info.location);
            if location.is_none_or(|at| numbers.get(shard.as_path()) != Some(&at.file)) {
                let shard = shown(&shard.to_string_lossy());
                let reason =
                    format!("the index puts it into the shard {shard}, which does not have it");
                return Err(CheckpointError::tensor(&index, name, reason));
            }
        }
        let unlisted = self.tensors.len() - weight_map.len();
        if unlisted > 0 {
            tracing::warn!(index = %index.display(), tensors = unlisted, "the shards hold tensors that their index does not name");
        }
        Ok(())
    }

    pub(super) fn finish(mut self) -> Result<Contents, CheckpointError> {
        for (name, info) in &self.tensors {
            let sums = self
                .bytes
                .checked_add(info.bytes)
                .zip(self.parameters.checked_add(info.elements()));
            let Some((bytes, parameters)) = sums else {
                let reason = "with it the size of all tensors together overflows 64 bits";
                return Err(CheckpointError::tensor(&self.path, name, reason));
            };
            (self.bytes, self.parameters) = (bytes, parameters);
        }
        let Contents {
            files,
            tensors,
            bytes,
            ..
        } = &self;
        tracing::debug!(path = %self.path.display(), files = files.len(), tensors = tensors.len(), bytes, "checkpoint opened");
        Ok(self)
    }
}
