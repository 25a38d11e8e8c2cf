//! Checkpoints of published shapes with random weights.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// The filter of all activations of the VAE for sound, which its files repeat for each: other numbers would be another VAE's.
const FILTER: [f32; 12] = [
    0.002_028_964_7,
    0.009_389_466,
    -0.025_543_459,
    -0.057_657_383,
    0.128_572_58,
    0.443_209_8,
    0.443_209_8,
    0.128_572_58,
    -0.057_657_383,
    -0.025_543_459,
    0.009_389_466,
    0.002_028_964_7,
];

/// Writes a VAE as diffusers has it: kernels of random numbers that keep the size of what passes through them, norms of 1 and
/// biases of 0, in single precision. One that is there is kept.
pub(super) fn write(folder: &Path, table: &Value) -> Result<()> {
    let path = folder.join("diffusion_pytorch_model.safetensors");
    if path.is_file() {
        return Ok(());
    }
    fs::create_dir_all(folder)?;
    fs::write(folder.join("config.json"), table["config"].to_string())?;
    let tensors = table["tensors"].as_object().context("no tensors")?;
    let mut shapes = Vec::new();
    let mut header = serde_json::Map::new();
    let mut offset = 0;
    for (name, shape) in tensors {
        let shape: Vec<usize> = serde_json::from_value(shape.clone())?;
        let end = offset + shape.iter().product::<usize>() * 4;
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [offset, end]});
        header.insert(name.clone(), entry);
        offset = end;
        shapes.push((name, shape));
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize((header.len() + 8).next_multiple_of(64) - 8, b' ');
    let part = folder.join("part");
    let mut file = BufWriter::with_capacity(1 << 22, File::create(&part)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let mut state = 1_u32;
    for (name, shape) in shapes {
        let count: usize = shape.iter().product();
        // Uniform numbers between -1 and 1 have a variance of 1/3; activations are about half of what goes in.
        let inputs: usize = shape.iter().skip(1).product();
        let scale = (3.0 / inputs.max(1) as f32).sqrt();
        for at in 0..count {
            let value: f32 = match name.rsplit('.').next() {
                Some("gamma") => 1.0,
                Some("bias") => 0.0,
                Some("filter") => FILTER[at % FILTER.len()],
                // Lengths of kernels that stand beside their directions: with 0.7 what residual blocks add and what transposed convolutions
                // take away are about as much.
                Some("weight_g") => 0.7,
                // What is inside a sine is of the size that it was trained to: 1, kept as it is or as its logarithm.
                Some("alpha" | "beta") if shape.len() > 1 => 1.0,
                _ => {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let value = ((state >> 8) as f32 / 8_388_608.0 - 1.0) * scale;
                    match name.rsplit('.').next() {
                        Some("alpha" | "beta") => value * 0.2,
                        _ => value,
                    }
                }
            };
            file.write_all(&value.to_le_bytes())?;
        }
    }
    file.flush()?;
    Ok(fs::rename(part, path)?)
}
