//! From frames to latents.

use sd_graph::{Scope, Tensor};

use super::config::Config;
use super::layers::{CausalConv, DownBlock, GroupNorm};
use crate::wan_vae::Chunk;

/// The encoder.
#[derive(Debug)]
pub struct Encoder {
    conv_in: CausalConv,
    down_blocks: Vec<DownBlock>,
    norm_out: GroupNorm,
    conv_out: CausalConv,
    quant_conv: CausalConv,
}

impl Encoder {
    /// Declares the encoder's parameters at the root of the VAE's checkpoint. The decoder is known but not needed here.
    pub fn new(root: &Scope<'_>, config: &Config) -> Encoder {
        for name in ["decoder", "post_quant_conv", "latents_mean", "latents_std"] {
            root.ignore(name);
        }
        let scope = root.sub("encoder");
        let top = config.levels().next().map_or(0, |level| level.output);
        let bottom = config.levels().last().map_or(0, |level| level.output);
        // Means and logarithms of variances.
        let moments = 2 * config.latent_channels;
        let down_blocks = config.levels().enumerate();
        let down_blocks = down_blocks.map(|(index, level)| {
            DownBlock::new(&scope.sub("down_blocks").sub(index), level, config)
        });
        Encoder {
            conv_in: CausalConv::new(&scope.sub("conv_in"), config.in_channels, top),
            down_blocks: down_blocks.collect(),
            norm_out: GroupNorm::new(&scope.sub("norm_out"), bottom, config),
            conv_out: CausalConv::new(&scope.sub("conv_out"), bottom, moments),
            quant_conv: CausalConv::pointwise(&root.sub("quant_conv"), moments, moments),
        }
    }

    /// Means and logarithms of variances `[t, 2 * latent channels, height / scale, width / scale]` of the latents of a chunk of
    /// frames `[n, 3, height, width]`: one for a clip's first, else as many as make one latent frame.
    pub(crate) fn forward_chunk<'g>(&self, frames: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        let x = self.conv_in.forward(frames, chunk);
        let blocks = self.down_blocks.iter();
        let x = blocks.fold(x, |x, block| block.forward(x, chunk));
        let x = self.conv_out.forward(self.norm_out.forward_silu(x), chunk);
        self.quant_conv.forward(x, chunk)
    }
}
