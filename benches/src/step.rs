//! What one call of the published Qwen-Image 2.1 transformer takes (32 blocks, random weights): by picture size, type of the
//! weights, reference pictures, and with keys and values of the prefix kept or not. `peers/step.py` does the same with diffusers
//! on the same file, and compares the results.
//!
//! ```sh
//! cargo xtask bench step --device CUDA0 --backends DIR --folder /dev/shm/step
//! python benches/peers/step.py --folder /dev/shm/step --device cuda --type bfloat16
//! ```
//!
//! It prints a line for each case and writes `last.json` to `--folder`: seconds of each call after one to warm up, their
//! median, the same of processor time over all threads (on Linux), the most bytes that the ledger held, and operations in the
//! graph. Processor time tells more where others use the machine too. A call is what a sampler does: inputs are set, all is
//! computed, the velocity is read. The checkpoint and the velocities stay in `--folder`.
#![allow(clippy::print_stdout)]

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use sd_backend::{Backend, BackendOptions, DType, Device, Ledger, MemoryBudgets, MemoryKind};
use sd_graph::{
    Cancel, Checkpoint, Declarations, Graph, LoadOptions, Plan, Progress, RunReport, RunnerCache,
    load,
};
use sd_models::qwen_image_2_1::{
    Layout, Prefix, Segment, Transformer, TransformerConfig, timestep_embedding,
};
use serde_json::{Value, json};

use crate::results::median;
use crate::transformer;

/// What a call of the transformer takes.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Device to run on.
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Folder of backends to load first.
    #[arg(long)]
    pub backends: Option<PathBuf>,
    /// Where the checkpoint and the results are kept.
    #[arg(long, default_value_os_t = std::env::temp_dir().join("sd-step"))]
    pub folder: PathBuf,
    /// Blocks of the transformer.
    #[arg(long, default_value_t = 32)]
    pub blocks: usize,
    /// Sides of the picture in pixels.
    #[arg(long, value_delimiter = ',', default_values_t = [512, 1024])]
    pub size: Vec<usize>,
    /// Tokens of text.
    #[arg(long, default_value_t = 64)]
    pub text: usize,
    /// Reference pictures of the same size.
    #[arg(long, value_delimiter = ',', default_values_t = [0])]
    pub references: Vec<usize>,
    /// Types of the weights in memory.
    #[arg(long, value_delimiter = ',', value_parser = sd_graph::weight_type, default_values_t = [DType::BF16])]
    pub weight_type: Vec<DType>,
    /// Types that keys and values of the prefix are kept in, beside not keeping them.
    #[arg(long, value_delimiter = ',', value_parser = sd_graph::weight_type, default_values_t = [DType::F32])]
    pub prefix: Vec<DType>,
    /// Threads that compute on the processor.
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Calls that are measured, after one to warm up.
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
}

/// Prints the lines, writes `last.json`, and returns what is in it.
pub fn run(arguments: &Arguments) -> Result<Value> {
    if let Some(folder) = &arguments.backends {
        Device::load_backends(folder)?;
    }
    let device = Device::select(&arguments.device)?;
    let config = transformer::config(arguments.blocks)?;
    std::fs::create_dir_all(&arguments.folder)?;
    let file = arguments.folder.join("transformer.safetensors");
    transformer::write(&file, &config, arguments.blocks)?;
    let checkpoint = Checkpoint::open(&file)?;
    println!(
        "{} blocks, {} tokens of text, {device} ({}), {} threads",
        arguments.blocks,
        arguments.text,
        device.description(),
        arguments.threads
    );
    println!(
        "{:>6} {:>6} {:>10} {:>8} {:>9} {:>9} {:>10} {:>8}",
        "size", "type", "references", "prefix", "call s", "cpu s", "most MiB", "nodes"
    );
    let mut cases: Vec<Value> = Vec::new();
    for &dtype in &arguments.weight_type {
        let loaded = Loaded::new(arguments, &config, &checkpoint, device, dtype)?;
        for &size in &arguments.size {
            for &references in &arguments.references {
                cases.extend(loaded.measure(arguments, size, references)?);
            }
        }
    }
    let last = json!({
        "device": device.description(),
        "blocks": arguments.blocks,
        "text": arguments.text,
        "threads": arguments.threads,
        "cases": cases,
    });
    let text = serde_json::to_string_pretty(&last)?;
    std::fs::write(arguments.folder.join("last.json"), text)?;
    Ok(last)
}

/// The transformer with its weights in one type.
struct Loaded<'c> {
    config: &'c TransformerConfig,
    module: Transformer,
    dtype: DType,
    device: Device,
    ledger: Ledger,
}

impl Loaded<'_> {
    fn new<'c>(
        arguments: &Arguments,
        config: &'c TransformerConfig,
        checkpoint: &Checkpoint,
        device: Device,
        dtype: DType,
    ) -> Result<Loaded<'c>> {
        let options = LoadOptions::default().weight_type(dtype);
        let declarations = Declarations::new(checkpoint, options);
        let module = Transformer::new(&declarations.root(), config);
        let params = declarations.finish()?;
        let loaded = Loaded {
            config,
            module,
            dtype,
            device,
            ledger: Ledger::new(MemoryBudgets::default()),
        };
        let quiet = &mut |_: &Progress| {};
        let backend = loaded.backend(arguments)?;
        load(checkpoint, &params, &backend, &Cancel::new(), quiet)?;
        Ok(loaded)
    }

    fn backend(&self, arguments: &Arguments) -> Result<Backend> {
        let options = BackendOptions::default().threads(arguments.threads);
        Ok(Backend::new(self.device, &options.ledger(&self.ledger))?)
    }

    /// Prints a line without and one with each way of keeping the prefix, and returns what is in them.
    fn measure(&self, arguments: &Arguments, size: usize, references: usize) -> Result<Vec<Value>> {
        let side = size / 16;
        let picture = Segment::Image {
            height: side,
            width: side,
        };
        let mut prefix = vec![Segment::Text(arguments.text / 2)];
        prefix.extend(std::iter::repeat_n(picture, references));
        prefix.push(Segment::Text(arguments.text - arguments.text / 2));
        let layout = Layout::new(prefix, side, side);
        let inputs = Inputs::new(&layout, self.config);
        let mut cases = Vec::new();
        let kept = arguments.prefix.iter().map(|&dtype| Some(dtype));
        for kept in [None].into_iter().chain(kept) {
            let mut backend = self.backend(arguments)?;
            let cache = RunnerCache::new();
            let watch = self.ledger.watch(self.device);
            if let Some(dtype) = kept {
                let mut plan = self.plan(&backend, &layout, Prefix::Store(dtype))?;
                self.call(
                    &mut plan,
                    &mut backend,
                    &inputs,
                    Prefix::Store(dtype),
                    &cache,
                )?;
            }
            let prefix = kept.map_or(Prefix::Compute, Prefix::Read);
            let mut plan = self.plan(&backend, &layout, prefix)?;
            let (mut seconds, mut busy) = (Vec::new(), Vec::new());
            let mut velocity = Vec::new();
            for run in 0..=arguments.runs {
                let (begin, used) = (Instant::now(), processor_seconds());
                (velocity, _) = self.call(&mut plan, &mut backend, &inputs, prefix, &cache)?;
                if run > 0 {
                    seconds.push(begin.elapsed().as_secs_f64());
                    busy.push(processor_seconds() - used);
                }
            }
            ensure!(
                velocity.iter().all(|value| value.is_finite()),
                "the result is no finite number"
            );
            let runs = seconds.clone();
            let (median, busy) = (median(&seconds), median(&busy));
            let kept = kept.map_or("off".to_owned(), |dtype| dtype.to_string());
            let name = format!("velocity-{}-{size}-{references}-{kept}.f32", self.dtype);
            write(&arguments.folder.join(&name), &velocity)?;
            let most = watch.most();
            println!(
                "{size:>6} {:>6} {references:>10} {kept:>8} {median:9.4} {busy:9.4} {:>10} {:>8}",
                self.dtype.to_string(),
                most.total() >> 20,
                plan.nodes()
            );
            cases.push(json!({
                "size": size, "type": self.dtype.to_string(), "references": references, "prefix": kept,
                "seconds": median, "processor_seconds": busy, "runs": runs, "velocity": name, "nodes": plan.nodes(),
                "most_bytes": most.total(), "weight_bytes": most.of(MemoryKind::Weights),
                "compute_bytes": most.of(MemoryKind::Compute), "cache_bytes": most.of(MemoryKind::Cache),
                "mapping_bytes": most.of(MemoryKind::Mapping),
            }));
        }
        Ok(cases)
    }

    fn plan(&self, backend: &Backend, layout: &Layout, prefix: Prefix) -> Result<Plan> {
        let is_read = matches!(prefix, Prefix::Read(_));
        let plan = Plan::build(backend, |g: Graph<'_>| {
            let pixels = if is_read {
                layout.target_tokens()
            } else {
                layout.image_tokens()
            };
            let latents = g.input::<f32>("latents", [pixels, self.config.in_channels]);
            let text = (!is_read).then(|| {
                g.input::<f32>("text", [layout.text_tokens(), self.config.context_in_dim])
            });
            let timestep = g.input::<f32>("timestep", [2, timestep_embedding(0.0).len()]);
            let module = &self.module;
            let velocity = module.forward_with(g, layout, latents, text, timestep, prefix);
            g.output("velocity", velocity);
        })?;
        Ok(plan)
    }

    /// What a sampler does at each step.
    fn call(
        &self,
        plan: &mut Plan,
        backend: &mut Backend,
        inputs: &Inputs,
        prefix: Prefix,
        cache: &RunnerCache,
    ) -> Result<(Vec<f32>, RunReport)> {
        let timestep = [timestep_embedding(0.5), timestep_embedding(0.0)];
        plan.set("timestep", timestep.as_flattened())?;
        if let Prefix::Read(_) = prefix {
            plan.set("latents", &inputs.latents[inputs.references..])?;
        } else {
            plan.set("latents", &inputs.latents)?;
            plan.set("text", &inputs.text)?;
        }
        if prefix != Prefix::Compute {
            plan.attach(cache)?;
        }
        let report = plan.run(backend, &Cancel::new())?;
        Ok((plan.read("velocity")?, report))
    }
}

/// What every call of a layout is given, made before any is timed.
struct Inputs {
    latents: Vec<f32>,
    /// How many of them are those of reference pictures.
    references: usize,
    text: Vec<f32>,
}

impl Inputs {
    fn new(layout: &Layout, config: &TransformerConfig) -> Inputs {
        let of = |tokens: usize| tokens * config.in_channels;
        let text = layout.text_tokens() * config.context_in_dim;
        Inputs {
            latents: transformer::numbers(of(layout.image_tokens()), 0),
            references: of(layout.image_tokens() - layout.target_tokens()),
            text: transformer::numbers(text, 1),
        }
    }
}

/// Processor time that this process has used, all threads together, in steps of a hundredth; 0 elsewhere than on Linux.
pub(crate) fn processor_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Behind the name, which is in brackets, `utime` and `stime` are numbers 12 and 13 of what follows.
    let fields = text.rsplit(')').next().unwrap_or_default().split(' ');
    let ticks = fields.skip(12).take(2).flat_map(str::parse::<f64>);
    ticks.sum::<f64>() / 100.0
}

pub(crate) fn write(path: &Path, values: &[f32]) -> Result<()> {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    Ok(std::fs::write(path, bytes)?)
}
