//! Names of tensors in the checkpoints of the models' authors, and of programs that keep them.

use sd_backend::Component;
use sd_graph::{Checkpoint, Declarations};

use super::config::Config;
use super::decoder::Decoder;
use super::encoder::Encoder;
use crate::config::from_json;
use crate::families::{Known, VAE_KEY};
use crate::naming::Naming;

/// Blocks that are looked for. More than a configuration may have.
const MOST: usize = 128;

/// What such names may begin with.
const PREFIXES: [&str; 3] = ["", "vae.", "first_stage_model."];

/// The VAEs of this family. Their names depend on how many blocks there are, which [`Names`] knows and a table cannot: what is found
/// here keeps the file's names behind the prefix.
pub(crate) static VAE: Known = Known {
    family: "WAN and Qwen-Image",
    component: Component::Vae,
    key: VAE_KEY,
    shared_key_class: None,
    architecture: "wan_vae",
    namings: &[
        Naming {
            title: "as in diffusers",
            prefixes: &PREFIXES,
            marks: &[
                "decoder.conv_in.weight",
                "decoder.mid_block.resnets.0.norm1.gamma",
            ],
            rules: &[],
        },
        Naming {
            title: "as published",
            prefixes: &PREFIXES,
            marks: &["decoder.conv1.weight", "decoder.middle.0.residual.0.gamma"],
            rules: &[],
        },
    ],
    config: |checkpoint| {
        let config = Config::of(checkpoint).map_err(|error| error.to_string())?;
        serde_json::to_value(config).map_err(|error| error.to_string())
    },
    declare: |checkpoint, options, config| {
        let path = checkpoint.path();
        let config = Config::checked(from_json(path, config)?, path)?;
        let names = Names::of(checkpoint);
        let declarations = Declarations::new(checkpoint, options);
        let declarations = declarations.translate(move |name| names.in_file(name));
        Encoder::new(&declarations.root(), &config);
        Decoder::new(&declarations.root(), &config);
        Ok(declarations.finish()?)
    },
};

/// How a checkpoint calls its tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Names {
    prefix: &'static str,
    /// Whether names are those of the authors, not those of diffusers.
    is_original: bool,
    is_residual: bool,
    /// Residual blocks of the encoder's levels, where names depend on it; the decoder's have one more.
    blocks: usize,
}

impl Names {
    /// Looks at how `checkpoint` calls the decoder's first layer and the encoder's levels. Those of diffusers without shortcuts
    /// if there are none.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Names {
        let found = PREFIXES.iter().find_map(|&prefix| {
            let has = |name: &str| checkpoint.get(&format!("{prefix}{name}")).is_some();
            let is_original = has("decoder.conv1.weight");
            (is_original || has("decoder.conv_in.weight")).then_some((prefix, is_original))
        });
        let (prefix, is_original) = found.unwrap_or_default();
        let has = |name: &str| checkpoint.get(&format!("{prefix}{name}")).is_some();
        // Blocks of the first level are counted; a flat list has the resampler behind them.
        let (is_residual, blocks) = if is_original {
            let nested = "encoder.downsamples.0.downsamples";
            let is_residual = has(&format!("{nested}.0.residual.2.weight"));
            let place = if is_residual {
                nested
            } else {
                "encoder.downsamples"
            };
            let is_block = |index: &usize| has(&format!("{place}.{index}.residual.2.weight"));
            (is_residual, (0..MOST).take_while(is_block).count())
        } else {
            (has("encoder.down_blocks.0.resnets.0.conv1.weight"), 0)
        };
        Names {
            prefix,
            is_original,
            is_residual,
            blocks,
        }
    }

    /// Whether levels have shortcuts.
    pub(crate) fn is_residual(&self) -> bool {
        self.is_residual
    }

    /// The name in the checkpoint of what diffusers calls `name`.
    pub(crate) fn in_file(&self, name: &str) -> String {
        if !self.is_original {
            return format!("{}{name}", self.prefix);
        }
        let path: Vec<&str> = name.split('.').collect();
        let name = match path.as_slice() {
            ["quant_conv", rest @ ..] => joined("conv1", rest),
            ["post_quant_conv", rest @ ..] => joined("conv2", rest),
            [half, "conv_in", rest @ ..] => joined(&format!("{half}.conv1"), rest),
            [half, "norm_out", rest @ ..] => joined(&format!("{half}.head.0"), rest),
            [half, "conv_out", rest @ ..] => joined(&format!("{half}.head.2"), rest),
            [half, "mid_block", "attentions", _, rest @ ..] => {
                joined(&format!("{half}.middle.1"), rest)
            }
            [half, "mid_block", "resnets", index, rest @ ..] => {
                let index = if *index == "0" { 0 } else { 2 };
                joined(&format!("{half}.middle.{index}"), &within_block(rest))
            }
            [half, "down_blocks", level, rest @ ..] => {
                let level = number(level);
                self.within_levels(half, "downsamples", level, self.blocks, rest)
            }
            [half, "up_blocks", level, rest @ ..] => {
                let level = number(level);
                self.within_levels(half, "upsamples", level, self.blocks + 1, rest)
            }
            _ => name.to_owned(),
        };
        format!("{}{name}", self.prefix)
    }

    /// A layer of a level, of which the resampler comes behind the `blocks` blocks. Levels with shortcuts have numbers of
    /// their own, the others' layers are numbered through.
    fn within_levels(
        &self,
        half: &str,
        levels: &str,
        level: usize,
        blocks: usize,
        rest: &[&str],
    ) -> String {
        let (index, rest) = match rest {
            ["resnets", index, rest @ ..] => (number(index), rest),
            ["upsamplers", _, rest @ ..] => (blocks, rest),
            ["downsampler" | "upsampler", rest @ ..] => (blocks, rest),
            // The encoder without shortcuts is numbered through by diffusers too.
            rest => return joined(&format!("{half}.{levels}.{level}"), &within_block(rest)),
        };
        let place = if self.is_residual {
            format!("{half}.{levels}.{level}.{levels}.{index}")
        } else {
            format!("{half}.{levels}.{}", level * (blocks + 1) + index)
        };
        joined(&place, &within_block(rest))
    }
}

/// Layers of a residual block are numbers of a sequence.
fn within_block<'n>(rest: &[&'n str]) -> Vec<&'n str> {
    let Some((first, others)) = rest.split_first() else {
        return Vec::new();
    };
    let place: &[&str] = match *first {
        "norm1" => &["residual", "0"],
        "conv1" => &["residual", "2"],
        "norm2" => &["residual", "3"],
        "conv2" => &["residual", "6"],
        "conv_shortcut" => &["shortcut"],
        _ => return rest.to_vec(),
    };
    place.iter().chain(others).copied().collect()
}

fn joined(place: &str, rest: &[&str]) -> String {
    let mut name = place.to_owned();
    for part in rest {
        name.push('.');
        name.push_str(part);
    }
    name
}

fn number(text: &str) -> usize {
    text.parse().unwrap_or_default()
}
