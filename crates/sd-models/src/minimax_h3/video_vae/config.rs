//! `config.json` of the VAE, and the sizes that follow from it.

use std::path::Path;

use sd_graph::Checkpoint;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::super::statistics::Statistics;
use super::names::VIDEO_VAE;
use crate::config::{check, from_json, read_json};
use crate::error::{Error, Result};
use crate::families::config_of;
use crate::wan_vae::Clip;

/// The class of diffusers that this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
enum Class {
    AutoencoderKLMiniMaxH3,
}

/// Configuration of a video VAE of MiniMax H3.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct Config {
    #[serde(rename = "_class_name")]
    class: Class,
    /// Channels of a frame.
    pub(super) in_channels: usize,
    pub(super) out_channels: usize,
    /// Channels of a latent.
    pub latent_channels: usize,
    /// Channels of each level of the encoder.
    pub(super) block_out_channels: Vec<usize>,
    /// Residual blocks of a level.
    pub(super) layers_per_block: usize,
    /// By how much each level shortens height and width.
    pub(super) spatial_downsample_factors: Vec<usize>,
    /// By how much each level shortens time.
    pub(super) temporal_downsample_factors: Vec<usize>,
    pub(super) norm_num_groups: usize,
    pub(super) norm_eps: f32,
    pub(super) spatial_padding_mode: String,
    pub(super) decoder_num_layers: usize,
    pub(super) decoder_num_attention_heads: usize,
    pub(super) decoder_attention_head_dim: usize,
    pub(super) decoder_num_register_tokens: usize,
    pub(super) decoder_ffn_mult: usize,
    pub(super) decoder_rope_theta: f64,
    pub(super) decoder_rope_dim_ratio: f64,
    pub(super) decoder_norm_eps: f32,
    /// Frames that are encoded at once.
    pub clip_length: usize,
    /// Latent frames that are left out at the end of a clip.
    pub token_drop: usize,
    /// Mean of each latent channel.
    #[serde(default)]
    pub latents_mean: Vec<f32>,
    /// Standard deviation of each latent channel.
    #[serde(default)]
    pub latents_std: Vec<f32>,
}

/// One level of the encoder.
#[derive(Debug, Clone, Copy)]
pub(super) struct Level {
    pub(super) input: usize,
    pub(super) output: usize,
    /// Pixels along a side to one of the result.
    pub(super) spatial: usize,
    /// Frames to one of the result.
    pub(super) temporal: usize,
}

impl Config {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Config`].
    pub fn read(path: &Path) -> Result<Config> {
        Config::checked(read_json(path)?, path)
    }

    /// As [`Config::read`]; means and deviations of latents that the file does not have are taken from `checkpoint`.
    ///
    /// # Errors
    /// As for [`Config::read`].
    pub(super) fn beside(path: &Path, checkpoint: &Checkpoint) -> Result<Config> {
        let config: Config = read_json(path)?;
        Config::checked(config.with_statistics(checkpoint), path)
    }

    /// What a file of weights alone says, under the model's names: its metadata, or names and shapes, which are enough for the
    /// published VAE alone.
    ///
    /// # Errors
    /// [`Error::Config`] with what is missing or impossible.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Result<Config> {
        let path = checkpoint.path();
        let told: Value = config_of(&VIDEO_VAE, checkpoint).map_err(|reason| Error::Config {
            path: path.to_owned(),
            reason: format!(
                "no config.json beside it, and it is no video VAE of MiniMax H3: {reason}"
            ),
        })?;
        let config: Config = from_json(path, told)?;
        Config::checked(config.with_statistics(checkpoint), path)
    }

    /// Adds means and deviations of latents, if there are none, as far as `checkpoint` has them or is the published VAE.
    pub(super) fn with_statistics(mut self, checkpoint: &Checkpoint) -> Config {
        if self.latents_mean.is_empty()
            && self.latents_std.is_empty()
            && let Some(found) = Statistics::of_frames(checkpoint, self.is_published())
        {
            self.latents_mean = found.mean;
            self.latents_std = found.std;
        }
        self
    }

    /// Whether it has the sizes of the published VAE.
    fn is_published(&self) -> bool {
        self.latent_channels == 24
            && self.block_out_channels == [128, 256, 256, 512, 512, 1024]
            && self.layers_per_block == 2
            && self.decoder_num_layers == 36
            && self.decoder_num_attention_heads == 32
            && self.decoder_attention_head_dim == 64
    }

    /// Refuses what makes no sense, of the file `path`.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub(crate) fn checked(config: Config, path: &Path) -> Result<Config> {
        config.check(path)?;
        Ok(config)
    }

    fn check(&self, path: &Path) -> Result<()> {
        let statistics = [&self.latents_mean, &self.latents_std];
        if statistics.into_iter().any(Vec::is_empty) {
            let folder = path.parent().unwrap_or(path);
            return Err(Error::Config {
                path: path.to_owned(),
                reason: format!(
                    "the means and deviations of latents are missing, and it is not of the published size, whose are known: the \
                    config.json of the model's folder vae, which has latents_mean and latents_std, must lie in {}, or `sd convert` \
                    write it into the file",
                    folder.display()
                ),
            });
        }
        let levels = self.block_out_channels.len();
        let factors = || {
            let spatial = self.spatial_downsample_factors.iter();
            spatial.zip(&self.temporal_downsample_factors)
        };
        let is_known = |(&spatial, &temporal): (&usize, &usize)| {
            matches!((spatial, temporal), (1, 1) | (2, 1 | 2))
        };
        let widest = self.block_out_channels.iter().copied().max().unwrap_or(0);
        let small = |value: usize, most: usize| (1..=most).contains(&value);
        check(
            path,
            &[
                (
                    "block_out_channels has from 1 to 8 levels",
                    small(levels, 8),
                ),
                (
                    "every level has a factor in space and one in time",
                    self.spatial_downsample_factors.len() == levels
                        && self.temporal_downsample_factors.len() == levels,
                ),
                (
                    "factors are 1 or 2, and time is shortened with space only",
                    factors().all(is_known),
                ),
                (
                    "in_channels and out_channels are 3",
                    self.in_channels == 3 && self.out_channels == 3,
                ),
                (
                    "latent_channels is from 1 to 4096",
                    small(self.latent_channels, 4096),
                ),
                (
                    "layers_per_block is from 1 to 64",
                    small(self.layers_per_block, 64),
                ),
                (
                    "channels are numbers that memory can hold",
                    small(widest, 1 << 20),
                ),
                (
                    "norm_num_groups divides the channels of all levels",
                    self.norm_num_groups > 0
                        && self.block_out_channels.iter().all(|&channels| {
                            channels > 0 && channels.is_multiple_of(self.norm_num_groups)
                        }),
                ),
                (
                    "spatial_padding_mode is reflect",
                    self.spatial_padding_mode == "reflect",
                ),
                (
                    "decoder_num_layers is at most 1024",
                    self.decoder_num_layers <= 1024,
                ),
                (
                    "the decoder's heads and their channels are numbers that memory can hold",
                    small(self.decoder_num_attention_heads, 1 << 12)
                        && small(self.decoder_attention_head_dim, 1 << 12),
                ),
                (
                    "decoder_num_register_tokens is from 1 to 4096",
                    small(self.decoder_num_register_tokens, 4096),
                ),
                (
                    "decoder_ffn_mult is from 1 to 64",
                    small(self.decoder_ffn_mult, 64),
                ),
                (
                    "decoder_rope_dim_ratio of a head's channels is a multiple of 6 channels",
                    self.rope_dim() > 0
                        && self.rope_dim().is_multiple_of(6)
                        && self.rope_dim() <= self.decoder_attention_head_dim,
                ),
                (
                    "decoder_rope_theta is above 0",
                    self.decoder_rope_theta > 0.0 && self.decoder_rope_theta.is_finite(),
                ),
                (
                    "eps are from 0 to 1",
                    [self.norm_eps, self.decoder_norm_eps]
                        .iter()
                        .all(|eps| (0.0..=1.0).contains(eps)),
                ),
                (
                    "clip_length is one frame more than whole latent frames, at most 4097",
                    small(self.clip_length, 4097)
                        && self.clip_length % self.frames_per_latent()
                            == 1 % self.frames_per_latent(),
                ),
                (
                    "token_drop is less than a clip has",
                    self.token_drop < self.clip_latents(),
                ),
                (
                    "latents_mean and latents_std have latent_channels entries",
                    statistics
                        .into_iter()
                        .all(|values| values.len() == self.latent_channels),
                ),
                (
                    "latents_mean and latents_std are numbers, and no deviation is 0",
                    statistics
                        .into_iter()
                        .flatten()
                        .all(|value| value.is_finite())
                        && self.latents_std.iter().all(|&std| std != 0.0),
                ),
            ],
        )
    }

    /// Pixels along a side of a latent.
    pub fn scale_factor(&self) -> usize {
        self.spatial_downsample_factors.iter().product()
    }

    /// Frames to a latent frame, but the first of a clip.
    pub fn frames_per_latent(&self) -> usize {
        self.temporal_downsample_factors
            .iter()
            .product::<usize>()
            .max(1)
    }

    /// Numbers that a latent is decoded to: a block of all channels, frames, rows and columns.
    pub(super) fn pixels_per_latent(&self) -> usize {
        let side = self.scale_factor();
        self.out_channels * self.frames_per_latent() * side * side
    }

    /// Latent frames that [`Config::clip_length`] frames become.
    pub fn clip_latents(&self) -> usize {
        self.clip_length.div_ceil(self.frames_per_latent())
    }

    /// Latent frames that so many frames from the beginning of a clip become.
    pub(super) fn latent_frames_of_clip(&self, frames: usize) -> usize {
        frames.div_ceil(self.frames_per_latent())
    }

    /// Latent frames that a clip of `frames` is encoded as: one for a picture; else as many as for the next whole number of
    /// clips, less [`Config::token_drop`].
    pub fn latent_frames(&self, frames: usize) -> usize {
        match frames {
            0 | 1 => frames,
            _ => frames.div_ceil(self.clip_length) * self.clip_latents() - self.token_drop,
        }
    }

    /// Frames that `latents` latent frames are decoded to: the first of each clip stands for one, the others for four.
    pub fn frames(&self, latents: usize) -> usize {
        let (clips, rest) = (latents / self.clip_latents(), latents % self.clip_latents());
        let more = match rest {
            0 => 0,
            rest => 1 + (rest - 1) * self.frames_per_latent(),
        };
        clips.saturating_mul(self.clip_length).saturating_add(more)
    }

    /// Latent frames that a clip has in common with the next when they are decoded.
    pub(super) fn latents_overlap(&self) -> usize {
        (self.clip_latents() - self.token_drop) % self.clip_latents()
    }

    /// Frames in front of a clip that the decoder makes and nobody sees: those that its first latent frame does not stand for.
    pub(super) fn frames_before(&self) -> usize {
        self.frames_per_latent() - 1
    }

    /// Frames that the encoder is given of the last clip of all, since no more of its latent frames are kept.
    pub(super) fn last_frames(&self) -> usize {
        1 + (self.clip_latents() - self.token_drop - 1) * self.frames_per_latent()
    }

    /// Channels of a token in the decoder.
    pub(super) fn decoder_dim(&self) -> usize {
        self.decoder_num_attention_heads * self.decoder_attention_head_dim
    }

    /// Channels of a head that are turned.
    pub(super) fn rope_dim(&self) -> usize {
        (self.decoder_attention_head_dim as f64 * self.decoder_rope_dim_ratio) as usize
    }

    /// The encoder's levels, from pixels to latents.
    pub(super) fn levels(&self) -> impl Iterator<Item = Level> + '_ {
        let inputs = self.block_out_channels.first().into_iter();
        let inputs = inputs.chain(&self.block_out_channels);
        let factors = self.spatial_downsample_factors.iter();
        let factors = factors.zip(&self.temporal_downsample_factors);
        inputs.zip(&self.block_out_channels).zip(factors).map(
            |((&input, &output), (&spatial, &temporal))| Level {
                input,
                output,
                spatial,
                temporal,
            },
        )
    }

    /// Brings latents to mean 0 and deviation 1, as the diffusion model sees them.
    pub fn normalize(&self, latents: &mut Clip) {
        self.each_channel(latents, |value, mean, std| (value - mean) / std);
    }

    /// Gives latents their mean and deviation back.
    pub fn denormalize(&self, latents: &mut Clip) {
        self.each_channel(latents, |value, mean, std| value * std + mean);
    }

    fn each_channel(&self, latents: &mut Clip, change: impl Fn(f32, f32, f32) -> f32) {
        let area = latents.height * latents.width;
        let statistics = self.latents_mean.iter().zip(&self.latents_std);
        let planes = latents.values.chunks_exact_mut(area.max(1));
        for (plane, (&mean, &std)) in planes.zip(statistics.cycle()) {
            for value in plane {
                *value = change(*value, mean, std);
            }
        }
    }
}
