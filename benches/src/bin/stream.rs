//! What streaming weights costs: one call of the published Qwen-Image 2.1 transformer (32 blocks, 13.3 GiB in BF16, random
//! weights) with all weights on the device, and with budgets for half, a quarter and a tenth of them, the others coming from
//! the host's memory, pinned where the device offers that, and from the disk.
//!
//! ```sh
//! cargo run --release -p sd-benches --bin stream -- --device CUDA0 --backends DIR
//! ```
//!
//! Each line is a budget for the device: where the other weights come from, seconds for one call (median of `--runs` after
//! one to warm up), its ratio to the first line, seconds in which the device waited for weights, bytes of weights that were
//! moved in a call and GiB of them a second, the most that the ledger held, and seconds for loading and planning.
//! `--blocks` makes a smaller model for machines with less memory.
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
    /// Where the weights come from that the budget has no room for: `host`, `disk`.
    #[arg(long, value_delimiter = ',', value_parser = residence, default_value = "host,disk")]
    from: Vec<Residence>,
    /// Parts of the weights that the budgets have room for, beside all.
    #[arg(long, value_delimiter = ',', default_values_t = [50, 25, 10])]
    percent: Vec<u64>,
}

fn residence(text: &str) -> Result<Residence, String> {
    let mut all = [Residence::Host, Residence::Disk].into_iter();
    all.find(|residence| residence.to_string() == text)
        .ok_or_else(|| "weights come from `host` or `disk`".to_owned())
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
    let pinned = match device.has_pinned_memory() {
        true => "pinned",
        false => "ordinary",
    };
    println!(
        "{} blocks, {} in BF16, {}x{}, {} tokens of text, {pinned} host memory, {device} ({})",
        arguments.blocks,
        Bytes(checkpoint.bytes()),
        arguments.size,
        arguments.size,
        arguments.text,
        device.description()
    );
    println!(
        "{:>6} {:>5} {:>10} {:>9} {:>7} {:>9} {:>12} {:>7} {:>12} {:>9} {:>9}",
        "from",
        "fits",
        "budget",
        "call s",
        "ratio",
        "waiting s",
        "moved",
        "GiB/s",
        "held",
        "segments",
        "loading s"
    );
    let case = |residence, percent, resident| {
        let case = (residence, percent, resident);
        measure(&arguments, &config, &checkpoint, device, case)
    };
    let resident = case(Residence::Device, 100, None)?;
    for &residence in &arguments.from {
        for &percent in &arguments.percent {
            case(residence, percent, Some(resident))?;
        }
    }
    std::fs::remove_file(&arguments.file)?;
    Ok(())
}

/// Prints the line of one budget, for weights that live there, and returns the seconds of one call.
fn measure(
    arguments: &Arguments,
    config: &TransformerConfig,
    checkpoint: &Checkpoint,
    device: Device,
    (residence, percent, resident): (Residence, u64, Option<f64>),
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
    let begin = Instant::now();
    weights.live(residence, Mapping::Auto);
    weights.stream(residence != Residence::Device);
    weights.load(&backend, &cancel, &mut |_: &Progress| {})?;
    let mut plan = Plan::build(&backend, graph)?;
    let loading = begin.elapsed().as_secs_f64();
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
        "{:>6} {:>4}% {:>10} {:9.3} {:7.2} {:9.3} {:>12} {:7.1} {:>12} {:>9} {:9.1}",
        residence.to_string(),
        percent,
        Bytes(budget).to_string(),
        call,
        call / resident.unwrap_or(call),
        report.waiting.as_secs_f64(),
        Bytes(report.weight_bytes).to_string(),
        report.weight_bytes as f64 / call / (1_u64 << 30) as f64,
        Bytes(report.most.total()).to_string(),
        report.segments,
        loading
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
