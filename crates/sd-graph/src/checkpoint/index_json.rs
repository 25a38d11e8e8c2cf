//! The index of a sharded checkpoint: a JSON file that says which file holds which tensor.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Component, Path, PathBuf};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::error::{CheckpointError, shown};
use super::file::WeightFile;
use super::foreign::{self, recognise};
use super::safetensors::MAX_HEADER;
use super::string_map::{StringMap, Trail};

const WEIGHT_MAP: &str = "weight_map";
/// Bytes that a shard's name may have: what file systems allow.
const MAX_SHARD_NAME: usize = 255;
/// Missing shards that an error names.
const NAMED: usize = 5;

/// What an index says.
pub(super) struct ShardIndex {
    /// For each tensor the path of its shard, relative to the index's folder; never one that leaves it.
    pub(super) weight_map: BTreeMap<String, PathBuf>,
}

impl ShardIndex {
    pub(super) fn read(path: &Path) -> Result<ShardIndex, CheckpointError> {
        let file = WeightFile::open(path)?;
        if file.length() > MAX_HEADER {
            let reason = format!(
                "the index has {} bytes, more than the {MAX_HEADER} that are allowed",
                file.length()
            );
            return Err(CheckpointError::index(path, reason));
        }
        let mut text = vec![0; file.length() as usize];
        file.read(None, 0, &mut text)?;
        if let Some(found) = recognise(&text[..text.len().min(foreign::HEAD as usize)]) {
            return Err(CheckpointError::Foreign {
                file: path.to_owned(),
                wanted: "an index of shards",
                found,
            });
        }
        if text.is_empty() {
            return Err(CheckpointError::index(path, "the file is empty"));
        }
        let weight_map = parse(path, &text)?;
        if weight_map.is_empty() {
            return Err(CheckpointError::index(
                path,
                format!("its `{WEIGHT_MAP}` names no tensor"),
            ));
        }
        let inside = |(tensor, shard): (String, String)| match inside_folder(&shard) {
            Ok(shard) => Ok((tensor, shard)),
            Err(why) => {
                let reason = format!("the index gives `{}` as its shard: {why}", shown(&shard));
                Err(CheckpointError::tensor(path, &tensor, reason))
            }
        };
        Ok(ShardIndex {
            weight_map: weight_map
                .into_iter()
                .map(inside)
                .collect::<Result<_, _>>()?,
        })
    }
}

/// The error for `missing`, the shards that are not there, out of `all`.
pub(super) fn missing_shards(index: &Path, missing: &[&Path], all: usize) -> CheckpointError {
    let mut names: Vec<String> = missing
        .iter()
        .take(NAMED)
        .map(|shard| shown(&shard.to_string_lossy()))
        .collect();
    if missing.len() > NAMED {
        names.push(format!("{} more", missing.len() - NAMED));
    }
    CheckpointError::index(
        index,
        format!(
            "{} of {all} shards are missing: {}",
            missing.len(),
            names.join(", ")
        ),
    )
}

fn parse(path: &Path, text: &[u8]) -> Result<BTreeMap<String, String>, CheckpointError> {
    let text = str::from_utf8(text).map_err(|error| {
        CheckpointError::index(path, format!("the index is not UTF-8 text: {error}"))
    })?;
    let mut reader = Reader::default();
    let mut json = serde_json::Deserializer::from_str(text);
    let result = (&mut reader)
        .deserialize(&mut json)
        .and_then(|map| json.end().map(|()| map));
    let reason = match (result, reader.trail.at) {
        (Ok(Some(map)), _) => return Ok(map),
        (Ok(None), _) => format!("it is no index of shards: it has no `{WEIGHT_MAP}`"),
        (Err(error), _) if !error.is_data() => {
            format!("the index is not valid JSON: {}", shown(&error.to_string()))
        }
        (Err(_), _) if reader.repeated => format!("the index has `{WEIGHT_MAP}` twice"),
        (Err(_), Some(name)) if reader.trail.repeated => {
            return Err(CheckpointError::tensor(
                path,
                &name,
                "the index names it twice",
            ));
        }
        (Err(error), Some(name)) => {
            let reason = format!(
                "the index does not name a file for it: {}",
                shown(&error.to_string())
            );
            return Err(CheckpointError::tensor(path, &name, reason));
        }
        (Err(error), None) => {
            format!(
                "`{WEIGHT_MAP}` must map tensor names to file names: {}",
                shown(&error.to_string())
            )
        }
    };
    Err(CheckpointError::index(path, reason))
}

#[derive(Default)]
struct Reader {
    trail: Trail,
    repeated: bool,
}

impl<'de> DeserializeSeed<'de> for &mut Reader {
    type Value = Option<BTreeMap<String, String>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Reader {
    type Value = Option<BTreeMap<String, String>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut weight_map = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != WEIGHT_MAP {
                map.next_value::<IgnoredAny>()?;
            } else if weight_map.is_some() {
                self.repeated = true;
                return Err(serde::de::Error::duplicate_field(WEIGHT_MAP));
            } else {
                weight_map = Some(map.next_value_seed(StringMap(&mut self.trail))?);
            }
        }
        Ok(weight_map)
    }
}

/// `shard` as a path below its folder, or why it is none. The answer is the same on every system.
fn inside_folder(shard: &str) -> Result<PathBuf, &'static str> {
    if shard.is_empty() {
        return Err("a file name is missing");
    }
    if shard.len() > MAX_SHARD_NAME {
        return Err("no file name is that long");
    }
    if shard.contains(['\\', ':', '\0']) {
        return Err("a shard's name must not contain a backslash, a colon or a zero");
    }
    let mut inside = PathBuf::new();
    for component in Path::new(shard).components() {
        match component {
            Component::Normal(part) => inside.push(part),
            _ => return Err("a shard must lie in the folder of its index"),
        }
    }
    Ok(inside)
}
