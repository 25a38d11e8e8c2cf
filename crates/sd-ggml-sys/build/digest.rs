//! A fingerprint of ggml's tree, pinned in `vendor/ggml-source/digest`.
//!
//! It guards against accidents: cargo checks a package's checksum when it downloads it and never again, so an edited
//! file in cargo's cache or a stale copy in a package would otherwise be built without a word. It is no protection
//! against an attacker; that is the SHA-256 in the stub's lock file. Hence a plain FNV-1a, which needs no dependency.
//!
//! `xtask` compiles this file too.

use std::fs;
use std::path::Path;

use super::failure::{Failure, Result};
use super::source;

const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01b3;

/// The fingerprint of all files this crate uses: their names, lengths and contents.
pub(crate) fn of(root: &Path) -> Result<String> {
    let mut state = OFFSET;
    for file in source::files(root)? {
        let path = root.join(&file);
        let content = fs::read(&path).map_err(|error| Failure::io("read", &path, &error))?;
        let name: Vec<_> = file.iter().map(|part| part.to_string_lossy()).collect();
        for bytes in [
            name.join("/").as_bytes(),
            &(content.len() as u64).to_le_bytes(),
            &content,
        ] {
            state = bytes.iter().fold(state, |state, byte| {
                (state ^ u64::from(*byte)).wrapping_mul(PRIME)
            });
        }
    }
    Ok(format!("fnv1a64:{state:016x}"))
}
