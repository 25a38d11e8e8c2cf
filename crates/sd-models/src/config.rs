//! Reading a model folder's JSON.

use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// Largest configuration that is read; published ones have a few kilobytes.
const LARGEST: u64 = 16 << 20;

/// Reads a JSON file as `T`.
///
/// # Errors
/// [`Error::Io`] with the path, or [`Error::Config`] with the line that is wrong.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let io = |source| Error::Io {
        path: path.to_owned(),
        source,
    };
    let config = |reason: String| Error::Config {
        path: path.to_owned(),
        reason,
    };
    let bytes = fs::metadata(path).map_err(io)?.len();
    if bytes > LARGEST {
        return Err(config(format!(
            "{bytes} bytes are too many for a configuration"
        )));
    }
    let text = fs::read_to_string(path).map_err(io)?;
    serde_json::from_str(&text).map_err(|error| config(error.to_string()))
}

/// Reads `value` as `T`, as if it stood in the file `path`.
///
/// # Errors
/// [`Error::Config`].
pub(crate) fn from_json<T: DeserializeOwned>(path: &Path, value: serde_json::Value) -> Result<T> {
    serde_json::from_value(value).map_err(|error| Error::Config {
        path: path.to_owned(),
        reason: error.to_string(),
    })
}

/// Refuses values that would make a model without sense.
///
/// # Errors
/// [`Error::Config`] naming the first field that fails.
pub(crate) fn check(path: &Path, rules: &[(&str, bool)]) -> Result<()> {
    match rules.iter().find(|(_, holds)| !holds) {
        Some((rule, _)) => Err(Error::Config {
            path: path.to_owned(),
            reason: format!("{rule} does not hold"),
        }),
        None => Ok(()),
    }
}
