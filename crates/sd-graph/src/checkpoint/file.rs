//! One open weight file.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use sd_backend::{MapOptions, MappedFile};

use super::error::{CheckpointError, shown};
use super::mapping::FileMappings;

/// A regular file, held open at the length it had when it was opened.
///
/// Reads name their position, so threads share one handle, and a file that is replaced under its name does not mix
/// with the one that was checked.
#[derive(Debug)]
pub(super) struct WeightFile {
    path: PathBuf,
    file: File,
    length: u64,
    mappings: Mutex<FileMappings>,
}

impl WeightFile {
    pub(super) fn open(path: &Path) -> Result<WeightFile, CheckpointError> {
        // Asked before opening: opening a named pipe would wait for its writer.
        regular(path, &metadata(path)?)?;
        let file = File::open(path).map_err(|error| CheckpointError::io(path, "opened", &error))?;
        let opened = file
            .metadata()
            .map_err(|error| CheckpointError::io(path, "opened", &error))?;
        regular(path, &opened)?;
        Ok(WeightFile {
            path: path.to_owned(),
            file,
            length: opened.len(),
            mappings: Mutex::default(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes when it was opened.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// What is kept of it in memory.
    pub(super) fn mappings(&self) -> MutexGuard<'_, FileMappings> {
        // It is right after each statement that changes it.
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps it; it must still be as long as when it was opened.
    pub(super) fn map(&self, options: MapOptions) -> io::Result<MappedFile> {
        MappedFile::open(&self.file, self.length, options)
    }

    /// Whether it lies on a disk of this machine.
    pub(super) fn is_local(&self) -> bool {
        sd_backend::is_local(&self.file)
    }

    /// Fills `into` from byte `offset` of the file; `tensor` is the one being read, for the error.
    pub(super) fn read(
        &self,
        tensor: Option<&str>,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), CheckpointError> {
        read_exact_at(&self.file, offset, into).map_err(|error| {
            let actual = self.file.metadata().map_or(0, |now| now.len());
            if error.kind() == io::ErrorKind::UnexpectedEof {
                let tensor = tensor.map(shown);
                return CheckpointError::Shrunk {
                    file: self.path.clone(),
                    tensor,
                    expected: self.length,
                    actual,
                };
            }
            match (tensor, CheckpointError::io(&self.path, "read", &error)) {
                (Some(tensor), CheckpointError::Io { file, kind, reason }) => CheckpointError::Io {
                    file,
                    kind,
                    reason: format!("tensor `{}`: {reason}", shown(tensor)),
                },
                (_, error) => error,
            }
        })
    }
}

/// What is at `path`, links followed.
pub(super) fn metadata(path: &Path) -> Result<fs::Metadata, CheckpointError> {
    fs::metadata(path).map_err(|error| {
        if error.kind() == io::ErrorKind::NotFound
            && fs::symlink_metadata(path).is_ok_and(|link| link.is_symlink())
        {
            let reason =
                "this is a link to a file that does not exist; the download may be incomplete"
                    .to_owned();
            return CheckpointError::Io {
                file: path.to_owned(),
                kind: error.kind(),
                reason,
            };
        }
        CheckpointError::io(path, "opened", &error)
    })
}

fn regular(path: &Path, metadata: &fs::Metadata) -> Result<(), CheckpointError> {
    let reason = if metadata.is_dir() {
        "this is a folder where a file is needed"
    } else if !metadata.is_file() {
        "this is neither a file nor a folder"
    } else {
        return Ok(());
    };
    Err(CheckpointError::Io {
        file: path.to_owned(),
        kind: io::ErrorKind::InvalidInput,
        reason: reason.to_owned(),
    })
}

#[cfg(unix)]
fn read_exact_at(file: &File, offset: u64, into: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, into, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut offset: u64, mut into: &mut [u8]) -> io::Result<()> {
    while !into.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, into, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                into = &mut into[read..];
                offset += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(not(any(unix, windows)))]
fn read_exact_at(_file: &File, _offset: u64, _into: &mut [u8]) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
