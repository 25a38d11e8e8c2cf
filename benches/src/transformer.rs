//! The transformer of Qwen-Image 2.1 as published, with random weights that are made on the spot.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::Result;
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
    let mut offset = 0;
    let mut header = serde_json::Map::new();
    for (name, shape) in tensors {
        let end = offset + shape.iter().product::<usize>() * 2;
        let entry =
            serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]});
        header.insert(format!("{name}.weight"), entry);
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
    let mut state = 1_u32;
    // Numbers around 1/64 of both signs, 32 MiB of them again and again.
    let block: Vec<u8> = (0..16 << 20)
        .flat_map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (((state >> 16) as u16 & 0x807f) | 0x3c00).to_le_bytes()
        })
        .collect();
    while offset > 0 {
        let part = offset.min(block.len());
        file.write_all(&block[..part])?;
        offset -= part;
    }
    file.flush()?;
    Ok(std::fs::rename(part, path)?)
}
