//! The GGUF format: counts, metadata, a list of tensors, and their data after some padding.

use std::collections::BTreeMap;

use super::StoredType;
use super::error::{CheckpointError, shown};
use super::file::WeightFile;
use super::gguf_cursor::{Cursor, UINT32};
use super::gguf_metadata::MetadataValue;
use super::safetensors::Listing;
use super::tensor_info::{Location, TensorInfo};
use super::write_gguf::SHAPE_KEY;

const MAGIC: [u8; 4] = *b"GGUF";
/// Metadata entries, and tensors, that a file may have.
const MAX_COUNT: u64 = 1_000_000;
/// Dimensions that a tensor may have: the format's limit.
const MAX_DIMS: u32 = 4;

const ALIGNMENT: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
/// A larger one would let almost any gap pass as padding.
const MAX_ALIGNMENT: u64 = 1 << 20;

/// Bytes that the shortest metadata entry takes: the length of its key, a type, a value of one byte.
const MIN_ENTRY: u64 = 8 + 4 + 1;
/// Bytes that the shortest tensor takes in the list: the length of its name, no dimension, type and offset.
const MIN_TENSOR: u64 = 8 + 4 + 4 + 8;

/// Whether `file` begins as a GGUF file does. No safetensors file does: its header would be above a gigabyte.
pub(super) fn is_gguf(file: &WeightFile) -> Result<bool, CheckpointError> {
    let mut head = [0; MAGIC.len()];
    if file.length() < MAGIC.len() as u64 {
        return Ok(false);
    }
    file.read(None, 0, &mut head)?;
    Ok(head == MAGIC)
}

/// Reads and checks everything before the data of `file`, which will be number `number` of its checkpoint. Tensor bytes
/// are not looked at.
pub(super) fn list(file: &WeightFile, number: usize) -> Result<Listing, CheckpointError> {
    let mut cursor = Cursor::new(file);
    cursor.skip(MAGIC.len() as u64)?;
    check_version(file, cursor.u32()?)?;
    let (tensors, entries) = (cursor.u64()?, cursor.u64()?);
    for (count, what) in [(tensors, "tensors"), (entries, "metadata entries")] {
        if count > MAX_COUNT {
            let reason = format!(
                "it announces {count} {what}, more than the {MAX_COUNT} that are allowed; it is damaged"
            );
            return Err(CheckpointError::header(file.path(), reason));
        }
    }
    cursor.demand(1, entries * MIN_ENTRY + tensors * MIN_TENSOR)?;

    let Metadata {
        texts,
        values,
        alignment,
    } = metadata(file, &mut cursor, entries)?;
    let mut infos = BTreeMap::new();
    for index in 0..tensors {
        let name = cursor.name(&|| format!("the name of tensor number {index}"))?;
        let info = tensor(file, &mut cursor, &name, alignment)?;
        if infos.contains_key(&name) {
            return Err(CheckpointError::tensor(
                file.path(),
                &name,
                "the file names it twice",
            ));
        }
        infos.insert(name, info);
    }

    for (name, (info, _)) in &mut infos {
        if let Some(own) = own_shape(&texts, name, info) {
            *info = own;
        }
    }

    // Neither can overflow: a header is far below 2^64, and so is an alignment.
    let data_start = cursor.position().next_multiple_of(alignment);
    check_layout(file, data_start, alignment, &infos)?;
    let place = |(name, (mut info, offset)): (String, (TensorInfo, u64))| {
        info.location = Some(Location {
            file: number,
            // Cannot overflow where it matters: `check_layout` holds all ranges against the length of the file.
            offset: data_start.saturating_add(offset),
        });
        (name, info)
    };
    Ok(Listing {
        metadata: texts,
        values,
        tensors: infos.into_iter().map(place).collect(),
    })
}

fn check_version(file: &WeightFile, version: u32) -> Result<(), CheckpointError> {
    let reason = match (version, version.swap_bytes()) {
        (2 | 3, _) => return Ok(()),
        (1, _) => "it is of version 1 of GGUF, which is no longer in use; convert the model anew"
            .to_owned(),
        (_, 1..=0xffff) => {
            "it is a GGUF file in big-endian byte order; only little-endian ones are read"
                .to_owned()
        }
        _ => format!("it is of version {version} of GGUF; versions 2 and 3 are read"),
    };
    Err(CheckpointError::header(file.path(), reason))
}

/// What comes before the list of tensors.
struct Metadata {
    texts: BTreeMap<String, String>,
    /// Where the values lie, in the order of the file.
    values: Vec<(String, MetadataValue)>,
    alignment: u64,
}

fn metadata(
    file: &WeightFile,
    cursor: &mut Cursor<'_>,
    entries: u64,
) -> Result<Metadata, CheckpointError> {
    let mut metadata = BTreeMap::new();
    let mut values = Vec::new();
    let mut alignment = DEFAULT_ALIGNMENT;
    for index in 0..entries {
        let key = cursor.name(&|| format!("the key of metadata entry number {index}"))?;
        let wrong = |reason: &str| Err(CheckpointError::metadata(file.path(), &key, reason));
        if metadata.contains_key(&key) {
            return wrong("the file has it twice");
        }
        let kind = cursor.u32()?;
        let start = cursor.position();
        let text = if key == ALIGNMENT {
            if kind != UINT32 {
                return wrong("it is not an unsigned 32-bit number");
            }
            alignment = cursor.u32()?.into();
            if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
                return wrong(&format!(
                    "it is {alignment}, not a power of two up to {MAX_ALIGNMENT}"
                ));
            }
            alignment.to_string()
        } else {
            cursor.value(&key, kind)?
        };
        if key != ALIGNMENT {
            let range = start..cursor.position();
            values.push((key.clone(), MetadataValue { kind, range }));
        }
        metadata.insert(key, text);
    }
    Ok(Metadata {
        texts: metadata,
        values,
        alignment,
    })
}

/// What the list says about the tensor `name`, and where in the data it begins.
fn tensor(
    file: &WeightFile,
    cursor: &mut Cursor<'_>,
    name: &str,
    alignment: u64,
) -> Result<(TensorInfo, u64), CheckpointError> {
    let wrong = |reason: String| CheckpointError::tensor(file.path(), name, reason);
    let rank = cursor.u32()?;
    if rank > MAX_DIMS {
        return Err(wrong(format!(
            "it has {rank} dimensions, more than the {MAX_DIMS} that are allowed"
        )));
    }
    let mut shape = Vec::with_capacity(rank as usize);
    for _ in 0..rank {
        let side = cursor.u64()?;
        let side = usize::try_from(side).map_err(|_| {
            wrong(format!(
                "a side of {side} is more than this machine's memory can have"
            ))
        })?;
        shape.push(side);
    }
    // The file has them innermost first.
    shape.reverse();
    let number = cursor.u32()?;
    let stored = StoredType::from_ggml(number)
        .ok_or_else(|| wrong(format!("its element type, number {number}, is not known")))?;
    let info = TensorInfo::new(stored, shape).map_err(wrong)?;
    let offset = cursor.u64()?;
    if !offset.is_multiple_of(alignment) {
        return Err(wrong(format!(
            "its data begins at {offset}, which is no multiple of the alignment {alignment}"
        )));
    }
    Ok((info, offset))
}

/// A tensor as it was before it got a shape that the format holds, if the metadata says so and it is the same bytes: rows of a
/// quantised type that were put together have to stay so.
fn own_shape(
    texts: &BTreeMap<String, String>,
    name: &str,
    info: &TensorInfo,
) -> Option<TensorInfo> {
    let text = texts.get(&format!("{SHAPE_KEY}{name}"))?;
    let sides = text.strip_prefix('[')?.strip_suffix(']')?;
    let sides = sides.split(',').map(|side| side.trim().parse());
    let shape: Vec<usize> = sides.collect::<Result<_, _>>().ok()?;
    let own = TensorInfo::new(info.stored, shape).ok()?;
    (own.bytes == info.bytes && own.elements() == info.elements()).then_some(own)
}

/// The tensors must lie in the file, apart from each other, with nothing but padding between and after them.
fn check_layout(
    file: &WeightFile,
    data_start: u64,
    alignment: u64,
    infos: &BTreeMap<String, (TensorInfo, u64)>,
) -> Result<(), CheckpointError> {
    let data = file.length().saturating_sub(data_start);
    let mut ranges = Vec::with_capacity(infos.len());
    for (name, (info, offset)) in infos {
        let end = offset.checked_add(info.bytes).ok_or_else(|| {
            let reason = format!(
                "its data begins at {offset}; with its {} bytes that overflows 64 bits",
                info.bytes
            );
            CheckpointError::tensor(file.path(), name, reason)
        })?;
        ranges.push((*offset, end, name.as_str()));
    }
    ranges.sort_unstable();

    let mut covered = 0;
    let mut last = "";
    let mut first_cut = None;
    for (begin, end, name) in ranges {
        let wrong = |reason: String| Err(CheckpointError::tensor(file.path(), name, reason));
        if begin < covered {
            return wrong(format!(
                "its data begins at {begin}, inside that of tensor `{}`, which ends at {covered}",
                shown(last)
            ));
        }
        if begin - covered >= alignment {
            return wrong(if end > data {
                format!(
                    "its data, from {begin} to {end}, lies outside of the file's {data} bytes of data"
                )
            } else {
                format!(
                    "its data begins at {begin}, the data before ends at {covered}: \
                     what lies between is more than padding and belongs to no tensor"
                )
            });
        }
        if end > data && first_cut.is_none() {
            first_cut = Some(shown(name));
        }
        (covered, last) = (end, name);
    }
    if first_cut.is_some() {
        return Err(CheckpointError::Truncated {
            file: file.path().to_owned(),
            actual: file.length(),
            expected: data_start.saturating_add(covered),
            tensor: first_cut,
        });
    }
    // A last tensor without bytes may begin after the end of a file whose last padding is left out.
    let left = data.saturating_sub(covered);
    if left >= alignment {
        let reason =
            format!("{left} of the file's bytes follow after the last tensor and belong to none");
        return Err(CheckpointError::header(file.path(), reason));
    }
    Ok(())
}
