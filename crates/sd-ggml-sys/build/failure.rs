//! The one error of the build script: a sentence for the person who reads cargo's output.

use std::fmt;
use std::io;
use std::path::Path;

/// Why the build stops, and what to do about it.
#[derive(Debug)]
pub(crate) struct Failure(String);

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }

    /// An input or output error, with what was tried and where.
    pub(crate) fn io(tried: &str, path: &Path, error: &io::Error) -> Self {
        Self(format!("cannot {tried} {}: {error}", path.display()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}
