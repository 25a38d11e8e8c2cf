//! The harness: groups of measurements that everybody waits for, on one device, into one [`Results`].
#![allow(clippy::print_stdout)]

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use sd_backend::{
    Backend, BackendOptions, DType, Device, Ledger, Mapping, MemoryBudgets, Residence,
};
use sd_graph::{
    Cancel, Checkpoint, Conversion, Declarations, Estimate, Existing, FileFormat, Graph,
    LoadOptions, LoadPlan, Progress,
};
use sd_models::qwen_image_2_1::{Layout, Transformer, timestep_embedding};
use serde_json::Value;

use crate::peers::{self, Peers};
use crate::results::{Case, Machine, Results, Seconds};
use crate::{rope, statistics, step, stream, tiny, transformer, vae};

/// What is measured together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Group {
    /// Opening and loading a checkpoint: mapped, read, converted.
    Load,
    /// Planning: from a configuration to what a graph takes.
    Plan,
    /// One call of the published transformer.
    Step,
    /// The same with a reference picture, and with what is kept of the prefix.
    Prefix,
    /// Decoding a picture with the published VAE.
    Decode,
    /// One call with budgets for a part of the weights.
    Stream,
    /// Writing a checkpoint as another format and type.
    Convert,
    /// Building and applying rotary embeddings.
    Rope,
}

/// What the groups measure, and on what.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Only these groups.
    #[arg(long, value_delimiter = ',', value_name = "GROUP")]
    pub filter: Vec<Group>,
    /// Device to run on.
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Folder of backends to load first.
    #[arg(long, value_name = "DIR")]
    pub backends: Option<PathBuf>,
    /// Threads that compute on the processor; as many as it runs at once unless given.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Small shapes and few runs: shows that everything works, and measures little.
    #[arg(long)]
    pub quick: bool,
    /// Blocks of the transformer; 32 are published, and 2 are quick.
    #[arg(long)]
    pub blocks: Option<usize>,
    /// Sides of pictures in pixels; 512 and 1024, or quick 64 and 128.
    #[arg(long, value_delimiter = ',')]
    pub size: Vec<usize>,
    /// Tokens of text.
    #[arg(long, default_value_t = 64)]
    pub text: usize,
    /// Types of the weights in memory; bf16 and q8_0 unless given.
    #[arg(long, value_delimiter = ',', value_parser = sd_graph::weight_type)]
    pub weight_type: Vec<DType>,
    /// Runs that are measured, after one to warm up; 5, or quick 3.
    #[arg(long)]
    pub runs: Option<usize>,
    /// Where checkpoints are made; a folder that is removed at the end unless given.
    #[arg(long, value_name = "DIR")]
    pub folder: Option<PathBuf>,
    /// The tiny checkpoint; groups leave it out where there is none.
    #[arg(long, value_name = "DIR", default_value = "models/tiny-qwen-image-2.1")]
    pub tiny: PathBuf,
    /// Other programs.
    #[command(flatten)]
    pub peers: Peers,
}

impl Group {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Group::Load => "load",
            Group::Plan => "plan",
            Group::Step => "step",
            Group::Prefix => "prefix",
            Group::Decode => "decode",
            Group::Stream => "stream",
            Group::Convert => "convert",
            Group::Rope => "rope",
        }
    }

    /// Whether it reads the synthetic transformer.
    fn wants_checkpoint(self) -> bool {
        !matches!(self, Group::Decode | Group::Rope)
    }
}

/// Measures all groups that were asked for, and says how many of them failed: why stands in [`Results::skipped`], and what the others
/// took is not lost. That a peer is not there, or fails, is noted there too and no failure.
///
/// # Errors
/// A device that is not there, a folder that cannot be written to.
pub fn run(arguments: &Arguments) -> Result<(Results, usize)> {
    if let Some(folder) = &arguments.backends {
        Device::load_backends(folder)?;
    }
    let device = Device::select(&arguments.device)?;
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = arguments.threads.unwrap_or(most);
    let made = tempfile::tempdir()?;
    let mut harness = Harness {
        arguments,
        device,
        folder: arguments.folder.as_deref().unwrap_or(made.path()),
        blocks: arguments.blocks.unwrap_or(match arguments.quick {
            true => 2,
            false => 32,
        }),
        sizes: match (arguments.size.is_empty(), arguments.quick) {
            (false, _) => arguments.size.clone(),
            (true, true) => vec![64, 128],
            (true, false) => vec![512, 1024],
        },
        types: match arguments.weight_type.is_empty() {
            true => vec![DType::BF16, DType::Q8_0],
            false => arguments.weight_type.clone(),
        },
        runs: arguments
            .runs
            .unwrap_or(if arguments.quick { 3 } else { 5 }),
        results: Results::new(device, threads)?,
    };
    let Machine { description, .. } = &harness.results.machine;
    println!("{device} ({description}), {threads} threads");
    std::fs::create_dir_all(harness.folder)?;
    let mut groups = arguments.filter.clone();
    if groups.is_empty() {
        groups = Group::value_variants().to_vec();
    }
    groups.sort();
    groups.dedup();
    if groups.iter().any(|group| group.wants_checkpoint()) {
        let config = transformer::config(harness.blocks)?;
        transformer::write(&harness.checkpoint(), &config, harness.blocks)?;
    }
    let mut failed = 0;
    for group in groups {
        println!("\n{}", group.name());
        if let Err(error) = harness.measure(group) {
            failed += 1;
            harness.skip(format!("{}, which failed: {error:#}", group.name()));
        }
    }
    Ok((harness.results, failed))
}

struct Harness<'a> {
    arguments: &'a Arguments,
    device: Device,
    folder: &'a Path,
    blocks: usize,
    sizes: Vec<usize>,
    types: Vec<DType>,
    runs: usize,
    results: Results,
}

impl Harness<'_> {
    fn checkpoint(&self) -> PathBuf {
        self.folder.join("transformer.safetensors")
    }

    fn threads(&self) -> usize {
        self.results.machine.threads
    }

    fn add(&mut self, case: Case) {
        let Seconds {
            median, low, high, ..
        } = case.seconds;
        println!("  {}: {median:.6} s ({low:.6} to {high:.6})", case.name);
        self.results.cases.push(case);
    }

    fn skip(&mut self, line: String) {
        println!("  left out: {line}");
        self.results.skipped.push(line);
    }

    fn measure(&mut self, group: Group) -> Result<()> {
        match group {
            Group::Load => self.load()?,
            Group::Plan => self.plan()?,
            Group::Step => self.step(group, 0, &[])?,
            Group::Prefix => self.step(group, 1, &[DType::F32])?,
            Group::Decode => self.decode()?,
            Group::Stream => self.stream()?,
            Group::Convert => self.convert()?,
            Group::Rope => {
                let cases = statistics::cases(group.name(), self.arguments.quick, rope::measure)?;
                cases.into_iter().for_each(|case| self.add(case));
            }
        }
        if matches!(
            group,
            Group::Load | Group::Plan | Group::Step | Group::Decode
        ) {
            self.tiny(group)?;
        }
        Ok(())
    }

    /// Seconds of `runs` calls after one to warm up, each of which returns what is to be kept of it.
    fn repeat<T>(&self, mut call: impl FnMut() -> Result<T>) -> Result<(Seconds, T)> {
        let mut last = call()?;
        let mut seconds = Vec::new();
        for _ in 0..self.runs.max(1) {
            // What the last call made is freed outside of the clock.
            drop(last);
            let begin = Instant::now();
            last = call()?;
            seconds.push(begin.elapsed().as_secs_f64());
        }
        let seconds = Seconds::of(&seconds).context("no run")?;
        Ok((seconds, last))
    }

    /// The tiny checkpoint's share of a group.
    fn tiny(&mut self, group: Group) -> Result<()> {
        let folder = &self.arguments.tiny;
        if !folder.join("model_index.json").is_file() {
            let line = format!(
                "{}, tiny checkpoint: none in {}",
                group.name(),
                folder.display()
            );
            self.skip(line);
            return Ok(());
        }
        let cases = statistics::cases(group.name(), self.arguments.quick, |criterion| {
            tiny::measure(criterion, folder, group);
        })?;
        cases.into_iter().for_each(|case| self.add(case));
        Ok(())
    }

    fn load(&mut self) -> Result<()> {
        let config = transformer::config(self.blocks)?;
        let path = self.checkpoint();
        let ways = [
            ("mapped", Mapping::Auto, None),
            ("read", Mapping::Never, None),
            ("to q8_0", Mapping::Never, Some(DType::Q8_0)),
        ];
        for (name, mapping, dtype) in ways {
            let ledger = Ledger::new(MemoryBudgets::default());
            let options = BackendOptions::default().threads(self.threads());
            let backend = Backend::new(self.device, &options.ledger(&ledger))?;
            let watch = ledger.watch(self.device);
            let (seconds, _) = self.repeat(|| {
                let checkpoint = Checkpoint::open(&path)?;
                let mut options = LoadOptions::default();
                if let Some(dtype) = dtype {
                    options = options.weight_type(dtype);
                }
                let declarations = Declarations::new(&checkpoint, options);
                let module = Transformer::new(&declarations.root(), &config);
                let params = declarations.finish()?;
                let plan = LoadPlan::new(&checkpoint, &params, self.device, mapping)?;
                plan.load(&backend, &Cancel::new(), &mut |_: &Progress| {})?;
                Ok((module, params))
            })?;
            let case = Case::new("load", format!("transformer, {name}"), seconds)
                .parameter("blocks", self.blocks)
                .peak(&watch.most());
            self.add(case);
        }
        Ok(())
    }

    fn plan(&mut self) -> Result<()> {
        let config = transformer::config(self.blocks)?;
        let checkpoint = Checkpoint::open(self.checkpoint())?;
        let options = BackendOptions::default().threads(self.threads());
        let backend = Backend::new(self.device, &options)?;
        for size in self.sizes.clone() {
            let layout = Layout::text_to_image(self.arguments.text, size / 16, size / 16);
            let (seconds, estimate) = self.repeat(|| {
                let declarations = Declarations::new(&checkpoint, LoadOptions::default());
                let module = Transformer::new(&declarations.root(), &config);
                declarations.finish()?;
                Ok(Estimate::of(&backend, |g: Graph<'_>| {
                    let latents =
                        g.input::<f32>("latents", [layout.image_tokens(), config.in_channels]);
                    let text =
                        g.input::<f32>("text", [layout.text_tokens(), config.context_in_dim]);
                    let timestep = g.input::<f32>("timestep", [2, timestep_embedding(0.0).len()]);
                    let velocity = module.forward(g, &layout, latents, text, timestep);
                    g.output("velocity", velocity);
                })?)
            })?;
            let case = Case::new("plan", format!("transformer, {size}"), seconds)
                .parameter("blocks", self.blocks)
                .parameter("size", size)
                .count("compute_bytes", estimate.compute_bytes);
            self.add(case);
        }
        Ok(())
    }

    /// Calls of the transformer with so many references, without and with each way of keeping the prefix.
    fn step(&mut self, group: Group, references: usize, prefix: &[DType]) -> Result<()> {
        let last = step::run(&step::Arguments {
            device: self.arguments.device.clone(),
            backends: None,
            folder: self.folder.to_path_buf(),
            blocks: self.blocks,
            size: self.sizes.clone(),
            text: self.arguments.text,
            references: vec![references],
            weight_type: self.types.clone(),
            prefix: prefix.to_vec(),
            threads: self.threads(),
            runs: self.runs.max(1),
        })?;
        for found in last["cases"].as_array().context("no cases")? {
            let number = |key: &str| found[key].as_u64().unwrap_or_default();
            let runs: Vec<f64> = serde_json::from_value(found["runs"].clone())?;
            let side = number("size") / 16;
            let tokens = self.arguments.text as u64 + (number("references") + 1) * side * side;
            let mut case = Case::new(
                group.name(),
                step_name(found),
                Seconds::of(&runs).context("no run")?,
            )
            .parameter("blocks", self.blocks)
            .parameter("tokens", tokens)
            .count("nodes", number("nodes"));
            for key in ["size", "type", "references", "prefix"] {
                case = case.parameter(key, found[key].clone());
            }
            for (kind, key) in [
                ("total", "most_bytes"),
                ("weights", "weight_bytes"),
                ("compute", "compute_bytes"),
                ("cache", "cache_bytes"),
                ("mapping", "mapping_bytes"),
            ] {
                case.peak_bytes.insert(kind.to_owned(), number(key));
            }
            self.add(case);
        }
        let found = peers::step(
            &self.arguments.peers.diffusers,
            self.folder,
            group,
            self.device,
        );
        self.heard(found);
        if group == Group::Step {
            let cases: Vec<Value> = last["cases"].as_array().cloned().unwrap_or_default();
            let found = peers::sd_cpp(&self.arguments.peers, self.folder, self.threads(), &cases);
            self.heard(found);
        }
        Ok(())
    }

    /// Adds what peers took; that one is not there, or failed, is a line in the results.
    fn heard(&mut self, found: peers::Found) {
        match found {
            Ok(peers) => {
                for peer in peers {
                    println!("  {}: {}: {:.6} s", peer.program, peer.name, peer.seconds);
                    self.results.peers.push(peer);
                }
            }
            Err(reason) => self.skip(format!("{reason:#}")),
        }
    }

    fn decode(&mut self) -> Result<()> {
        for size in self.sizes.clone() {
            let report = vae::run(&vae::Arguments {
                model: vae::Model::Qwen21,
                device: self.arguments.device.clone(),
                backends: None,
                folder: self.folder.join("vae"),
                size: (size, size),
                frames: 1,
                encode: false,
                weight_type: DType::F32,
                tile: "whole".to_owned(),
                memory_budget: MemoryBudgets::default(),
                threads: self.threads(),
                plan: false,
                runs: self.runs.max(1),
                seconds: 0.0,
                peers: self.arguments.peers.diffusers.clone(),
            })?;
            let runs: Vec<f64> = serde_json::from_value(report["runs"].clone())?;
            let name = format!("qwen21, {size}, f32");
            let seconds = Seconds::of(&runs).context("no run")?;
            let mut case = Case::new("decode", &*name, seconds).parameter("size", size);
            for (kind, key) in [
                ("total", "peak_bytes"),
                ("weights", "weight_bytes"),
                ("compute", "compute_bytes"),
            ] {
                let bytes = report[key].as_u64().unwrap_or_default();
                case.peak_bytes.insert(kind.to_owned(), bytes);
            }
            self.add(case);
            let found = peers::vae(
                &self.arguments.peers.diffusers,
                &self.folder.join("vae"),
                self.device,
                &name,
            );
            self.heard(found);
        }
        Ok(())
    }

    fn stream(&mut self) -> Result<()> {
        let size = self.sizes.iter().copied().max().unwrap_or(512);
        // A processor's own memory is the host's: there weights come from the disk alone.
        let from = match Device::cpu().is_ok_and(|cpu| cpu == self.device) {
            true => vec![Residence::Disk],
            false => vec![Residence::Host, Residence::Disk],
        };
        let arguments = stream::Arguments {
            device: self.arguments.device.clone(),
            backends: None,
            file: self.checkpoint(),
            blocks: self.blocks,
            size,
            text: self.arguments.text,
            threads: Some(self.threads()),
            runs: self.runs.max(1),
            from,
            without_resident: false,
            percent: vec![50, 25, 10],
        };
        let calls = stream::measure_all(&arguments, |residence, percent, error| {
            let out = error.downcast_ref::<sd_graph::Error>();
            if !out.is_some_and(sd_graph::Error::is_out_of_memory) {
                return Err(error);
            }
            // Few blocks are large parts of the whole: one has to fit.
            self.skip(format!("stream, {percent} % from {residence}: {error}"));
            Ok(())
        })?;
        for call in calls {
            let name = format!("{size}, {} % from {}", call.percent, call.residence);
            let seconds = Seconds::of(&call.seconds).context("no run")?;
            let case = Case::new("stream", name, seconds)
                .parameter("blocks", self.blocks)
                .parameter("size", size)
                .parameter("percent", call.percent)
                .parameter("budget", call.budget)
                .parameter("from", call.residence.to_string())
                .peak(&call.report.most)
                .count("weight_bytes", call.report.weight_bytes)
                .count("segments", call.report.segments as u64);
            self.add(case);
        }
        Ok(())
    }

    fn convert(&mut self) -> Result<()> {
        let checkpoint = Checkpoint::open(self.checkpoint())?;
        let formats = [
            ("gguf, q8_0", FileFormat::Gguf, Some(DType::Q8_0), "gguf"),
            (
                "safetensors, as they are",
                FileFormat::Safetensors,
                None,
                "safetensors",
            ),
        ];
        for (name, format, dtype, ending) in formats {
            let path = self.folder.join(format!("converted.{ending}"));
            let ledger = Ledger::new(MemoryBudgets::default());
            let conversion = Conversion::new(&checkpoint, format, |_, info| {
                dtype.filter(|_| info.shape.len() == 2)
            })
            .map_err(sd_graph::Error::from)?;
            let (seconds, report) = self.repeat(|| {
                let quiet = &mut |_: &Progress| {};
                let cancel = Cancel::new();
                Ok(conversion.write(&path, Existing::Replace, &ledger, &cancel, quiet)?)
            })?;
            std::fs::remove_file(&path)?;
            let mut case = Case::new("convert", format!("transformer, {name}"), seconds)
                .parameter("blocks", self.blocks)
                .count("read_bytes", checkpoint.bytes())
                .count("written_bytes", report.bytes);
            case.peak_bytes.insert("staging".to_owned(), report.staging);
            case.peak_bytes.insert("total".to_owned(), report.staging);
            self.add(case);
        }
        Ok(())
    }
}

/// The name of what `step` measured.
pub(crate) fn step_name(case: &Value) -> String {
    let text = |key: &str| case[key].as_str().unwrap_or_default().to_owned();
    let mut name = format!("{}, {}", case["size"], text("type"));
    match case["references"].as_u64() {
        None | Some(0) => {}
        Some(1) => name.push_str(", 1 reference"),
        Some(many) => name.push_str(&format!(", {many} references")),
    }
    if text("prefix") != "off" {
        name.push_str(&format!(", prefix in {}", text("prefix")));
    }
    name
}
