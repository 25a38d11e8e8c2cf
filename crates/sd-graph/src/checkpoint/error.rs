//! What can be wrong with weight files, in words.

use std::fmt::{self, Write as _};
use std::io;
use std::path::{Path, PathBuf};

/// Characters of a foreign text (a tensor's name, a parser's complaint) that an error shows.
const TEXT_LIMIT: usize = 200;
/// Characters of a path that an error shows: its end, where the file's name is.
const PATH_LIMIT: usize = 500;

/// Why a checkpoint cannot be opened or read.
///
/// Every text names the file and, where there is one, the tensor. Texts stay short whatever the file holds: names are
/// cut after 200 characters and control characters are escaped, also in the fields called `tensor` and `reason`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file or folder cannot be opened or read: missing, no permission, not a regular file, a failing disk.
    #[error("{}: {reason}", ShownPath(.file))]
    Io {
        /// The file or folder.
        file: PathBuf,
        /// The kind of failure.
        kind: io::ErrorKind,
        /// What failed and why.
        reason: String,
    },
    /// A folder holds no weights in a form that is known, or more than one.
    #[error("folder {}: {reason}", ShownPath(.folder))]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// What was looked for and what was found.
        reason: String,
    },
    /// A file is of another kind than its name says.
    #[error("{}: expected {wanted}, but this is {found}", ShownPath(.file))]
    Foreign {
        /// The file.
        file: PathBuf,
        /// What the file should be.
        wanted: &'static str,
        /// What it is, with a hint what to do.
        found: &'static str,
    },
    /// A file is shorter than its own beginning says.
    #[error("{}: {}", ShownPath(.file), Cut(*.actual, *.expected, .tensor.as_deref()))]
    Truncated {
        /// The file.
        file: PathBuf,
        /// Bytes that the file has.
        actual: u64,
        /// Bytes that it should have; a lower bound while `tensor` is `None`.
        expected: u64,
        /// The first tensor that is incomplete; `None` if not even the list of tensors is complete.
        tensor: Option<String>,
    },
    /// The header of a file, or the file as a whole, is wrong.
    #[error("{}: {reason}", ShownPath(.file))]
    Header {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// What a file says about one tensor is wrong.
    #[error("{}: tensor `{tensor}`: {reason}", ShownPath(.file))]
    Tensor {
        /// The file, or the label of a table.
        file: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// The index of a sharded checkpoint is wrong, or does not fit its shards.
    #[error("{}: {reason}", ShownPath(.file))]
    Index {
        /// The index file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A tensor was asked for that the checkpoint does not hold.
    #[error("{}: there is no tensor `{tensor}`", ShownPath(.file))]
    NoSuchTensor {
        /// The checkpoint.
        file: PathBuf,
        /// The name that was asked for.
        tensor: String,
    },
    /// A tensor of a table was to be read; a table has no data.
    #[error("{}: tensor `{tensor}` has no data: this is a table of names and shapes", ShownPath(.file))]
    NoData {
        /// The label of the table.
        file: PathBuf,
        /// The tensor's name.
        tensor: String,
    },
    /// A read asked for bytes that the tensor does not have, or offered a buffer of the wrong length.
    #[error(
        "{}: tensor `{tensor}`: {length} bytes at offset {offset} were asked for, it has {bytes} bytes",
        ShownPath(.file)
    )]
    OutOfRange {
        /// The file.
        file: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// First byte asked for, counted from the tensor's beginning.
        offset: u64,
        /// Bytes asked for.
        length: u64,
        /// Bytes that the tensor has.
        bytes: u64,
    },
    /// A file got shorter after it was opened.
    #[error(
        "{}: {}the file was changed while in use: it had {expected} bytes when it was opened, now it has {actual}",
        ShownPath(.file), InTensor(.tensor.as_deref())
    )]
    Shrunk {
        /// The file.
        file: PathBuf,
        /// The tensor that was being read, if one was.
        tensor: Option<String>,
        /// Bytes when it was opened.
        expected: u64,
        /// Bytes now.
        actual: u64,
    },
}

impl CheckpointError {
    /// The operating system's refusal `error` while a file was to be `action`: "opened", "read".
    pub(super) fn io(file: &Path, action: &str, error: &io::Error) -> CheckpointError {
        let reason = match error.kind() {
            io::ErrorKind::NotFound => "there is no such file or folder".to_owned(),
            io::ErrorKind::PermissionDenied => format!("cannot be {action}: permission denied"),
            _ => format!("cannot be {action}: {error}"),
        };
        CheckpointError::Io {
            file: file.to_owned(),
            kind: error.kind(),
            reason,
        }
    }

    pub(super) fn header(file: &Path, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::Header {
            file: file.to_owned(),
            reason: reason.into(),
        }
    }

    pub(super) fn tensor(file: &Path, tensor: &str, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::Tensor {
            file: file.to_owned(),
            tensor: shown(tensor),
            reason: reason.into(),
        }
    }

    pub(super) fn metadata(file: &Path, key: &str, reason: impl fmt::Display) -> CheckpointError {
        CheckpointError::header(file, format!("metadata `{}`: {reason}", shown(key)))
    }

    pub(super) fn index(file: &Path, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::Index {
            file: file.to_owned(),
            reason: reason.into(),
        }
    }
}

/// `text` made fit for a message: at most 200 characters, control characters escaped.
pub(super) fn shown(text: &str) -> String {
    let mut short = String::new();
    let mut length = 0;
    for char in text.chars() {
        let before = short.len();
        push_escaped(&mut short, char);
        length += short[before..].chars().count();
        if length > TEXT_LIMIT {
            short.truncate(before);
            // Writing to a string cannot fail.
            let _ = write!(short, "… ({} bytes)", text.len());
            break;
        }
    }
    short
}

/// A path in a message: its end, control characters escaped.
struct ShownPath<'a>(&'a Path);

impl fmt::Display for ShownPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.0.to_string_lossy();
        let start = path
            .char_indices()
            .rev()
            .nth(PATH_LIMIT)
            .map(|(at, char)| at + char.len_utf8());
        let mut text = String::new();
        if start.is_some() {
            text.push('…');
        }
        path[start.unwrap_or(0)..]
            .chars()
            .for_each(|char| push_escaped(&mut text, char));
        f.write_str(&text)
    }
}

/// Characters that would break a line, steer a terminal or reorder the text around them are escaped.
fn push_escaped(into: &mut String, char: char) {
    let steers = matches!(char, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    if char.is_control() || steers {
        into.extend(char.escape_default());
    } else {
        into.push(char);
    }
}

/// Bytes that a file has, bytes that it should have, and its first incomplete tensor.
struct Cut<'a>(u64, u64, Option<&'a str>);

impl fmt::Display for Cut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cut(actual, expected, tensor) = self;
        let at_least = if tensor.is_none() { "at least " } else { "" };
        write!(
            f,
            "the file ends after {actual} of {at_least}{expected} bytes; the download may have been cut off"
        )?;
        match tensor {
            Some(tensor) => write!(f, " (tensor `{tensor}` is the first incomplete one)"),
            None => Ok(()),
        }
    }
}

struct InTensor<'a>(Option<&'a str>);

impl fmt::Display for InTensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(tensor) => write!(f, "tensor `{tensor}`: "),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_is_cut_and_escaped() {
        assert_eq!(shown("blocks.0.weight"), "blocks.0.weight");
        assert_eq!(shown("größe"), "größe");
        assert_eq!(shown("a\n\u{1b}[2J\u{202e}b"), "a\\n\\u{1b}[2J\\u{202e}b");
        assert_eq!(shown(&"x".repeat(200)), "x".repeat(200));
        assert_eq!(
            shown(&"x".repeat(5000)),
            format!("{}… (5000 bytes)", "x".repeat(200))
        );
        assert_eq!(
            shown(&"\0".repeat(5000)),
            format!("{}… (5000 bytes)", "\\u{0}".repeat(40))
        );
    }

    #[test]
    fn a_long_path_keeps_its_end() {
        let path = format!("/{}/weights.safetensors", "é".repeat(2000));
        let text = ShownPath(Path::new(&path)).to_string();
        assert_eq!(text.chars().count(), PATH_LIMIT + 1);
        assert!(
            text.starts_with("…é") && text.ends_with("/weights.safetensors"),
            "{text}"
        );
        assert_eq!(ShownPath(Path::new("a\nb")).to_string(), "a\\nb");
    }
}
