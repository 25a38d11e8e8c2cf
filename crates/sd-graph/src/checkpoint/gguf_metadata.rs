//! Values of a GGUF file's metadata that are too long to be kept: read again when they are asked for.

use std::ops::Range;

use super::Checkpoint;
use super::error::CheckpointError;
use super::file::WeightFile;
use super::gguf_cursor::{ARRAY, Cursor, STRING};

/// Where a value lies in its file. It was checked when the file was opened, and is checked again when it is read.
#[derive(Debug, Clone)]
pub(super) struct MetadataValue {
    /// The format's number of its type.
    pub(super) kind: u32,
    pub(super) range: Range<u64>,
}

impl Checkpoint {
    /// The texts of the array `key` in a GGUF file's metadata, such as the tokens of a vocabulary; `None` if there is no such
    /// array of texts.
    ///
    /// # Errors
    /// The file cannot be read, or was changed.
    pub fn metadata_texts(&self, key: &str) -> Result<Option<Vec<String>>, CheckpointError> {
        self.array(key, |cursor, element, key| match element {
            STRING => Some(cursor.text(key)),
            _ => None,
        })
    }

    /// The whole numbers of the array `key` in a GGUF file's metadata, truth values as 0 and 1; `None` if there is no such array of
    /// 32-bit numbers or truth values.
    ///
    /// # Errors
    /// As for [`Checkpoint::metadata_texts`].
    pub fn metadata_numbers(&self, key: &str) -> Result<Option<Vec<i64>>, CheckpointError> {
        self.array(key, |cursor, element, _| match element {
            4 => Some(cursor.u32().map(i64::from)),
            7 => Some(cursor.u8().map(i64::from)),
            5 => Some(cursor.u32().map(|bits| i64::from(bits.cast_signed()))),
            _ => None,
        })
    }

    /// The elements of an array, each read by `next`, which says `None` to types that are not asked for.
    fn array<T>(
        &self,
        key: &str,
        next: impl Fn(&mut Cursor<'_>, u32, &str) -> Option<Result<T, CheckpointError>>,
    ) -> Result<Option<Vec<T>>, CheckpointError> {
        let Some((file, value)) = self.value(key).filter(|(_, value)| value.kind == ARRAY) else {
            return Ok(None);
        };
        let mut cursor = Cursor::starting_at(file, value.range.start);
        let (element, count) = (cursor.u32()?, cursor.u64()?);
        // Each element takes a byte at least.
        cursor.demand(count, 1)?;
        let mut elements = Vec::new();
        for _ in 0..count {
            match next(&mut cursor, element, key) {
                Some(found) => elements.push(found?),
                None => return Ok(None),
            }
        }
        Ok(Some(elements))
    }

    fn value(&self, key: &str) -> Option<(&WeightFile, &MetadataValue)> {
        let (file, value) = self.0.values.get(key)?;
        Some((self.0.files.get(*file)?, value))
    }

    /// The metadata of a GGUF file as it stands there: key, number of the type, bytes of the value. What describes the file
    /// itself and not what is in it (its alignment, which part of several it is) is left out.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn metadata_entries(&self) -> Result<Vec<(String, u32, Vec<u8>)>, CheckpointError> {
        let is_kept = |key: &&String| !key.starts_with("split.");
        let keys = self.0.values.keys().filter(is_kept);
        keys.filter_map(|key| Some((key, self.value(key)?)))
            .map(|(key, (file, value))| {
                // Inside the header, which has a limit.
                let mut bytes = vec![0; (value.range.end - value.range.start) as usize];
                file.read(None, value.range.start, &mut bytes)?;
                Ok((key.clone(), value.kind, bytes))
            })
            .collect()
    }
}
