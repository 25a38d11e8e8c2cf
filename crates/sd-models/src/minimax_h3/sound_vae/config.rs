//! `config.json`, and what follows from it.

use std::path::Path;

use sd_graph::Checkpoint;
use serde::{Deserialize, Serialize};

use super::super::statistics::Statistics;
use super::names::VAE;
use crate::config::{check, from_json, read_json};
use crate::error::{Error, Result};
use crate::families::config_of;
use crate::shapes::Shapes;
use crate::sound::RATES;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
enum Class {
    AutoencoderKLMiniMaxH3Audio,
}

/// Configuration of the VAE for sound.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct Config {
    #[serde(rename = "_class_name")]
    class: Class,
    /// Channels of the encoder's first layer; each level doubles them.
    pub(super) encoder_dim: usize,
    /// By how much each of the encoder's levels shortens time.
    pub(super) encoder_rates: Vec<usize>,
    /// Channels behind the encoder and before the decoder.
    pub(super) latent_dim: usize,
    /// Numbers of a latent.
    pub latent_channels: usize,
    #[serde(default = "usual_heads")]
    pub(super) num_attention_heads: usize,
    /// Channels of the decoder's first layer; each level halves them.
    pub(super) decoder_dim: usize,
    /// By how much each of the decoder's levels lengthens time.
    pub(super) decoder_rates: Vec<usize>,
    pub(super) decoder_kernel_sizes: Vec<usize>,
    /// Kernels of the blocks that stand side by side at each of the decoder's levels.
    #[serde(default = "usual_kernels")]
    pub(super) resblock_kernel_sizes: Vec<usize>,
    #[serde(default = "usual_dilations")]
    pub(super) resblock_dilation_sizes: Vec<Vec<usize>>,
    /// Samples a second.
    #[serde(default = "usual_rate")]
    pub sampling_rate: u32,
    /// Mean of each number of a latent.
    #[serde(default)]
    pub latents_mean: Vec<f32>,
    /// Standard deviation of each number of a latent.
    #[serde(default)]
    pub latents_std: Vec<f32>,
}

fn usual_heads() -> usize {
    8
}

fn usual_kernels() -> Vec<usize> {
    vec![3, 7, 11]
}

fn usual_dilations() -> Vec<Vec<usize>> {
    vec![vec![1, 3, 5]; 3]
}

fn usual_rate() -> u32 {
    32_000
}

impl Config {
    /// Reads `config.json`; statistics of latents that it does not have are taken from `checkpoint`.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Config`].
    pub(super) fn read(path: &Path, checkpoint: &Checkpoint) -> Result<Config> {
        let config: Config = read_json(path)?;
        config.with_statistics(checkpoint).checked(path)
    }

    /// What a file of weights alone says by its metadata, or by names and shapes.
    ///
    /// # Errors
    /// [`Error::Config`] with what is missing or impossible.
    pub(super) fn of(checkpoint: &Checkpoint) -> Result<Config> {
        let path = checkpoint.path();
        let told = config_of(&VAE, checkpoint).map_err(|reason| Error::Config {
            path: path.to_owned(),
            reason: format!("no config.json beside it, and it is no VAE for sound: {reason}"),
        })?;
        let config: Config = from_json(path, told)?;
        config.with_statistics(checkpoint).checked(path)
    }

    /// What names and shapes say, whether or not that makes a model.
    ///
    /// # Errors
    /// What is missing.
    pub(super) fn described(checkpoint: &Checkpoint) -> Result<Config, String> {
        Ok(detected(checkpoint)?.with_statistics(checkpoint))
    }

    /// Single files have the statistics of latents as tensors.
    pub(super) fn with_statistics(mut self, checkpoint: &Checkpoint) -> Config {
        if let Some(stored) = Statistics::stored(checkpoint) {
            for (values, found) in [
                (&mut self.latents_mean, stored.mean),
                (&mut self.latents_std, stored.std),
            ] {
                if values.is_empty() {
                    *values = found;
                }
            }
        }
        self
    }

    pub(super) fn checked(self, path: &Path) -> Result<Config> {
        let all = |values: &[usize], holds: fn(usize) -> bool| {
            (1..=16).contains(&values.len()) && values.iter().all(|&value| holds(value))
        };
        let hop = |rates: &[usize]| {
            let mut rates = rates.iter();
            rates.try_fold(1_usize, |product, &rate| product.checked_mul(rate))
        };
        let widest = 1
            << self
                .encoder_rates
                .len()
                .max(self.decoder_rates.len())
                .min(16);
        let is_upsampled = |(&rate, &kernel): (&usize, &usize)| {
            (rate..=2 * rate).contains(&kernel) && (kernel - rate).is_multiple_of(2)
        };
        let heads = self.num_attention_heads;
        let head_dim = self.latent_dim.checked_div(heads).unwrap_or(0);
        check(
            path,
            &[
                (
                    "encoder_rates are from 2 to 64",
                    all(&self.encoder_rates, |rate| (2..=64).contains(&rate)),
                ),
                (
                    "decoder_rates are from 2 to 64",
                    all(&self.decoder_rates, |rate| (2..=64).contains(&rate)),
                ),
                (
                    "decoder_rates multiply to what encoder_rates do, at most 65536",
                    hop(&self.encoder_rates) == hop(&self.decoder_rates)
                        && hop(&self.encoder_rates).is_some_and(|hop| hop <= 1 << 16),
                ),
                (
                    "decoder_kernel_sizes are one to two times decoder_rates, by an even number more",
                    self.decoder_kernel_sizes.len() == self.decoder_rates.len()
                        && (self.decoder_rates.iter())
                            .zip(&self.decoder_kernel_sizes)
                            .all(is_upsampled),
                ),
                (
                    "resblock_kernel_sizes are odd and at most 63",
                    all(&self.resblock_kernel_sizes, |size| {
                        size % 2 == 1 && size < 64
                    }),
                ),
                (
                    "resblock_dilation_sizes are from 1 to 64 for each of resblock_kernel_sizes",
                    self.resblock_dilation_sizes.len() == self.resblock_kernel_sizes.len()
                        && (self.resblock_dilation_sizes.iter())
                            .all(|each| all(each, |dilation| (1..=64).contains(&dilation))),
                ),
                (
                    "latent_dim is shared by num_attention_heads, and a head by latent_channels",
                    self.latent_channels > 0
                        && heads > 0
                        && self.latent_dim.is_multiple_of(heads)
                        && head_dim.is_multiple_of(self.latent_channels)
                        && head_dim > 0,
                ),
                (
                    "decoder_dim can be halved at each level",
                    self.decoder_dim > 0
                        && self
                            .decoder_dim
                            .is_multiple_of(1 << self.decoder_rates.len().min(16)),
                ),
                (
                    "channels are numbers that memory can hold",
                    [self.encoder_dim, self.latent_dim, self.decoder_dim]
                        .iter()
                        .all(|&dim| dim > 0 && dim.saturating_mul(widest) <= 1 << 20),
                ),
                (
                    "sampling_rate can be had",
                    RATES.contains(&self.sampling_rate),
                ),
                (
                    "latents_mean has latent_channels entries",
                    self.latents_mean.len() == self.latent_channels,
                ),
                (
                    "latents_std has latent_channels entries above 0",
                    self.latents_std.len() == self.latent_channels
                        && self.latents_std.iter().all(|&std| std > 0.0),
                ),
            ],
        )?;
        Ok(self)
    }

    /// Samples that become one latent.
    pub fn hop(&self) -> usize {
        self.encoder_rates.iter().product()
    }

    /// Latents that so many samples of a channel become.
    pub fn latents(&self, samples: usize) -> usize {
        samples.div_ceil(self.hop())
    }

    /// Latents to each side that a sample depends on when it is decoded.
    pub(super) fn decoder_reach(&self) -> usize {
        // Samples of what the layer reads, from the last layer backwards. An activation reads six, with the filters before and
        // behind it.
        const ACTIVATION: usize = 6;
        let block = |(&size, dilations): (&usize, &Vec<usize>)| -> usize {
            let half = size / 2;
            dilations
                .iter()
                .map(|dilation| 2 * ACTIVATION + half * (dilation + 1))
                .sum()
        };
        let blocks = (self.resblock_kernel_sizes.iter())
            .zip(&self.resblock_dilation_sizes)
            .map(block)
            .max()
            .unwrap_or(0);
        let last = 3 + ACTIVATION;
        let upsampled = (self.decoder_rates.iter().rev())
            .fold(last, |reach, rate| (reach + blocks).div_ceil(*rate) + 1);
        upsampled + 3
    }

    /// Latents' worth of samples to each side that what the convolutions of the encoder make depends on.
    pub(super) fn encoder_reach(&self) -> usize {
        const UNITS: usize = 3 * (1 + 3 + 9);
        let samples =
            (self.encoder_rates.iter().rev()).fold(1, |reach, rate| (reach + 2) * rate + UNITS);
        (samples + 3).div_ceil(self.hop())
    }
}

/// What names and shapes say. Those of a weight are the same whether it is folded or not.
fn detected(checkpoint: &Checkpoint) -> Result<Config, String> {
    let shapes = Shapes::of(checkpoint);
    let kernel = |place: &str| -> Result<[usize; 3], String> {
        let name = [format!("{place}.weight"), format!("{place}.weight_v")]
            .into_iter()
            .find(|name| shapes.has(name))
            .ok_or_else(|| format!("no tensor {place}.weight"))?;
        let sides = shapes.sides(&name)?;
        <[usize; 3]>::try_from(sides).map_err(|_| format!("{name} is no kernel: {sides:?}"))
    };
    let has = |place: &str| kernel(place).is_ok();
    let levels = |pattern: &str, first: usize| -> Result<Vec<[usize; 3]>, String> {
        let places = (first..first + 16).map(|level| pattern.replace('#', &level.to_string()));
        places
            .take_while(|place| has(place))
            .map(|place| kernel(&place))
            .collect()
    };
    let [encoder_dim, ..] = kernel("encoder.block.0")?;
    let down = levels("encoder.block.#.block.4", 1)?;
    let up = levels("decoder.ups.#.0", 0)?;
    let sizes =
        (0..).map_while(|index| kernel(&format!("decoder.resblocks.{index}.convs1.0")).ok());
    let sizes: Vec<usize> = sizes.map(|[_, _, size]| size).take(256).collect();
    let kernels = sizes.len().checked_div(up.len()).unwrap_or(0);
    let rounds = |block: usize| {
        let place = |round: &usize| has(&format!("decoder.resblocks.{block}.convs1.{round}"));
        (0..16).take_while(place).count()
    };
    let [latent_channels, latent_dim] = shapes.matrix("pre_block.proj.weight")?;
    let [decoder_dim, ..] = kernel("decoder.conv_pre")?;
    Ok(Config {
        class: Class::AutoencoderKLMiniMaxH3Audio,
        encoder_dim,
        encoder_rates: down.iter().map(|[_, _, size]| size / 2).collect(),
        latent_dim,
        latent_channels,
        num_attention_heads: usual_heads(),
        decoder_dim,
        decoder_rates: up.iter().map(|[_, _, size]| size.div_ceil(2)).collect(),
        decoder_kernel_sizes: up.iter().map(|&[_, _, size]| size).collect(),
        resblock_kernel_sizes: sizes[..kernels].to_vec(),
        resblock_dilation_sizes: (0..kernels)
            .map(|block| (0..rounds(block)).map(|round| 2 * round + 1).collect())
            .collect(),
        sampling_rate: usual_rate(),
        latents_mean: Vec::new(),
        latents_std: Vec::new(),
    })
}
