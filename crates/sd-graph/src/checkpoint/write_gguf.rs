//! What stands before the data in a GGUF file that is written.

use std::collections::BTreeSet;

use super::conversion::Written;
use super::error::CheckpointError;
use super::gguf_cursor::{STRING, UINT32};
use super::{Checkpoint, StoredType, TensorInfo};

/// Where a tensor may begin: the format's default, in bytes.
pub(super) const ALIGNMENT: u64 = 32;

/// Bytes of a tensor's name that other readers of the format accept.
const MOST_NAME: usize = 63;

/// Keys that say something of types, which change.
const OF_TYPES: [&str; 2] = ["general.file_type", "general.quantization_version"];

/// The version of ggml's quantised types.
const QUANTIZATION_VERSION: u32 = 2;

/// Why such a file cannot hold a tensor, if it cannot.
pub(super) fn refuses(name: &str, tensor: &TensorInfo) -> Option<String> {
    if tensor.stored.to_ggml().is_none() {
        let stored = tensor.stored;
        return Some(format!("a GGUF file holds no {stored}; give it another type"));
    }
    if tensor.shape.len() > 4 {
        let rank = tensor.shape.len();
        return Some(format!(
            "it has {rank} dimensions, and GGUF files hold 4; safetensors files hold more"
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
    let is_kept = |key: &str| !given.contains(key) && !OF_TYPES.contains(&key);
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
    if tensors.iter().any(|tensor| tensor.info.stored.is_quantized()) {
        let version = QUANTIZATION_VERSION.to_le_bytes().to_vec();
        entries.push((OF_TYPES[1].to_owned(), UINT32, version));
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
        // A scalar is a vector of one for most readers.
        let shape = if info.shape.is_empty() { &[1] } else { info.shape.as_slice() };
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

/// [`refuses`] has seen to it that there is one.
fn number(stored: StoredType) -> u32 {
    stored.to_ggml().unwrap_or(u32::MAX)
}

fn text(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}
