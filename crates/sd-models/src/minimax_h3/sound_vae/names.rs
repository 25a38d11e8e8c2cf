//! How files name the tensors.

use sd_backend::Component;
use sd_graph::Declarations;

use super::attention::Narrowing;
use super::config::Config;
use super::decoder::Decoder;
use super::encoder::Encoder;
use crate::config::from_json;
use crate::families::Known;
use crate::naming::Naming;

/// The VAE for sound. All programs name its tensors as its authors do; those that keep it beside other parts put something in front.
pub(crate) static VAE: Known = Known {
    family: "MiniMax H3, sound",
    component: Component::Vae,
    key: "sd.config.sound_vae",
    shared_key_class: Some("AutoencoderKLMiniMaxH3Audio"),
    architecture: "minimax_h3_sound_vae",
    namings: &[Naming {
        title: "as published",
        prefixes: &["", "audio_vae.", "first_stage_model."],
        marks: &["pre_block.attn.qkv.weight", "dec_in_proj.weight"],
        rules: &[],
    }],
    config: |checkpoint| {
        let config = Config::described(checkpoint)?;
        serde_json::to_value(config).map_err(|error| error.to_string())
    },
    declare: |checkpoint, options, config| {
        let path = checkpoint.path();
        let config: Config = from_json(path, config)?;
        let config = config.with_statistics(checkpoint).checked(path)?;
        let declarations = Declarations::new(checkpoint, options);
        let root = declarations.root();
        for name in ["logs_proj", "latents_mean", "latents_std"] {
            root.ignore(name);
        }
        Encoder::new(&root, &config);
        Narrowing::new(&root, &config);
        Decoder::new(&root, &config);
        Ok(declarations.finish()?)
    },
};
