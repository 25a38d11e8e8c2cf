//! How frames are cut into tiles, and put together again, to the reference's numbers.
//!
//! Tiles of one length cover a side, and neighbours overlap by at least so much; what is too much is shared out among the
//! overlaps in whole latents. Where two overlap the later counts from nothing on, and the earlier as much less. The reference
//! blends a tile with the one above it first, and the result with the tile to its left as that was before it was blended
//! itself; so where four tiles meet the one to the left and above counts nothing. That is kept.

use std::ops::Range;

use rayon::prelude::*;

use crate::error::{Error, Result};

/// How much of each frame is worked on at once. Other tiles give slightly other frames: latents do not see beyond theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tiling {
    /// All of it.
    Whole,
    /// Squares one after the other.
    Tiles {
        /// Pixels along a side, whole latents, at least two.
        size: usize,
        /// Pixels that neighbours have in common at least, whole latents, at least one.
        overlap: usize,
    },
}

impl Default for Tiling {
    /// As the model was released: tiles of 256 pixels that overlap by 64 or more.
    fn default() -> Tiling {
        Tiling::Tiles {
            size: 256,
            overlap: 64,
        }
    }
}

impl Tiling {
    /// Refuses tiles that are no whole latents of `scale` pixels, or do not overlap.
    pub(super) fn check(self, scale: usize) -> Result<()> {
        match self {
            Tiling::Whole => Ok(()),
            Tiling::Tiles { size, overlap } => {
                let is_whole = |side: usize| side > 0 && side.is_multiple_of(scale);
                let fits = is_whole(size) && is_whole(overlap) && size >= 2 * scale;
                if fits && overlap < size {
                    return Ok(());
                }
                Err(Error::Tiles {
                    size,
                    overlap,
                    multiple: scale,
                })
            }
        }
    }

    /// Latents along a side of the tiles of frames of so many latents; none if all is worked on at once.
    pub(super) fn tile(self, (height, width): (usize, usize), scale: usize) -> Option<usize> {
        match self {
            Tiling::Tiles { size, .. } if size / scale < height.max(width) => Some(size / scale),
            _ => None,
        }
    }

    /// Tiles over a side of so many latents of `scale` pixels, in latents.
    pub(super) fn over(self, side: usize, scale: usize) -> Tiles {
        match self {
            Tiling::Whole => Tiles::whole(side),
            Tiling::Tiles { size, overlap } => Tiles::new(side, size / scale, overlap / scale),
        }
    }
}

/// Tiles of equal length along one side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tiles {
    side: usize,
    length: usize,
    starts: Vec<usize>,
    /// What each has in common with the next.
    overlaps: Vec<usize>,
}

/// A run of a tile's elements and how much they count.
#[derive(Debug, Clone, PartialEq)]
struct Share {
    elements: Range<usize>,
    weights: Vec<f32>,
}

/// The elements of a tile along one side that count.
#[derive(Debug, Clone, PartialEq)]
struct Shares {
    /// Those that belong to the tile itself, blended with the tile before.
    own: Share,
    /// Those that the next tile is blended with.
    next: Share,
}

impl Tiles {
    fn whole(side: usize) -> Tiles {
        Tiles {
            side,
            length: side,
            starts: vec![0],
            overlaps: Vec::new(),
        }
    }

    /// As few tiles of `length` as cover `side` while neighbours have `least` in common.
    fn new(side: usize, length: usize, least: usize) -> Tiles {
        if length >= side {
            return Tiles::whole(side);
        }
        let step = length.saturating_sub(least).max(1);
        let count = 1 + (side - length).div_ceil(step);
        let gaps = count - 1;
        let slack = (length + gaps * step).saturating_sub(side);
        let overlaps: Vec<usize> = (0..gaps)
            .map(|gap| length - step + slack / gaps + usize::from(gap < slack % gaps))
            .collect();
        let starts = overlaps.iter().scan(0, |start, overlap| {
            *start += length - overlap;
            Some(*start)
        });
        Tiles {
            side,
            length,
            starts: std::iter::once(0).chain(starts).collect(),
            overlaps,
        }
    }

    /// The same of a side `scale` times as long.
    pub(super) fn scaled(&self, scale: usize) -> Tiles {
        let scaled = |values: &[usize]| values.iter().map(|value| value * scale).collect();
        Tiles {
            side: self.side * scale,
            length: self.length * scale,
            starts: scaled(&self.starts),
            overlaps: scaled(&self.overlaps),
        }
    }

    /// Length of each tile.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// Length of the side.
    pub(super) fn side(&self) -> usize {
        self.side
    }

    /// Number of tiles.
    pub(super) fn count(&self) -> usize {
        self.starts.len()
    }

    /// Where tile `index` lies.
    pub(super) fn range(&self, index: usize) -> Range<usize> {
        let start = self.starts.get(index).copied().unwrap_or(0);
        start..start + self.length
    }

    /// What tile `index` has in common with the next; nothing for the last.
    fn overlap(&self, index: usize) -> usize {
        self.overlaps.get(index).copied().unwrap_or(0)
    }

    fn shares(&self, index: usize) -> Shares {
        let before = index
            .checked_sub(1)
            .map_or(0, |before| self.overlap(before));
        let behind = self.overlap(index);
        let rising = |at: usize, overlap: usize| match at < overlap {
            true => at as f32 / overlap as f32,
            false => 1.0,
        };
        let own = 0..self.length - behind;
        // The next tile gives up its own end to the one after it.
        let next = behind.min(self.length - self.overlap(index + 1));
        Shares {
            own: Share {
                weights: own.clone().map(|at| rising(at, before)).collect(),
                elements: own,
            },
            next: Share {
                elements: self.length - behind..self.length - behind + next,
                weights: (0..next).map(|at| 1.0 - rising(at, behind)).collect(),
            },
        }
    }
}

/// Planes of frames, put together from tiles.
#[derive(Debug)]
pub(super) struct Mosaic {
    rows: Tiles,
    columns: Tiles,
    values: Vec<f32>,
}

impl Mosaic {
    /// `planes` without values.
    pub(super) fn new(planes: usize, rows: &Tiles, columns: &Tiles) -> Mosaic {
        Mosaic {
            rows: rows.clone(),
            columns: columns.clone(),
            values: vec![0.0; planes * rows.side * columns.side],
        }
    }

    /// Lays the tile `[planes, rows, columns]` in its row and column of tiles.
    pub(super) fn add(&mut self, (row, column): (usize, usize), tile: &[f32]) {
        let (down, along) = (self.rows.shares(row), self.columns.shares(column));
        self.add_part((row, column), tile, &down.own, &along.own);
        self.add_part((row, column), tile, &down.next, &along.own);
        // Beside the tile to the right it counts as it is, not as it was blended with the tile above.
        let plain = Share {
            weights: vec![1.0; down.own.weights.len()],
            ..down.own
        };
        self.add_part((row, column), tile, &plain, &along.next);
    }

    fn add_part(
        &mut self,
        (row, column): (usize, usize),
        tile: &[f32],
        down: &Share,
        along: &Share,
    ) {
        let (top, left) = (self.rows.range(row).start, self.columns.range(column).start);
        let (height, width) = (self.rows.length, self.columns.length);
        let area = self.rows.side * self.columns.side;
        let stride = self.columns.side;
        let planes = self.values.par_chunks_exact_mut(area.max(1));
        let tiles = tile.par_chunks_exact((height * width).max(1));
        planes.zip(tiles).for_each(|(plane, tile)| {
            for (y, down) in down.elements.clone().zip(&down.weights) {
                let from = &tile[y * width..][along.elements.clone()];
                let target = (top + y) * stride + left + along.elements.start;
                let to = plane[target..].iter_mut();
                for ((to, from), along) in to.zip(from).zip(&along.weights) {
                    *to += from * (down * along);
                }
            }
        });
    }

    /// The planes.
    pub(super) fn finish(self) -> Vec<f32> {
        self.values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_much_is_shared_out() {
        // What the reference says of the sides of its usual frames, in latents of 16 pixels.
        for (side, starts) in [
            (16, &[0][..]),
            (17, &[0, 1]),
            (30, &[0, 7, 14]),
            (32, &[0, 8, 16]),
            (48, &[0, 10, 21, 32]),
            (84, &[0, 11, 22, 33, 44, 56, 68]),
        ] {
            let tiles = Tiling::default().over(side, 16);
            assert_eq!(tiles.starts, starts, "{side}");
        }
    }

    /// Constant tiles come back wherever they lie, and every pixel is covered.
    #[test]
    fn shares_add_up_to_all() {
        for side in 1..40 {
            for (length, least) in [(4, 1), (4, 2), (5, 3), (8, 2)] {
                let rows = Tiles::new(side, length, least);
                let columns = Tiles::new(side + 3, length, least).scaled(2);
                let mut mosaic = Mosaic::new(2, &rows, &columns);
                let tile = vec![1.0; 2 * rows.length() * columns.length()];
                for row in 0..rows.count() {
                    for column in 0..columns.count() {
                        mosaic.add((row, column), &tile);
                    }
                }
                let off = |value: &f32| (value - 1.0).abs() > 1e-6;
                assert!(!mosaic.finish().iter().any(off), "{rows:?} {columns:?}");
            }
        }
    }
}
