//! From latents to frames.

use sd_graph::{Scope, Tensor};

use super::chunk::Chunk;
use super::config::Config;
use super::layers::{CausalConv, ChannelNorm, Depth, MidBlock, ResidualBlock};
use super::resample::Upsampler;
use super::shortcut::{Duplicating, Level};
use crate::nn::Conv2d;
use crate::rope::Circular;

/// The decoder.
#[derive(Debug)]
pub struct Decoder {
    post_quant_conv: Conv2d,
    conv_in: CausalConv,
    mid_block: MidBlock,
    up_blocks: Vec<UpBlock>,
    norm_out: ChannelNorm,
    conv_out: CausalConv,
    patch: usize,
}

#[derive(Debug)]
struct UpBlock {
    resnets: Vec<ResidualBlock>,
    upsampler: Option<Upsampler>,
    shortcut: Option<Duplicating>,
}

impl Decoder {
    /// Declares the decoder's parameters at the root of the VAE's checkpoint. The encoder, and what only clips need in a
    /// VAE for pictures, are known but not needed here.
    pub fn new(root: &Scope<'_>, config: &Config) -> Decoder {
        root.ignore("encoder");
        root.ignore("quant_conv");
        let scope = root.sub("decoder");
        let depth = config.depth();
        let top = config.up_levels().next().map_or(0, |level| level.input);
        let bottom = config.up_levels().last().map_or(0, |level| level.output);
        let z_dim = config.z_dim;
        Decoder {
            post_quant_conv: Conv2d::new(&root.sub("post_quant_conv"), z_dim, z_dim, 1),
            conv_in: CausalConv::new(&scope.sub("conv_in"), z_dim, top, depth),
            mid_block: MidBlock::new(&scope.sub("mid_block"), top, depth),
            up_blocks: config
                .up_levels()
                .enumerate()
                .map(|(index, level)| {
                    UpBlock::new(&scope.sub("up_blocks").sub(index), level, config, depth)
                })
                .collect(),
            norm_out: ChannelNorm::new(&scope.sub("norm_out"), bottom),
            conv_out: CausalConv::new(&scope.sub("conv_out"), bottom, config.out_channels(), depth),
            patch: config.patch(),
        }
    }

    /// The picture `[1, channels, height, width]` of a latent `[1, z, height / scale, width / scale]` that has its mean and
    /// deviation back, whose sides join along the axes of `circular`. Values are meant to lie in -1..1 but are not clamped
    /// here.
    pub fn forward<'g>(&self, z: Tensor<'g>, circular: Circular) -> Tensor<'g> {
        self.forward_chunk(z, &Chunk::picture(circular))
    }

    /// The frames of a chunk of latents `[t, z, height / scale, width / scale]`: one for a clip's first, four for each
    /// further.
    pub(crate) fn forward_chunk<'g>(&self, z: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        let x = self.post_quant_conv.forward(z, chunk.circular);
        let mut x = self.conv_in.forward(x, chunk);
        x = self.mid_block.forward(x, chunk);
        for block in &self.up_blocks {
            x = block.forward(x, chunk);
        }
        x = self.conv_out.forward(self.norm_out.forward_silu(x), chunk);
        match self.patch {
            1 => x,
            // Columns of a square are the slower channels.
            patch => x.transpose(2, 3).pixel_shuffle(patch).transpose(2, 3),
        }
    }
}

impl UpBlock {
    fn new(scope: &Scope<'_>, level: Level, config: &Config, depth: Depth) -> UpBlock {
        let resnets = (0..=config.num_res_blocks())
            .map(|index| {
                let input = if index == 0 {
                    level.input
                } else {
                    level.output
                };
                let resnet = scope.sub("resnets").sub(index);
                ResidualBlock::new(&resnet, input, level.output, depth)
            })
            .collect();
        let (name, output) = if config.is_residual() {
            ("upsampler", level.output)
        } else {
            ("upsamplers.0", level.output / 2)
        };
        UpBlock {
            resnets,
            upsampler: level
                .resample
                .map(|time| Upsampler::new(&scope.sub(name), [level.output, output], time, depth)),
            shortcut: (config.is_residual() && level.resample.is_some())
                .then_some(Duplicating(level)),
        }
    }

    fn forward<'g>(&self, input: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        let mut x = self
            .resnets
            .iter()
            .fold(input, |x, resnet| resnet.forward(x, chunk));
        if let Some(upsampler) = &self.upsampler {
            x = upsampler.forward(x, chunk);
        }
        match &self.shortcut {
            Some(shortcut) => x + shortcut.forward(input, chunk.is_first()),
            None => x,
        }
    }
}
