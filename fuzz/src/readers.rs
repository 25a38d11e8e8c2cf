//! Readers of weight files: whatever is in a file, opening it succeeds or says why not, and what it then says holds.

use std::fs;
use std::path::Path;

use sd_graph::Checkpoint;

/// Opens `bytes` as a safetensors file in `folder`.
pub fn safetensors(folder: &Path, bytes: &[u8]) {
    checked(&folder.join("input.safetensors"), bytes);
}

/// Opens `bytes` as a GGUF file in `folder`.
pub fn gguf(folder: &Path, bytes: &[u8]) {
    checked(&folder.join("input.gguf"), bytes);
}

/// Opens `bytes` as the index of shards in `folder`, where it may find `a.safetensors` and `b.safetensors`.
pub fn index(folder: &Path, bytes: &[u8]) {
    for name in ["a", "b"] {
        let shard = folder.join(format!("{name}.safetensors"));
        if !shard.exists() {
            let header = format!(
                r#"{{"{name}.one":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},"{name}.two":{{"dtype":"U8","shape":[1],"data_offsets":[8,9]}}}}"#
            );
            let length = (header.len() as u64).to_le_bytes();
            let shard_bytes = [&length[..], header.as_bytes(), &[7; 9]].concat();
            fs::write(shard, shard_bytes).expect("the folder can be written to");
        }
    }
    checked(&folder.join("input.safetensors.index.json"), bytes);
}

fn checked(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).expect("the folder can be written to");
    let checkpoint = match Checkpoint::open(path) {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            let text = error.to_string();
            assert!(text.len() < 4096, "an error that nobody reads: {text}");
            assert!(!text.is_empty() && !text.contains('\n'), "{text:?}");
            return;
        }
    };
    let stored: u64 = checkpoint.files().map(|(_, length)| length).sum();
    assert!(
        checkpoint.bytes() <= stored,
        "more bytes than the files have"
    );
    let (mut bytes, mut parameters) = (0, 0);
    let mut data = Vec::new();
    for (name, info) in checkpoint.tensors() {
        assert_eq!(info.stored.bytes(info.elements()), Some(info.bytes));
        bytes += info.bytes;
        parameters += info.elements();
        data.resize(
            usize::try_from(info.bytes).expect("no more than the file has"),
            0,
        );
        checkpoint
            .read(name, &mut data)
            .expect("what was checked is there");
        assert!(checkpoint.read_at(name, info.bytes, &mut [0]).is_err());
    }
    assert_eq!(
        (bytes, parameters),
        (checkpoint.bytes(), checkpoint.parameters())
    );
    assert_eq!(checkpoint.len(), checkpoint.tensors().len());
    for (key, value) in checkpoint.metadata() {
        // What is too long to be kept is read again, and is what was checked.
        let numbers = checkpoint.metadata_numbers(key);
        numbers.expect("arrays of numbers were checked");
        // Texts in arrays are skipped when a file is opened; what is no text is told now.
        if let Err(error) = checkpoint.metadata_texts(key) {
            assert!(error.to_string().contains("UTF-8"), "{error}");
        }
        assert!(
            key.len() + value.len()
                <= fs::metadata(path).map_or(0, |file| file.len() as usize) + (1 << 16)
        );
    }
}
