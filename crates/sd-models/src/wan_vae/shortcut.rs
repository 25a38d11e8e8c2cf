//! Shortcuts of WAN 2.2's levels, which have no weights: channels are averaged into smaller frames, or repeated into larger
//! ones.

use sd_graph::Tensor;

/// How a level changes frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Level {
    pub(crate) input: usize,
    pub(crate) output: usize,
    /// Whether height and width change by 2, and if so whether time does too.
    pub(crate) resample: Option<bool>,
}

impl Level {
    /// Frames to one, or of one.
    pub(crate) fn frames(self) -> usize {
        if self.resample == Some(true) { 2 } else { 1 }
    }

    /// Pixels to one, or of one, over time too.
    fn factor(self) -> usize {
        let pixels = if self.resample.is_some() { 4 } else { 1 };
        pixels * self.frames()
    }

    /// How many channels [`Averaging`] makes one of; `None` if they do not divide.
    pub(crate) fn averaged(self) -> Option<usize> {
        let channels = self.input.checked_mul(self.factor())?;
        (self.output > 0 && channels.is_multiple_of(self.output)).then(|| channels / self.output)
    }

    /// How often [`Duplicating`] repeats each channel; `None` if they do not divide. The decoder's last level, which enlarges
    /// nothing, has no shortcut.
    pub(crate) fn repeats(self) -> Option<usize> {
        if self.resample.is_none() {
            return Some(1);
        }
        let channels = self.output.checked_mul(self.factor())?;
        (self.input > 0 && channels.is_multiple_of(self.input)).then(|| channels / self.input)
    }
}

/// Squares of pixels, and pairs of frames, become channels, of which groups are averaged: `AvgDown3D`.
#[derive(Debug)]
pub(crate) struct Averaging(pub(crate) Level);

impl Averaging {
    /// `[t, in, h, w] -> [t / frames, out, h / 2, w / 2]`, zeros before a single frame.
    pub(crate) fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let level = self.0;
        let x = match level.resample {
            Some(_) => x.pixel_unshuffle(2),
            None => x,
        };
        let depth = level.frames();
        let x = if x.dim(0).is_multiple_of(depth) {
            x
        } else {
            (x.slice(0, 0, 1) * 0.0).concat(x, 0)
        };
        let (frames, height, width) = (x.dim(0) / depth, x.dim(2), x.dim(3));
        let parts = x.dim(1) / level.input.max(1);
        // [t, in, depth of time, squares of pixels]: that order of channels is averaged in groups.
        let pixels = height * width;
        let channels = x
            .reshape([frames, depth, level.input, parts * pixels])
            .permute([0, 2, 1, 3]);
        let group = level.averaged().unwrap_or(1);
        let groups = channels.reshape([frames, level.output, group, pixels]);
        let sum = (1..group).fold(groups.slice(2, 0, 1), |sum, index| {
            sum + groups.slice(2, index, 1)
        });
        (sum * (1.0 / group as f32)).reshape([frames, level.output, height, width])
    }
}

/// Channels are repeated and laid out over new pixels and frames: `DupUp3D`.
#[derive(Debug)]
pub(crate) struct Duplicating(pub(crate) Level);

impl Duplicating {
    /// `[t, in, h, w] -> [t * frames, out, 2 h, 2 w]`; of a clip's first frame only the last of its frames remains.
    pub(crate) fn forward<'g>(&self, x: Tensor<'g>, is_first: bool) -> Tensor<'g> {
        let g = x.graph();
        let (frames, channels, height, width) = (x.dim(0), x.dim(1), x.dim(2), x.dim(3));
        let Level { output, .. } = self.0;
        let depth = self.0.frames();
        let repeats = self.0.repeats().unwrap_or(1).max(1);
        let dropped = if is_first { depth - 1 } else { 0 };
        let count = frames * depth - dropped;
        // For each channel of each new frame, the planes that its four pixels come from: upper left, upper right, lower left,
        // lower right.
        let sources: Vec<[i32; 4]> = (dropped..frames * depth)
            .flat_map(|frame| (0..output).map(move |channel| (frame, channel)))
            .map(|(frame, channel)| {
                [0, 1, 2, 3].map(|pixel| {
                    let index = (channel * depth + frame % depth) * 4 + pixel;
                    (frame / depth * channels + index / repeats) as i32
                })
            })
            .collect();
        let planes = x.reshape([frames * channels, height * width]);
        let select = |index: &[i32]| planes.rows(g.constant(index, [index.len()]));

        if sources
            .iter()
            .all(|pixels| pixels.iter().all(|&source| source == pixels[0]))
        {
            // All four pixels of a channel come from one plane: the plane, enlarged.
            let index: Vec<i32> = sources.iter().map(|pixels| pixels[0]).collect();
            let is_identity = (0..).zip(&index).all(|(at, &source)| at == source);
            let chosen = if is_identity && index.len() == frames * channels {
                planes
            } else {
                select(&index)
            };
            return chosen
                .reshape([count, output, height, width])
                .upscale_nearest(2);
        }
        if sources.iter().all(|[a, b, c, d]| a == b && c == d) {
            // Rows come from two planes in turn; pixels of a row are repeated.
            let index: Vec<i32> = sources.iter().flat_map(|&[a, _, c, _]| [a, c]).collect();
            let is_identity = (0..).zip(&index).all(|(at, &source)| at == source);
            let chosen = if is_identity && index.len() == frames * channels {
                planes
            } else {
                select(&index)
            };
            return chosen
                .reshape([count * output, 2, height, width])
                .permute([0, 2, 1, 3])
                .reshape([count, output, 2 * height, width])
                .upscale_nearest_by([1, 2]);
        }
        select(sources.as_flattened())
            .reshape([count, output * 4, height, width])
            .pixel_shuffle(2)
    }
}
