//! Weight files: which tensors they hold, and reading them.
//!
//! [`Checkpoint`] says what is accepted and what is refused. A format is a reader that turns an open file into checked
//! [`TensorInfo`]s (`safetensors`, over `header`; `gguf`, over `gguf_cursor`); everything else does not know formats.
//! Nothing in a file is believed before it is checked, and no code here can panic on what a file says.

mod contents;
mod conversion;
mod error;
mod file;
mod folder;
mod foreign;
mod gguf;
mod gguf_cursor;
mod gguf_metadata;
mod header;
mod index_json;
mod mapping;
mod safetensors;
mod selection;
mod stored_type;
mod string_map;
mod tensor_info;
mod write_error;
mod write_gguf;
mod write_safetensors;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use conversion::{Conversion, ConversionReport, Existing, FileFormat};
pub use error::CheckpointError;
pub use selection::{Rows, Selection};
pub use stored_type::{StoredType, UnknownStoredType};
pub use tensor_info::TensorInfo;
pub use write_error::WriteError;

use contents::Contents;
use error::shown;
use tensor_info::Location;

/// A checked list of the tensors in one or more weight files, which are held open.
///
/// Opening reads the lists of tensors of the files and checks them; no tensor byte is read. What an opened checkpoint
/// says about its tensors holds: every name is there once, every shape fits its bytes, every byte lies in the file.
/// A clone shares the list and the files.
///
/// # What is accepted
///
/// - One **safetensors** file, whatever its name.
/// - One **GGUF** file of version 2 or 3, little-endian, whatever its name: it is known by its first four bytes.
/// - The **index of a sharded checkpoint**, `*.safetensors.index.json` or any other `.json` with a `weight_map`.
/// - A **folder** with exactly one of `diffusion_pytorch_model.safetensors`,
///   `diffusion_pytorch_model.safetensors.index.json`, `model.safetensors` and `model.safetensors.index.json`; or, with
///   none of these, a single other `*.safetensors` or a single `*.gguf`. Hidden files do not count. A variant
///   (`model.fp16.safetensors`) is used only where it is opened by name, and a lone shard of several is not a checkpoint.
/// - Links are followed, also out of the folder: download caches are made of them.
/// - Every element type of the safetensors format, types below a byte included, and every one of ggml; scalars (shape
///   `[]`); tensors without elements (a side of 0); files without tensors; any name, the empty one included; fields of
///   an entry or an index that are not known.
///
/// # What is refused, beyond what cannot be read at all
///
/// | What | Why |
/// |---|---|
/// | a header or an index above 100 MB | the limit of the format's own library |
/// | a name that is there twice: tensor, metadata key, index entry, or one tensor in two shards | two readers would see two models |
/// | an unknown element type | the tensor's size cannot be checked, so the file's layout cannot either |
/// | a shape whose bytes overflow 64 bits, sides of 0 counted as 1 | sides are multiplied later, by code that may leave out the 0 |
/// | more than 64 dimensions | PyTorch and NumPy make no such tensors; a list of millions would only fill memory |
/// | ranges that are reversed, overlap, leave the file or do not match shape and type | the data would be something else's |
/// | bytes that belong to no tensor, between tensors or at the end | the format forbids them: a place to hide things, or a sign of damage |
/// | `__metadata__` that is not a map from texts to texts (`null` counts as none) | the format says so |
/// | a shard outside the index's folder (`..`, absolute, with a backslash or colon) | an index must not reach other files |
/// | a missing shard, or a shard without a tensor that the index puts there | the checkpoint is incomplete |
/// | files of another kind: web pages, Git LFS pointers, PyTorch pickles | named as what they are |
///
/// What of this speaks of headers, names, types, shapes and ranges holds for GGUF too. There, besides:
///
/// | What | Decision |
/// |---|---|
/// | version 1, a version after 3, big-endian files | refused: none are published any more, not known, none are met |
/// | metadata and list of tensors above 256 MB, more than a million entries or tensors, a count beyond the file | refused before memory is taken |
/// | a key or name above 65535 bytes or not UTF-8, a metadata text that is not UTF-8 | refused; names above ggml's 63 bytes are accepted, and so is the empty one |
/// | metadata numbers, truth values, texts, arrays of up to 16 numbers | kept as texts |
/// | other arrays, texts above 64 KiB | skipped, and kept as `[151936 values]`, `[text of 70000 bytes]` |
/// | arrays of arrays, truth values other than 0 and 1, unknown value types | refused: the format has none |
/// | `general.alignment` that is no 32-bit power of two up to 1 MiB | refused: a large one would hide anything as padding |
/// | more than 4 dimensions | refused: the format's limit. `comfy.gguf.orig_shape.NAME` in the metadata gives a tensor back the shape that it had before, if that is the same bytes |
/// | rows of a quantised type that are not whole blocks | refused: the size would not be one |
/// | data that does not begin at a multiple of the alignment | refused, as ggml does |
/// | less than one alignment of bytes before a tensor or after the last one | accepted: padding, whatever is in it |
/// | more than that | refused: bytes that belong to no tensor |
/// | tensors whose data is in another order than the list, a file without its last padding | accepted: nothing depends on it |
/// | one part of a split file | accepted when opened by name, and only what it holds; not as the weights of a folder |
///
/// A tensor of a shard that the index does not name is accepted, as `transformers` and `diffusers` do: the index says
/// which files there are, the files say what is in them; one warning counts such tensors. The sizes that an index
/// states (`total_size`) are not used: published ones are often wrong.
///
/// # While it is open
///
/// Each file is held open, so a file that is replaced under its name does not mix with the one that was checked.
/// Reads name their position: threads read from one checkpoint without waiting for each other. A file that gets
/// shorter while it is open makes reads fail, and nothing else.
#[derive(Clone)]
pub struct Checkpoint(Arc<Contents>);

impl Checkpoint {
    /// Opens a safetensors or GGUF file, the index of a sharded checkpoint, or the folder of one of them, and checks
    /// all lists of tensors; [`Checkpoint`] says what is accepted.
    ///
    /// # Errors
    ///
    /// Whatever is wrong with the files comes out here, except for damage to the tensors' values, which the format
    /// cannot tell.
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint, CheckpointError> {
        let path = path.as_ref();
        let path = if file::metadata(path)?.is_dir() {
            folder::choose(path)?
        } else {
            path.to_owned()
        };
        let mut contents = Contents {
            path,
            ..Contents::default()
        };
        if contents
            .path
            .extension()
            .is_some_and(|ending| ending.eq_ignore_ascii_case("json"))
        {
            contents.add_shards()?;
        } else {
            contents.add_file(&contents.path.clone())?;
        }
        Ok(Checkpoint(Arc::new(contents.finish()?)))
    }

    /// A list without files, to plan for a model whose weights are not there: names, types, and shapes with the
    /// outermost side first. `label` stands in errors where the file would.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Tensor`] for a name that is there twice and for a shape that no file could hold.
    pub fn from_table<I>(label: &str, entries: I) -> Result<Checkpoint, CheckpointError>
    where
        I: IntoIterator<Item = (String, StoredType, Vec<usize>)>,
    {
        let mut contents = Contents {
            path: PathBuf::from(label),
            ..Contents::default()
        };
        for (name, stored, shape) in entries {
            let info = TensorInfo::new(stored, shape)
                .map_err(|why| CheckpointError::tensor(&contents.path, &name, why))?;
            if contents.tensors.contains_key(&name) {
                return Err(CheckpointError::tensor(
                    &contents.path,
                    &name,
                    "the table names it twice",
                ));
            }
            contents.tensors.insert(name, info);
        }
        Ok(Checkpoint(Arc::new(contents.finish()?)))
    }

    /// The file that was opened, which in a sharded checkpoint is the index; the label of a table.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.0.tensors.get(name)
    }

    /// All tensors, sorted by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &TensorInfo)> {
        self.0
            .tensors
            .iter()
            .map(|(name, info)| (name.as_str(), info))
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.0.tensors.len()
    }

    /// Whether there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.0.tensors.is_empty()
    }

    /// Bytes of all tensors together.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Elements of all tensors together.
    pub fn parameters(&self) -> u64 {
        self.0.parameters
    }

    /// The weight files with their lengths in bytes, sorted by name; none for a table.
    pub fn files(&self) -> impl ExactSizeIterator<Item = (&Path, u64)> {
        self.0.files.iter().map(|file| (file.path(), file.length()))
    }

    /// The metadata of all files: the `__metadata__` texts of safetensors files, and for GGUF files every entry as
    /// text. Where shards disagree, the first in the order of
    /// [`files`](Checkpoint::files) is taken.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.0.metadata
    }

    /// Reads the whole tensor `name` into `into`, which must have exactly its [`bytes`](TensorInfo::bytes).
    ///
    /// # Errors
    ///
    /// [`NoSuchTensor`](CheckpointError::NoSuchTensor), [`OutOfRange`](CheckpointError::OutOfRange) for a wrong length,
    /// [`NoData`](CheckpointError::NoData) for a table, and [`Shrunk`](CheckpointError::Shrunk) or
    /// [`Io`](CheckpointError::Io) when the file cannot be read; `into` is then partly overwritten.
    pub fn read(&self, name: &str, into: &mut [u8]) -> Result<(), CheckpointError> {
        let info = self.find(name)?;
        if into.len() as u64 != info.bytes {
            return Err(self.out_of_range(name, info, 0, into));
        }
        self.fill(name, info, 0, into)
    }

    /// Reads part of the tensor `name`: the `into.len()` bytes from its byte `offset` on.
    ///
    /// # Errors
    ///
    /// As for [`read`](Checkpoint::read); a part that is not all inside the tensor is
    /// [`OutOfRange`](CheckpointError::OutOfRange).
    pub fn read_at(&self, name: &str, offset: u64, into: &mut [u8]) -> Result<(), CheckpointError> {
        let info = self.find(name)?;
        if offset
            .checked_add(into.len() as u64)
            .is_none_or(|end| end > info.bytes)
        {
            return Err(self.out_of_range(name, info, offset, into));
        }
        self.fill(name, info, offset, into)
    }

    fn find(&self, name: &str) -> Result<&TensorInfo, CheckpointError> {
        let missing = || CheckpointError::NoSuchTensor {
            file: self.0.path.clone(),
            tensor: shown(name),
        };
        self.get(name).ok_or_else(missing)
    }

    /// `offset` and the length of `into` have been checked against the tensor's.
    fn fill(
        &self,
        name: &str,
        info: &TensorInfo,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let no_data = || CheckpointError::NoData {
            file: self.0.path.clone(),
            tensor: shown(name),
        };
        let read = |at: Location, into: &mut [u8]| {
            let file = self.0.files.get(at.file).ok_or_else(no_data)?;
            file.read(Some(name), at.offset, into)
        };
        let Some(pieces) = &info.pieces else {
            let at = info.location.ok_or_else(no_data)?;
            let offset = at.offset + offset;
            return read(Location { offset, ..at }, into);
        };
        let (mut offset, mut into) = (offset, into);
        while !into.is_empty() {
            let (at, length) = pieces.at(offset).ok_or_else(no_data)?;
            let (piece, rest) = into.split_at_mut((length as usize).min(into.len()));
            read(at, piece)?;
            offset += piece.len() as u64;
            into = rest;
        }
        Ok(())
    }

    fn out_of_range(
        &self,
        name: &str,
        info: &TensorInfo,
        offset: u64,
        into: &[u8],
    ) -> CheckpointError {
        let file = info.location.and_then(|at| self.0.files.get(at.file));
        CheckpointError::OutOfRange {
            file: file.map_or_else(|| self.0.path.clone(), |file| file.path().to_owned()),
            tensor: shown(name),
            offset,
            length: into.len() as u64,
            bytes: info.bytes,
        }
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Contents {
            path,
            files,
            tensors,
            bytes,
            ..
        } = &*self.0;
        f.debug_struct("Checkpoint")
            .field("path", path)
            .field("files", &files.len())
            .field("tensors", &tensors.len())
            .field("bytes", bytes)
            .finish()
    }
}
