//! Arguments of `sd vae`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use sd_models::FrameRate;

use super::{Machine, Sides};

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
    /// Decode latents as the output's name says: to a PNG (animated for a clip), to a video (.avi, .mp4, .mkv, .webm, .mov, .gif), or
    /// to numbered PNGs in a new folder.
    #[command(
        after_help = "Videos other than .avi are written by the program ffmpeg, which must be there."
    )]
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

    #[command(flatten)]
    pub(crate) machine: Machine,
}
