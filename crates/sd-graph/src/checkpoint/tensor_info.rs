//! What is known of one tensor before it is read.

use std::sync::Arc;

use super::StoredType;

/// Dimensions that a tensor may have.
pub(super) const MAX_RANK: usize = 64;

/// What a checkpoint says about one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The type of the elements as stored.
    pub stored: StoredType,
    /// Sides, outermost first; empty for a scalar. The product of those that are not 0 fits in 62 bits.
    pub shape: Vec<usize>,
    /// Bytes that the tensor takes in its file.
    pub bytes: u64,
    /// `None` in a table without files, and for what lies in pieces.
    pub(super) location: Option<Location>,
    /// For a tensor that a selection put together from what does not lie in one stretch.
    pub(super) pieces: Option<Arc<Pieces>>,
}

/// A tensor whose bytes come in turns from several places.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pieces {
    /// Where the first piece of each turn lies.
    pub(super) starts: Vec<Location>,
    /// Bytes of a piece.
    pub(super) length: u64,
    /// Bytes from a piece to the one of the next turn.
    pub(super) stride: u64,
}

impl Pieces {
    /// Where byte `offset` of the tensor lies, and how many bytes from there on are of one piece.
    pub(super) fn at(&self, offset: u64) -> Option<(Location, u64)> {
        let piece = offset.checked_div(self.length)?;
        let turn = piece.checked_div(self.starts.len() as u64)?;
        let start = self
            .starts
            .get((piece % self.starts.len() as u64) as usize)?;
        let within = offset % self.length;
        let location = Location {
            offset: start.offset + turn * self.stride + within,
            ..*start
        };
        Some((location, self.length - within))
    }
}

/// Where a tensor's data lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Location {
    /// Which of the checkpoint's files.
    pub(super) file: usize,
    /// First byte, from the beginning of the file.
    pub(super) offset: u64,
}

impl TensorInfo {
    /// A tensor without a place, or the reason why there can be none such.
    pub(super) fn new(stored: StoredType, shape: Vec<usize>) -> Result<TensorInfo, String> {
        if shape.len() > MAX_RANK {
            return Err(format!(
                "it has {} dimensions, more than the {MAX_RANK} that are allowed",
                shape.len()
            ));
        }
        let size = |sides: &[usize], zero: u64| {
            sides.iter().try_fold(1_u64, |product, &side| {
                product.checked_mul(if side == 0 { zero } else { side as u64 })
            })
        };
        // The limit of the smallest plain type, 4 bits, holds for quantised elements too.
        let fits = size(&shape, 1).is_some_and(|elements| {
            let bits = stored.bits().unwrap_or(4);
            let blocks = stored
                .block()
                .map(|(len, bytes)| elements.div_ceil(len).checked_mul(bytes));
            elements.checked_mul(bits.into()).is_some() && blocks != Some(None)
        });
        let (Some(elements), true) = (size(&shape, 0), fits) else {
            return Err(format!(
                "shape {shape:?} of type {stored} is impossible: its size overflows 64 bits"
            ));
        };
        if let Some((len, _)) = stored.block() {
            let row = shape.last().map_or(1, |&row| row as u64);
            if !row.is_multiple_of(len) {
                return Err(format!(
                    "shape {shape:?} of type {stored} has rows of {row}, which are not whole blocks of {len}"
                ));
            }
        }
        let Some(bytes) = stored.bytes(elements) else {
            return Err(format!(
                "shape {shape:?} of type {stored} does not fill whole bytes"
            ));
        };
        Ok(TensorInfo {
            stored,
            shape,
            bytes,
            location: None,
            pieces: None,
        })
    }

    /// Number of elements: the product of the sides.
    pub fn elements(&self) -> u64 {
        self.shape
            .iter()
            .fold(1, |product: u64, &side| product.saturating_mul(side as u64))
    }
}
