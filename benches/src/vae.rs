//! What a VAE of a published shape takes: seconds and bytes to decode or encode a picture or a clip, with random weights that
//! are made on the spot. `peers/vae.py` does the same with diffusers on the same files, and compares the results.
//!
//! ```sh
//! cargo xtask bench vae --model wan21 --size 832x480 --frames 17 --folder /tmp/vae
//! python benches/peers/vae.py --folder /tmp/vae --threads 2
//! ```
//!
//! It prints one JSON object: seconds of each run after one to warm up, and their median; the most bytes that the ledger
//! held on the device, weights included; of them what is computed in and what weights take; and the most that the process had
//! resident. With `--tile auto` or pixels, frames are worked on in squares. What is made stays in `--folder`: the checkpoint,
//! the latents, and what came of them.
#![allow(clippy::print_stdout)]

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use sd_backend::{Backend, BackendOptions, DType, Device, Ledger, MemoryBudgets, MemoryKind};
use sd_graph::{Cancel, LoadOptions, Progress, Reporter};
use sd_models::minimax_h3::video_vae::{self, VideoVae};
use sd_models::noise;
use sd_models::wan_vae::{Clip, ClipReport, Fit, Latents, Tiling, WanVae, Work};
use serde_json::{Value, json};

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
        let vae = WanVae::open(folder, options)?;
        let tiling = match tile {
            "auto" => Tiling::Fit,
            "whole" => Tiling::Whole,
            _ => Tiling::Squares(pixels()? / vae.config().scale_factor()),
        };
        Ok(Opened::Wan(Box::new(vae), tiling.into()))
    }

    fn scale(&self) -> usize {
        match self {
            Opened::Wan(vae, _) => vae.config().scale_factor(),
            Opened::MinimaxH3(vae, _) => vae.config().scale_factor(),
        }
    }

    /// Channels of frames and of latents.
    fn channels(&self) -> [usize; 2] {
        match self {
            Opened::Wan(vae, _) => [vae.config().channels(), vae.config().z_dim],
            Opened::MinimaxH3(vae, _) => [3, vae.config().latent_channels],
        }
    }

    fn latent_frames(&self, frames: usize) -> usize {
        match self {
            Opened::Wan(vae, _) => vae.config().latent_frames(frames),
            Opened::MinimaxH3(vae, _) => vae.config().latent_frames(frames),
        }
    }

    /// What encoding or decoding takes, in frames and pixels.
    fn fit(
        &self,
        backend: &Backend,
        encodes: bool,
        frames: usize,
        (height, width): (usize, usize),
    ) -> Result<Fit> {
        let size = (height / self.scale(), width / self.scale());
        Ok(match (self, encodes) {
            (Opened::Wan(vae, work), true) => {
                vae.fit_encoding(backend, frames, (height, width), *work)?
            }
            (Opened::Wan(vae, work), false) => {
                vae.fit_decoding(backend, self.latent_frames(frames), size, *work)?
            }
            (Opened::MinimaxH3(vae, tiling), true) => {
                vae.fit_encoding(backend, frames, (height, width), *tiling)?
            }
            (Opened::MinimaxH3(vae, tiling), false) => vae.fit_decoding(backend, size, *tiling)?,
        })
    }

    fn encode(&mut self, backend: &mut Backend, clip: &Clip) -> Result<(Clip, ClipReport)> {
        let (cancel, mut quiet) = (Cancel::new(), |_: &Progress| {});
        let with = (&cancel, &mut quiet as &mut dyn Reporter);
        Ok(match self {
            Opened::Wan(vae, work) => vae.encode(backend, clip, *work, &cancel)?,
            Opened::MinimaxH3(vae, tiling) => {
                let (posterior, report) = vae.encode(backend, clip, *tiling, with)?;
                (posterior.mean, report)
            }
        })
    }

    fn decode(&mut self, backend: &mut Backend, latents: &Clip) -> Result<(Clip, ClipReport)> {
        let (cancel, mut quiet) = (Cancel::new(), |_: &Progress| {});
        let scale = self.scale();
        let (vae, tiling) = match self {
            Opened::Wan(vae, work) => return Ok(vae.decode(backend, latents, *work, &cancel)?),
            Opened::MinimaxH3(vae, tiling) => (vae, *tiling),
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
        Ok((clip, report))
    }
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
    write(&folder, &arguments.model.table()?)?;

    let options = LoadOptions::default().weight_type(arguments.weight_type);
    let mut vae = Opened::new(arguments.model, &folder, &options, &arguments.tile)?;
    let scale = vae.scale();
    let ledger = Ledger::new(arguments.memory_budget.clone());
    let options = BackendOptions::default()
        .threads(arguments.threads)
        .ledger(&ledger);
    let mut backend = Backend::new(device, &options)?;

    let (width, height) = arguments.size;
    ensure!(
        width % scale == 0 && height % scale == 0,
        "sides must be multiples of {scale} pixels"
    );
    if arguments.plan {
        let size = (height, width);
        let fit = vae.fit(&backend, arguments.encode, arguments.frames, size)?;
        let report = json!({
            "bytes": fit.bytes,
            "tile": fit.tile.map(|tile| tile * scale),
            "smallest": fit.smallest,
        });
        println!("{report}");
        return Ok(report);
    }
    let [colours, latent_channels] = vae.channels();
    let input = match arguments.encode {
        true => clip([arguments.frames, colours, height, width], 0.5),
        false => {
            let frames = vae.latent_frames(arguments.frames);
            clip(
                [frames, latent_channels, height / scale, width / scale],
                1.0,
            )
        }
    };
    let (mut seconds, mut last) = (Vec::new(), None);
    for run in 0..=arguments.runs {
        let begin = Instant::now();
        let outcome = match arguments.encode {
            true => vae.encode(&mut backend, &input)?,
            false => vae.decode(&mut backend, &input)?,
        };
        if run > 0 || arguments.runs == 0 {
            seconds.push((begin.elapsed().as_secs_f64() * 1e4).round() / 1e4);
        }
        last = Some(outcome);
    }
    let (result, report) = last.context("no run")?;
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
    let mut sorted = seconds.clone();
    sorted.sort_by(f64::total_cmp);
    let report = json!({
        "program": "sd",
        "task": task,
        "model": format!("{:?}", arguments.model).to_lowercase(),
        "device": device.description(),
        "threads": backend.threads(),
        "type": arguments.weight_type.name(),
        "width": width,
        "height": height,
        "frames": arguments.frames,
        "tile": report.tile.map(|tile| tile * scale),
        "seconds": sorted[sorted.len() / 2],
        "runs": seconds,
        "peak_bytes": report.peak,
        "weight_bytes": weights,
        "compute_bytes": report.peak.saturating_sub(weights),
        "resident_bytes": resident(),
    });
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

/// Writes a VAE as diffusers has it: kernels of random numbers that keep the size of what passes through them, norms of 1 and
/// biases of 0, in single precision. One that is there is kept.
fn write(folder: &Path, table: &Value) -> Result<()> {
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
        for _ in 0..count {
            let value: f32 = match name.rsplit('.').next() {
                Some("gamma") => 1.0,
                Some("bias") => 0.0,
                _ => {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    ((state >> 8) as f32 / 8_388_608.0 - 1.0) * scale
                }
            };
            file.write_all(&value.to_le_bytes())?;
        }
    }
    file.flush()?;
    Ok(fs::rename(part, path)?)
}
