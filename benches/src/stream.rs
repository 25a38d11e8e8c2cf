//! What streaming weights costs: one call of the published Qwen-Image 2.1 transformer (32 blocks, 13.3 GiB in BF16, random
//! weights) with all weights on the device, and with budgets for half, a quarter and a tenth of them, the others coming from
//! the host's memory, pinned where the device offers that, and from the disk.
//!
//! ```sh
//! cargo xtask bench stream --device CUDA0 --backends DIR
//! ```
//!
//! Each line is a budget for the device: where the other weights come from, seconds for one call (median of `--runs` after
//! one to warm up), its ratio to the first line, seconds in which the device waited for weights, bytes of weights that were
//! moved in a call and GiB of them a second, the most that the ledger held, and seconds for loading and planning.
//! `--blocks` makes a smaller model for machines with less memory.
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Args;
use sd_backend::{
    Backend, BackendOptions, Bytes, Device, Ledger, Mapping, MemoryBudget, MemoryBudgets, Residence,
};
use sd_graph::{
    Cancel, Checkpoint, Declarations, Estimate, Graph, LoadOptions, Plan, Progress, RunReport,
    Weights,
};
use sd_models::qwen_image_2_1::{Layout, Transformer, TransformerConfig, timestep_embedding};

use crate::results::median;
use crate::transformer;

/// What streaming weights costs.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Device to run on.
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Folder of backends to load first.
    #[arg(long)]
    pub backends: Option<PathBuf>,
    /// Where to write the checkpoint.
    #[arg(long, default_value_os_t = std::env::temp_dir().join("sd-stream.safetensors"))]
    pub file: PathBuf,
    /// Blocks of the transformer.
    #[arg(long, default_value_t = 32)]
    pub blocks: usize,
    /// Sides of the picture in pixels.
    #[arg(long, default_value_t = 1024)]
    pub size: usize,
    /// Tokens of text.
    #[arg(long, default_value_t = 64)]
    pub text: usize,
    /// Threads that compute on the processor; as the engine chooses unless given.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Calls that are measured.
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Where the weights come from that the budget has no room for: `host`, `disk`.
    #[arg(long, value_delimiter = ',', value_parser = residence, default_value = "host,disk")]
    pub from: Vec<Residence>,
    /// Leave out the line with all weights on the device, where they do not fit.
    #[arg(long)]
    pub without_resident: bool,
    /// Parts of the weights that the budgets have room for, beside all.
    #[arg(long, value_delimiter = ',', default_values_t = [50, 25, 10])]
    pub percent: Vec<u64>,
}

fn residence(text: &str) -> Result<Residence, String> {
    let mut all = [Residence::Host, Residence::Disk].into_iter();
    all.find(|residence| residence.to_string() == text)
        .ok_or_else(|| "weights come from `host` or `disk`".to_owned())
}

/// What one call took with one budget.
#[derive(Debug)]
pub struct Call {
    /// Where the other weights came from.
    pub residence: Residence,
    /// The part of the weights that the budget had room for, in percent.
    pub percent: u64,
    /// The budget, in bytes.
    pub budget: u64,
    /// Seconds of each call.
    pub seconds: Vec<f64>,
    /// What the last one did.
    pub report: RunReport,
}

/// Prints the lines, and removes the checkpoint.
pub fn run(arguments: &Arguments) -> Result<()> {
    measure_all(arguments, |_, _, error| Err(error))?;
    Ok(std::fs::remove_file(&arguments.file)?)
}

/// Prints the lines, and returns what is in them; `refused` hears of a budget that could not be measured, and decides whether to go on.
pub fn measure_all(
    arguments: &Arguments,
    mut refused: impl FnMut(Residence, u64, anyhow::Error) -> Result<()>,
) -> Result<Vec<Call>> {
    if let Some(folder) = &arguments.backends {
        Device::load_backends(folder)?;
    }
    let device = Device::select(&arguments.device)?;
    let config = transformer::config(arguments.blocks)?;
    transformer::write(&arguments.file, &config, arguments.blocks)?;
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
        measure(arguments, &config, &checkpoint, device, case)
    };
    let mut calls: Vec<Call> = Vec::new();
    if !arguments.without_resident {
        calls.push(case(Residence::Device, 100, None)?);
    }
    for &residence in &arguments.from {
        for &percent in &arguments.percent {
            let first = calls.first().map(|call| median(&call.seconds));
            match case(residence, percent, first) {
                Ok(call) => calls.push(call),
                Err(error) => refused(residence, percent, error)?,
            }
        }
    }
    Ok(calls)
}

/// Prints the line of one budget, for weights that live there, and returns what is in it.
fn measure(
    arguments: &Arguments,
    config: &TransformerConfig,
    checkpoint: &Checkpoint,
    device: Device,
    (residence, percent, resident): (Residence, u64, Option<f64>),
) -> Result<Call> {
    let declarations = Declarations::new(checkpoint, LoadOptions::default());
    let module = Transformer::new(&declarations.root(), config);
    let mut weights = Weights::new(checkpoint.clone(), declarations.finish()?);
    let side = arguments.size / 16;
    let layout = Layout::text_to_image(arguments.text, side, side);
    let graph = |g: Graph<'_>| {
        let latents = g.input::<f32>("latents", [layout.image_tokens(), config.in_channels]);
        let text = g.input::<f32>("text", [layout.text_tokens(), config.context_in_dim]);
        let timestep = g.input::<f32>("timestep", [2, timestep_embedding(0.0).len()]);
        g.output(
            "velocity",
            module.forward(g, &layout, latents, text, timestep),
        );
    };
    let free = Backend::new(device, &BackendOptions::default())?;
    let estimate = Estimate::of(&free, graph)?;
    let compute = estimate.compute_bytes.max(estimate.segmented_bytes) + estimate.constant_bytes;
    drop(free);
    let budget = compute + weights.bytes() * percent / 100 + (64 << 20);
    let budgets = MemoryBudgets::default().with(&device.name(), MemoryBudget::Bytes(budget));
    let ledger = Ledger::new(budgets);
    let mut options = BackendOptions::default().ledger(&ledger);
    if let Some(threads) = arguments.threads {
        options = options.threads(threads);
    }
    let mut backend = Backend::new(device, &options)?;
    let cancel = Cancel::new();
    let begin = Instant::now();
    weights.live(residence, Mapping::Auto);
    weights.stream(residence != Residence::Device);
    weights.load(&backend, &cancel, &mut |_: &Progress| {})?;
    let mut plan = Plan::build(&backend, graph)?;
    let loading = begin.elapsed().as_secs_f64();
    let latents = transformer::numbers(layout.image_tokens() * config.in_channels, 0);
    let text = transformer::numbers(layout.text_tokens() * config.context_in_dim, 1);
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
    let call = median(&seconds);
    let report = last.context("no run")?;
    anyhow::ensure!(
        report.most.total() <= budget,
        "{} were held of a budget of {}",
        Bytes(report.most.total()),
        Bytes(budget)
    );
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
    Ok(Call {
        residence,
        percent,
        budget,
        seconds,
        report,
    })
}
