//! What a file is that is no weight file of a known format.

/// Bytes of a file's beginning that [`recognise`] looks at.
pub(super) const HEAD: u64 = 64;

const WEB_PAGE: &str =
    "a web page, as servers send instead of a file that they refuse or cannot find";
const LFS: &str =
    "a Git LFS pointer and not the file itself; `git lfs pull` in its repository fetches it";
const ZIP: &str =
    "a zip archive, as PyTorch's .ckpt, .pt and .bin files are; convert it to safetensors";
const PICKLE: &str =
    "a Python pickle, as old .ckpt, .pt and .bin files are; convert it to safetensors";

const TEXTS: &[(&str, &str)] = &[
    ("<!doctype", WEB_PAGE),
    ("<html", WEB_PAGE),
    (
        "<?xml",
        "an XML text, as servers send instead of a file that they refuse or cannot find",
    ),
    ("version https://git-lfs", LFS),
];

const MAGICS: &[(&[u8], &str)] = &[
    (b"PK\x03\x04", ZIP),
    (b"\x80\x02", PICKLE),
    (b"\x80\x03", PICKLE),
    (b"\x80\x04", PICKLE),
    (b"\x80\x05", PICKLE),
    (b"\x93NUMPY", "a NumPy array; convert it to safetensors"),
    (b"\x89HDF", "an HDF5 file; convert it to safetensors"),
    (b"\x1f\x8b", "a gzip archive; unpack it"),
];

/// What a file beginning with `head` is, if it is a well-known kind of file that holds no readable weights.
pub(super) fn recognise(head: &[u8]) -> Option<&'static str> {
    let text = head
        .strip_prefix(b"\xef\xbb\xbf")
        .unwrap_or(head)
        .trim_ascii_start();
    let begins = |with: &str| {
        text.get(..with.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(with.as_bytes()))
    };
    if let Some((_, found)) = TEXTS.iter().find(|(with, _)| begins(with)) {
        return Some(found);
    }
    // A safetensors file begins with a length, which may look like any of these, and has its `{` here.
    if head.get(8) == Some(&b'{') {
        return None;
    }
    MAGICS
        .iter()
        .find(|(magic, _)| head.starts_with(magic))
        .map(|(_, found)| *found)
}

/// Like [`recognise`], and also tells text files, where a binary file is needed.
pub(super) fn recognise_text(head: &[u8]) -> Option<&'static str> {
    let is_text = |byte: &u8| matches!(byte, b' '..=b'~' | b'\t' | b'\n' | b'\r');
    // Four such bytes are a header length above the limit; fewer may be the beginning of a real one.
    if head.len() < 4 || !head.iter().take(8).all(is_text) {
        return None;
    }
    match head.trim_ascii_start().first() {
        Some(b'{' | b'[') => Some("a JSON text"),
        _ => Some("a text file, perhaps a message saved in place of a download"),
    }
}
