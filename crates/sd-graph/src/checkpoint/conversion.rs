//! Writing a checkpoint as one file, with tensors of other types.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use sd_backend::{DType, Device, Ledger, MemoryKind};

use super::write_error::WriteError;
use super::write_gguf;
use super::write_safetensors;
use super::{Checkpoint, StoredType, TensorInfo};
use crate::convert::{convert, is_convertible};
use crate::error::{Error, Result};
use crate::run::{Cancel, Progress, Reporter};

/// Elements that one thread converts at once: whole blocks and whole bytes of every type.
const PIECE: u64 = 1 << 20;

/// Bytes of a piece of a tensor that keeps its type.
const KEPT_PIECE: u64 = 4 << 20;

/// Threads that convert pieces at once.
const MOST_LANES: usize = 8;

/// A format of weight files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileFormat {
    /// GGUF, which holds every type of ggml, and tensors of up to 4 dimensions.
    Gguf,
    /// Safetensors, which holds no quantised types.
    Safetensors,
}

impl FileFormat {
    /// The format that the ending of a file's name says.
    ///
    /// # Errors
    /// [`WriteError::Format`].
    pub fn of(file: &Path) -> Result<FileFormat, WriteError> {
        let ending = file.extension().unwrap_or_default();
        let is = |known: &str| ending.eq_ignore_ascii_case(known);
        match () {
            () if is("gguf") => Ok(FileFormat::Gguf),
            () if is("safetensors") => Ok(FileFormat::Safetensors),
            () => Err(WriteError::Format {
                file: file.to_owned(),
            }),
        }
    }

    /// Why a tensor cannot stand in such a file, if it cannot.
    fn refuses(self, name: &str, tensor: &TensorInfo) -> Option<String> {
        match self {
            FileFormat::Gguf => write_gguf::refuses(name, tensor),
            FileFormat::Safetensors => write_safetensors::refuses(tensor),
        }
    }
}

/// What becomes of a file that has the name of the one to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// It stays, and nothing is written.
    Keep,
    /// It is replaced once the new one is complete.
    Replace,
}

/// A tensor to be written.
#[derive(Debug, Clone)]
pub(super) struct Written {
    pub(super) name: String,
    /// As it will be; without a place.
    pub(super) info: TensorInfo,
    from: StoredType,
}

/// What [`Conversion::write`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConversionReport {
    /// Tensors in the file.
    pub tensors: usize,
    /// Of them, those whose type was changed.
    pub converted: usize,
    /// Bytes of the file.
    pub bytes: u64,
    /// Most bytes of memory that pieces of tensors took at once; it does not depend on the size of the file.
    pub staging: u64,
}

/// A checkpoint that is to be written as one file, with a type for each tensor.
///
/// Everything that can be known before a byte is written is checked when it is made. Tensors are read, converted and written in
/// pieces, several at once on as many threads, so that memory does not grow with the model. Names, shapes and metadata stay what
/// they are.
#[derive(Debug)]
pub struct Conversion {
    checkpoint: Checkpoint,
    format: FileFormat,
    tensors: Vec<Written>,
    metadata: Vec<(String, String)>,
}

impl Conversion {
    /// Plans to write `checkpoint` in `format`; `dtype` says which type a tensor gets, and `None` that it keeps the file's. A
    /// floating-point type of 8 bits, which GGUF does not know, becomes F16 there, which holds all of its values.
    ///
    /// # Errors
    /// [`WriteError::Tensor`] for a tensor that cannot get its type, or that the format cannot hold.
    pub fn new(
        checkpoint: &Checkpoint,
        format: FileFormat,
        dtype: impl Fn(&str, &TensorInfo) -> Option<DType>,
    ) -> Result<Conversion, WriteError> {
        let mut tensors = Vec::with_capacity(checkpoint.len());
        for (name, info) in checkpoint.tensors() {
            let asked = dtype(name, info).or_else(|| in_gguf(info.stored, format));
            let stored = match asked {
                None => info.stored,
                Some(asked) if is_convertible(info.stored, asked) => of_memory(asked)
                    .ok_or_else(|| WriteError::tensor(name, format!("{asked} is not written")))?,
                Some(asked) => {
                    let reason = format!("{} cannot become {asked}", info.stored);
                    return Err(WriteError::tensor(name, reason));
                }
            };
            let written = TensorInfo::new(stored, info.shape.clone())
                .map_err(|reason| WriteError::tensor(name, reason))?;
            if let Some(reason) = format.refuses(name, &written) {
                return Err(WriteError::tensor(name, reason));
            }
            tensors.push(Written {
                name: name.to_owned(),
                info: written,
                from: info.stored,
            });
        }
        if format == FileFormat::Safetensors {
            write_safetensors::arrange(&mut tensors);
        }
        Ok(Conversion {
            checkpoint: checkpoint.clone(),
            format,
            tensors,
            metadata: Vec::new(),
        })
    }

    /// Adds a text to the metadata, in place of what the checkpoint has under this key.
    pub fn metadata(mut self, key: &str, text: &str) -> Conversion {
        self.metadata.push((key.to_owned(), text.to_owned()));
        self
    }

    /// Name, type in the checkpoint and type in the file of each tensor.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, StoredType, StoredType)> {
        let tensors = self.tensors.iter();
        tensors.map(|tensor| (tensor.name.as_str(), tensor.from, tensor.info.stored))
    }

    /// Writes the file: under another name in the same folder, which gets the right one when all of it is on the disk. `progress`
    /// hears of [`Progress::Writing`], and memory is taken on the account of `ledger`.
    ///
    /// # Errors
    /// [`Error::Write`]; [`Error::Checkpoint`] when the checkpoint cannot be read; [`Error::Unconvertible`] for a value that the
    /// wanted type cannot hold; memory that runs out; a run that was cancelled. Nothing is left of the file then, and a file that was
    /// to be replaced is still there.
    pub fn write(
        &self,
        file: &Path,
        existing: Existing,
        ledger: &Ledger,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<ConversionReport> {
        cancel.check()?;
        self.check_target(file, existing)?;
        let header = match self.format {
            FileFormat::Gguf => {
                write_gguf::header(&self.checkpoint, &self.tensors, &self.metadata)?
            }
            FileFormat::Safetensors => {
                write_safetensors::header(&self.checkpoint, &self.tensors, &self.metadata)
            }
        };
        let alignment = match self.format {
            FileFormat::Gguf => write_gguf::ALIGNMENT,
            FileFormat::Safetensors => 1,
        };
        let padded = |tensor: &Written| tensor.info.bytes.next_multiple_of(alignment);
        let total = header.len() as u64 + self.tensors.iter().map(padded).sum::<u64>();

        let lanes = rayon::current_num_threads().clamp(1, MOST_LANES);
        let staging = lanes as u64 * self.largest_piece();
        let _reservation = match Device::cpu() {
            Ok(cpu) => Some(ledger.reserve(cpu, staging, MemoryKind::Staging)?),
            Err(_) => None,
        };

        let folder = file
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let part = tempfile::Builder::new()
            .prefix(".sd-")
            .suffix(".part")
            .tempfile_in(folder)
            .map_err(|error| WriteError::io(file, &error, (0, total)))?;
        let mut sink = Sink {
            out: part.as_file(),
            file,
            written: 0,
            total,
        };
        sink.write(&header)?;
        let mut run = Run {
            cancel,
            progress,
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
        };
        for (index, tensor) in self.tensors.iter().enumerate() {
            run.write_tensor(&self.checkpoint, tensor, &mut sink)?;
            let padding = padded(tensor) - tensor.info.bytes;
            sink.write(&[0; write_gguf::ALIGNMENT as usize][..padding as usize])?;
            run.progress.report(&Progress::Writing {
                done: index + 1,
                total: self.tensors.len(),
                bytes: sink.written,
                of: total,
            });
        }
        // A disk may say only now that it is full.
        let complete = part.as_file().sync_all();
        let refused = |error: &io::Error| WriteError::io(file, error, (total, total));
        complete.map_err(|error| refused(&error))?;
        make_readable(part.as_file()).map_err(|error| refused(&error))?;
        let renamed = match existing {
            Existing::Replace => part.persist(file),
            Existing::Keep => part.persist_noclobber(file),
        };
        renamed.map_err(|error| match error.error.kind() {
            io::ErrorKind::AlreadyExists => WriteError::Exists {
                file: file.to_owned(),
            },
            _ => refused(&error.error),
        })?;
        Ok(ConversionReport {
            tensors: self.tensors.len(),
            converted: self.tensors.iter().filter(|t| !t.is_kept()).count(),
            bytes: total,
            staging,
        })
    }

    /// Refuses a name at which nothing is to be written.
    fn check_target(&self, file: &Path, existing: Existing) -> Result<(), WriteError> {
        let Ok(target) = fs::canonicalize(file) else {
            return Ok(());
        };
        let is_read =
            |read: &Path| fs::canonicalize(read).is_ok_and(|read| is_same(&read, &target));
        if self.checkpoint.files().any(|(read, _)| is_read(read)) {
            return Err(WriteError::SameFile {
                file: file.to_owned(),
            });
        }
        if target.is_dir() {
            return Err(WriteError::Io {
                file: file.to_owned(),
                kind: io::ErrorKind::IsADirectory,
                reason: "cannot be written: it is a folder".to_owned(),
            });
        }
        match existing {
            Existing::Replace => Ok(()),
            Existing::Keep => Err(WriteError::Exists {
                file: file.to_owned(),
            }),
        }
    }

    /// Bytes of the largest piece, as it is read and as it is written.
    fn largest_piece(&self) -> u64 {
        let piece = |tensor: &Written| {
            let elements = tensor.info.elements().min(PIECE);
            match tensor.is_kept() {
                true => tensor.info.bytes.min(KEPT_PIECE),
                false => {
                    let bytes = |stored: StoredType| stored.bytes(elements).unwrap_or(0);
                    bytes(tensor.from) + bytes(tensor.info.stored)
                }
            }
        };
        self.tensors.iter().map(piece).max().unwrap_or(0)
    }
}

impl Written {
    fn is_kept(&self) -> bool {
        self.from == self.info.stored
    }
}

/// The file that is written.
struct Sink<'f, W> {
    out: W,
    file: &'f Path,
    written: u64,
    total: u64,
}

impl<W: Write> Sink<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.out
            .write_all(bytes)
            .map_err(|error| WriteError::io(self.file, &error, (self.written, self.total)))?;
        self.written += bytes.len() as u64;
        Ok(())
    }
}

/// Memory of one thread.
#[derive(Debug, Default)]
struct Lane {
    read: Vec<u8>,
    converted: Vec<u8>,
}

struct Run<'r> {
    cancel: &'r Cancel,
    progress: &'r mut dyn Reporter,
    lanes: Vec<Lane>,
}

impl Run<'_> {
    fn write_tensor<W: Write>(
        &mut self,
        checkpoint: &Checkpoint,
        tensor: &Written,
        sink: &mut Sink<'_, W>,
    ) -> Result<()> {
        let (from, to) = (tensor.from, tensor.info.stored);
        let not_declared = || Error::NotDeclared {
            name: tensor.name.clone(),
        };
        // First byte and number of bytes of each piece as it is read, and bytes as it is written.
        let pieces: Vec<(u64, u64, u64)> = if tensor.is_kept() {
            let starts = (0..tensor.info.bytes).step_by(KEPT_PIECE as usize);
            let bytes = |start| KEPT_PIECE.min(tensor.info.bytes - start);
            starts.map(|start| (start, bytes(start), 0)).collect()
        } else {
            let elements = tensor.info.elements();
            let mut pieces = Vec::new();
            let mut read = 0;
            for first in (0..elements).step_by(PIECE as usize) {
                let count = PIECE.min(elements - first);
                let bytes = |stored: StoredType| stored.bytes(count).ok_or_else(not_declared);
                let (stored, written) = (bytes(from)?, bytes(to)?);
                pieces.push((read, stored, written));
                read += stored;
            }
            pieces
        };
        for batch in pieces.chunks(self.lanes.len()) {
            self.cancel.check()?;
            self.lanes.par_iter_mut().zip(batch).try_for_each(
                |(lane, &(start, bytes, written))| {
                    lane.read.resize(bytes as usize, 0);
                    checkpoint.read_at(&tensor.name, start, &mut lane.read)?;
                    if written == 0 {
                        return Ok(());
                    }
                    lane.converted.resize(written as usize, 0);
                    let memory = to.in_memory().ok_or_else(not_declared)?;
                    convert(&lane.read, from, memory, &mut lane.converted).map_err(|source| {
                        Error::Unconvertible {
                            name: tensor.name.clone(),
                            source,
                        }
                    })
                },
            )?;
            for lane in &self.lanes[..batch.len()] {
                sink.write(match tensor.is_kept() {
                    true => &lane.read,
                    false => &lane.converted,
                })?;
            }
        }
        Ok(())
    }
}

/// What stands for a floating-point type in GGUF, which does not know it.
fn in_gguf(stored: StoredType, format: FileFormat) -> Option<DType> {
    let is_small = matches!(
        stored,
        StoredType::F8E4M3 | StoredType::F8E5M2 | StoredType::F8E4M3Fnuz | StoredType::F8E5M2Fnuz
    );
    (is_small && format == FileFormat::Gguf).then_some(DType::F16)
}

fn of_memory(dtype: DType) -> Option<StoredType> {
    StoredType::from_ggml(dtype.to_ggml())
}

/// Whether two paths, links followed, lead to one file.
#[cfg(unix)]
fn is_same(one: &PathBuf, other: &PathBuf) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |path: &PathBuf| fs::metadata(path).ok().map(|m| (m.dev(), m.ino()));
    one == other || (identity(one).is_some() && identity(one) == identity(other))
}

#[cfg(not(unix))]
fn is_same(one: &PathBuf, other: &PathBuf) -> bool {
    one == other
}

/// Temporary files belong to their owner alone; a weight file is an ordinary one.
#[cfg(unix)]
fn make_readable(file: &fs::File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn make_readable(_file: &fs::File) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes so many bytes and no more.
    struct Disk(usize);

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.0);
            self.0 -= taken;
            match taken {
                0 => Err(io::ErrorKind::StorageFull.into()),
                taken => Ok(taken),
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_and_a_locked_folder_are_said_to_be() {
        let mut sink = Sink {
            out: Disk(150),
            file: Path::new("model.gguf"),
            written: 0,
            total: 200,
        };
        sink.write(&[0; 100]).unwrap();
        let error = sink.write(&[0; 100]).unwrap_err();
        assert!(
            matches!(
                &error,
                WriteError::Io {
                    kind: io::ErrorKind::StorageFull,
                    ..
                }
            ),
            "{error}"
        );
        assert_eq!(
            error.to_string(),
            "model.gguf: the disk is full after 100 of 200 bytes"
        );

        let denied = WriteError::io(
            Path::new("model.gguf"),
            &io::ErrorKind::PermissionDenied.into(),
            (0, 200),
        );
        assert_eq!(
            denied.to_string(),
            "model.gguf: cannot be written: permission denied"
        );
    }
}
