//! How files name the VAE's tensors, and what their shapes say of it.

use sd_backend::Component;
use sd_graph::{Checkpoint, Declarations};
use serde_json::{Value, json};

use super::config::Config;
use super::decoder::Decoder;
use super::encoder::Encoder;
use crate::config::from_json;
use crate::families::Known;
use crate::naming::{Naming, Rule, part, whole};
use crate::shapes::Shapes;

/// What names may begin with.
const PREFIXES: &[&str] = &["", "vae.", "first_stage_model.", "video_vae."];

/// The video VAE of MiniMax H3. The model has the reference's names, but for the feed-forward, of whose two halves in one
/// tensor the reference has the gate behind and the authors have it in front.
pub(crate) static VIDEO_VAE: Known = Known {
    family: "MiniMax H3",
    component: Component::Vae,
    key: "sd.config.video_vae",
    shared_key_class: Some("AutoencoderKLMiniMaxH3"),
    architecture: "minimax_h3_vae",
    namings: &[
        Naming {
            title: "as in diffusers",
            prefixes: PREFIXES,
            marks: &["decoder.register_tokens", "decoder.proj_in.weight"],
            rules: DIFFUSERS,
        },
        Naming {
            title: "as published",
            prefixes: PREFIXES,
            marks: &["decoder.register_tokens", "decoder.x_embedder.weight"],
            rules: PUBLISHED,
        },
    ],
    config,
    declare: |checkpoint, options, config| {
        let path = checkpoint.path();
        let config: Config = from_json(path, config)?;
        let config = Config::checked(config.with_statistics(checkpoint), path)?;
        let declarations = Declarations::new(checkpoint, options);
        Encoder::new(&declarations.root(), &config);
        Decoder::new(&declarations.root(), &config);
        Ok(declarations.finish()?)
    },
};

const DIFFUSERS: &[Rule] = &[
    part(
        "decoder.transformer_blocks.#.ff.net.0.proj.*",
        "decoder.transformer_blocks.#.ff.value.*",
        0,
        2,
    ),
    part(
        "decoder.transformer_blocks.#.ff.net.0.proj.*",
        "decoder.transformer_blocks.#.ff.gate.*",
        1,
        2,
    ),
];

const PUBLISHED: &[Rule] = &[
    whole(
        "encoder.down.#.block.#.nin_shortcut.*",
        "encoder.down_blocks.#.resnets.#.conv_shortcut.*",
    ),
    whole(
        "encoder.down.#.block.#.*",
        "encoder.down_blocks.#.resnets.#.*",
    ),
    whole(
        "encoder.down.#.downsample.*",
        "encoder.down_blocks.#.downsamplers.0.*",
    ),
    whole("decoder.x_embedder.*", "decoder.proj_in.*"),
    whole(
        "decoder.transformer_blocks.#.attn.to_out.*",
        "decoder.transformer_blocks.#.attn.to_out.0.*",
    ),
    part(
        "decoder.transformer_blocks.#.ff.w1.*",
        "decoder.transformer_blocks.#.ff.gate.*",
        0,
        2,
    ),
    part(
        "decoder.transformer_blocks.#.ff.w1.*",
        "decoder.transformer_blocks.#.ff.value.*",
        1,
        2,
    ),
    whole(
        "decoder.transformer_blocks.#.ff.w2.*",
        "decoder.transformer_blocks.#.ff.net.2.*",
    ),
];

/// `config.json` by the shapes of the tensors. They do not tell how many channels a head has, so that only a decoder of the
/// published width is known; nor which of the levels that shorten space shorten time too, and lengths of clips: these are as
/// published. Means and deviations of latents are those of [`Statistics::of_frames`](super::super::statistics), or left out.
fn config(checkpoint: &Checkpoint) -> Result<Value, String> {
    const GROUPS: usize = 32;
    const HEADS: usize = 32;
    const HEAD_DIM: usize = 64;
    let shapes = Shapes::of(checkpoint);
    let [dim, latent_channels] = shapes.matrix("decoder.proj_in.weight")?;
    let [voxels, _] = shapes.matrix("decoder.proj_out.weight")?;
    let [wide, _] = shapes.matrix("decoder.transformer_blocks.0.ff.gate.weight")?;
    let levels = shapes.count("encoder.down_blocks.#.resnets.0.conv1.weight");
    let at = |level: usize, name: &str| format!("encoder.down_blocks.{level}.{name}");
    let channels = |level: usize| match shapes.sides(&at(level, "resnets.0.conv1.weight"))? {
        &[output, ..] => Ok(output),
        [] => Err("a kernel without sides".to_owned()),
    };
    let block_out_channels: Vec<usize> = (0..levels).map(channels).collect::<Result<_, _>>()?;
    let shortens: Vec<bool> = (0..levels)
        .map(|level| shapes.has(&at(level, "downsamplers.0.conv.weight")))
        .collect();
    let spatial: Vec<usize> = shortens.iter().map(|&is| 1 + usize::from(is)).collect();
    let factor: usize = spatial.iter().product();
    // Of four levels that shorten space, the two in the middle.
    let temporal: Vec<usize> = match (&shortens[..], voxels.checked_div(3 * factor * factor)) {
        (&[true, true, true, true, ref rest @ ..], Some(4)) if !rest.contains(&true) => {
            let inner = |level: usize| 1 + usize::from((1..=2).contains(&level));
            (0..levels).map(inner).collect()
        }
        _ => {
            return Err(
                "its shapes do not say which levels shorten time, as its config.json does"
                    .to_owned(),
            );
        }
    };
    if dim != HEADS * HEAD_DIM {
        return Err(
            "its shapes do not say how many heads its decoder has, as its config.json does"
                .to_owned(),
        );
    }
    if !wide.is_multiple_of(dim) {
        return Err(format!("{wide} is no multiple of {dim}"));
    }
    let mut config = json!({
        "_class_name": "AutoencoderKLMiniMaxH3",
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": latent_channels,
        "block_out_channels": block_out_channels,
        "layers_per_block": shapes.count("encoder.down_blocks.0.resnets.#.conv1.weight"),
        "spatial_downsample_factors": spatial,
        "temporal_downsample_factors": temporal,
        "norm_num_groups": GROUPS,
        "norm_eps": 1e-6,
        "spatial_padding_mode": "reflect",
        "decoder_num_layers": shapes.count("decoder.transformer_blocks.#.scale1"),
        "decoder_num_attention_heads": HEADS,
        "decoder_attention_head_dim": HEAD_DIM,
        "decoder_num_register_tokens": shapes.vector("decoder.register_tokens")? / dim,
        "decoder_ffn_mult": wide / dim,
        "decoder_rope_theta": 100.0,
        "decoder_rope_dim_ratio": 0.75,
        "decoder_norm_eps": 1e-5,
        "clip_length": 17,
        "token_drop": 3,
    });
    let known: Config =
        serde_json::from_value(config.clone()).map_err(|error| error.to_string())?;
    let known = known.with_statistics(checkpoint);
    for (field, values) in [
        ("latents_mean", &known.latents_mean),
        ("latents_std", &known.latents_std),
    ] {
        // With the digits of single precision, not those of what it becomes in double.
        let digits = values.iter().map(|value| value.to_string().parse::<f64>());
        let digits: Vec<f64> = digits.filter_map(|digits| digits.ok()).collect();
        if !digits.is_empty() {
            config[field] = json!(digits);
        }
    }
    Ok(config)
}
