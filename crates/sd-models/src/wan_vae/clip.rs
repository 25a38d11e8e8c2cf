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

    /// A clip of `values [channels, frames, height, width]`, the order in which diffusion models have latents.
    pub fn from_channels_first(
        [channels, frames, height, width]: [usize; 4],
        values: &[f32],
    ) -> Clip {
        Clip {
            frames,
            channels,
            height,
            width,
            values: swapped([channels, frames], height * width, values),
        }
    }

    /// The values `[channels, frames, height, width]`.
    pub fn channels_first(&self) -> Vec<f32> {
        let planes = [self.frames, self.channels];
        swapped(planes, self.height * self.width, &self.values)
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

/// Planes `[outer, inner]` of `area` values as `[inner, outer]`.
fn swapped([outer, inner]: [usize; 2], area: usize, values: &[f32]) -> Vec<f32> {
    let places = (0..inner).flat_map(|inside| (0..outer).map(move |out| out * inner + inside));
    places
        .filter_map(|plane| values.get(plane * area..(plane + 1) * area))
        .flatten()
        .copied()
        .collect()
}
