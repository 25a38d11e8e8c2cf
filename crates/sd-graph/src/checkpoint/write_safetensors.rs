//! What stands before the data in a safetensors file that is written.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::conversion::Written;
use super::gguf_cursor::ARRAY;
use super::{Checkpoint, TensorInfo};

/// What the beginning of the data is a multiple of.
const ALIGNMENT: usize = 8;

/// Why such a file cannot hold a tensor, if it cannot.
pub(super) fn refuses(tensor: &TensorInfo) -> Option<String> {
    tensor.stored.is_quantized().then(|| {
        format!(
            "a safetensors file holds no {}; F32, F16 or BF16 can be asked for, or a GGUF file",
            tensor.stored
        )
    })
}

/// Puts tensors with large elements first, so that all are aligned for their elements.
pub(super) fn arrange(tensors: &mut [Written]) {
    tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.info.stored.bits()));
}

/// Everything before the data of `tensors`.
pub(super) fn header(
    checkpoint: &Checkpoint,
    tensors: &[Written],
    metadata: &[(String, String)],
) -> Vec<u8> {
    let mut texts: BTreeMap<&str, &str> = (checkpoint.metadata().iter())
        .filter(|(key, _)| {
            checkpoint
                .0
                .values
                .get(*key)
                .is_none_or(|(_, value)| value.kind != ARRAY)
        })
        .map(|(key, text)| (key.as_str(), text.as_str()))
        .collect();
    texts.extend(
        metadata
            .iter()
            .map(|(key, text)| (key.as_str(), text.as_str())),
    );
    let mut entries = Map::new();
    if !texts.is_empty() {
        entries.insert("__metadata__".to_owned(), json!(texts));
    }
    let mut begin = 0;
    for Written { name, info, .. } in tensors {
        let end = begin + info.bytes;
        let entry = json!({
            "dtype": info.stored.name(),
            "shape": info.shape,
            "data_offsets": [begin, end],
        });
        entries.insert(name.clone(), entry);
        begin = end;
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    bytes
}
