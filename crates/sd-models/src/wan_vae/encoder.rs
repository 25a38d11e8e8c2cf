//! From frames to latents.

use sd_graph::{Scope, Tensor};

use super::chunk::Chunk;
use super::config::Config;
use super::layers::{CausalConv, ChannelNorm, Depth, MidBlock, ResidualBlock};
use super::resample::Downsampler;
use super::shortcut::Averaging;
use crate::nn::Conv2d;
use crate::rope::Circular;

/// The encoder.
#[derive(Debug)]
pub struct Encoder {
    conv_in: CausalConv,
    down_blocks: Vec<DownBlock>,
    mid_block: MidBlock,
    norm_out: ChannelNorm,
    conv_out: CausalConv,
    quant_conv: Conv2d,
    patch: usize,
    z_dim: usize,
}

#[derive(Debug)]
struct DownBlock {
    resnets: Vec<ResidualBlock>,
    downsampler: Option<Downsampler>,
    shortcut: Option<Averaging>,
}

impl Encoder {
    /// Declares the encoder's parameters at the root of the VAE's checkpoint. The decoder, and what only clips need in a
    /// VAE for pictures, are known but not needed here.
    pub fn new(root: &Scope<'_>, config: &Config) -> Encoder {
        root.ignore("decoder");
        root.ignore("post_quant_conv");
        let scope = root.sub("encoder");
        let depth = config.depth();
        let top = config.down_levels().next().map_or(0, |level| level.input);
        let bottom = config.down_levels().last().map_or(0, |level| level.output);
        // Means and logarithms of variances.
        let moments = config.z_dim.saturating_mul(2);
        Encoder {
            conv_in: CausalConv::new(&scope.sub("conv_in"), config.in_channels(), top, depth),
            down_blocks: down_blocks(&scope.sub("down_blocks"), config, depth),
            mid_block: MidBlock::new(&scope.sub("mid_block"), bottom, depth),
            norm_out: ChannelNorm::new(&scope.sub("norm_out"), bottom),
            conv_out: CausalConv::new(&scope.sub("conv_out"), bottom, moments, depth),
            quant_conv: Conv2d::new(&root.sub("quant_conv"), moments, moments, 1),
            patch: config.patch(),
            z_dim: config.z_dim,
        }
    }

    /// The mean `[1, z, height / scale, width / scale]` of the latents of a picture `[1, channels, height, width]` with values
    /// in -1..1.
    pub fn forward<'g>(&self, picture: Tensor<'g>, circular: Circular) -> Tensor<'g> {
        self.forward_chunk(picture, &Chunk::picture(circular))
    }

    /// The means of the latents of a chunk of frames: a clip's first, or four for each frame of latents.
    pub(crate) fn forward_chunk<'g>(&self, frames: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        let x = match self.patch {
            1 => frames,
            // Columns of a square are the slower channels.
            patch => frames
                .transpose(2, 3)
                .pixel_unshuffle(patch)
                .transpose(2, 3),
        };
        let mut x = self.conv_in.forward(x, chunk);
        for block in &self.down_blocks {
            x = block.forward(x, chunk);
        }
        x = self.mid_block.forward(x, chunk);
        x = self.conv_out.forward(self.norm_out.forward_silu(x), chunk);
        let moments = self.quant_conv.forward(x, chunk.circular);
        moments.slice(1, 0, self.z_dim)
    }
}

/// The levels at `scope`. Those with shortcuts have names of their own, the layers of others are numbered through.
fn down_blocks(scope: &Scope<'_>, config: &Config, depth: Depth) -> Vec<DownBlock> {
    let mut number = 0..;
    let mut next = || scope.sub(number.next().unwrap_or_default());
    config
        .down_levels()
        .map(|level| {
            let residual = config.is_residual().then(&mut next);
            let resnets = (0..config.num_res_blocks())
                .map(|index| {
                    let scope = match &residual {
                        Some(level) => level.sub("resnets").sub(index),
                        None => next(),
                    };
                    let input = if index == 0 {
                        level.input
                    } else {
                        level.output
                    };
                    ResidualBlock::new(&scope, input, level.output, depth)
                })
                .collect();
            let downsampler = level.resample.map(|time| {
                let scope = match &residual {
                    Some(level) => level.sub("downsampler"),
                    None => next(),
                };
                Downsampler::new(&scope, level.output, time, depth)
            });
            DownBlock {
                resnets,
                downsampler,
                shortcut: residual.map(|_| Averaging(level)),
            }
        })
        .collect()
}

impl DownBlock {
    fn forward<'g>(&self, input: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        let mut x = self
            .resnets
            .iter()
            .fold(input, |x, resnet| resnet.forward(x, chunk));
        if let Some(downsampler) = &self.downsampler {
            x = downsampler.forward(x, chunk);
        }
        match &self.shortcut {
            Some(shortcut) => x + shortcut.forward(input),
            None => x,
        }
    }
}
