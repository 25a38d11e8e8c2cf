//! The configuration of a VAE whose files do not say it, from the names and shapes of its tensors.

use sd_graph::Checkpoint;

use super::config::{Class, Config};
use super::names::Names;
use super::statistics::published;

/// Levels and blocks that are looked for. More than a configuration may have.
const MOST: usize = 128;

/// A file of weights, looked at under the names of its author.
struct Looked<'c> {
    checkpoint: &'c Checkpoint,
    names: &'c Names,
}

impl Looked<'_> {
    /// Sides of the tensor that diffusers calls `name`.
    fn shape(&self, name: &str) -> Result<Vec<usize>, String> {
        let name = self.names.in_file(name);
        match self.checkpoint.get(&name) {
            Some(info) => Ok(info.shape.clone()),
            None => Err(format!("no tensor {name}")),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.shape(name).is_ok()
    }

    /// `[out, in]` channels of a convolution.
    fn channels(&self, name: &str) -> Result<[usize; 2], String> {
        let shape = self.shape(&format!("{name}.weight"))?;
        match shape[..] {
            [output, input, ..] => Ok([output, input]),
            _ => Err(format!("{name}.weight is no kernel: {shape:?}")),
        }
    }
}

/// The configuration that `checkpoint` can be read with, whose tensors are called as `names` says.
///
/// # Errors
/// What is not there, or cannot be.
pub(super) fn config(checkpoint: &Checkpoint, names: &Names) -> Result<Config, String> {
    let looked = Looked { checkpoint, names };
    let kernel = looked.shape("encoder.conv_in.weight")?;
    // Kernels of a VAE for pictures are flat, or one frame deep.
    let is_flat = kernel.len() == 4 || kernel.get(2) == Some(&1);
    let [base_dim, in_channels] = looked.channels("encoder.conv_in")?;
    let [out_channels, decoder_base_dim] = looked.channels("decoder.conv_out")?;
    let [z_dim, _] = looked.channels("post_quant_conv")?;
    let is_residual = names.is_residual();
    let levels = levels(&looked, is_residual)?;

    let mut dim_mult = Vec::new();
    for level in &levels {
        let [output, _] = looked.channels(&format!("{}.conv1", level.first))?;
        if base_dim == 0 || !output.is_multiple_of(base_dim) {
            return Err(format!("{output} channels are no multiple of {base_dim}"));
        }
        dim_mult.push(output / base_dim);
    }
    let num_res_blocks = levels.first().map_or(0, |level| level.blocks);
    let halves = levels.len().saturating_sub(1);
    let (latents_mean, latents_std) = match published(z_dim) {
        Some((mean, std)) => (mean.to_vec(), std.to_vec()),
        None => {
            tracing::warn!(
                "{}: no config.json, and no published VAE has {z_dim} latent channels; latents are taken to have mean 0 and \
                deviation 1",
                checkpoint.path().display()
            );
            (vec![0.0; z_dim], vec![1.0; z_dim])
        }
    };
    // Colours, or colours and alpha, of a square of pixels.
    let patch = (1..=16).find(|side| matches!(in_channels / (side * side), 3 | 4));
    Ok(Config {
        class: match is_flat {
            true => Class::AutoencoderKLQwenImage21,
            false => Class::AutoencoderKLWan,
        },
        base_dim,
        decoder_base_dim: Some(decoder_base_dim),
        z_dim,
        dim_mult,
        num_res_blocks,
        attn_scales: Vec::new(),
        temperal_downsample: levels.iter().take(halves).map(|l| l.time).collect(),
        latents_mean,
        latents_std,
        is_residual,
        in_channels,
        out_channels: Some(out_channels),
        patch_size: patch.filter(|&side| side > 1),
    })
}

/// What is seen of a level of the encoder.
struct Seen {
    /// Its first residual block.
    first: String,
    blocks: usize,
    /// Whether it halves time.
    time: bool,
}

/// The encoder's levels, from pixels to latents.
fn levels(looked: &Looked<'_>, is_residual: bool) -> Result<Vec<Seen>, String> {
    let path = |index: usize| format!("encoder.down_blocks.{index}");
    let is_block = |place: &str| looked.has(&format!("{place}.conv1.weight"));
    let halves = |place: &str| looked.has(&format!("{place}.resample.1.weight"));
    let has_time = |place: &str| looked.has(&format!("{place}.time_conv.weight"));
    let mut levels: Vec<Seen> = Vec::new();
    if is_residual {
        for place in (0..MOST).map(path) {
            let block = |index: usize| format!("{place}.resnets.{index}");
            let blocks = (0..MOST).take_while(|&index| is_block(&block(index)));
            let blocks = blocks.count();
            if blocks == 0 {
                break;
            }
            let downsampler = format!("{place}.downsampler");
            levels.push(Seen {
                first: block(0),
                blocks,
                time: has_time(&downsampler),
            });
        }
    } else {
        // Layers are numbered through; what halves ends a level.
        let mut level: Option<Seen> = None;
        for place in (0..MOST).map(path) {
            if is_block(&place) {
                let seen = level.get_or_insert_with(|| Seen {
                    first: place.clone(),
                    blocks: 0,
                    time: false,
                });
                seen.blocks += 1;
            } else if halves(&place) {
                let seen = level.take().ok_or(format!("no blocks before {place}"))?;
                levels.push(Seen {
                    time: has_time(&place),
                    ..seen
                });
            } else {
                break;
            }
        }
        levels.extend(level);
    }
    match levels.first().map(|level| level.blocks) {
        None => Err("no levels of an encoder".to_owned()),
        Some(blocks) if levels.iter().any(|level| level.blocks != blocks) => {
            Err("levels with different numbers of blocks".to_owned())
        }
        Some(_) => Ok(levels),
    }
}
