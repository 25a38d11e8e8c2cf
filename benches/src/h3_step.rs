//! What a step of the published MiniMax H3 transformer takes (50 blocks, random weights), and what a run computes once before its first:
//! by type of the weights, with all of them on the device and with budgets for a part of them. `peers/h3_step.py` does the same with
//! diffusers on the same file, and compares the results.
//!
//! ```sh
//! cargo xtask bench h3-step --device CUDA0 --backends DIR --folder /dev/shm/h3 --peers --python python3
//! ```
//!
//! It prints a line for each case, then a table, and writes `results.json` to `--folder` (and `--out`). A step is what a sampler does:
//! rows are set, all is computed, velocities are read. The checkpoint and the velocities stay in `--folder`: 62 GiB for 50 blocks.
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use sd_backend::{
    Backend, BackendOptions, Bytes, DType, Device, Ledger, Mapping, MemoryBudget, MemoryBudgets,
    Residence,
};
use sd_graph::{Cancel, Estimate, LoadOptions, Progress};
use sd_models::minimax_h3::{
    Conditions, Denoiser, Extent, Layout, Noisy, QkvOrder, Schedule, Shifts, Stage, Tag,
    USUAL_FRAMES, distinct_times,
};
use serde_json::{Value, json};

use crate::peers::{self, Diffusers};
use crate::results::{Case, Results, Seconds, median};
use crate::step::{processor_seconds, write};
use crate::{table, transformer, vae};

/// The group of all cases.
pub const GROUP: &str = "h3";

/// What a step of MiniMax H3 takes.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Device to run on.
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Folder of backends to load first.
    #[arg(long)]
    pub backends: Option<PathBuf>,
    /// Where the checkpoint and the results are kept.
    #[arg(long, default_value_os_t = std::env::temp_dir().join("sd-h3"))]
    pub folder: PathBuf,
    /// Blocks of the transformer.
    #[arg(long, default_value_t = 50)]
    pub blocks: usize,
    /// Width and height in pixels.
    #[arg(long, default_value = "1344x768", value_parser = vae::size)]
    pub size: (usize, usize),
    /// Frames of the clip.
    #[arg(long, default_value_t = USUAL_FRAMES)]
    pub frames: usize,
    /// Tokens of text.
    #[arg(long, default_value_t = 64)]
    pub text: usize,
    /// Steps of the run, whose modulations are prepared together. The middle one is measured.
    #[arg(long, default_value_t = 8)]
    pub steps: usize,
    /// Types of the weights in memory.
    #[arg(long, value_delimiter = ',', value_parser = sd_graph::weight_type, default_values_t = [DType::BF16])]
    pub weight_type: Vec<DType>,
    /// Parts of the weights of steps that there is memory for, in percent. The others come from the host's memory, on a processor from the
    /// disk.
    #[arg(long, value_delimiter = ',', default_values_t = [100, 50])]
    pub percent: Vec<u64>,
    /// Threads that compute on the processor.
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Steps that are measured, after one to warm up.
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Where to write the results as JSON, beside the folder.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Another program.
    #[command(flatten)]
    pub peers: Diffusers,
}

/// What all cases have in common.
struct Run<'a> {
    arguments: &'a Arguments,
    device: Device,
    layout: Layout,
    extent: Extent,
    /// Of video and of sound.
    schedules: [Schedule; 2],
}

/// Prints lines and a table, writes the results, and returns them.
pub fn run(arguments: &Arguments) -> Result<Results> {
    if let Some(folder) = &arguments.backends {
        Device::load_backends(folder)?;
    }
    let device = Device::select(&arguments.device)?;
    transformer::write_h3(&arguments.folder, arguments.blocks)?;
    let (extent, _) = Extent::nearest(arguments.size, arguments.frames)?;
    let text = vec![Tag::Text; arguments.text];
    let layout = Layout::new(text, Conditions::Keyframes(Vec::new()), extent.rows())?;
    let shifts = Shifts::default();
    let schedule = |shift| Schedule::new(shift, arguments.steps + 1);
    let run = Run {
        arguments,
        device,
        layout,
        extent,
        schedules: [schedule(shifts.video)?, schedule(shifts.sound)?],
    };
    println!(
        "{} blocks, {} ({} rows: {} of text, {} of sound, {} of video), {device} ({}), {} threads",
        arguments.blocks,
        run.name(),
        run.layout.rows(),
        run.layout.text_rows(),
        run.layout.sound_rows(),
        run.layout.video_rows(),
        device.description(),
        arguments.threads,
    );
    println!(
        "{:>6} {:>12} {:>12} {:>9} {:>9} {:>10} {:>10}",
        "type", "fits", "what", "s", "cpu s", "most", "moved"
    );
    let mut results = Results::new(device, arguments.threads)?;
    let mut told = Vec::new();
    for &dtype in &arguments.weight_type {
        for &percent in &arguments.percent {
            match run.measure(dtype, percent) {
                Ok((cases, call)) => {
                    results.cases.extend(cases);
                    told.push(call);
                }
                // Few blocks are large parts of the whole: two have to fit.
                Err(error) if is_out_of_memory(&error) => {
                    results
                        .skipped
                        .push(format!("{dtype}, {percent} %: {error:#}"));
                }
                Err(error) => return Err(error),
            }
        }
    }
    let [video, sound] = run.times();
    let clip = run.extent.rows();
    let last = json!({
        "threads": arguments.threads,
        "text": arguments.text,
        "clip": [clip.frames, clip.latents.height, clip.latents.width, clip.sound],
        "times": [video, sound],
        "cases": told,
    });
    let text = serde_json::to_string_pretty(&last)?;
    std::fs::write(arguments.folder.join("last.json"), text)?;
    match peers::h3_step(&arguments.peers, &arguments.folder, device) {
        Ok(found) => results.peers = found,
        Err(reason) => results.skipped.push(format!("{reason:#}")),
    }
    println!("\n{}", table::markdown(&results, None));
    results.write(&arguments.folder.join("results.json"))?;
    if let Some(file) = &arguments.out {
        results.write(file)?;
    }
    Ok(results)
}

fn is_out_of_memory(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<sd_models::Error>();
    error.is_some_and(sd_models::Error::is_out_of_memory)
}

impl Run<'_> {
    fn name(&self) -> String {
        let Extent { size, frames } = self.extent;
        format!("{}x{}, {frames} frames", size.width, size.height)
    }

    /// Of the step that is measured, of video and of sound.
    fn times(&self) -> [f32; 2] {
        let [video, sound] = &self.schedules;
        let step = self.arguments.steps / 2;
        [video.time(step), sound.time(step)]
    }

    /// Preparation and steps with a budget that has room for so many percent of the steps' weights, all of them being no budget: both cases, and
    /// what the peer is told of the steps.
    fn measure(&self, dtype: DType, percent: u64) -> Result<(Vec<Case>, Value)> {
        let Run {
            arguments,
            device,
            layout,
            ..
        } = self;
        let is_resident = percent >= 100;
        let options = LoadOptions::default().weight_type(dtype);
        let mut model = Denoiser::open(&arguments.folder, QkvOrder::Stacked, &[], &options)?;
        let [video, sound] = &self.schedules;
        let times = distinct_times([video, sound]);
        let free = Backend::new(*device, &BackendOptions::default())?;
        let estimate = |stage| model.estimate(stage, &free, layout, times.len());
        let (before, step) = (estimate(Stage::Preparation)?, estimate(Stage::Steps)?);
        drop(free);

        let is_processor = Device::cpu()? == *device;
        let elsewhere = match is_processor {
            true => Residence::Disk,
            false => Residence::Host,
        };
        let mut budgets = MemoryBudgets::default();
        if !is_resident {
            let need = |estimate: &Estimate| {
                let computed = estimate.compute_bytes.max(estimate.segmented_bytes);
                computed + estimate.constant_bytes
            };
            let part = model.weights(Stage::Steps).bytes() * percent / 100;
            let budget = (need(&step) + part).max(need(&before) + before.streamed_weight_bytes);
            let budget = budget + before.cache_bytes + (64 << 20);
            budgets = budgets.with(&device.name(), MemoryBudget::Bytes(budget));
        }
        let ledger = Ledger::new(budgets);
        let options = BackendOptions::default().threads(arguments.threads);
        let mut backend = Backend::new(*device, &options.ledger(&ledger))?;
        let (cancel, quiet) = (Cancel::new(), &mut |_: &Progress| {});
        // As in a run: what prepares it is not there during its steps.
        let weights = model.weights_mut(Stage::Preparation);
        weights.live(elsewhere, Mapping::Auto);
        weights.stream(!is_resident);
        if !is_resident {
            let weights = model.weights_mut(Stage::Steps);
            weights.live(elsewhere, Mapping::Auto);
            weights.stream(true);
        }
        let fits = match is_resident {
            true => "all".to_owned(),
            false => format!("{percent} %, {elsewhere}"),
        };
        let name = |what: &str| match is_resident {
            true => format!("{what}, {}, {dtype}", self.name()),
            false => format!(
                "{what}, {}, {dtype}, {percent} % from {elsewhere}",
                self.name()
            ),
        };
        let case = |what: &str, seconds: &[f64], busy: &[f64], estimate: &Estimate| {
            let seconds = Seconds::of(seconds).context("no run")?;
            let mut case = Case::new(GROUP, name(what), seconds)
                .parameter("blocks", arguments.blocks)
                .parameter("rows", layout.rows())
                .parameter("type", dtype.to_string())
                .parameter("percent", percent)
                .parameter("times", times.len())
                .count("nodes", estimate.nodes as u64);
            case.processor_seconds = Some(median(busy));
            anyhow::Ok(case)
        };
        let print = |what: &str, case: &Case| {
            let most = case.peak_bytes.get("total").copied().unwrap_or_default();
            let moved = case.counts.get("weight_bytes").copied().unwrap_or_default();
            println!(
                "{:>6} {fits:>12} {what:>12} {:9.4} {:9.4} {:>10} {:>10}",
                dtype.to_string(),
                case.seconds.median,
                case.processor_seconds.unwrap_or_default(),
                Bytes(most).to_string(),
                Bytes(moved).to_string(),
            );
        };

        // Weights are read and converted before the clock runs; those that come and go are read within.
        let weights = model.weights_mut(Stage::Preparation);
        weights.load(&backend, &cancel, quiet)?;
        let text = transformer::numbers(layout.text_rows() * model.config().text_dim, 1);
        let watch = ledger.watch(*device);
        let (begin, used) = (Instant::now(), processor_seconds());
        let (prepared, moved) = model.prepare(&mut backend, &text, &times, &cancel, quiet)?;
        let took = [begin.elapsed().as_secs_f64()];
        let preparation = case("prepare", &took, &[processor_seconds() - used], &before)?;
        let preparation = preparation.peak(&watch.most()).count("weight_bytes", moved);
        print("prepare", &preparation);
        drop(watch);

        let (wide, of_sound) = (
            model.config().video_channels(),
            model.config().audio_in_channels,
        );
        let video = transformer::numbers(layout.video_rows() * wide, 0);
        let sound = transformer::numbers(layout.sound_rows() * of_sound, 2);
        let noisy = Noisy {
            video: &video,
            sound: &sound,
            times: self.times(),
        };
        let weights = model.weights_mut(Stage::Steps);
        weights.load(&backend, &cancel, quiet)?;
        let watch = ledger.watch(*device);
        let (mut seconds, mut busy, mut velocity) = (Vec::new(), Vec::new(), None);
        for run in 0..=arguments.runs {
            let (begin, used) = (Instant::now(), processor_seconds());
            let weights = model.weights_mut(Stage::Steps);
            weights.bring(&backend, &cancel, quiet)?;
            let made = model.velocity(&mut backend, layout, &prepared, noisy, &cancel, quiet)?;
            if run > 0 {
                seconds.push(begin.elapsed().as_secs_f64());
                busy.push(processor_seconds() - used);
            }
            velocity = Some(made);
        }
        let velocity = velocity.context("no run")?;
        let made = [&velocity.video[..], &velocity.sound].concat();
        ensure!(
            made.iter().all(|value| value.is_finite()),
            "the result is no finite number"
        );
        let step = case("step", &seconds, &busy, &step)?
            .peak(&watch.most())
            .count("weight_bytes", velocity.weight_bytes);
        print("step", &step);
        let file = format!("velocity-{dtype}-{percent}.f32");
        write(&arguments.folder.join(&file), &made)?;
        let told = json!({
            "name": step.name, "seconds": step.seconds.median,
            "processor_seconds": step.processor_seconds, "velocity": file,
        });
        Ok((vec![preparation, step], told))
    }
}
