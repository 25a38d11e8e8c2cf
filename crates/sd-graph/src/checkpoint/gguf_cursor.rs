//! Reading the beginning of a GGUF file piece by piece, without believing a length in it.

use super::error::CheckpointError;
use super::file::WeightFile;

/// Bytes that everything before the data may take.
pub(super) const MAX_HEADER: u64 = 256_000_000;
/// Bytes that a key or a tensor's name may have: the format's limit for keys.
const MAX_NAME: u64 = 65_535;
/// Bytes of a metadata text that is kept; a longer one is only described.
const MAX_TEXT: u64 = 65_536;
/// Numbers of a metadata array that is kept; a longer one is only described.
const MAX_LISTED: u64 = 16;
/// Bytes that are read at once.
const PIECE: u64 = 1 << 16;

/// Type numbers of metadata values that have a meaning here; the others are in [`Cursor::scalar`].
pub(super) const UINT32: u32 = 4;
pub(super) const INT32: u32 = 5;
pub(super) const STRING: u32 = 8;
pub(super) const ARRAY: u32 = 9;

/// A place in the beginning of a file. Every step is held against the file's length and [`MAX_HEADER`] first.
pub(super) struct Cursor<'a> {
    file: &'a WeightFile,
    /// Bytes of the file from `start` on.
    buffer: Vec<u8>,
    start: u64,
    at: u64,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(file: &'a WeightFile) -> Cursor<'a> {
        Cursor {
            file,
            buffer: Vec::new(),
            start: 0,
            at: 0,
        }
    }

    /// As [`Cursor::new`], from byte `at` on.
    pub(super) fn starting_at(file: &'a WeightFile, at: u64) -> Cursor<'a> {
        Cursor {
            file,
            buffer: Vec::new(),
            start: at,
            at,
        }
    }

    /// The next byte's place in the file.
    pub(super) fn position(&self) -> u64 {
        self.at
    }

    /// Whether `count` things of at least `size` bytes each can follow.
    pub(super) fn demand(&self, count: u64, size: u64) -> Result<(), CheckpointError> {
        let (path, length) = (self.file.path(), self.file.length());
        let end = count
            .checked_mul(size)
            .and_then(|bytes| self.at.checked_add(bytes));
        match end {
            Some(end) if end <= length.min(MAX_HEADER) => Ok(()),
            Some(end) if end <= MAX_HEADER => Err(CheckpointError::Truncated {
                file: path.to_owned(),
                actual: length,
                expected: end,
                tensor: None,
            }),
            _ => {
                let reason = format!(
                    "what it announces at byte {} goes beyond the {MAX_HEADER} bytes that metadata and \
                     list of tensors may take; it is damaged",
                    self.at
                );
                Err(CheckpointError::header(path, reason))
            }
        }
    }

    pub(super) fn skip(&mut self, bytes: u64) -> Result<(), CheckpointError> {
        self.demand(bytes, 1)?;
        self.at += bytes;
        Ok(())
    }

    pub(super) fn u8(&mut self) -> Result<u8, CheckpointError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, CheckpointError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, CheckpointError> {
        self.array().map(u64::from_le_bytes)
    }

    /// A key or a tensor's name; `what` says whose.
    pub(super) fn name(&mut self, what: &dyn Fn() -> String) -> Result<String, CheckpointError> {
        let wrong = |reason: String| CheckpointError::header(self.file.path(), reason);
        let length = self.u64()?;
        if length > MAX_NAME {
            return Err(wrong(format!(
                "{} has {length} bytes, more than the {MAX_NAME} that are allowed; the file is damaged",
                what()
            )));
        }
        String::from_utf8(self.bytes(length)?)
            .map_err(|error| wrong(format!("{} is not UTF-8 text: {error}", what())))
    }

    /// A text of the array `key`.
    pub(super) fn text(&mut self, key: &str) -> Result<String, CheckpointError> {
        let length = self.u64()?;
        let bytes = self.bytes(length)?;
        String::from_utf8(bytes).map_err(|error| {
            let reason = format!("it is not UTF-8 text: {error}");
            CheckpointError::metadata(self.file.path(), key, reason)
        })
    }

    /// The value of the metadata entry `key`, as text.
    pub(super) fn value(&mut self, key: &str, kind: u32) -> Result<String, CheckpointError> {
        let wrong = |reason: String| CheckpointError::metadata(self.file.path(), key, reason);
        match kind {
            STRING => {
                let length = self.u64()?;
                if length > MAX_TEXT {
                    self.skip(length)?;
                    return Ok(format!("[text of {length} bytes]"));
                }
                String::from_utf8(self.bytes(length)?)
                    .map_err(|error| wrong(format!("it is not UTF-8 text: {error}")))
            }
            ARRAY => {
                let (element, count) = (self.u32()?, self.u64()?);
                match (element, width(element)) {
                    (STRING, _) => {
                        self.demand(count, 8)?;
                        for _ in 0..count {
                            let length = self.u64()?;
                            self.skip(length)?;
                        }
                    }
                    (_, Some(width)) => {
                        self.demand(count, width)?;
                        if count <= MAX_LISTED {
                            let values: Result<Vec<String>, _> =
                                (0..count).map(|_| self.scalar(key, element)).collect();
                            return Ok(format!("[{}]", values?.join(", ")));
                        }
                        self.skip(count * width)?;
                    }
                    (ARRAY, _) => {
                        return Err(wrong("it is an array of arrays".to_owned()));
                    }
                    _ => {
                        return Err(wrong(format!(
                            "it is an array of the type number {element}, which is not known"
                        )));
                    }
                }
                Ok(format!("[{count} values]"))
            }
            _ => self.scalar(key, kind),
        }
    }

    /// A number or truth value as text.
    fn scalar(&mut self, key: &str, kind: u32) -> Result<String, CheckpointError> {
        let reason = match kind {
            0 => return Ok(u8::from_le_bytes(self.array()?).to_string()),
            1 => return Ok(i8::from_le_bytes(self.array()?).to_string()),
            2 => return Ok(u16::from_le_bytes(self.array()?).to_string()),
            3 => return Ok(i16::from_le_bytes(self.array()?).to_string()),
            UINT32 => return Ok(self.u32()?.to_string()),
            5 => return Ok(i32::from_le_bytes(self.array()?).to_string()),
            6 => return Ok(f32::from_le_bytes(self.array()?).to_string()),
            7 => match self.array()? {
                [0] => return Ok("false".to_owned()),
                [1] => return Ok("true".to_owned()),
                [other] => format!("it is a truth value of {other}, neither 0 nor 1"),
            },
            10 => return Ok(self.u64()?.to_string()),
            11 => return Ok(i64::from_le_bytes(self.array()?).to_string()),
            12 => return Ok(f64::from_le_bytes(self.array()?).to_string()),
            _ => format!("its type number {kind} is not known"),
        };
        Err(CheckpointError::metadata(self.file.path(), key, reason))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], CheckpointError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// `length` bytes; memory is taken only once they are known to be there.
    fn bytes(&mut self, length: u64) -> Result<Vec<u8>, CheckpointError> {
        self.demand(length, 1)?;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, mut into: &mut [u8]) -> Result<(), CheckpointError> {
        self.demand(into.len() as u64, 1)?;
        while !into.is_empty() {
            // What was skipped may lie beyond the buffer; `at` never goes back.
            let known = usize::try_from(self.at - self.start)
                .ok()
                .and_then(|from| self.buffer.get(from..))
                .unwrap_or_default();
            let count = known.len().min(into.len());
            if count == 0 {
                let piece = PIECE.min(self.file.length() - self.at);
                self.buffer.resize(piece as usize, 0);
                self.start = self.at;
                self.file.read(None, self.start, &mut self.buffer)?;
                continue;
            }
            let (first, rest) = into.split_at_mut(count);
            first.copy_from_slice(&known[..count]);
            (into, self.at) = (rest, self.at + count as u64);
        }
        Ok(())
    }
}

/// Bytes of a number or truth value in an array.
fn width(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        UINT32..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
