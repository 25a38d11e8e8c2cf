//! How files name the tensors of Qwen3-VL, and what their shapes and metadata say of it.

use std::collections::BTreeSet;

use sd_backend::Component;
use sd_graph::{Checkpoint, Declarations, Selection};
use serde_json::{Value, json};

use super::config::Config;
use super::text::TextModel;
use crate::config::from_json;
use crate::error::{Error, Result};
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
    key: "sd.config.text-encoder",
    shared_key_class: None,
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
    declare: |checkpoint, options, config| {
        let path = checkpoint.path();
        let config = Config::checked(from_json(path, config)?, path)?;
        let declarations = Declarations::new(checkpoint, options);
        TextModel::new(&declarations.root(), &config.text_config);
        Ok(declarations.finish()?)
    },
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

/// The configuration of the vision tower, if it is in the file. Heads and deepstack layers are told by no shape: they are those of the
/// published towers.
fn vision_config(shapes: Shapes<'_>) -> Result<Option<Value>, String> {
    if !shapes.has(PATCHES) {
        return Ok(None);
    }
    let &[hidden, ..] = shapes.sides(PATCHES)? else {
        return Ok(None);
    };
    match (hidden, shapes.count(BLOCKS)) {
        (1152, 27) => vision_sizes(shapes, 16, &[8, 16, 24]).map(Some),
        (1024, 24) => vision_sizes(shapes, 16, &[5, 11, 17]).map(Some),
        _ => Ok(None),
    }
}

const PATCHES: &str = "model.visual.patch_embed.proj.weight";
const BLOCKS: &str = "model.visual.blocks.#.attn.qkv.weight";

/// What shapes say of the vision tower, with so many heads and features taken behind these blocks.
fn vision_sizes(shapes: Shapes<'_>, heads: usize, deepstack: &[usize]) -> Result<Value, String> {
    let &[hidden, channels, frames, side, _] = shapes.sides(PATCHES)? else {
        return Err(format!("{PATCHES} is no kernel of frames"));
    };
    let [positions, _] = shapes.matrix("model.visual.pos_embed.weight")?;
    let [inner, _] = shapes.matrix("model.visual.blocks.0.mlp.linear_fc1.weight")?;
    let [out, merged] = shapes.matrix("model.visual.merger.linear_fc2.weight")?;
    Ok(json!({
        "depth": shapes.count(BLOCKS),
        "hidden_size": hidden,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": inner,
        "num_heads": heads,
        "in_channels": channels,
        "patch_size": side,
        "temporal_patch_size": frames,
        "spatial_merge_size": merged.checked_div(hidden).unwrap_or(0).isqrt(),
        "out_hidden_size": out,
        "num_position_embeddings": positions,
        "deepstack_visual_indexes": deepstack,
    }))
}

macro_rules! vision {
    ($from:literal, $to:literal) => {
        whole(concat!($from, ".*"), concat!("model.visual.", $to, ".*"))
    };
}

/// llama.cpp's names of the vision tower, in its `mmproj` file. Two frames of a patch's kernel are a tensor each there, and features
/// have the numbers of their blocks: both are seen to in [`with_vision`].
static MMPROJ: Naming = Naming {
    title: "as in llama.cpp",
    prefixes: &[""],
    marks: &[
        "v.patch_embd.weight.1",
        "v.position_embd.weight",
        "mm.2.weight",
    ],
    rules: &[
        vision!("v.patch_embd", "patch_embed.proj"),
        vision!("v.position_embd", "pos_embed"),
        vision!("v.blk.#.ln1", "blocks.#.norm1"),
        vision!("v.blk.#.ln2", "blocks.#.norm2"),
        vision!("v.blk.#.attn_qkv", "blocks.#.attn.qkv"),
        vision!("v.blk.#.attn_out", "blocks.#.attn.proj"),
        vision!("v.blk.#.ffn_up", "blocks.#.mlp.linear_fc1"),
        vision!("v.blk.#.ffn_down", "blocks.#.mlp.linear_fc2"),
        vision!("v.post_ln", "merger.norm"),
        vision!("mm.0", "merger.linear_fc1"),
        vision!("mm.2", "merger.linear_fc2"),
        vision!("v.deepstack.#.norm", "deepstack_merger_list.#.norm"),
        vision!("v.deepstack.#.fc1", "deepstack_merger_list.#.linear_fc1"),
        vision!("v.deepstack.#.fc2", "deepstack_merger_list.#.linear_fc2"),
    ],
};

/// A text encoder without a vision tower together with the tower in `mmproj`, a file as llama.cpp has it beside its language models;
/// and the tower's configuration, as the reference's `config.json` has it. Both have the reference's names then.
///
/// # Errors
/// [`Error::UnknownFile`] for another file; a second tower, and one that makes no sense.
pub fn with_vision(text: &Checkpoint, mmproj: &Checkpoint) -> Result<(Checkpoint, Value)> {
    const KERNELS: [&str; 2] = ["v.patch_embd.weight", "v.patch_embd.weight.1"];
    if MMPROJ.prefixes_in(mmproj).is_empty() {
        let names = mmproj
            .tensors()
            .map(|(name, _)| name.escape_debug().to_string());
        return Err(Error::UnknownFile {
            path: mmproj.path().to_owned(),
            looked_for: format!("vision tower (Qwen3-VL): {}", MMPROJ.marks.join(" and ")),
            found: names.take(4).collect::<Vec<_>>().join(", "),
        });
    }
    // Blocks that features are taken behind, in order.
    let block_of = |name: &str| {
        name.strip_prefix("v.deepstack.")?
            .split('.')
            .next()?
            .parse()
            .ok()
    };
    let blocks: BTreeSet<usize> = mmproj
        .tensors()
        .filter_map(|(name, _)| block_of(name))
        .collect();
    let blocks: Vec<usize> = blocks.into_iter().collect();

    let mut selection = Selection::new(text);
    selection.add_all(text)?;
    selection.stack(PATCHES, mmproj, &KERNELS, 2)?;
    for (stored, _) in mmproj.tensors().filter(|(name, _)| !KERNELS.contains(name)) {
        for (name, rows) in MMPROJ.in_model(stored) {
            let place = block_of(stored).and_then(|block| blocks.binary_search(&block).ok());
            let name = match (block_of(stored), place) {
                (Some(block), Some(place)) => {
                    name.replacen(&format!("list.{block}."), &format!("list.{place}."), 1)
                }
                _ => name,
            };
            selection.add(name, mmproj, stored, rows)?;
        }
    }
    let joined = selection.finish()?;
    let heads = mmproj.metadata().get("clip.vision.attention.head_count");
    let heads = heads.and_then(|heads| heads.parse().ok()).unwrap_or(16);
    let config =
        vision_sizes(Shapes::of(&joined), heads, &blocks).map_err(|reason| Error::Config {
            path: mmproj.path().to_owned(),
            reason,
        })?;
    Ok((joined, config))
}
