//! What can be wrong with writing a weight file.

use std::io;
use std::path::{Path, PathBuf};

use super::error::shown;

/// Why a weight file was not written. Nothing is left of it then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The name of the file does not say its format.
    #[error("{}: the name must end in .gguf or .safetensors, which says what is written", file.display())]
    Format {
        /// The file.
        file: PathBuf,
    },
    /// There is a file of this name, which is not to be replaced.
    #[error("{}: the file exists already", file.display())]
    Exists {
        /// The file.
        file: PathBuf,
    },
    /// The file is one of those that are read.
    #[error("{}: this is the file that is read; it cannot be written at the same time", file.display())]
    SameFile {
        /// The file.
        file: PathBuf,
    },
    /// The format cannot hold a tensor as it is to be.
    #[error("tensor `{tensor}`: {reason}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// Why not.
        reason: String,
    },
    /// The system refused: no permission, no such folder, a full disk.
    #[error("{}: {reason}", file.display())]
    Io {
        /// The file or folder.
        file: PathBuf,
        /// The kind of failure.
        kind: io::ErrorKind,
        /// What failed and why.
        reason: String,
    },
}

impl WriteError {
    pub(super) fn tensor(tensor: &str, reason: impl Into<String>) -> WriteError {
        WriteError::Tensor {
            tensor: shown(tensor),
            reason: reason.into(),
        }
    }

    /// The refusal `error` after `written` of `total` bytes.
    pub(super) fn io(file: &Path, error: &io::Error, (written, total): (u64, u64)) -> WriteError {
        let reason = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                format!("the disk is full after {written} of {total} bytes")
            }
            io::ErrorKind::FileTooLarge => {
                format!("the disk holds no files of {total} bytes; {written} of them were accepted")
            }
            io::ErrorKind::PermissionDenied => "cannot be written: permission denied".to_owned(),
            io::ErrorKind::ReadOnlyFilesystem => {
                "cannot be written: the disk is read-only".to_owned()
            }
            io::ErrorKind::NotFound => "cannot be written: there is no such folder".to_owned(),
            _ => format!("cannot be written: {error}"),
        };
        WriteError::Io {
            file: file.to_owned(),
            kind: error.kind(),
            reason,
        }
    }
}
