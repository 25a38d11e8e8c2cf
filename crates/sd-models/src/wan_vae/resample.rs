//! Between levels: larger and smaller frames, more and fewer of them.

use sd_graph::{Scope, Tensor};

use super::chunk::Chunk;
use super::layers::{Depth, TimeConv};
use crate::nn::Conv2d;

/// Doubles height and width and, in a clip, time.
#[derive(Debug)]
pub(crate) struct Upsampler {
    time_conv: Option<TimeConv>,
    conv: Conv2d,
}

/// Halves height and width and, in a clip, time.
#[derive(Debug)]
pub(crate) struct Downsampler {
    conv: Conv2d,
    time_conv: Option<TimeConv>,
}

/// The layer `time_conv` where there is one and clips can be made: a VAE for pictures has it without use.
fn time_conv(
    scope: &Scope<'_>,
    [input, output]: [usize; 2],
    time: bool,
    depth: Depth,
) -> Option<TimeConv> {
    let clips = time && depth == Depth::Three;
    if time && !clips {
        scope.ignore("time_conv");
    }
    clips.then(|| TimeConv::new(&scope.sub("time_conv"), input, output, 1))
}

impl Upsampler {
    /// Declares `time_conv` where `time` says so, and `resample.1`, which brings `input` channels to `output`.
    pub(crate) fn new(
        scope: &Scope<'_>,
        [input, output]: [usize; 2],
        time: bool,
        depth: Depth,
    ) -> Upsampler {
        let both = [input, input.saturating_mul(2)];
        Upsampler {
            time_conv: time_conv(scope, both, time, depth).map(TimeConv::late),
            conv: Conv2d::new(&scope.sub("resample.1"), input, output, 3),
        }
    }

    pub(crate) fn forward<'g>(&self, x: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        let x = match &self.time_conv {
            // A clip's first frame stays one.
            Some(time_conv) if chunk.is_first() => time_conv.pass_by(x, chunk),
            Some(time_conv) => {
                let (frames, channels, height, width) = (x.dim(0), x.dim(1), x.dim(2), x.dim(3));
                // The first half of the channels is the earlier of two frames.
                time_conv
                    .forward(x, chunk)
                    .reshape([2 * frames, channels, height, width])
            }
            None => x,
        };
        self.conv.forward(x.upscale_nearest(2), chunk.circular)
    }
}

impl Downsampler {
    /// Declares `resample.1` and, where `time` says so, `time_conv`, for `channels` channels.
    pub(crate) fn new(scope: &Scope<'_>, channels: usize, time: bool, depth: Depth) -> Downsampler {
        let both = [channels, channels];
        Downsampler {
            conv: Conv2d::new(&scope.sub("resample.1"), channels, channels, 3),
            time_conv: time_conv(scope, both, time, depth).map(TimeConv::halving),
        }
    }

    pub(crate) fn forward<'g>(&self, x: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        let x = self.conv.forward_halving(x, chunk.circular);
        match &self.time_conv {
            Some(time_conv) if chunk.is_first() => time_conv.pass_by(x, chunk),
            Some(time_conv) => time_conv.forward(x, chunk),
            None => x,
        }
    }
}
