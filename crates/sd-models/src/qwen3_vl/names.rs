//! How files name the tensors of Qwen3-VL, and what their shapes and metadata say of it.

use sd_backend::Component;
use sd_graph::Checkpoint;
use serde_json::{Value, json};

use crate::families::Known;
use crate::naming::{Naming, Rule, whole};
use crate::shapes::Shapes;

/// What names begin with in files of safetensors: none in a file of its own, the others in files of whole models.
const PREFIXES: &[&str] = &[
    "",
    "text_encoder.",
    "text_encoders.+.",
    "text_encoders.+.transformer.",
];

/// Qwen3-VL as a text encoder.
pub(crate) static TEXT_ENCODER: Known = Known {
    family: "Qwen3-VL",
    component: Component::TextEncoder,
    architecture: "qwen3vl",
    namings: &[
        Naming {
            title: "as in transformers",
            prefixes: PREFIXES,
            marks: &[
                "model.language_model.embed_tokens.weight",
                "model.language_model.layers.0.self_attn.q_norm.weight",
            ],
            rules: &[],
        },
        Naming {
            title: "without language_model",
            prefixes: PREFIXES,
            marks: &[
                "model.embed_tokens.weight",
                "model.layers.0.self_attn.q_norm.weight",
            ],
            rules: SHORT,
        },
        Naming {
            title: "as in llama.cpp",
            prefixes: &[""],
            marks: &["token_embd.weight", "blk.0.attn_q_norm.weight"],
            rules: LLAMA_CPP,
        },
    ],
    config,
};

/// The names of older releases of transformers, which ComfyUI's files have.
const SHORT: &[Rule] = &[
    whole(
        "model.embed_tokens.*",
        "model.language_model.embed_tokens.*",
    ),
    whole("model.layers.#.*", "model.language_model.layers.#.*"),
    whole("model.norm.*", "model.language_model.norm.*"),
    whole("visual.*", "model.visual.*"),
];

macro_rules! layer {
    ($from:literal, $to:literal) => {
        whole(
            concat!("blk.#.", $from, ".*"),
            concat!("model.language_model.layers.#.", $to, ".*"),
        )
    };
}

/// llama.cpp's names. The vision tower is in a file of its own there.
const LLAMA_CPP: &[Rule] = &[
    whole("token_embd.*", "model.language_model.embed_tokens.*"),
    whole("output_norm.*", "model.language_model.norm.*"),
    whole("output.*", "lm_head.*"),
    layer!("attn_norm", "input_layernorm"),
    layer!("attn_q", "self_attn.q_proj"),
    layer!("attn_k", "self_attn.k_proj"),
    layer!("attn_v", "self_attn.v_proj"),
    layer!("attn_output", "self_attn.o_proj"),
    layer!("attn_q_norm", "self_attn.q_norm"),
    layer!("attn_k_norm", "self_attn.k_norm"),
    layer!("ffn_norm", "post_attention_layernorm"),
    layer!("ffn_gate", "mlp.gate_proj"),
    layer!("ffn_up", "mlp.up_proj"),
    layer!("ffn_down", "mlp.down_proj"),
];

/// The token that stands for a piece of a picture, by its text.
pub(crate) const IMAGE_TOKEN: &str = "<|image_pad|>";
/// As [`IMAGE_TOKEN`], for a piece of a clip.
pub(crate) const VIDEO_TOKEN: &str = "<|video_pad|>";

/// `config.json` by shapes, and by the metadata of llama.cpp's files where there is some. What neither tells is as published; the
/// numbers of the picture tokens are those of the published vocabulary, until a tokenizer says others.
fn config(checkpoint: &Checkpoint) -> Result<Value, String> {
    let shapes = Shapes::of(checkpoint);
    let [vocab_size, hidden] = shapes.matrix("model.language_model.embed_tokens.weight")?;
    let layer = |name: &str| format!("model.language_model.layers.0.{name}.weight");
    let head_dim = shapes.vector(&layer("self_attn.q_norm"))?;
    let [queries, _] = shapes.matrix(&layer("self_attn.q_proj"))?;
    let [keys, _] = shapes.matrix(&layer("self_attn.k_proj"))?;
    let [inner, _] = shapes.matrix(&layer("mlp.gate_proj"))?;
    if head_dim == 0 || !queries.is_multiple_of(head_dim) || !keys.is_multiple_of(head_dim) {
        return Err(format!(
            "projections to {queries} and {keys} channels are no heads of {head_dim}"
        ));
    }
    let metadata = checkpoint.metadata();
    let architecture = metadata.get("general.architecture");
    let said = |key: &str| {
        let key = format!("{}.{key}", architecture?);
        metadata.get(&key)?.parse::<f64>().ok()
    };
    // 24, 20 and 20 of the 64 pairs of a head of 128.
    let (pairs, time, height) = (head_dim / 2, head_dim * 3 / 16, head_dim * 5 / 32);
    let mut config = json!({
        "image_token_id": 151_655,
        "video_token_id": 151_656,
        "text_config": {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers":
                shapes.count("model.language_model.layers.#.self_attn.q_norm.weight"),
            "num_attention_heads": queries / head_dim,
            "num_key_value_heads": keys / head_dim,
            "head_dim": head_dim,
            "rms_norm_eps": said("attention.layer_norm_rms_epsilon").unwrap_or(1e-6),
            "vocab_size": vocab_size,
            "max_position_embeddings": said("context_length").map_or(262_144, |n| n as u64),
            "hidden_act": "silu",
            "attention_bias": shapes.has("model.language_model.layers.0.self_attn.q_proj.bias"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": said("rope.freq_base").unwrap_or(5_000_000.0),
                "mrope_interleaved": true,
                "mrope_section": [time, height, pairs.saturating_sub(time + height)],
            },
        },
    });
    if let Some(vision) = vision_config(shapes)? {
        config["vision_config"] = vision;
    }
    Ok(config)
}

/// The configuration of the vision tower, if it is in the file and is one of the published ones, whose heads and deepstack layers
/// shapes do not tell.
fn vision_config(shapes: Shapes<'_>) -> Result<Option<Value>, String> {
    let patch = "model.visual.patch_embed.proj.weight";
    if !shapes.has(patch) {
        return Ok(None);
    }
    let &[hidden, channels, frames, side, _] = shapes.sides(patch)? else {
        return Ok(None);
    };
    let depth = shapes.count("model.visual.blocks.#.attn.qkv.weight");
    let deepstack = match (hidden, depth) {
        (1152, 27) => [8, 16, 24],
        (1024, 24) => [5, 11, 17],
        _ => return Ok(None),
    };
    let [positions, _] = shapes.matrix("model.visual.pos_embed.weight")?;
    let [inner, _] = shapes.matrix("model.visual.blocks.0.mlp.linear_fc1.weight")?;
    let [out, merged] = shapes.matrix("model.visual.merger.linear_fc2.weight")?;
    Ok(Some(json!({
        "depth": depth,
        "hidden_size": hidden,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": inner,
        "num_heads": 16,
        "in_channels": channels,
        "patch_size": side,
        "temporal_patch_size": frames,
        "spatial_merge_size": (merged / hidden).isqrt(),
        "out_hidden_size": out,
        "num_position_embeddings": positions,
        "deepstack_visual_indexes": deepstack,
    })))
}
