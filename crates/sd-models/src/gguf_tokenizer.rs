//! The tokenizer that a GGUF file of a language model holds.

use std::collections::HashMap;
use std::str::FromStr;

use sd_graph::Checkpoint;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use crate::error::{Error, Result};

/// How texts are cut into words before their bytes are paired, for `tokenizer.ggml.pre = qwen2`: contractions, words with what stands
/// before them, single digits, signs, ends of lines, spaces.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Types of tokens, as `tokenizer.ggml.token_type` numbers them.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// The tokenizer in the metadata of `checkpoint`; `None` if there is none.
///
/// # Errors
/// [`Error::Tokenizer`] for a kind that is not known, and for one that makes no sense.
pub(crate) fn read(checkpoint: &Checkpoint) -> Result<Option<Tokenizer>> {
    let Some(tokens) = checkpoint.metadata_texts("tokenizer.ggml.tokens")? else {
        return Ok(None);
    };
    let wrong = |reason: String| {
        let path = checkpoint.path().display();
        Error::Tokenizer(format!(
            "{path}: {reason}; another can be given with --tokenizer"
        ))
    };
    let said = |key: &str| checkpoint.metadata().get(key).map_or("", String::as_str);
    for (key, known) in [
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "qwen2"),
    ] {
        if said(key) != known {
            return Err(wrong(format!(
                "{key} is `{}`, and `{known}` is known",
                said(key)
            )));
        }
    }
    let merges = checkpoint.metadata_texts("tokenizer.ggml.merges")?;
    let merges = merges.ok_or_else(|| wrong("there are no tokenizer.ggml.merges".to_owned()))?;
    let types = checkpoint.metadata_numbers("tokenizer.ggml.token_type")?;
    let types = types.unwrap_or_default();

    let mut vocabulary: HashMap<String, usize> = HashMap::new();
    let mut added: Vec<Value> = Vec::new();
    for (id, token) in tokens.into_iter().enumerate() {
        match types.get(id) {
            Some(&UNUSED) => {}
            Some(&kind @ (CONTROL | USER_DEFINED)) => added.push(json!({
                "id": id,
                "content": token,
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": kind == CONTROL,
            })),
            _ => {
                vocabulary.insert(token, id);
            }
        }
    }
    let description = json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": { "type": "NFC" },
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            {
                "type": "Split",
                "pattern": { "Regex": QWEN2 },
                "behavior": "Isolated",
                "invert": false,
            },
            {
                "type": "ByteLevel",
                "add_prefix_space": false,
                "trim_offsets": true,
                "use_regex": false,
            },
        ]},
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": true,
            "trim_offsets": true,
            "use_regex": true,
        },
        "model": { "type": "BPE", "vocab": vocabulary, "merges": merges },
    });
    let tokenizer = Tokenizer::from_str(&description.to_string());
    tokenizer
        .map(Some)
        .map_err(|error| wrong(error.to_string()))
}
