//! The VAE's decoder, for one frame.
//!
//! `AutoencoderKLQwenImage21` is the video VAE of WAN 2.2 with time folded away: all convolutions are two-dimensional,
//! and what remains of time is which channels a shortcut keeps.

use std::path::Path;

use sd_graph::{Param, Role, Scope, Tensor};
use serde::Deserialize;

use crate::config::{check, read_json};
use crate::error::Result;
use crate::nn::Conv2d;
use crate::rope::Circular;

/// `vae/config.json`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct VaeConfig {
    /// Channels of the encoder's first layer.
    base_dim: usize,
    /// Channels of the decoder's last layer.
    #[serde(default)]
    decoder_base_dim: Option<usize>,
    /// Latent channels.
    pub z_dim: usize,
    /// Channels of each level by the base.
    dim_mult: Vec<usize>,
    /// Residual blocks of a level.
    num_res_blocks: usize,
    #[serde(default)]
    attn_scales: Vec<f32>,
    /// Whether each level halves time too.
    temperal_downsample: Vec<bool>,
    /// Mean of each latent channel.
    pub latents_mean: Vec<f32>,
    /// Standard deviation of each latent channel.
    pub latents_std: Vec<f32>,
    is_residual: bool,
    /// Channels of a picture: red, green, blue and, for Qwen-Image 2.1, alpha.
    pub out_channels: usize,
    #[serde(default)]
    patch_size: Option<usize>,
}

impl VaeConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) or [`Error::Config`](crate::Error::Config).
    pub fn read(path: &Path) -> Result<VaeConfig> {
        let config: VaeConfig = read_json(path)?;
        let levels = config.dim_mult.len();
        check(
            path,
            &[
                ("dim_mult has from 1 to 8 levels", (1..=8).contains(&levels)),
                (
                    "dim_mult are above 0",
                    config.dim_mult.iter().all(|&mult| mult > 0),
                ),
                (
                    "temperal_downsample has one entry less than dim_mult",
                    config.temperal_downsample.len() + 1 == levels,
                ),
                (
                    "base_dim > 0",
                    config.base_dim > 0 && config.decoder_base_dim != Some(0),
                ),
                ("z_dim > 0", config.z_dim > 0),
                (
                    "latents_mean has z_dim entries",
                    config.latents_mean.len() == config.z_dim,
                ),
                (
                    "latents_std has z_dim entries",
                    config.latents_std.len() == config.z_dim,
                ),
                ("attn_scales is empty", config.attn_scales.is_empty()),
                ("is_residual = true", config.is_residual),
                ("out_channels > 0", config.out_channels > 0),
                (
                    "patch_size is null or 1",
                    config.patch_size.is_none_or(|size| size == 1),
                ),
                (
                    "the channels of neighbouring levels divide each other as the shortcuts need",
                    config.up_levels().all(|level| level.repeats().is_some()),
                ),
            ],
        )?;
        Ok(config)
    }

    /// Pixels along a side of a latent.
    pub fn scale_factor(&self) -> usize {
        1 << (self.dim_mult.len() - 1)
    }

    /// The decoder's levels, from latents to pixels.
    fn up_levels(&self) -> impl Iterator<Item = UpLevel> + '_ {
        let base = self.decoder_base_dim.unwrap_or(self.base_dim);
        let levels = self.dim_mult.len();
        (0..levels).map(move |index| {
            let dim = |level: usize| {
                base.saturating_mul(self.dim_mult[levels - 1 - level.saturating_sub(1)])
            };
            let up = (index + 1 < levels).then(|| self.temperal_downsample[levels - 2 - index]);
            UpLevel {
                input: dim(index),
                output: dim(index + 1),
                up,
            }
        })
    }
}

/// One level of the decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct UpLevel {
    input: usize,
    output: usize,
    /// Whether the picture is doubled, and if so whether a clip's frames were too.
    up: Option<bool>,
}

impl UpLevel {
    /// How often the shortcut repeats each channel; `None` if channels do not divide.
    fn repeats(self) -> Option<usize> {
        let factor = if self.up == Some(true) { 8 } else { 4 };
        let channels = self.output.checked_mul(factor)?;
        if self.up.is_none() {
            return Some(1);
        }
        channels
            .is_multiple_of(self.input)
            .then(|| channels / self.input)
    }
}

/// The decoder of `AutoencoderKLQwenImage21`.
#[derive(Debug)]
pub struct VaeDecoder {
    post_quant_conv: Conv2d,
    conv_in: Conv2d,
    mid_resnets: [ResidualBlock; 2],
    mid_attention: AttentionBlock,
    up_blocks: Vec<UpBlock>,
    norm_out: ChannelNorm,
    conv_out: Conv2d,
}

/// Each pixel's channels brought to length `sqrt(channels)`, times a weight.
#[derive(Debug)]
struct ChannelNorm {
    gamma: Param,
    channels: usize,
}

#[derive(Debug)]
struct ResidualBlock {
    norm1: ChannelNorm,
    conv1: Conv2d,
    norm2: ChannelNorm,
    conv2: Conv2d,
    conv_shortcut: Option<Conv2d>,
}

#[derive(Debug)]
struct AttentionBlock {
    norm: ChannelNorm,
    to_qkv: Conv2d,
    proj: Conv2d,
}

#[derive(Debug)]
struct UpBlock {
    resnets: Vec<ResidualBlock>,
    up: Option<(Conv2d, DuplicatingShortcut)>,
}

/// Doubles a picture without weights: repeats channels and lays them out over the new pixels.
#[derive(Debug)]
struct DuplicatingShortcut {
    /// For each output channel, the input channels of its four pixels: upper left, upper right, lower left, lower right.
    sources: Vec<[i32; 4]>,
}

impl VaeDecoder {
    /// Declares the decoder's parameters at the root of the VAE's checkpoint. The encoder, and what only clips need,
    /// are known but not needed here.
    pub fn new(root: &Scope<'_>, config: &VaeConfig) -> VaeDecoder {
        root.ignore("encoder");
        root.ignore("quant_conv");
        let scope = root.sub("decoder");
        let top = config.up_levels().next().map_or(0, |level| level.input);
        let bottom = config.up_levels().last().map_or(0, |level| level.output);
        let mid = scope.sub("mid_block");
        VaeDecoder {
            post_quant_conv: Conv2d::new(
                &root.sub("post_quant_conv"),
                config.z_dim,
                config.z_dim,
                1,
            ),
            conv_in: Conv2d::new(&scope.sub("conv_in"), config.z_dim, top, 3),
            mid_resnets: [0, 1]
                .map(|index| ResidualBlock::new(&mid.sub("resnets").sub(index), top, top)),
            mid_attention: AttentionBlock::new(&mid.sub("attentions.0"), top),
            up_blocks: config
                .up_levels()
                .enumerate()
                .map(|(index, level)| {
                    UpBlock::new(
                        &scope.sub("up_blocks").sub(index),
                        level,
                        config.num_res_blocks,
                    )
                })
                .collect(),
            norm_out: ChannelNorm::new(&scope.sub("norm_out"), bottom),
            conv_out: Conv2d::new(&scope.sub("conv_out"), bottom, config.out_channels, 3),
        }
    }

    /// The picture `[1, 4, height, width]` of a latent `[1, z, height / scale, width / scale]` that has its mean and
    /// deviation back, whose sides join along the axes of `circular`. Values are meant to lie in -1..1 but are not clamped
    /// here.
    pub fn forward<'g>(&self, z: Tensor<'g>, circular: Circular) -> Tensor<'g> {
        let x = self.post_quant_conv.forward(z, circular);
        let mut x = self.conv_in.forward(x, circular);
        x = self.mid_resnets[0].forward(x, circular);
        x = self.mid_attention.forward(x, circular);
        x = self.mid_resnets[1].forward(x, circular);
        for block in &self.up_blocks {
            x = block.forward(x, circular);
        }
        self.conv_out
            .forward(self.norm_out.forward_silu(x), circular)
    }
}

impl ChannelNorm {
    fn new(scope: &Scope<'_>, channels: usize) -> ChannelNorm {
        ChannelNorm {
            gamma: scope.param("gamma", [channels], Role::Vector),
            channels,
        }
    }

    /// Channels go innermost for the norm and stay there: `[n, c, h, w] -> [n, h, w, c]`.
    fn channels_last<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let gamma = x.graph().param(&self.gamma) * (self.channels as f32).sqrt();
        x.permute([0, 2, 3, 1]).l2_norm(1e-12) * gamma
    }

    fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        self.channels_last(x).permute([0, 3, 1, 2])
    }

    fn forward_silu<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        self.channels_last(x).silu().permute([0, 3, 1, 2])
    }
}

impl ResidualBlock {
    fn new(scope: &Scope<'_>, input: usize, output: usize) -> ResidualBlock {
        ResidualBlock {
            norm1: ChannelNorm::new(&scope.sub("norm1"), input),
            conv1: Conv2d::new(&scope.sub("conv1"), input, output, 3),
            norm2: ChannelNorm::new(&scope.sub("norm2"), output),
            conv2: Conv2d::new(&scope.sub("conv2"), output, output, 3),
            conv_shortcut: (input != output)
                .then(|| Conv2d::new(&scope.sub("conv_shortcut"), input, output, 1)),
        }
    }

    fn forward<'g>(&self, x: Tensor<'g>, circular: Circular) -> Tensor<'g> {
        let shortcut = self
            .conv_shortcut
            .as_ref()
            .map_or(x, |conv| conv.forward(x, circular));
        let x = self.conv1.forward(self.norm1.forward_silu(x), circular);
        let x = self.conv2.forward(self.norm2.forward_silu(x), circular);
        x + shortcut
    }
}

impl AttentionBlock {
    fn new(scope: &Scope<'_>, channels: usize) -> AttentionBlock {
        AttentionBlock {
            norm: ChannelNorm::new(&scope.sub("norm"), channels),
            to_qkv: Conv2d::new(
                &scope.sub("to_qkv"),
                channels,
                channels.saturating_mul(3),
                1,
            ),
            proj: Conv2d::new(&scope.sub("proj"), channels, channels, 1),
        }
    }

    /// One head over all pixels of the picture.
    fn forward<'g>(&self, x: Tensor<'g>, circular: Circular) -> Tensor<'g> {
        let (channels, height, width) = (x.dim(1), x.dim(2), x.dim(3));
        let pixels = height * width;
        let qkv = self
            .to_qkv
            .forward(self.norm.forward(x), circular)
            .reshape([3, channels, pixels]);
        let [q, k, v] = qkv.chunk(0).map(|part| part.transpose(1, 2));
        let mixed = q.attention(k, v, None, 1.0 / (channels as f32).sqrt());
        let mixed = mixed
            .reshape([pixels, channels])
            .transpose(0, 1)
            .reshape([1, channels, height, width]);
        self.proj.forward(mixed, circular) + x
    }
}

impl UpBlock {
    fn new(scope: &Scope<'_>, level: UpLevel, num_res_blocks: usize) -> UpBlock {
        let resnets = (0..=num_res_blocks)
            .map(|index| {
                let input = if index == 0 {
                    level.input
                } else {
                    level.output
                };
                ResidualBlock::new(&scope.sub("resnets").sub(index), input, level.output)
            })
            .collect();
        let up = level.up.map(|_| {
            let upsampler = scope.sub("upsampler");
            upsampler.ignore("time_conv");
            let conv = Conv2d::new(&upsampler.sub("resample.1"), level.output, level.output, 3);
            (conv, DuplicatingShortcut::new(level))
        });
        UpBlock { resnets, up }
    }

    fn forward<'g>(&self, input: Tensor<'g>, circular: Circular) -> Tensor<'g> {
        let x = self
            .resnets
            .iter()
            .fold(input, |x, resnet| resnet.forward(x, circular));
        match &self.up {
            Some((conv, shortcut)) => {
                conv.forward(x.upscale_nearest(2), circular) + shortcut.forward(input)
            }
            None => x,
        }
    }
}

impl DuplicatingShortcut {
    /// `DupUp3D` for the first frame: of the frames that a channel is spread over, only the last remains.
    fn new(level: UpLevel) -> DuplicatingShortcut {
        let frames = if level.up == Some(true) { 2 } else { 1 };
        let repeats = level.repeats().unwrap_or(1).max(1);
        let source = |output: usize, pixel: usize| {
            (((output * frames + frames - 1) * 4 + pixel) / repeats) as i32
        };
        let sources = (0..level.output)
            .map(|output| [0, 1, 2, 3].map(|pixel| source(output, pixel)))
            .collect();
        DuplicatingShortcut { sources }
    }

    fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let g = x.graph();
        let (channels, height, width) = (x.dim(1), x.dim(2), x.dim(3));
        let output = self.sources.len();
        let planes = x.reshape([channels, height * width]);
        let select = |index: &[i32]| planes.rows(g.constant(index, [index.len()]));

        if self
            .sources
            .iter()
            .all(|pixels| pixels.iter().all(|&source| source == pixels[0]))
        {
            // All four pixels of a channel come from one plane: the plane, enlarged.
            let index: Vec<i32> = self.sources.iter().map(|pixels| pixels[0]).collect();
            let is_identity = index
                .iter()
                .enumerate()
                .all(|(at, &source)| at as i32 == source);
            let chosen = if is_identity && output == channels {
                planes
            } else {
                select(&index)
            };
            return chosen
                .reshape([1, output, height, width])
                .upscale_nearest(2);
        }
        let all: Vec<i32> = self.sources.iter().flatten().copied().collect();
        // [output, row, column of the four] planes: columns first, then rows, go between the pixels.
        let columns = select(&all)
            .reshape([output * 2, 2, height * width])
            .permute([0, 2, 1]);
        let rows = columns
            .reshape([output, 2, height, 2 * width])
            .permute([0, 2, 1, 3]);
        rows.reshape([1, output, 2 * height, 2 * width])
    }
}
