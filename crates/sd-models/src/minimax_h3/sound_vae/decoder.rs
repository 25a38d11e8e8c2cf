//! The decoder: BigVGAN.

use sd_graph::{Scope, Tensor};

use super::activation::{Activation, Rates};
use super::config::Config;
use super::layers::{Conv, Lengthening, Way};

/// Latents `[n, latent_channels, t]` to samples `[n, 1, t * hop]`, which may be beyond -1 to 1.
#[derive(Debug)]
pub(super) struct Decoder {
    dec_in_proj: Conv,
    conv_pre: Conv,
    levels: Vec<Level>,
    activation_post: Activation,
    conv_post: Conv,
}

#[derive(Debug)]
struct Level {
    up: Lengthening,
    blocks: Vec<Block>,
}

/// Rounds of two activations and two convolutions, the first of which has gaps.
#[derive(Debug)]
struct Block {
    rounds: Vec<Round>,
}

#[derive(Debug)]
struct Round {
    act1: Activation,
    conv1: Conv,
    act2: Activation,
    conv2: Conv,
}

impl Decoder {
    pub(super) fn new(root: &Scope<'_>, config: &Config) -> Decoder {
        let scope = root.sub("decoder");
        let mut dim = config.decoder_dim;
        let kernels = config.resblock_kernel_sizes.len();
        let sizes = config
            .decoder_rates
            .iter()
            .zip(&config.decoder_kernel_sizes);
        let levels = (sizes.enumerate())
            .map(|(index, (&rate, &size))| {
                let up = scope.sub("ups").sub(index).sub(0);
                let up = Lengthening::new(&up, [dim, dim / 2, size], rate);
                dim /= 2;
                let blocks = (config.resblock_kernel_sizes.iter())
                    .zip(&config.resblock_dilation_sizes)
                    .enumerate()
                    .map(|(block, (&size, dilations))| {
                        let scope = scope.sub("resblocks").sub(index * kernels + block);
                        Block::new(&scope, [dim, dim, size], dilations)
                    })
                    .collect();
                Level { up, blocks }
            })
            .collect();
        Decoder {
            dec_in_proj: Conv::new(
                &root.sub("dec_in_proj"),
                config.latent_channels,
                config.latent_dim,
                1,
            ),
            conv_pre: Conv::new(
                &scope.sub("conv_pre"),
                config.latent_dim,
                config.decoder_dim,
                7,
            ),
            levels,
            activation_post: Activation::new(&scope.sub("activation_post"), dim),
            conv_post: Conv::without_bias(&scope.sub("conv_post"), dim, 1, 7),
        }
    }

    pub(super) fn forward<'g>(&self, z: Tensor<'g>, way: Way) -> Tensor<'g> {
        let mut x = self.conv_pre.forward(self.dec_in_proj.forward(z));
        let mut rates = Rates::new(x.graph(), x.dim(2), way);
        for level in &self.levels {
            x = level.up.forward(x);
            rates = Rates::new(x.graph(), x.dim(2), way);
            let blocks = level.blocks.iter().map(|block| block.forward(x, &rates));
            if let Some(sum) = blocks.reduce(|sum, block| sum + block) {
                x = sum * (1.0 / level.blocks.len() as f32);
            }
        }
        self.conv_post
            .forward(self.activation_post.forward(x, &rates))
    }
}

impl Block {
    fn new(scope: &Scope<'_>, sizes: [usize; 3], dilations: &[usize]) -> Block {
        let activations = scope.sub("activations");
        let activation = |index: usize| Activation::new(&activations.sub(index), sizes[0]);
        let rounds = dilations.iter().enumerate();
        Block {
            rounds: rounds
                .map(|(round, &dilation)| Round {
                    act1: activation(2 * round),
                    conv1: Conv::dilated(&scope.sub("convs1").sub(round), sizes, dilation),
                    act2: activation(2 * round + 1),
                    conv2: Conv::dilated(&scope.sub("convs2").sub(round), sizes, 1),
                })
                .collect(),
        }
    }

    fn forward<'g>(&self, x: Tensor<'g>, rates: &Rates<'g>) -> Tensor<'g> {
        self.rounds.iter().fold(x, |x, round| {
            let y = round.conv1.forward(round.act1.forward(x, rates));
            x + round.conv2.forward(round.act2.forward(y, rates))
        })
    }
}
