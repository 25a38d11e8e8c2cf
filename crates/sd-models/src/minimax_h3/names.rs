//! How files name the transformer's tensors, and what their shapes say of it.

use sd_backend::Component;
use sd_graph::{Checkpoint, Declarations, Selection};
use serde_json::{Value, json};

use super::config::{PATCH, TransformerConfig};
use super::preparation::Preparation;
use super::transformer::Transformer;
use crate::config::from_json;
use crate::error::{Error, Result};
use crate::families::{Found, Known, config_of, part_in};
use crate::naming::{Naming, Rule, part, whole};
use crate::shapes::Shapes;

/// What names begin with: none in diffusers' files and most GGUF files, the others in files of ComfyUI and of whole models.
const PREFIXES: &[&str] = &[
    "",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
];

/// The transformer of MiniMax H3. Gate and value of feed-forwards are matrices of their own here, which no file has: diffusers keeps
/// the value's rows first, all others the gate's.
pub(crate) static TRANSFORMER: Known = Known {
    family: "MiniMax H3",
    component: Component::Diffusion,
    key: "sd.config.diffusion",
    shared_key_class: None,
    architecture: "minimax_h3",
    namings: &[
        Naming {
            title: "as in diffusers",
            prefixes: PREFIXES,
            marks: &["audio_proj_in.weight", "context_embedder.weight"],
            rules: DIFFUSERS,
        },
        Naming {
            title: "as published",
            prefixes: PREFIXES,
            marks: &["video_patch_proj.weight", "audio_patch_proj.weight"],
            rules: PUBLISHED,
        },
    ],
    config,
    declare: |checkpoint, options, config| {
        let path = checkpoint.path();
        let config = TransformerConfig::checked(from_json(path, config)?, path)?;
        let declarations = Declarations::new(checkpoint, options);
        let root = declarations.root();
        Preparation::new(&root, &config);
        Transformer::new(&root, &config);
        Ok(declarations.finish()?)
    },
};

/// How the rows of queries, keys and values follow each other in files that have them as one matrix. The shapes are the same, so
/// whoever has the file must know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QkvOrder {
    /// All queries, all keys, all values: ComfyUI's files and those made of them.
    #[default]
    Stacked,
    /// Queries, keys and values of one head, then those of the next: the files of the model's authors.
    ByHead,
}

/// The transformer in `checkpoint` under the model's names, and its configuration as its metadata or its shapes tell it.
///
/// # Errors
/// [`Error::UnknownFile`](crate::Error::UnknownFile) if it is not there, [`Error::Config`](crate::Error::Config) for shapes that are
/// no such transformer's, and tensors that cannot be what their names say.
pub fn transformer_in(
    checkpoint: &Checkpoint,
    order: QkvOrder,
) -> Result<(Checkpoint, TransformerConfig)> {
    let part = select(checkpoint, order)?;
    let path = checkpoint.path();
    let config = config_of(&TRANSFORMER, &part).map_err(|reason| Error::Config {
        path: path.to_owned(),
        reason,
    })?;
    let config = TransformerConfig::checked(from_json(path, config)?, path)?;
    Ok((part, config))
}

/// The transformer in `checkpoint` under the model's names.
///
/// # Errors
/// As for [`transformer_in`].
pub(super) fn select(checkpoint: &Checkpoint, order: QkvOrder) -> Result<Checkpoint> {
    let found = part_in(checkpoint, &TRANSFORMER)?;
    match order {
        QkvOrder::Stacked => found.select(checkpoint),
        QkvOrder::ByHead => select_by_head(checkpoint, &found),
    }
}

/// What such a matrix is called.
const FUSED: &str = ".attn.qkv_proj.weight";

fn select_by_head(checkpoint: &Checkpoint, found: &Found) -> Result<Checkpoint> {
    let mut selection = Selection::new(checkpoint);
    for (stored, info) in checkpoint.tensors() {
        let Some(name) = stored.strip_prefix(&*found.prefix) else {
            continue;
        };
        let names = found.naming.in_model(name);
        let Some(before) = stored.strip_suffix(FUSED) else {
            for (name, rows) in names {
                selection.add(name, checkpoint, stored, rows)?;
            }
            continue;
        };
        // As many channels as the norm of a head's queries has weights.
        let norm = checkpoint.get(&format!("{before}.attn.q_norm.weight"));
        let channels: usize = norm.map_or(0, |norm| norm.shape.iter().product());
        let rows = info.shape.first().copied().unwrap_or(0);
        let heads = rows.checked_div(channels.saturating_mul(3)).unwrap_or(0);
        for (name, rows) in names {
            selection.add_grouped(name, checkpoint, stored, heads, rows)?;
        }
    }
    Ok(selection.finish()?)
}

/// Heads of the queries, keys or values `weight` of a checkpoint with the model's names. DiffSynth-Studio trains on the authors' files as
/// they are, so that LoRAs have their rows head by head; of all that write LoRAs for this model it alone writes PEFT's names.
pub(super) fn heads_of(checkpoint: &Checkpoint, weight: &str) -> Option<usize> {
    let before = ["to_q", "to_k", "to_v"]
        .iter()
        .find_map(|part| weight.strip_suffix(&format!("{part}.weight")))?;
    let elements = |name: &str| Some(checkpoint.get(name)?.shape.iter().product::<usize>());
    let rows = *checkpoint.get(weight)?.shape.first()?;
    rows.checked_div(elements(&format!("{before}norm_q.weight"))?)
}

const VALUE: usize = 0;
const DIFFUSERS: &[Rule] = &[
    part(
        "transformer_blocks.#.ff.net.0.proj.*",
        "transformer_blocks.#.ff.value.*",
        VALUE,
        2,
    ),
    part(
        "transformer_blocks.#.ff.net.0.proj.*",
        "transformer_blocks.#.ff.gate.*",
        1 - VALUE,
        2,
    ),
    part(
        "token_refiner.refiner_blocks.#.ff.net.0.proj.*",
        "token_refiner.refiner_blocks.#.ff.value.*",
        VALUE,
        2,
    ),
    part(
        "token_refiner.refiner_blocks.#.ff.net.0.proj.*",
        "token_refiner.refiner_blocks.#.ff.gate.*",
        1 - VALUE,
        2,
    ),
];

const PUBLISHED: &[Rule] = &[
    whole("video_patch_proj.*", "proj_in.*"),
    whole("audio_patch_proj.*", "audio_proj_in.*"),
    whole("condition_proj.*", "context_embedder.*"),
    whole("time_embedder.proj_in.*", "time_embedder.linear_1.*"),
    whole("time_embedder.proj_out.*", "time_embedder.linear_2.*"),
    whole("final_layer.norm.*", "norm_out.norm.*"),
    whole("final_layer.adaln_proj.linear.*", "norm_out.linear.*"),
    whole("final_layer.video_out.*", "proj_out.*"),
    whole("final_layer.audio_out.*", "audio_proj_out.*"),
    whole("blocks.#.norm1.*", "transformer_blocks.#.norm1.*"),
    whole("blocks.#.norm2.*", "transformer_blocks.#.norm2.*"),
    whole("blocks.#.adaln_proj.*", "transformer_blocks.#.adaln_proj.*"),
    part(
        "blocks.#.attn.qkv_proj.*",
        "transformer_blocks.#.attn.to_q.*",
        0,
        3,
    ),
    part(
        "blocks.#.attn.qkv_proj.*",
        "transformer_blocks.#.attn.to_k.*",
        1,
        3,
    ),
    part(
        "blocks.#.attn.qkv_proj.*",
        "transformer_blocks.#.attn.to_v.*",
        2,
        3,
    ),
    whole(
        "blocks.#.attn.q_norm.*",
        "transformer_blocks.#.attn.norm_q.*",
    ),
    whole(
        "blocks.#.attn.k_norm.*",
        "transformer_blocks.#.attn.norm_k.*",
    ),
    whole(
        "blocks.#.attn.out_proj.*",
        "transformer_blocks.#.attn.to_out.0.*",
    ),
    part("blocks.#.mlp.fc1.*", "transformer_blocks.#.ff.gate.*", 0, 2),
    part(
        "blocks.#.mlp.fc1.*",
        "transformer_blocks.#.ff.value.*",
        1,
        2,
    ),
    whole("blocks.#.mlp.fc2.*", "transformer_blocks.#.ff.net.2.*"),
    whole(
        "token_refiner.blocks.#.norm1.*",
        "token_refiner.refiner_blocks.#.norm1.*",
    ),
    whole(
        "token_refiner.blocks.#.norm2.*",
        "token_refiner.refiner_blocks.#.norm2.*",
    ),
    part(
        "token_refiner.blocks.#.attn.qkv_proj.*",
        "token_refiner.refiner_blocks.#.attn.to_q.*",
        0,
        3,
    ),
    part(
        "token_refiner.blocks.#.attn.qkv_proj.*",
        "token_refiner.refiner_blocks.#.attn.to_k.*",
        1,
        3,
    ),
    part(
        "token_refiner.blocks.#.attn.qkv_proj.*",
        "token_refiner.refiner_blocks.#.attn.to_v.*",
        2,
        3,
    ),
    whole(
        "token_refiner.blocks.#.attn.q_norm.*",
        "token_refiner.refiner_blocks.#.attn.norm_q.*",
    ),
    whole(
        "token_refiner.blocks.#.attn.k_norm.*",
        "token_refiner.refiner_blocks.#.attn.norm_k.*",
    ),
    whole(
        "token_refiner.blocks.#.attn.out_proj.*",
        "token_refiner.refiner_blocks.#.attn.to_out.0.*",
    ),
    part(
        "token_refiner.blocks.#.mlp.fc1.*",
        "token_refiner.refiner_blocks.#.ff.gate.*",
        0,
        2,
    ),
    part(
        "token_refiner.blocks.#.mlp.fc1.*",
        "token_refiner.refiner_blocks.#.ff.value.*",
        1,
        2,
    ),
    whole(
        "token_refiner.blocks.#.mlp.fc2.*",
        "token_refiner.refiner_blocks.#.ff.net.2.*",
    ),
];

/// `config.json` by the shapes of the tensors. They do not tell the base of rotary frequencies, nor how many pairs of channels an axis
/// turns, nor what is added in norms: these are as published, the pairs in proportion to the head.
fn config(checkpoint: &Checkpoint) -> Result<Value, String> {
    let shapes = Shapes::of(checkpoint);
    let [hidden, video] = shapes.matrix("proj_in.weight")?;
    let [_, sound] = shapes.matrix("audio_proj_in.weight")?;
    let [_, text] = shapes.matrix("context_embedder.weight")?;
    let head = shapes.vector("transformer_blocks.0.attn.norm_q.weight")?;
    let [inner, _] = shapes.matrix("transformer_blocks.0.attn.to_q.weight")?;
    let [ffn, _] = shapes.matrix("transformer_blocks.0.ff.gate.weight")?;
    let [_, time] = shapes.matrix("norm_out.linear.weight")?;
    let patch: usize = PATCH.iter().product();
    if head == 0 || !inner.is_multiple_of(head) || !video.is_multiple_of(patch) {
        return Err(format!(
            "queries of {inner} channels are no heads of {head}, or {video} channels no squares of {patch}"
        ));
    }
    let table = match shapes.has("adaln_t_table") {
        true => Some(shapes.matrix("adaln_t_table")?[0]),
        false => None,
    };
    // A table has no layers before it, and nothing is made of these sizes then.
    let (frequencies, time_hidden) = match table {
        Some(_) => (256, hidden),
        None => {
            let [time_hidden, frequencies] = shapes.matrix("time_embedder.linear_1.weight")?;
            (frequencies, time_hidden)
        }
    };
    Ok(json!({
        "num_attention_heads": inner / head,
        "attention_head_dim": head,
        "hidden_size": hidden,
        "num_layers": shapes.count("transformer_blocks.#.norm1.weight"),
        "num_refiner_layers": shapes.count("token_refiner.refiner_blocks.#.norm1.weight"),
        "ffn_dim": ffn,
        "in_channels": video / patch,
        "audio_in_channels": sound,
        "patch_size": PATCH,
        "text_dim": text,
        "freq_dim": frequencies,
        "time_embed_hidden_dim": time_hidden,
        "time_embed_dim": time,
        // 16 of 128.
        "rope_freq_dim": head / 8,
        "rope_theta": 10000.0,
        "norm_eps": 1e-5,
        "qk_norm_eps": 1e-5,
        "final_norm_eps": 1e-5,
        "time_table": table,
    }))
}
