//! What a VAE of a published shape takes: seconds and bytes to decode or encode a picture or a clip, with random weights that
//! are made on the spot. `peers/vae.py` does the same with diffusers on the same files, and compares the results.
//!
//! ```sh
//! cargo xtask bench vae --model wan21 --size 832x480 --frames 17 --folder /tmp/vae
//! python benches/peers/vae.py --folder /tmp/vae
//! cargo xtask bench vae --model minimax-h3-sound --seconds 5 --peers --python python3
//! ```
//!
//! It prints one JSON object: seconds of each run after one to warm up, and their median; the most bytes that the ledger
//! held on the device, weights included; of them what is computed in and what weights take; and the most that the process had
//! resident. With `--tile auto` or pixels, frames are worked on in squares. With `--peers` diffusers follows at once. What is made stays
//! in `--folder`: the checkpoint, the latents, and what came of them.
//!
//! MiniMax H3's VAE for sound wants `--seconds` in place of a size. A sound is a clip here: each channel a frame, and its latents the rows.
#![allow(clippy::print_stdout)]

mod files;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use sd_backend::{Backend, BackendOptions, DType, Device, Ledger, MemoryBudgets, MemoryKind};
use sd_graph::{Cancel, LoadOptions, Progress, Reporter};
use sd_models::minimax_h3::sound_vae::{self, SoundVae};
use sd_models::minimax_h3::video_vae::{self, VideoVae};
use sd_models::wan_vae::{Clip, Fit, Latents, Tiling, WanVae, Work};
use sd_models::{Sound, noise};
use serde_json::{Value, json};

use crate::peers::{self, Diffusers};
use crate::results::median;
use crate::step::processor_seconds;

/// What a VAE takes.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Shape of the VAE.
    #[arg(long, default_value = "qwen21")]
    pub model: Model,
    /// Device to run on.
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// Folder of backends to load first.
    #[arg(long)]
    pub backends: Option<PathBuf>,
    /// Where the checkpoint and the results are kept.
    #[arg(long, default_value_os_t = std::env::temp_dir().join("sd-vae"))]
    pub folder: PathBuf,
    /// Width and height in pixels.
    #[arg(long, default_value = "512x512", value_parser = size)]
    pub size: (usize, usize),
    /// Frames of the clip.
    #[arg(long, default_value_t = 1)]
    pub frames: usize,
    /// Length of the sound, for the VAE that is for sound.
    #[arg(long, default_value_t = 5.0)]
    pub seconds: f64,
    /// Encode instead of decoding.
    #[arg(long)]
    pub encode: bool,
    /// Type of the kernels in memory: f32 or f16.
    #[arg(long, default_value = "f32", value_parser = sd_graph::weight_type)]
    pub weight_type: DType,
    /// Squares of so many pixels, `auto` for those that fit, or `whole`.
    #[arg(long, default_value = "whole")]
    pub tile: String,
    /// Memory that may be used.
    #[arg(long, default_value = "auto")]
    pub memory_budget: MemoryBudgets,
    /// Threads that compute on the processor.
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Say how much memory it would take, and do nothing.
    #[arg(long)]
    pub plan: bool,
    /// Runs that are measured, after one to warm up.
    #[arg(long, default_value_t = 3)]
    pub runs: usize,
    /// Another program.
    #[command(flatten)]
    pub peers: Diffusers,
}

/// A published VAE.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Model {
    /// WAN 2.1's.
    Wan21,
    /// WAN 2.2's.
    Wan22,
    /// Qwen-Image 2.1's.
    Qwen21,
    /// MiniMax H3's, of frames.
    MinimaxH3,
    /// MiniMax H3's, of sound.
    MinimaxH3Sound,
}

impl Model {
    /// Configuration, and names and shapes of all tensors.
    fn table(self) -> Result<Value> {
        let text = match self {
            Model::Wan21 => {
                include_str!("../../crates/sd-models/tests/fixtures/published/wan21_vae.json")
            }
            Model::Wan22 => {
                include_str!("../../crates/sd-models/tests/fixtures/published/wan22_vae.json")
            }
            Model::Qwen21 => {
                include_str!("../../crates/sd-models/tests/fixtures/published/qwenimage21_vae.json")
            }
            Model::MinimaxH3 => {
                include_str!("../../crates/sd-models/tests/fixtures/published/minimax_h3_vae.json")
            }
            Model::MinimaxH3Sound => {
                include_str!(
                    "../../crates/sd-models/tests/fixtures/published/minimax_h3_sound_vae.json"
                )
            }
        };
        Ok(serde_json::from_str(text)?)
    }
}

pub(crate) fn size(text: &str) -> Result<(usize, usize), String> {
    let sides = text
        .split_once('x')
        .and_then(|(width, height)| Some((width.parse().ok()?, height.parse().ok()?)));
    sides.ok_or_else(|| "WIDTHxHEIGHT is expected".to_owned())
}

/// A VAE that was opened, and how it works on frames.
enum Opened {
    Wan(Box<WanVae>, Work),
    MinimaxH3(Box<VideoVae>, video_vae::Tiling),
    MinimaxH3Sound(Box<SoundVae>),
}

impl Opened {
    fn new(model: Model, folder: &Path, options: &LoadOptions, tile: &str) -> Result<Opened> {
        let pixels = || tile.parse::<usize>().context("--tile");
        if let Model::MinimaxH3 = model {
            let vae = VideoVae::open(folder, options)?;
            let tiling = match tile {
                "auto" => video_vae::Tiling::default(),
                "whole" => video_vae::Tiling::Whole,
                _ => video_vae::Tiling::Tiles {
                    size: pixels()?,
                    overlap: (pixels()? / 4).next_multiple_of(vae.config().scale_factor()),
                },
            };
            return Ok(Opened::MinimaxH3(Box::new(vae), tiling));
        }
        if let Model::MinimaxH3Sound = model {
            return Ok(Opened::MinimaxH3Sound(Box::new(SoundVae::open(folder)?)));
        }
        let vae = WanVae::open(folder, options)?;
        let tiling = match tile {
            "auto" => Tiling::Fit,
            "whole" => Tiling::Whole,
            _ => Tiling::Squares(pixels()? / vae.config().scale_factor()),
        };
        Ok(Opened::Wan(Box::new(vae), tiling.into()))
    }

    /// Pixels along a side of a latent; samples of a latent.
    fn scale(&self) -> usize {
        match self {
            Opened::Wan(vae, _) => vae.config().scale_factor(),
            Opened::MinimaxH3(vae, _) => vae.config().scale_factor(),
            Opened::MinimaxH3Sound(vae) => vae.config().hop(),
        }
    }

    /// What is encoded or decoded, random numbers around 0: frames, channels, height and width.
    fn input(&self, arguments: &Arguments) -> Clip {
        let ((width, height), scale) = (arguments.size, self.scale());
        let (channels, latent_channels, latent_frames) = match self {
            Opened::Wan(vae, _) => {
                let config = vae.config();
                let frames = config.latent_frames(arguments.frames);
                (config.channels(), config.z_dim, frames)
            }
            Opened::MinimaxH3(vae, _) => {
                let config = vae.config();
                let frames = config.latent_frames(arguments.frames);
                (3, config.latent_channels, frames)
            }
            Opened::MinimaxH3Sound(vae) => {
                let samples = samples(arguments, vae);
                return match arguments.encode {
                    true => clip([2, 1, 1, samples], 0.1),
                    false => {
                        let count = vae.config().latents(samples);
                        clip([2, 1, count, vae.config().latent_channels], 1.0)
                    }
                };
            }
        };
        match arguments.encode {
            true => clip([arguments.frames, channels, height, width], 0.5),
            false => {
                let (height, width) = (height / scale, width / scale);
                clip([latent_frames, latent_channels, height, width], 1.0)
            }
        }
    }

    /// What encoding or decoding takes, as it is printed.
    fn fit(&self, backend: &Backend, arguments: &Arguments) -> Result<Value> {
        let ((width, height), frames) = (arguments.size, arguments.frames);
        let size = (height / self.scale(), width / self.scale());
        let fit: Fit = match (self, arguments.encode) {
            (Opened::Wan(vae, work), true) => {
                vae.fit_encoding(backend, frames, (height, width), *work)?
            }
            (Opened::Wan(vae, work), false) => {
                let frames = vae.config().latent_frames(frames);
                vae.fit_decoding(backend, frames, size, *work)?
            }
            (Opened::MinimaxH3(vae, tiling), true) => {
                vae.fit_encoding(backend, frames, (height, width), *tiling)?
            }
            (Opened::MinimaxH3(vae, tiling), false) => vae.fit_decoding(backend, size, *tiling)?,
            (Opened::MinimaxH3Sound(vae), encodes) => {
                let samples = samples(arguments, vae);
                let (weights, beside) = match encodes {
                    true => vae.encoding_need(backend, samples)?,
                    false => vae.decoding_need(backend, vae.config().latents(samples))?,
                };
                return Ok(json!({"bytes": weights + beside, "weight_bytes": weights}));
            }
        };
        Ok(json!({
            "bytes": fit.bytes,
            "weight_bytes": fit.weights,
            "tile": fit.tile.map(|tile| tile * self.scale()),
            "smallest": fit.smallest,
        }))
    }

    fn encode(&mut self, backend: &mut Backend, clip: &Clip) -> Result<(Clip, Option<usize>)> {
        let (cancel, mut quiet) = (Cancel::new(), |_: &Progress| {});
        let with = (&cancel, &mut quiet as &mut dyn Reporter);
        Ok(match self {
            Opened::Wan(vae, work) => {
                let (latents, report) = vae.encode(backend, clip, *work, &cancel)?;
                (latents, report.tile)
            }
            Opened::MinimaxH3(vae, tiling) => {
                let (posterior, report) = vae.encode(backend, clip, *tiling, with)?;
                (posterior.mean, report.tile)
            }
            Opened::MinimaxH3Sound(vae) => {
                let channels = clip.values.chunks_exact(clip.width).map(<[f32]>::to_vec);
                let sound = Sound::new(vae.config().sampling_rate, channels.collect());
                let sound = sound.context("no sound")?;
                let made = vae.encode(backend, &sound, with.0, with.1)?;
                (
                    signal([made.count, vae.config().latent_channels], made.values),
                    None,
                )
            }
        })
    }

    fn decode(&mut self, backend: &mut Backend, latents: &Clip) -> Result<(Clip, Option<usize>)> {
        let (cancel, mut quiet) = (Cancel::new(), |_: &Progress| {});
        let scale = self.scale();
        let (vae, tiling) = match self {
            Opened::Wan(vae, work) => {
                let (clip, report) = vae.decode(backend, latents, *work, &cancel)?;
                return Ok((clip, report.tile));
            }
            Opened::MinimaxH3(vae, tiling) => (vae, *tiling),
            Opened::MinimaxH3Sound(vae) => {
                let latents = sound_vae::Latents {
                    count: latents.height,
                    values: latents.values.clone(),
                };
                let sound = vae.decode(backend, &latents, &cancel, &mut quiet)?;
                let samples = sound.channels().concat();
                return Ok((signal([1, sound.samples()], samples), None));
            }
        };
        let mut clip = Clip {
            frames: 0,
            channels: 3,
            height: latents.height * scale,
            width: latents.width * scale,
            values: Vec::new(),
        };
        let mut add = |frame: &[f32]| {
            clip.frames += 1;
            clip.values.extend_from_slice(frame);
            Ok::<_, sd_models::Error>(())
        };
        let with = (&cancel, &mut quiet as &mut dyn Reporter);
        let report = vae.decode(backend, latents, tiling, with, &mut add)?;
        Ok((clip, report.tile))
    }
}

/// Samples of each channel of the sound that is asked for.
fn samples(arguments: &Arguments, vae: &SoundVae) -> usize {
    let rate = f64::from(vae.config().sampling_rate);
    ((arguments.seconds * rate) as usize).max(1)
}

/// Both channels of a sound, or of its latents, as a clip.
fn signal([height, width]: [usize; 2], values: Vec<f32>) -> Clip {
    Clip {
        frames: 2,
        channels: 1,
        height,
        width,
        values,
    }
}

/// What was asked for, and with `--peers` what diffusers takes for the same, as JSON objects and a line of ratios.
pub fn compare(arguments: &Arguments) -> Result<()> {
    let ours = run(arguments)?;
    let device = Device::select(&arguments.device)?;
    for peer in peers::vae(&arguments.peers, &arguments.folder, device, "vae")? {
        let ratio = |key: &str, theirs: Option<f64>| match (ours[key].as_f64(), theirs) {
            (Some(own), Some(theirs)) if theirs > 0.0 => format!("{:.2}", own / theirs),
            _ => "unknown".to_owned(),
        };
        println!(
            "diffusers, {}: {:.4} s, processor {:.2} s, most {} bytes; of it we take {} of the time, {} of the processor's, {} of the bytes; \
             relative error {:.1e}",
            peer.dtype.as_deref().unwrap_or_default(),
            peer.seconds,
            peer.processor_seconds.unwrap_or_default(),
            peer.peak_bytes.unwrap_or_default(),
            ratio("seconds", Some(peer.seconds)),
            ratio("processor_seconds", peer.processor_seconds),
            ratio("peak_bytes", peer.peak_bytes.map(|bytes| bytes as f64)),
            peer.error.unwrap_or(f64::NAN),
        );
    }
    Ok(())
}

/// Prints what was asked for as one JSON object, and returns it.
pub fn run(arguments: &Arguments) -> Result<Value> {
    if let Some(folder) = &arguments.backends {
        Device::load_backends(folder)?;
    }
    let device = Device::select(&arguments.device)?;
    let folder = arguments
        .folder
        .join(format!("{:?}", arguments.model).to_lowercase());
    files::write(&folder, &arguments.model.table()?)?;

    let options = LoadOptions::default().weight_type(arguments.weight_type);
    let mut vae = Opened::new(arguments.model, &folder, &options, &arguments.tile)?;
    let scale = vae.scale();
    let ledger = Ledger::new(arguments.memory_budget.clone());
    let options = BackendOptions::default()
        .threads(arguments.threads)
        .ledger(&ledger);
    let mut backend = Backend::new(device, &options)?;

    let (width, height) = arguments.size;
    let is_sound = matches!(arguments.model, Model::MinimaxH3Sound);
    ensure!(
        is_sound || width % scale == 0 && height % scale == 0,
        "sides must be multiples of {scale} pixels"
    );
    if arguments.plan {
        let report = vae.fit(&backend, arguments)?;
        println!("{report}");
        return Ok(report);
    }
    let input = vae.input(arguments);
    let (mut seconds, mut busy, mut last) = (Vec::new(), Vec::new(), None);
    let watch = ledger.watch(device);
    for run in 0..=arguments.runs {
        let (begin, used) = (Instant::now(), processor_seconds());
        let outcome = match arguments.encode {
            true => vae.encode(&mut backend, &input)?,
            false => vae.decode(&mut backend, &input)?,
        };
        if run > 0 || arguments.runs == 0 {
            seconds.push((begin.elapsed().as_secs_f64() * 1e4).round() / 1e4);
            busy.push(processor_seconds() - used);
        }
        last = Some(outcome);
    }
    let peak = watch.most().total();
    let (result, tile) = last.context("no run")?;
    ensure!(
        result.values.iter().all(|value| value.is_finite()),
        "the result is no finite number"
    );
    let weights = ledger.report(device).used;
    let weights = weights.of(MemoryKind::Weights) + weights.of(MemoryKind::Mapping);
    let task = match arguments.encode {
        true => "encode",
        false => "decode",
    };
    keep(&folder, "input", &input)?;
    keep(&folder, "result", &result)?;
    let mut report = json!({
        "program": "sd",
        "task": task,
        "model": format!("{:?}", arguments.model).to_lowercase(),
        "device": device.description(),
        "threads": backend.threads(),
        "type": arguments.weight_type.name(),
        "tile": tile.map(|tile| tile * scale),
        "seconds": median(&seconds),
        "processor_seconds": median(&busy),
        "runs": seconds,
        "processor_runs": busy,
        "peak_bytes": peak,
        "weight_bytes": weights,
        "compute_bytes": peak.saturating_sub(weights),
        "resident_bytes": resident(),
    });
    match is_sound {
        true => report["sound_seconds"] = arguments.seconds.into(),
        false => {
            report["width"] = width.into();
            report["height"] = height.into();
            report["frames"] = arguments.frames.into();
        }
    }
    let mut told = report.clone();
    told["folder"] = folder.display().to_string().into();
    fs::write(arguments.folder.join("last.json"), told.to_string())?;
    println!("{report}");
    Ok(report)
}

/// Random numbers around 0, the same each time.
fn clip([frames, channels, height, width]: [usize; 4], scale: f32) -> Clip {
    let count = frames * channels * height * width;
    let values = noise::normal(1, count.max(16));
    Clip {
        frames,
        channels,
        height,
        width,
        values: values
            .into_iter()
            .take(count)
            .map(|value| value * scale)
            .collect(),
    }
}

fn keep(folder: &Path, name: &str, clip: &Clip) -> Result<()> {
    let file = Latents {
        clip: clip.clone(),
        frame_rate: None,
    };
    Ok(file.write(folder.join(format!("{name}.safetensors")))?)
}

/// The most bytes that this process had resident, where the system tells.
fn resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}
