//! Arguments of the command, and what its help says.

mod generate;
mod model;
mod outcome;
mod plan;
mod vae;
mod video;

use std::net::Ipv4Addr;
use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand};

pub(crate) use generate::{Generate, Preview, Sides};
pub(crate) use model::{Loading, Machine, Model, Parts, Weights};
pub(crate) use outcome::{Noise, Size};
pub(crate) use plan::Plan;
pub(crate) use vae::{Tile, Vae, VaeFiles};
pub(crate) use video::{Video, VideoParts};

/// Over options that every command has, which come last.
const EVERYWHERE: &str = "Options of every command";

/// Pictures and clips from a diffusion checkpoint.
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
    #[arg(short, long, global = true, help_heading = EVERYWHERE, action = ArgAction::Count)]
    pub(crate) verbose: u8,

    /// Say nothing but errors.
    #[arg(short, long, global = true, help_heading = EVERYWHERE, conflicts_with = "verbose")]
    pub(crate) quiet: bool,

    /// Folder of backends to load (libggml-cuda.so and the like, of the same version of ggml); SD_BACKENDS does the same. A
    /// program built with the feature `dynamic-backends` looks beside itself without either.
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "DIR")]
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
    /// Make a clip with sound from a prompt, and from pictures, clips and sounds.
    #[command(
        after_help = "Without --model the tiny checkpoint of the repository is used: it draws a coloured shape that moves, with a tone, such as \
        \"a red circle moves right on a black background with a tone of 440 hertz\" (-W 128 -H 128 -f 22 --steps 21).\n\n\
        A clip begins with --first-frame and ends with --last-frame, or refers to what --ref-image, --ref-video \
        and --ref-audio give. Whatever has to be adjusted, such as sides that are no multiples of 32, is said on standard error and in the \
        report."
    )]
    Video(Box<Video>),
    /// Say how much memory a picture or clip needs, without loading the model.
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
    #[arg(short, long, value_name = "N", value_parser = model::threads, allow_negative_numbers = true)]
    pub(crate) threads: Option<usize>,

    /// Folder in which large weights are kept, so that clients need not send them again. It is never emptied.
    #[arg(long, value_name = "DIR")]
    pub(crate) cache: Option<PathBuf>,
}

fn address(text: &str) -> Result<Ipv4Addr, String> {
    match text {
        "localhost" => Ok(Ipv4Addr::LOCALHOST),
        _ => text
            .parse()
            .map_err(|_| "an IPv4 address of this machine is expected".to_owned()),
    }
}
