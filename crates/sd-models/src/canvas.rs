//! What a picture is made on.

use crate::rope::Circular;
use crate::tiling::{self, Tiles};

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

impl Piece {
    /// The same, `scale` times as large.
    pub(crate) fn scaled(self, scale: usize) -> Piece {
        Piece {
            height: self.height * scale,
            width: self.width * scale,
            ..self
        }
    }
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

    /// Smaller and smaller squares that it may be decoded in where all at once is too much; none if it has a tile already.
    pub(crate) fn smaller(self) -> impl Iterator<Item = Canvas> {
        let is_open = self.tile.is_none();
        let squares = tiling::squares(self.longest()).filter(move |_| is_open);
        squares.map(move |tile| self.tile(Some(tile)))
    }

    /// In squares half as large; none if those would be too small.
    pub(crate) fn halved(self) -> Option<Canvas> {
        let tile = tiling::halved(self.tile, self.longest())?;
        Some(self.tile(Some(tile)))
    }

    fn longest(&self) -> usize {
        self.height.max(self.width)
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
