//! The safetensors format: 8 bytes of header length, a JSON header, then the tensors' data.

use std::collections::BTreeMap;

use super::error::{CheckpointError, shown};
use super::file::WeightFile;
use super::foreign::{self, recognise, recognise_text};
use super::gguf_metadata::MetadataValue;
use super::header::{Entry, Header, TypeName};
use super::tensor_info::{Location, TensorInfo};

/// Bytes before the header: its length, little-endian.
const PREFIX: u64 = 8;
/// Bytes that a header may have: the limit of the format's own library.
pub(super) const MAX_HEADER: u64 = 100_000_000;

/// The checked contents of one file.
pub(super) struct Listing {
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) tensors: Vec<(String, TensorInfo)>,
    /// Where each value of a GGUF file's metadata lies.
    pub(super) values: Vec<(String, MetadataValue)>,
}

/// Reads and checks the header of `file`, which will be number `number` of its checkpoint. No tensor byte is read.
pub(super) fn list(file: &WeightFile, number: usize) -> Result<Listing, CheckpointError> {
    let text = header_text(file)?;
    let data_start = PREFIX + text.len() as u64;
    let Header { metadata, entries } = Header::read(file.path(), &text)?;

    let mut tensors = Vec::with_capacity(entries.len());
    let mut ranges = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let range = entry.data_offsets;
        let mut info = checked(file, &name, entry)?;
        // Cannot overflow where it matters: `check_layout` holds all ranges against the length of the file.
        info.location = Some(Location {
            file: number,
            offset: data_start.saturating_add(range.0),
        });
        ranges.push((range, tensors.len()));
        tensors.push((name, info));
    }
    ranges.sort_unstable();
    check_layout(
        file,
        data_start,
        ranges
            .iter()
            .map(|&(range, at)| (tensors[at].0.as_str(), range)),
    )?;
    Ok(Listing {
        metadata,
        tensors,
        values: Vec::new(),
    })
}

/// The header's bytes, read only after its announced length has been found possible.
fn header_text(file: &WeightFile) -> Result<Vec<u8>, CheckpointError> {
    let (path, length) = (file.path(), file.length());
    let mut head = [0; foreign::HEAD as usize];
    let head = &mut head[..length.min(foreign::HEAD) as usize];
    file.read(None, 0, head)?;
    if let Some(found) = recognise(head).or_else(|| recognise_text(head)) {
        return Err(CheckpointError::Foreign {
            file: path.to_owned(),
            wanted: "a safetensors or GGUF file",
            found,
        });
    }
    let cut = |expected| CheckpointError::Truncated {
        file: path.to_owned(),
        actual: length,
        expected,
        tensor: None,
    };
    if head.is_empty() {
        return Err(CheckpointError::header(path, "the file is empty"));
    }
    let Some((prefix, rest)) = head.split_first_chunk::<{ PREFIX as usize }>() else {
        return Err(cut(PREFIX));
    };
    let announced = u64::from_le_bytes(*prefix);
    if announced == 0 {
        let reason = "it announces a header of 0 bytes; \
                      this is what a download looks like that reserved its space and did not finish";
        return Err(CheckpointError::header(path, reason));
    }
    if announced > MAX_HEADER {
        let reason = format!(
            "it announces a header of {announced} bytes, more than the {MAX_HEADER} that are allowed; \
             it is damaged or not a safetensors file"
        );
        return Err(CheckpointError::header(path, reason));
    }
    if announced > length - PREFIX {
        if rest.first().is_none_or(|&first| first == b'{') {
            return Err(cut(PREFIX + announced));
        }
        let reason = format!(
            "it announces a header of {announced} bytes, beyond the file's {length}; \
             it is damaged or not a safetensors file"
        );
        return Err(CheckpointError::header(path, reason));
    }
    let mut text = vec![0; announced as usize];
    file.read(None, PREFIX, &mut text)?;
    Ok(text)
}

/// What one entry says, without regard to the others or to the file's length.
fn checked(file: &WeightFile, name: &str, entry: Entry) -> Result<TensorInfo, CheckpointError> {
    let wrong = |reason: String| CheckpointError::tensor(file.path(), name, reason);
    let stored = match entry.dtype {
        TypeName::Known(stored) => stored,
        TypeName::Unknown(text) => {
            return Err(wrong(format!("its element type `{text}` is not known")));
        }
    };
    let info = TensorInfo::new(stored, entry.shape.0).map_err(wrong)?;
    let (begin, end) = entry.data_offsets;
    let Some(given) = end.checked_sub(begin) else {
        return Err(wrong(format!(
            "its data ends at {end}, before it begins at {begin}"
        )));
    };
    if given != info.bytes {
        return Err(wrong(format!(
            "it has {given} bytes of data (from {begin} to {end}), but shape {:?} of type {stored} takes {}",
            info.shape, info.bytes
        )));
    }
    Ok(info)
}

/// Together the ranges, given in ascending order, must cover the data exactly once.
fn check_layout<'a>(
    file: &WeightFile,
    data_start: u64,
    ranges: impl Iterator<Item = (&'a str, (u64, u64))>,
) -> Result<(), CheckpointError> {
    let data = file.length() - data_start;
    let mut covered = 0;
    let mut last = None;
    let mut first_cut = None;
    for (name, (begin, end)) in ranges {
        let wrong = |reason: String| Err(CheckpointError::tensor(file.path(), name, reason));
        if begin < covered {
            let other = shown(last.unwrap_or_default());
            return wrong(format!(
                "its data begins at {begin}, inside that of tensor `{other}`, which ends at {covered}"
            ));
        }
        if begin > covered && end > data {
            return wrong(format!(
                "its data, from {begin} to {end}, lies outside of the file's {data} bytes of data"
            ));
        }
        if begin > covered {
            return wrong(format!(
                "its data begins at {begin}, the data before ends at {covered}: what lies between belongs to no tensor"
            ));
        }
        if end > data && first_cut.is_none() {
            first_cut = Some(shown(name));
        }
        (covered, last) = (end, Some(name));
    }
    if covered > data {
        let expected = data_start.saturating_add(covered);
        let file = file.path().to_owned();
        return Err(CheckpointError::Truncated {
            file,
            actual: data_start + data,
            expected,
            tensor: first_cut,
        });
    }
    if covered < data {
        let reason = format!(
            "{} of the file's bytes follow after the last tensor and belong to none",
            data - covered
        );
        return Err(CheckpointError::header(file.path(), reason));
    }
    Ok(())
}
