//! Transformers as published, with random weights that are made on the spot.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result};
use sd_models::qwen_image_2_1::TransformerConfig;

/// The published shape, with so many blocks (32 are published).
pub fn config(blocks: usize) -> Result<TransformerConfig> {
    Ok(serde_json::from_value(serde_json::json!({
        "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56], "causal_condition": true,
        "context_in_dim": 4096, "eps": 1e-6, "in_channels": 64, "mlp_ratio": 3,
        "num_attention_heads": 32, "num_layers": blocks, "out_channels": 64, "patch_size": 1
    }))?)
}

/// Numbers between -1 and 1 for an input; two seeds give two inputs.
pub fn numbers(count: usize, seed: usize) -> Vec<f32> {
    let number = |n: usize| ((n * 37 + n / 257 * 11 + seed * 31) % 257) as f32 / 128.0 - 1.0;
    (0..count).map(number).collect()
}

/// Writes a checkpoint that the transformer of `config` can be loaded from; one of that many bytes that is there is kept, since
/// what is written is the same each time.
pub fn write(path: &Path, config: &TransformerConfig, blocks: usize) -> Result<()> {
    let dim = config.inner_dim();
    let inner = 3 * dim;
    let mut tensors = vec![
        (
            "time_text_embed.timestep_embedder.linear_1".to_owned(),
            vec![dim, 256],
        ),
        (
            "time_text_embed.timestep_embedder.linear_2".to_owned(),
            vec![dim, dim],
        ),
        ("txt_in.text_norm".to_owned(), vec![4096]),
        ("txt_in.in_layer".to_owned(), vec![dim, 4096]),
        ("txt_in.out_layer".to_owned(), vec![dim, dim]),
        ("img_in".to_owned(), vec![dim, 64]),
        ("modulation.1".to_owned(), vec![4 * dim, dim]),
        ("norm_out.linear".to_owned(), vec![dim, dim]),
        ("proj_out".to_owned(), vec![64, dim]),
    ];
    for block in 0..blocks {
        let name = |part: &str| format!("transformer_blocks.{block}.{part}");
        for part in ["to_q", "to_k", "to_v", "to_out.0"] {
            tensors.push((name(&format!("attn.{part}")), vec![dim, dim]));
        }
        tensors.push((name("attn.norm_q"), vec![128]));
        tensors.push((name("attn.norm_k"), vec![128]));
        tensors.push((name("img_mlp.proj"), vec![inner, dim]));
        tensors.push((name("img_mlp.gate_layer"), vec![inner, dim]));
        tensors.push((name("img_mlp.out"), vec![dim, inner]));
    }
    let tensors = tensors.into_iter().map(|(name, shape)| Written {
        name: format!("{name}.weight"),
        shape,
        fill: Fill::Around(-7),
    });
    write_file(path, &tensors.collect::<Vec<_>>())
}

/// Writes a folder as diffusers has it with the published MiniMax H3 transformer, of which 50 blocks are published. A checkpoint of
/// as many bytes that is there is kept.
pub fn write_h3(folder: &Path, blocks: usize) -> Result<()> {
    let text =
        include_str!("../../crates/sd-models/tests/fixtures/published/minimax_h3_transformer.json");
    let mut table: serde_json::Value = serde_json::from_str(text)?;
    table["config"]["num_layers"] = blocks.into();
    let mut tensors = Vec::new();
    for (name, shape) in table["tensors"].as_object().context("no tensors")? {
        let block = name.strip_prefix("transformer_blocks.");
        let block = block.and_then(|name| name.split('.').next()?.parse().ok());
        if block.is_some_and(|block: usize| block >= blocks) {
            continue;
        }
        tensors.push(Written {
            name: name.clone(),
            shape: serde_json::from_value(shape.clone())?,
            fill: match () {
                () if name.contains("norm") && !name.contains("linear") => Fill::Ones,
                // What gates let through then matters, and differs between text, sound and video.
                () if name.contains("adaln_proj") && name.ends_with("bias") => Fill::Around(-2),
                // Times then matter.
                () if name.starts_with("time_embedder") => Fill::Around(-5),
                () => Fill::Around(-7),
            },
        });
    }
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join("config.json"), table["config"].to_string())?;
    write_file(&folder.join(H3_FILE), &tensors)
}

/// The checkpoint in a folder of diffusers.
pub const H3_FILE: &str = "diffusion_pytorch_model.safetensors";

/// A tensor that is made.
struct Written {
    name: String,
    shape: Vec<usize>,
    fill: Fill,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fill {
    Ones,
    /// Of both signs, from two to this power up to twice that.
    Around(i16),
}

impl Fill {
    /// A number in BF16 from 16 random bits.
    fn number(self, random: u16) -> u16 {
        match self {
            Fill::Ones => 0x3f80,
            Fill::Around(power) => (random & 0x807f) | ((127 + power).unsigned_abs() << 7),
        }
    }
}

/// Writes tensors in BF16; a file of as many bytes that is there is kept.
fn write_file(path: &Path, tensors: &[Written]) -> Result<()> {
    let mut offset = 0;
    let mut header = serde_json::Map::new();
    for Written { name, shape, .. } in tensors {
        let end = offset + shape.iter().product::<usize>() * 2;
        let entry =
            serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]});
        header.insert(name.clone(), entry);
        offset = end;
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize((header.len() + 8).next_multiple_of(64) - 8, b' ');
    let bytes = (8 + header.len() + offset) as u64;
    if path.metadata().is_ok_and(|found| found.len() == bytes) {
        return Ok(());
    }
    // Under another name first: whoever has an older one open keeps it.
    let part = path.with_extension("part");
    let mut file = BufWriter::with_capacity(1 << 22, File::create(&part)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    // 32 MiB of each kind of numbers, again and again: a tensor goes on where the one before ended.
    let mut blocks: Vec<(Fill, Vec<u8>)> = Vec::new();
    let mut at = 0;
    for Written { shape, fill, .. } in tensors {
        if !blocks.iter().any(|(other, _)| other == fill) {
            blocks.push((*fill, block(*fill)));
        }
        let found = blocks.iter().find(|(other, _)| other == fill);
        let (_, block) = found.context("no block")?;
        let mut left = shape.iter().product::<usize>() * 2;
        while left > 0 {
            let end = block.len().min(at + left);
            file.write_all(&block[at..end])?;
            left -= end - at;
            at = end % block.len();
        }
    }
    file.flush()?;
    Ok(std::fs::rename(part, path)?)
}

fn block(fill: Fill) -> Vec<u8> {
    let mut state = 1_u32;
    (0..16 << 20)
        .flat_map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            fill.number((state >> 16) as u16).to_le_bytes()
        })
        .collect()
}
