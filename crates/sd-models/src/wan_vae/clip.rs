//! Frames, or latents of frames, in the host's memory.

use crate::tiling::Tiles;

/// Values `[frames, channels, height, width]`: pictures with values from -1 to 1, or latents.
#[derive(Debug, Clone, PartialEq)]
pub struct Clip {
    /// Number of frames.
    pub frames: usize,
    /// Channels of a frame.
    pub channels: usize,
    /// Rows of a frame.
    pub height: usize,
    /// Columns of a frame.
    pub width: usize,
    /// The values, innermost dimension fastest.
    pub values: Vec<f32>,
}

impl Clip {
    /// Values of one frame.
    pub fn frame_len(&self) -> usize {
        self.channels * self.height * self.width
    }

    /// The frames, one by one.
    pub fn each_frame(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.frame_len().max(1))
    }

    /// The tile of each frame that begins at `row` of `rows` and `column` of `columns`.
    pub(crate) fn tile(
        &self,
        (rows, row): (&Tiles, usize),
        (columns, column): (&Tiles, usize),
    ) -> Clip {
        let values = self
            .values
            .chunks_exact((self.height * self.width).max(1))
            .flat_map(|plane| rows.elements(row).map(move |y| (plane, y)))
            .flat_map(|(plane, y)| {
                let line = &plane[y * self.width..];
                columns.elements(column).map(move |x| line[x])
            })
            .collect();
        Clip {
            height: rows.length,
            width: columns.length,
            values,
            ..*self
        }
    }
}
