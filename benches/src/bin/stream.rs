//! What streaming weights costs: one call of the published Qwen-Image 2.1 transformer (32 blocks, 13.3 GiB in BF16, random
//! weights) with all weights on the device, and with budgets for half, a quarter and a tenth of them.
//!
//! ```sh
//! cargo run --release -p sd-benches --bin stream -- --device CUDA0 --backends DIR
//! ```
//!
//! Each line is a budget for the device: seconds for one call (median of `--runs` after one to warm up), its ratio to the
//! first line, seconds in which the device waited for weights, bytes of weights that were moved, and the most that the
//! ledger held. `--blocks` makes a smaller model for machines with less memory.
#![allow(clippy::print_stdout)]

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use sd_backend::{
    Backend, BackendOptions, Bytes, Device, Ledger, Mapping, MemoryBudget, MemoryBudgets, Residence,
};
use sd_graph::{
    Cancel, Checkpoint, Declarations, Estimate, Graph, LoadOptions, Plan, Progress, Weights,
};
use sd_models::qwen_image_2_1::{Layout, Transformer, TransformerConfig, timestep_embedding};

/// What streaming weights costs.
#[derive(Debug, Parser)]
struct Arguments {
    /// Device to run on.
    #[arg(long, default_value = "auto")]
    device: String,
    /// Folder of backends to load first.
    #[arg(long)]
    backends: Option<PathBuf>,
    /// Where to write the checkpoint.
    #[arg(long, default_value_os_t = std::env::temp_dir().join("sd-stream.safetensors"))]
    file: PathBuf,
    /// Blocks of the transformer.
    #[arg(long, default_value_t = 32)]
    blocks: usize,
    /// Sides of the picture in pixels.
    #[arg(long, default_value_t = 1024)]
    size: usize,
    /// Tokens of text.
    #[arg(long, default_value_t = 64)]
    text: usize,
    /// Calls that are measured.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Stream from the disk instead of from the host's memory.
    #[arg(long)]
    from_disk: bool,
    /// Parts of the weights that the budgets have room for.
    #[arg(long, value_delimiter = ',', default_values_t = [100, 50, 25, 10])]
    percent: Vec<u64>,
}

impl Arguments {
    /// Where weights that stream live.
    fn residence(&self) -> Residence {
        match self.from_disk {
            true => Residence::Disk,
            false => Residence::Host,
        }
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Some(folder) = &arguments.backends {
        Device::load_backends(folder)?;
    }
    let device = Device::select(&arguments.device)?;
    let config: TransformerConfig = serde_json::from_value(serde_json::json!({
        "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56], "causal_condition": true,
        "context_in_dim": 4096, "eps": 1e-6, "in_channels": 64, "mlp_ratio": 3,
        "num_attention_heads": 32, "num_layers": arguments.blocks, "out_channels": 64, "patch_size": 1
    }))?;
    write(&arguments.file, &config, arguments.blocks)?;
    let checkpoint = Checkpoint::open(&arguments.file)?;
    println!(
        "{} blocks, {} in BF16, {}x{}, {} tokens of text, weights from {}, {device} ({})",
        arguments.blocks,
        Bytes(checkpoint.bytes()),
        arguments.size,
        arguments.size,
        arguments.text,
        arguments.residence(),
        device.description()
    );
    println!(
        "{:>16} {:>9} {:>7} {:>9} {:>12} {:>12} {:>9}",
        "budget", "call s", "ratio", "waiting s", "moved", "held", "segments"
    );
    let mut resident = None;
    for &percent in &arguments.percent {
        let line = measure(&arguments, &config, &checkpoint, device, percent, resident)?;
        resident = resident.or(Some(line));
    }
    std::fs::remove_file(&arguments.file)?;
    Ok(())
}

/// Prints the line of one budget and returns the seconds of one call.
fn measure(
    arguments: &Arguments,
    config: &TransformerConfig,
    checkpoint: &Checkpoint,
    device: Device,
    percent: u64,
    resident: Option<f64>,
) -> Result<f64> {
    let declarations = Declarations::new(checkpoint, LoadOptions::default());
    let transformer = Transformer::new(&declarations.root(), config);
    let mut weights = Weights::new(checkpoint.clone(), declarations.finish()?);
    let side = arguments.size / 16;
    let layout = Layout::text_to_image(arguments.text, side, side);
    let graph = |g: Graph<'_>| {
        let latents = g.input::<f32>("latents", [layout.image_tokens(), config.in_channels]);
        let text = g.input::<f32>("text", [layout.text_tokens(), config.context_in_dim]);
        let timestep = g.input::<f32>("timestep", [2, timestep_embedding(0.0).len()]);
        g.output(
            "velocity",
            transformer.forward(g, &layout, latents, text, timestep),
        );
    };
    let free = Backend::new(device, &BackendOptions::default())?;
    let estimate = Estimate::of(&free, graph)?;
    let compute = estimate.compute_bytes.max(estimate.segmented_bytes) + estimate.constant_bytes;
    drop(free);
    let budget = compute + weights.bytes() * percent / 100 + (64 << 20);
    let budgets = MemoryBudgets::default().with(&device.name(), MemoryBudget::Bytes(budget));
    let ledger = Ledger::new(budgets);
    let mut backend = Backend::new(device, &BackendOptions::default().ledger(&ledger))?;
    let cancel = Cancel::new();
    let is_streamed = percent < 100;
    let residence = if is_streamed {
        arguments.residence()
    } else {
        Residence::Device
    };
    weights.live(residence, Mapping::Auto);
    weights.stream(is_streamed);
    weights.load(&backend, &cancel, &mut |_: &Progress| {})?;
    let mut plan = Plan::build(&backend, graph)?;
    let latents: Vec<f32> = (0..layout.image_tokens() * config.in_channels)
        .map(|n| ((n * 37) % 257) as f32 / 128.0 - 1.0)
        .collect();
    let text: Vec<f32> = (0..layout.text_tokens() * config.context_in_dim)
        .map(|n| ((n * 31) % 257) as f32 / 128.0 - 1.0)
        .collect();
    let mut seconds = Vec::new();
    let mut last = None;
    for run in 0..=arguments.runs {
        let begin = Instant::now();
        plan.set("latents", &latents)?;
        plan.set("text", &text)?;
        plan.set(
            "timestep",
            [timestep_embedding(0.5), timestep_embedding(0.0)].as_flattened(),
        )?;
        let report = plan.run(&mut backend, &cancel)?;
        let velocity = plan.read::<f32>("velocity")?;
        anyhow::ensure!(
            velocity.iter().all(|value| value.is_finite()),
            "the result is no finite number"
        );
        if run > 0 {
            seconds.push(begin.elapsed().as_secs_f64());
            last = Some(report);
        }
    }
    seconds.sort_by(f64::total_cmp);
    let call = seconds[seconds.len() / 2];
    let report = last.context("no run")?;
    println!(
        "{:>4}% {:>10} {:9.3} {:7.2} {:9.3} {:>12} {:>12} {:>9}",
        percent,
        Bytes(budget).to_string(),
        call,
        call / resident.unwrap_or(call),
        report.waiting.as_secs_f64(),
        Bytes(report.weight_bytes).to_string(),
        Bytes(report.used.total()).to_string(),
        report.segments
    );
    Ok(call)
}

/// Writes a checkpoint that the transformer of `config` can be loaded from.
fn write(path: &Path, config: &TransformerConfig, blocks: usize) -> Result<()> {
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
    let mut file = BufWriter::with_capacity(1 << 22, File::create(path)?);
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
    Ok(())
}
