//! What stands before the data in a GGUF file that is written.

use std::collections::BTreeSet;

use super::conversion::Written;
use super::error::CheckpointError;
use super::gguf_cursor::{ARRAY, INT32, STRING, UINT32};
use super::{Checkpoint, StoredType, TensorInfo};

/// Where a tensor may begin: the format's default, in bytes.
pub(super) const ALIGNMENT: u64 = 32;

/// Bytes of a tensor's name that other readers of the format accept.
const MOST_NAME: usize = 63;

/// Sides that a tensor has in a file.
const MOST_SIDES: usize = 4;

/// What stands before a tensor's name in the key of its shape, where the file has it in another. ComfyUI's files of this format say it
/// in this way too.
pub(super) const SHAPE_KEY: &str = "comfy.gguf.orig_shape.";

/// Keys that say something of types, which change, or of the format.
const NOT_KEPT: [&str; 4] = [
    QUANTIZATION,
    "general.file_type",
    "general.alignment",
    "format",
];

const QUANTIZATION: &str = "general.quantization_version";

/// The version of ggml's quantised types.
const QUANTIZATION_VERSION: u32 = 2;

/// Why such a file cannot hold a tensor, if it cannot.
pub(super) fn refuses(name: &str, tensor: &TensorInfo) -> Option<String> {
    if tensor.stored.to_ggml().is_none() {
        let stored = tensor.stored;
        return Some(format!(
            "a GGUF file holds no {stored}; give it another type"
        ));
    }
    (name.len() > MOST_NAME).then(|| {
        format!(
            "its name has {} bytes, and other readers of GGUF files take {MOST_NAME}",
            name.len()
        )
    })
}

/// Everything before the data of `tensors`, padding included.
pub(super) fn header(
    checkpoint: &Checkpoint,
    tensors: &[Written],
    metadata: &[(String, String)],
) -> Result<Vec<u8>, CheckpointError> {
    let given: BTreeSet<&str> = metadata.iter().map(|(key, _)| key.as_str()).collect();
    let is_kept =
        |key: &str| !given.contains(key) && !NOT_KEPT.contains(&key) && !key.starts_with(SHAPE_KEY);
    let mut entries: Vec<(String, u32, Vec<u8>)> = metadata
        .iter()
        .map(|(key, value)| (key.clone(), STRING, text(value)))
        .collect();
    let own = checkpoint.metadata_entries()?;
    if own.is_empty() {
        // Texts of a safetensors file.
        let texts = checkpoint.metadata().iter();
        let texts = texts.filter(|(key, _)| is_kept(key));
        entries.extend(texts.map(|(key, value)| (key.clone(), STRING, text(value))));
    } else {
        entries.extend(own.into_iter().filter(|(key, ..)| is_kept(key)));
    }
    if tensors
        .iter()
        .any(|tensor| tensor.info.stored.is_quantized())
    {
        let version = QUANTIZATION_VERSION.to_le_bytes().to_vec();
        entries.push((QUANTIZATION.to_owned(), UINT32, version));
    }

    let is_folded = |tensor: &&Written| tensor.info.shape.len() > MOST_SIDES;
    for Written { name, info, .. } in tensors.iter().filter(is_folded) {
        let sides = info
            .shape
            .iter()
            .flat_map(|&side| (side as u32).to_le_bytes());
        let mut array = INT32.to_le_bytes().to_vec();
        array.extend((info.shape.len() as u64).to_le_bytes());
        array.extend(sides);
        entries.push((format!("{SHAPE_KEY}{name}"), ARRAY, array));
    }

    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((entries.len() as u64).to_le_bytes());
    for (key, kind, value) in &entries {
        bytes.extend(text(key));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(value);
    }
    let mut offset = 0_u64;
    for Written { name, info, .. } in tensors {
        bytes.extend(text(name));
        let shape = folded(&info.shape).unwrap_or_else(|| info.shape.clone());
        bytes.extend((shape.len() as u32).to_le_bytes());
        for &side in shape.iter().rev() {
            bytes.extend((side as u64).to_le_bytes());
        }
        bytes.extend(number(info.stored).to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        offset += info.bytes.next_multiple_of(ALIGNMENT);
    }
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
    Ok(bytes)
}

/// The shape under which a tensor stands in the file, where its own cannot: the innermost sides of one with more than 4 as one, and
/// a scalar as a vector of one.
fn folded(shape: &[usize]) -> Option<Vec<usize>> {
    match shape {
        [] => Some(vec![1]),
        [outer @ .., _, _] if shape.len() > MOST_SIDES => {
            let kept = outer.get(..MOST_SIDES - 1)?;
            let inner = shape.get(MOST_SIDES - 1..)?;
            Some([kept, &[inner.iter().product()]].concat())
        }
        _ => None,
    }
}

/// [`refuses`] has seen to it that there is one.
fn number(stored: StoredType) -> u32 {
    stored.to_ggml().unwrap_or(u32::MAX)
}

fn text(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}
