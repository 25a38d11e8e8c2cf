//! What a picture is made on.

use crate::rope::Circular;
use crate::tiling::Tiles;

/// A picture's latents, which of its sides join, and how much of it is decoded at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Canvas {
    /// Rows of latents.
    pub height: usize,
    /// Columns of latents.
    pub width: usize,
    /// Sides that join.
    pub circular: Circular,
    /// Side of the square of latents that is decoded at once; everything if none. Changes the picture a little, since each
    /// square is decoded without seeing the others, and needs less memory.
    pub tile: Option<usize>,
}

/// What one run of the decoder is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Piece {
    pub(crate) height: usize,
    pub(crate) width: usize,
    /// Sides that join within the piece.
    pub(crate) circular: Circular,
}

impl From<(usize, usize)> for Canvas {
    /// `(height, width)` latents, no sides joined, decoded at once.
    fn from((height, width): (usize, usize)) -> Canvas {
        Canvas {
            height,
            width,
            circular: Circular::NONE,
            tile: None,
        }
    }
}

impl Canvas {
    /// Joins sides.
    pub fn circular(mut self, circular: Circular) -> Canvas {
        self.circular = circular;
        self
    }

    /// Decodes squares of `tile` latents one after the other.
    pub fn tile(mut self, tile: Option<usize>) -> Canvas {
        self.tile = tile;
        self
    }

    /// Latents.
    pub fn tokens(&self) -> usize {
        self.height * self.width
    }

    /// Tiles from top to bottom and from left to right.
    pub(crate) fn tiles(&self) -> (Tiles, Tiles) {
        (
            Tiles::new(self.height, self.tile, self.circular.y),
            Tiles::new(self.width, self.tile, self.circular.x),
        )
    }

    /// What the decoder is given at once. A side that is cut joins by its tiles, a whole one by its convolutions.
    pub(crate) fn piece(&self) -> Piece {
        let (rows, columns) = self.tiles();
        Piece {
            height: rows.length,
            width: columns.length,
            circular: Circular {
                x: self.circular.x && columns.is_whole(),
                y: self.circular.y && rows.is_whole(),
            },
        }
    }
}
