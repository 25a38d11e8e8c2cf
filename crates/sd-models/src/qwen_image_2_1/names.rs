//! How files name the transformer's tensors, and what their shapes say of it.

use std::path::PathBuf;

use sd_backend::Component;
use sd_graph::{Checkpoint, Declarations};
use serde_json::{Value, json};

use super::transformer::{Transformer, TransformerConfig};
use crate::config::from_json;
use crate::error::Result;
use crate::families::Known;
use crate::lora::{Adapted, adapt};
use crate::naming::{Naming, Rule, part};
use crate::shapes::Shapes;

/// What names begin with: none in diffusers' files and most GGUF files, the others in files of ComfyUI and of whole models.
const PREFIXES: &[&str] = &[
    "",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
];

/// The transformer of Qwen-Image 2.1. All files have the reference's names but for the feed-forward, whose gate and up projections
/// ComfyUI keeps as one, the gate's rows first.
pub(crate) static TRANSFORMER: Known = Known {
    family: "Qwen-Image 2.1",
    component: Component::Diffusion,
    key: "sd.config.diffusion",
    shared_key_class: None,
    architecture: "qwen_image_2_1",
    namings: &[
        Naming {
            title: "gate and up projections in one",
            prefixes: PREFIXES,
            marks: &[
                "txt_in.text_norm.weight",
                "transformer_blocks.0.img_mlp.gate_up.weight",
            ],
            rules: FUSED,
        },
        Naming {
            title: "as in diffusers",
            prefixes: PREFIXES,
            marks: &["txt_in.text_norm.weight"],
            rules: FUSED,
        },
    ],
    config,
    declare: |checkpoint, options, config| {
        let path = checkpoint.path();
        let config = TransformerConfig::checked(from_json(path, config)?, path)?;
        let declarations = Declarations::new(checkpoint, options);
        Transformer::new(&declarations.root(), &config);
        Ok(declarations.finish()?)
    },
};

/// Adds LoRAs, each so many times, to the transformer whose tensors `checkpoint` has under the reference's names.
///
/// Modules are found by their names as diffusers, PEFT, kohya's scripts and ComfyUI write them, whatever names the transformer's own
/// file has.
///
/// # Errors
/// [`Error::Lora`](crate::Error::Lora) for a file of which nothing fits and for a strength that is no number; files that cannot be read.
pub fn with_loras(checkpoint: &Checkpoint, loras: &[(PathBuf, f32)]) -> Result<Adapted> {
    adapt(checkpoint, &TRANSFORMER, loras, None)
}

/// Names of LoRAs are these too, whatever the names of the weights.
const FUSED: &[Rule] = &[
    part(
        "transformer_blocks.#.img_mlp.gate_up.*",
        "transformer_blocks.#.img_mlp.gate_layer.*",
        0,
        2,
    ),
    part(
        "transformer_blocks.#.img_mlp.gate_up.*",
        "transformer_blocks.#.img_mlp.proj.*",
        1,
        2,
    ),
];

/// `config.json` by the shapes of the tensors. They do not tell how a head's channels are shared out among the rotary axes, `eps` and
/// `causal_condition`: these are as published, the axes in proportion to the head.
fn config(checkpoint: &Checkpoint) -> Result<Value, String> {
    let shapes = Shapes::of(checkpoint);
    let [inner, in_channels] = shapes.matrix("img_in.weight")?;
    let [out_channels, _] = shapes.matrix("proj_out.weight")?;
    let head_dim = shapes.vector("transformer_blocks.0.attn.norm_q.weight")?;
    let [wide, _] = shapes.matrix("transformer_blocks.0.img_mlp.gate_layer.weight")?;
    if head_dim == 0 || inner == 0 || !inner.is_multiple_of(head_dim) || !wide.is_multiple_of(inner)
    {
        return Err(format!(
            "a width of {inner} is no multiple of heads of {head_dim} channels, or {wide} none of it"
        ));
    }
    // 16, 56 and 56 of 128.
    let time = head_dim / 16 * 2;
    let side = (head_dim - time) / 4 * 2;
    Ok(json!({
        "patch_size": 1,
        "in_channels": in_channels,
        "out_channels": out_channels,
        "num_layers": shapes.count("transformer_blocks.#.attn.norm_q.weight"),
        "attention_head_dim": head_dim,
        "num_attention_heads": inner / head_dim,
        "context_in_dim": shapes.vector("txt_in.text_norm.weight")?,
        "mlp_ratio": wide / inner,
        "axes_dims_rope": [head_dim - 2 * side, side, side],
        "eps": 1e-6,
        "causal_condition": true,
    }))
}
