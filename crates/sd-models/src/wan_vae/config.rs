//! `config.json` of a VAE, and the sizes that follow from it.

use std::path::Path;

use sd_graph::Checkpoint;
use serde::{Deserialize, Serialize};

use super::clip::Clip;
use super::detect;
use super::layers::Depth;
use super::names::Names;
use super::shortcut::Level;
use crate::config::{check, read_json};
use crate::error::{Error, Result};

/// Which classes of diffusers this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub(super) enum Class {
    AutoencoderKLWan,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
}

/// Configuration of a VAE of this family.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct Config {
    #[serde(rename = "_class_name")]
    pub(super) class: Class,
    /// Channels of the encoder's first layer.
    pub(super) base_dim: usize,
    /// Channels of the decoder's last layer.
    #[serde(default)]
    pub(super) decoder_base_dim: Option<usize>,
    /// Latent channels.
    pub z_dim: usize,
    /// Channels of each level by the base.
    pub(super) dim_mult: Vec<usize>,
    /// Residual blocks of a level.
    pub(super) num_res_blocks: usize,
    #[serde(default)]
    pub(super) attn_scales: Vec<f32>,
    /// Whether each level halves time too.
    pub(super) temperal_downsample: Vec<bool>,
    /// Mean of each latent channel.
    pub latents_mean: Vec<f32>,
    /// Standard deviation of each latent channel.
    pub latents_std: Vec<f32>,
    /// Whether levels have shortcuts, as in WAN 2.2.
    #[serde(default)]
    pub(super) is_residual: bool,
    /// Channels that the encoder reads, those of a square of pixels where there are patches.
    #[serde(default = "rgb", alias = "input_channels")]
    pub(super) in_channels: usize,
    /// Channels that the decoder writes. Qwen-Image has one number for both.
    #[serde(default)]
    pub(super) out_channels: Option<usize>,
    /// Side of the squares of pixels that become channels.
    #[serde(default)]
    pub(super) patch_size: Option<usize>,
}

fn rgb() -> usize {
    3
}

impl Config {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) or [`Error::Config`](crate::Error::Config).
    pub fn read(path: &Path) -> Result<Config> {
        Config::checked(read_json(path)?, path)
    }

    /// Refuses what makes no sense, of the file `path`.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config).
    pub(crate) fn checked(config: Config, path: &Path) -> Result<Config> {
        config.check(path)?;
        Ok(config)
    }

    /// What a file of weights alone says by its names and shapes; `config.json` is not needed then.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with what is missing or impossible.
    pub fn of(checkpoint: &Checkpoint) -> Result<Config> {
        let path = checkpoint.path();
        let key = crate::families::VAE_KEY;
        if let Some(text) = checkpoint.metadata().get(key) {
            let told = serde_json::from_str(text).map_err(|error| Error::Config {
                path: path.to_owned(),
                reason: format!("{key} in its metadata: {error}"),
            })?;
            return Config::checked(told, path);
        }
        let names = Names::of(checkpoint);
        let config = detect::config(checkpoint, &names).map_err(|reason| Error::Config {
            path: path.to_owned(),
            reason: format!("no config.json beside it, and it is no VAE of this family: {reason}"),
        })?;
        config.check(path)?;
        Ok(config)
    }

    fn check(&self, path: &Path) -> Result<()> {
        let config = self;
        let levels = config.dim_mult.len();
        let squares = config.patch().saturating_mul(config.patch());
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
                (
                    "num_res_blocks is from 1 to 64",
                    (1..=64).contains(&config.num_res_blocks),
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
                (
                    "is_residual = true in a VAE for pictures",
                    config.is_residual || !config.is_for_pictures(),
                ),
                (
                    "in_channels and out_channels are those of squares of patch_size, and the same",
                    config.in_channels > 0
                        && squares > 0
                        && config.in_channels.is_multiple_of(squares)
                        && config.out_channels() == config.in_channels,
                ),
                ("patch_size is at most 16", config.patch() <= 16),
                (
                    "channels are numbers that memory can hold",
                    config.widest() <= 1 << 20,
                ),
                (
                    "the channels of neighbouring levels divide each other as the shortcuts need",
                    !config.is_residual
                        || (config.up_levels().all(|level| level.repeats().is_some())
                            && config.down_levels().all(|level| level.averaged().is_some())),
                ),
                (
                    "the channels that the decoder halves are even",
                    config.is_residual
                        || config.up_levels().all(|level| {
                            level.resample.is_none() || level.output.is_multiple_of(2)
                        }),
                ),
                (
                    "temperal_downsample halves time twice in a VAE for clips",
                    config.is_for_pictures() || config.frames_per_latent() == 4,
                ),
            ],
        )
    }

    /// Whether it has two-dimensional kernels, for pictures and no clips: Qwen-Image 2.1.
    pub fn is_for_pictures(&self) -> bool {
        self.class == Class::AutoencoderKLQwenImage21
    }

    /// Pixels along a side of a latent.
    pub fn scale_factor(&self) -> usize {
        (1 << (self.dim_mult.len() - 1)) * self.patch()
    }

    /// Channels of a picture: red, green, blue and, for Qwen-Image 2.1, alpha.
    pub fn channels(&self) -> usize {
        self.out_channels() / (self.patch() * self.patch()).max(1)
    }

    /// Frames of a chunk but the first, which make one frame of latents.
    pub fn frames_per_latent(&self) -> usize {
        1 << self
            .temperal_downsample
            .iter()
            .filter(|&&time| time)
            .count()
    }

    /// Frames of latents that a clip of `frames` is encoded as: one for the first frame, one for each further whole chunk.
    /// Frames behind the last whole chunk are left out, as in the reference.
    pub fn latent_frames(&self, frames: usize) -> usize {
        frames.min(1) + frames.saturating_sub(1) / self.frames_per_latent()
    }

    /// Frames that `latents` frames of latents are decoded as.
    pub fn frames(&self, latents: usize) -> usize {
        latents.min(1) + latents.saturating_sub(1) * self.frames_per_latent()
    }

    /// Brings latents to mean 0 and deviation 1, as diffusion models see them.
    pub fn normalize(&self, latents: &mut Clip) {
        self.each_channel(latents, |value, mean, std| (value - mean) / std);
    }

    /// Gives latents their mean and deviation back, as the decoder reads them.
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

    pub(crate) fn depth(&self) -> Depth {
        if self.is_for_pictures() {
            Depth::One
        } else {
            Depth::Three
        }
    }

    pub(crate) fn is_residual(&self) -> bool {
        self.is_residual
    }

    pub(crate) fn num_res_blocks(&self) -> usize {
        self.num_res_blocks
    }

    /// Side of the squares of pixels that become channels; 1 if none do.
    pub(crate) fn patch(&self) -> usize {
        self.patch_size.unwrap_or(1)
    }

    pub(crate) fn in_channels(&self) -> usize {
        self.in_channels
    }

    pub(crate) fn out_channels(&self) -> usize {
        self.out_channels.unwrap_or(self.in_channels)
    }

    fn widest(&self) -> usize {
        let base = self.base_dim.max(self.decoder_base_dim.unwrap_or(0));
        let mult = self.dim_mult.iter().max().map_or(1, |&mult| mult);
        base.saturating_mul(mult)
            .max(self.in_channels)
            .max(self.z_dim)
    }

    /// The encoder's levels, from pixels to latents.
    pub(crate) fn down_levels(&self) -> impl Iterator<Item = Level> + '_ {
        let dim = |level: usize| match level.checked_sub(1) {
            None => self.base_dim,
            Some(before) => self.base_dim.saturating_mul(self.dim_mult[before]),
        };
        (0..self.dim_mult.len()).map(move |index| Level {
            input: dim(index),
            output: dim(index + 1),
            resample: self.temperal_downsample.get(index).copied(),
        })
    }

    /// The decoder's levels, from latents to pixels. Without shortcuts the level before has halved the channels.
    pub(crate) fn up_levels(&self) -> impl Iterator<Item = Level> + '_ {
        let base = self.decoder_base_dim.unwrap_or(self.base_dim);
        let levels = self.dim_mult.len();
        (0..levels).map(move |index| {
            let dim = |level: usize| {
                base.saturating_mul(self.dim_mult[levels - 1 - level.saturating_sub(1)])
            };
            let halved = index > 0 && !self.is_residual;
            Level {
                input: dim(index) / if halved { 2 } else { 1 },
                output: dim(index + 1),
                resample: (index + 1 < levels)
                    .then(|| self.temperal_downsample[levels - 2 - index]),
            }
        })
    }
}
