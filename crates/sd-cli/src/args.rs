//! Arguments of the command, and what its help says.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use sd_backend::{DType, Mapping, MemoryBudgets, Placement};
use sd_graph::{LoadOptions, TensorTypes};
use sd_models::{
    Circular, FrameRate, ModelArgs, ModelFiles, PipelineBuilder, PreviewBy, Request, Rng, Sampler,
    Schedule, Scheduler,
};

/// Pictures from a diffusion checkpoint.
#[derive(Debug, Parser)]
#[command(
    name = "sd",
    version,
    about,
    max_term_width = 100,
    propagate_version = true
)]
pub(crate) struct Sd {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Say more on standard error; twice for details.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,

    /// Say nothing but errors.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,

    /// Folder of backends to load (libggml-cuda.so and the like, of the same version of ggml); SD_BACKENDS does the same. A
    /// program built with the feature `dynamic-backends` looks beside itself without either.
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) backends: Option<PathBuf>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make a picture from a prompt.
    #[command(
        after_help = "Without --model the tiny checkpoint of the repository is used: it draws coloured shapes, such \
        as \"a large red circle on a blue background\"."
    )]
    Generate(Box<Generate>),
    /// Say how much memory a picture needs, without loading the model.
    Plan(Box<Plan>),
    /// Say what a checkpoint is: a model folder, or a single .safetensors or .gguf file.
    Info(Info),
    /// Write a file of weights as a GGUF or safetensors file, with weights of other types.
    #[command(
        after_help = "What is read is a .safetensors or .gguf file, or a folder of one part of a model (its transformer, say). The \
        ending of the output's name says what is written: .gguf holds all types, .safetensors F32, F16 and BF16. Of a diffusion \
        model, weights outside of its layers keep their type unless a --tensor-type names them; vectors and biases are never \
        quantised. Memory does not grow with the file."
    )]
    Convert(Convert),
    /// List the devices there are to run on, with their memory and what they can do.
    Devices(Devices),
    /// Encode pictures and frames of clips as latents, and decode latents, with a VAE of the WAN family or of MiniMax H3.
    #[command(subcommand)]
    Vae(Vae),
    /// Let programs on other machines compute on this machine's devices.
    #[command(
        after_help = "Clients name the server as a device: sd generate --device rpc://HOST:PORT, or rpc://HOST:PORT/1 for \
        its second device. It serves one client at a time, until it is interrupted.\n\n\
        The protocol has no passwords and no encryption, and believes what it is told: whoever reaches the port can read \
        what clients compute and bring the server down. Other addresses than 127.0.0.1 are for networks whose every user \
        you trust; through others, lead the port by a tunnel (ssh -L)."
    )]
    RpcServer(RpcServer),
}

/// Arguments of `sd generate`.
#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// What the picture shows. Empty is allowed: a picture of nothing in particular.
    #[arg(short, long, value_name = "TEXT")]
    pub(crate) prompt: String,

    /// What the picture should not show; needs a guidance above 1. Without it, guidance leads away from an empty prompt.
    #[arg(short, long, value_name = "TEXT")]
    pub(crate) negative_prompt: Option<String>,

    /// Model folder in the diffusers layout (with a model_index.json), or a .safetensors or .gguf file with some or all parts.
    #[arg(short, long, value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) references: References,

    #[command(flatten)]
    pub(crate) parts: Parts,

    /// Width in pixels, rounded down to a multiple of 32 [default: that of the last reference picture, or the model's].
    #[arg(short = 'W', long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) width: Option<usize>,

    /// Height in pixels, rounded down to a multiple of 32.
    #[arg(short = 'H', long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) height: Option<usize>,

    /// Number of steps, from 1 to 1000.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) steps: Option<usize>,

    #[command(flatten)]
    pub(crate) sampling: Sampling,

    /// Leave out calls of the model whose answer is estimated to change by less than this part: 0.05 hardly changes a picture,
    /// 0.2 shows [default: 0, none].
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) step_cache: Option<f32>,

    /// Guidance scale: 1 follows the prompt as it is, more exaggerates it and doubles the time.
    #[arg(short, long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) guidance: Option<f32>,

    /// Seed of the starting noise: the same seed and settings give the same picture.
    #[arg(
        short,
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true
    )]
    pub(crate) seed: u64,

    /// Make so many pictures, of this seed and the following ones; the prompt is computed once.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        allow_negative_numbers = true
    )]
    pub(crate) count: u64,

    /// Whose random numbers the seed stands for: PyTorch's on a processor (cpu), or on a graphics card of NVIDIA (cuda, and
    /// cuda:THREADS for one that runs fewer threads at once than the picture has latents: 196608 on an RTX 4090).
    #[arg(long, value_name = "cpu|cuda", default_value_t = Rng::default())]
    pub(crate) rng: Rng,

    /// Sides that continue at the opposite one, so that the picture tiles without a seam.
    #[arg(long, value_name = "SIDES")]
    pub(crate) circular: Option<Sides>,

    /// Decode the picture in overlapping squares of so many pixels, at least 64: less memory, more time [default: at once,
    /// or in the largest squares that memory allows].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) vae_tile: Option<usize>,

    #[command(flatten)]
    pub(crate) preview: Preview,

    #[command(flatten)]
    pub(crate) resources: Resources,

    #[command(flatten)]
    pub(crate) weights: Weights,

    #[command(flatten)]
    pub(crate) options: Model,

    /// Threads that compute on the processor [default: as many as there are].
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) threads: Option<usize>,

    /// File to write; {seed} in its name is the seed. Several pictures are numbered (output-1.png, output-2.png) where the
    /// name does not say so.
    #[arg(short, long, value_name = "FILE.png", default_value = "output.png")]
    pub(crate) output: PathBuf,

    /// Print one report in JSON on standard output: sizes, seconds per stage, bytes, and all pictures.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Pictures that the prompt is about.
#[derive(Debug, Args)]
pub(crate) struct References {
    /// Picture that the prompt is about (PNG, JPEG or WebP); may be given up to four times. The prompt may
    /// speak of `<image1>`, `<image2>` and so on.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) ref_image: Vec<PathBuf>,

    /// Scale reference pictures to the area of a square of so many pixels by side, from 32 to 2048: less memory and time, or
    /// more detail [default: the area of the model's own pictures].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) ref_size: Option<usize>,
}

/// How steps are taken, and at which noise levels.
#[derive(Debug, Args)]
pub(crate) struct Sampling {
    /// How steps are taken; heun asks the model twice a step.
    #[arg(long, value_name = "NAME", default_value_t = Sampler::default().name().to_owned(), value_parser = names(Sampler::ALL.map(Sampler::name)))]
    sampler: String,

    /// How the noise levels are laid out; `model` is as the checkpoint's author has them.
    #[arg(long, value_name = "NAME", default_value_t = Scheduler::default().name().to_owned(), value_parser = names(Scheduler::NAMED.each_ref().map(Scheduler::name)))]
    schedule: String,

    /// The noise levels themselves, as many as steps, falling from at most 1, such as 1,0.8,0.5,0.2. The final 0 is implied.
    #[arg(
        long,
        value_name = "LEVEL,...",
        value_delimiter = ',',
        allow_negative_numbers = true,
        conflicts_with_all = ["schedule", "steps"]
    )]
    sigmas: Vec<f32>,
}

/// One of some names, listed by the help.
fn names<const N: usize>(names: [&'static str; N]) -> PossibleValuesParser {
    PossibleValuesParser::new(names)
}

impl Sampling {
    /// Passes them on.
    pub(crate) fn apply<'c>(&self, request: Request<'c>) -> Result<Request<'c>, sd_models::Error> {
        let scheduler = match &self.sigmas[..] {
            [] => self.schedule.parse()?,
            sigmas => Scheduler::Exact(sigmas.to_vec()),
        };
        Ok(request.sampler(self.sampler.parse()?).scheduler(scheduler))
    }

    /// Refuses levels that no model could use.
    pub(crate) fn check(&self) -> Result<(), sd_models::Error> {
        match &self.sigmas[..] {
            [] => Ok(()),
            // How many timesteps the model knows makes no difference here.
            sigmas => Schedule::exact(sigmas, 1).map(drop),
        }
    }
}

/// What is shown while steps are taken.
#[derive(Debug, Args)]
pub(crate) struct Preview {
    /// Show what is made so far behind every N steps, in --preview-file and in terminals that can: by a linear map (small, and
    /// next to no time) or by the decoder (its time and memory each time) [default: linear].
    #[arg(long, value_name = "N[:linear|decoder]", value_parser = preview)]
    pub(crate) preview: Option<(usize, PreviewBy)>,

    /// File that each preview replaces.
    #[arg(long, value_name = "FILE.png", requires = "preview")]
    pub(crate) preview_file: Option<PathBuf>,
}

fn preview(text: &str) -> Result<(usize, PreviewBy), String> {
    let (every, by) = text.split_once(':').unwrap_or((text, "linear"));
    let every = every.parse().ok().filter(|&every| every > 0);
    let by = match by {
        "linear" => Some(PreviewBy::Linear),
        "decoder" => Some(PreviewBy::Decoder),
        _ => None,
    };
    every.zip(by).ok_or_else(|| {
        "a number of steps is expected, alone or with `:linear` or `:decoder`".to_owned()
    })
}

/// Files of single parts of a model.
#[derive(Debug, Args)]
pub(crate) struct Parts {
    /// Transformer, in place of the model's: a .safetensors or .gguf file, or a folder.
    #[arg(long, value_name = "PATH")]
    pub(crate) transformer: Option<PathBuf>,

    /// Text encoder, in place of the model's: a .safetensors file, a .gguf file as llama.cpp has it, or a folder.
    #[arg(long, value_name = "PATH")]
    pub(crate) text_encoder: Option<PathBuf>,

    /// Vision tower of a text encoder whose file has none, for prompts about pictures: a .gguf file as llama.cpp has it (mmproj).
    #[arg(long, value_name = "FILE")]
    pub(crate) vision: Option<PathBuf>,

    /// VAE, in place of the model's: a file or a folder.
    #[arg(long, value_name = "PATH")]
    pub(crate) vae: Option<PathBuf>,

    /// Tokenizer, in place of the model's or of that in a .gguf text encoder: tokenizer.json, or a folder with it.
    #[arg(long, value_name = "PATH")]
    pub(crate) tokenizer: Option<PathBuf>,

    /// LoRA to add to the transformer, and how many times [default: 1]. May be given several times.
    #[arg(long, value_name = "FILE[:STRENGTH]", value_parser = lora)]
    pub(crate) lora: Vec<(PathBuf, f32)>,
}

impl Parts {
    /// All files of a model with these parts.
    pub(crate) fn files(&self, model: Option<&Path>) -> ModelFiles {
        let mut files = ModelFiles::default();
        if let Some(path) = model {
            files = files.model(path);
        }
        if let Some(path) = &self.transformer {
            files = files.transformer(path);
        }
        if let Some(path) = &self.text_encoder {
            files = files.text_encoder(path);
        }
        if let Some(path) = &self.vision {
            files = files.vision(path);
        }
        if let Some(path) = &self.vae {
            files = files.vae(path);
        }
        if let Some(path) = &self.tokenizer {
            files = files.tokenizer(path);
        }
        let loras = self.lora.iter();
        loras.fold(files, |files, (path, strength)| files.lora(path, *strength))
    }
}

/// A path, and behind a colon a number if what is there is one.
fn lora(text: &str) -> Result<(PathBuf, f32), String> {
    let (path, strength) = match text.rsplit_once(':') {
        Some((path, number)) if !path.is_empty() && number.parse::<f32>().is_ok() => {
            (path, number.parse().unwrap_or(1.0))
        }
        _ => (text, 1.0),
    };
    if path.is_empty() {
        return Err("a file is expected".to_owned());
    }
    if !f32::is_finite(strength) {
        return Err(format!("{strength} is no strength"));
    }
    Ok((path.into(), strength))
}

/// Sides of a picture that join.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sides {
    /// Left and right.
    X,
    /// Top and bottom.
    Y,
    /// All four.
    Xy,
}

impl From<Sides> for Circular {
    fn from(sides: Sides) -> Circular {
        match sides {
            Sides::X => Circular::X,
            Sides::Y => Circular::Y,
            Sides::Xy => Circular::XY,
        }
    }
}

/// Arguments of `sd plan`.
#[derive(Debug, Args)]
pub(crate) struct Plan {
    /// Model folder in the diffusers layout, or a file with some or all parts.
    #[arg(value_name = "MODEL", required_unless_present = "transformer")]
    pub(crate) model: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) parts: Parts,

    /// Width in pixels [default: the model's].
    #[arg(short = 'W', long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) width: Option<usize>,

    /// Height in pixels [default: the model's].
    #[arg(short = 'H', long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) height: Option<usize>,

    /// Tokens of the prompt.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) tokens: usize,

    /// Size of a picture that the prompt is about; may be given up to four times.
    #[arg(long, value_name = "WxH", value_parser = dimensions)]
    pub(crate) reference: Vec<(u32, u32)>,

    /// Scale reference pictures to the area of a square of so many pixels by side [default: that of the model's own pictures].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) ref_size: Option<usize>,

    #[command(flatten)]
    pub(crate) resources: Resources,

    #[command(flatten)]
    pub(crate) weights: Weights,

    #[command(flatten)]
    pub(crate) options: Model,

    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `sd devices`.
#[derive(Debug, Args)]
pub(crate) struct Devices {
    /// List the devices of this server too; may be given several times.
    #[arg(long, value_name = "rpc://HOST:PORT")]
    pub(crate) server: Vec<String>,

    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Where the model runs, and in how much memory.
#[derive(Debug, Args)]
pub(crate) struct Resources {
    /// Device to run on: auto, cpu, gpu, the name of one, or rpc://HOST:PORT for one of a server.
    #[arg(short, long, value_name = "NAME", default_value = "auto")]
    pub(crate) device: String,

    /// Memory that may be used: auto, 8GiB, free-2GiB, or by device: cuda0=8GiB,cpu=4GiB.
    #[arg(long, value_name = "BUDGET", default_value = "auto")]
    pub(crate) memory_budget: MemoryBudgets,

    /// Where the parts go: a device for all, or by part, such as diffusion=cuda0,vae=cpu,text-encoder=cuda0@disk. After
    /// an @: where the part's weights are while it does not run (device, host, disk). The rest is chosen.
    #[arg(long, value_name = "PLACEMENT")]
    pub(crate) placement: Option<Placement>,

    /// Use weight files where they lie in memory: auto, never, always (also where a device does not say it can).
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub(crate) mapping: Mapping,
}

impl Resources {
    /// Passes them on.
    pub(crate) fn apply(&self, builder: PipelineBuilder) -> PipelineBuilder {
        builder
            .device(self.device.as_str())
            .placement(self.placement.clone().unwrap_or_default())
            .mapping(self.mapping)
            .memory_budget(self.memory_budget.clone())
    }
}

/// Options of single models.
#[derive(Debug, Args)]
pub(crate) struct Model {
    /// Options of single models, with commas between them: qwen_image_2_1_prefix_cache=true|false keeps keys and values of
    /// the prompt between steps [default: true], qwen_image_2_1_prefix_cache_type=f32|f16|q8_0 says in which type
    /// [default: f32]. May be given several times.
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub(crate) model_args: Vec<ModelArgs>,
}

impl Model {
    /// Passes them on; the last that says something decides.
    pub(crate) fn apply(&self, builder: PipelineBuilder) -> PipelineBuilder {
        let args = self.model_args.iter();
        let args = args.fold(ModelArgs::default(), |before, args| args.or(before));
        builder.prefix_cache(args.prefix_cache())
    }
}

/// Which types weights get in memory.
#[derive(Debug, Args)]
pub(crate) struct Weights {
    /// Type that weights get, such as f16, q8_0 or q4_K [default: that of the files].
    #[arg(long, value_name = "TYPE", value_parser = sd_graph::weight_type)]
    pub(crate) weight_type: Option<DType>,

    /// Type of the weights in whose full name a regular expression is found, such as '^transformer\..*attn=q8_0'. May be
    /// given several times; the first that fits decides, and comes before --weight-type.
    #[arg(long, value_name = "PATTERN=TYPE")]
    pub(crate) tensor_type: Vec<TensorTypes>,
}

impl Weights {
    /// What they ask of a file.
    pub(crate) fn apply_to(&self, mut options: LoadOptions) -> LoadOptions {
        if let Some(dtype) = self.weight_type {
            options = options.weight_type(dtype);
        }
        let rules = self.tensor_type.iter();
        rules.fold(options, |options, rules| {
            options.tensor_types(rules.clone())
        })
    }

    /// Passes them on.
    pub(crate) fn apply(&self, mut builder: PipelineBuilder) -> PipelineBuilder {
        if let Some(dtype) = self.weight_type {
            builder = builder.weight_type(dtype);
        }
        for rules in &self.tensor_type {
            builder = builder.tensor_types(rules.clone());
        }
        builder
    }
}

/// What to do with a VAE.
#[derive(Debug, Subcommand)]
pub(crate) enum Vae {
    /// Encode a picture or clip: a PNG, which may be animated, the PNGs of a folder in the order of their names, or a video.
    #[command(
        after_help = "The file has the tensor `latents`, F32 [frames, channels, height, width]: the means, not normalised, and \
        in its metadata the frame rate where the input has one. A clip's first frame makes one frame of latents, each \
        further four frames one more; frames that remain are left out, and said so. Of MiniMax H3's a clip has 5 frames in 2 \
        frames of latents, and each further 17 in 5 more; what a clip of another length becomes is said.\n\n\
        Videos are read by the program ffmpeg, which must be there."
    )]
    Encode(VaeFiles),
    /// Decode latents as the output's name says: to a PNG (animated for a clip), to a video (.mp4, .mkv, .webm, .mov, .gif), or
    /// to numbered PNGs in a new folder.
    #[command(after_help = "Videos are written by the program ffmpeg, which must be there.")]
    Decode(VaeFiles),
}

/// Squares that frames are worked on in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tile {
    Auto,
    Whole,
    Pixels(usize),
}

fn tile(text: &str) -> Result<Tile, String> {
    match text {
        "auto" => Ok(Tile::Auto),
        "whole" => Ok(Tile::Whole),
        _ => text
            .parse()
            .map(Tile::Pixels)
            .map_err(|_| "a number of pixels, `auto` or `whole` is expected".to_owned()),
    }
}

/// Arguments of `sd vae encode` and `sd vae decode`.
#[derive(Debug, Args)]
pub(crate) struct VaeFiles {
    /// What to encode or decode.
    #[arg(value_name = "INPUT")]
    pub(crate) input: PathBuf,

    /// Folder of the VAE (with a config.json), or its file of weights, which needs none beside it unless it is MiniMax H3's.
    #[arg(long, value_name = "PATH")]
    pub(crate) vae: PathBuf,

    /// File, or new folder for a decoded clip, to write.
    #[arg(short, long, value_name = "PATH")]
    pub(crate) output: PathBuf,

    /// Work on overlapping squares of so many pixels: less memory, more time. `auto` takes all at once if that fits, else the
    /// largest squares that do; `whole` insists. Of MiniMax H3's VAE `auto` are the squares of 256 that it was released with.
    #[arg(long, value_name = "N|auto|whole", default_value = "auto", value_parser = tile)]
    pub(crate) tile: Tile,

    /// Sides that continue at the opposite one.
    #[arg(long, value_name = "SIDES")]
    pub(crate) circular: Option<Sides>,

    /// Pictures a second: instead of the input's, or 16 where nothing says how many.
    #[arg(long, value_name = "RATE")]
    pub(crate) frame_rate: Option<FrameRate>,

    /// The program that reads and writes videos.
    #[arg(long, value_name = "PATH", default_value = "ffmpeg")]
    pub(crate) ffmpeg: PathBuf,

    /// Print one report in JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,

    /// Device to run on: auto, cpu, gpu, the name of one, or rpc://HOST:PORT for one of a server.
    #[arg(short, long, value_name = "NAME", default_value = "auto")]
    pub(crate) device: String,

    /// Memory that may be used: auto, 8GiB, free-2GiB, or by device: cuda0=8GiB,cpu=4GiB.
    #[arg(long, value_name = "BUDGET", default_value = "auto")]
    pub(crate) memory_budget: MemoryBudgets,

    /// Threads that compute on the processor [default: as many as there are].
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) threads: Option<usize>,
}

/// Arguments of `sd info`.
#[derive(Debug, Args)]
pub(crate) struct Info {
    /// Model folder, .safetensors or .gguf file.
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,

    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `sd convert`.
#[derive(Debug, Args)]
pub(crate) struct Convert {
    /// File or folder of weights to read.
    #[arg(value_name = "IN")]
    pub(crate) input: PathBuf,

    /// File to write: .gguf or .safetensors.
    #[arg(value_name = "OUT")]
    pub(crate) output: PathBuf,

    #[command(flatten)]
    pub(crate) weights: Weights,

    /// Replace the output if it exists.
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Print one report in JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `sd rpc-server`.
#[derive(Debug, Args)]
pub(crate) struct RpcServer {
    /// IPv4 address to listen at: of this machine alone (127.0.0.1), of one of its networks, or of all (0.0.0.0).
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = address)]
    pub(crate) host: Ipv4Addr,

    /// Port to listen at; 0 takes a free one and says which.
    #[arg(short, long, value_name = "N", default_value_t = 50052)]
    pub(crate) port: u16,

    /// Device to serve; may be given several times [default: all graphics cards, or else the processor].
    #[arg(short, long, value_name = "NAME")]
    pub(crate) device: Vec<String>,

    /// Threads that compute on the processor [default: as many as there are].
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) threads: Option<usize>,

    /// Folder in which large weights are kept, so that clients need not send them again. It is never emptied.
    #[arg(long, value_name = "DIR")]
    pub(crate) cache: Option<PathBuf>,
}

fn dimensions(text: &str) -> Result<(u32, u32), String> {
    let (width, height) = text.split_once(['x', 'X']).unwrap_or_default();
    match (width.trim().parse(), height.trim().parse()) {
        (Ok(width), Ok(height)) => Ok((width, height)),
        _ => Err("width and height in pixels are expected, such as 1200x800".to_owned()),
    }
}

fn address(text: &str) -> Result<Ipv4Addr, String> {
    match text {
        "localhost" => Ok(Ipv4Addr::LOCALHOST),
        _ => text
            .parse()
            .map_err(|_| "an IPv4 address of this machine is expected".to_owned()),
    }
}
