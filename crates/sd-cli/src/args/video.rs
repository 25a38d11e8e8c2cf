//! Arguments of `sd video`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use sd_models::minimax_h3::QkvOrder;
use sd_models::{ModelFiles, PipelineBuilder, VideoPipeline};

use super::{Loading, Noise, Size};

/// Arguments of `sd video`.
#[derive(Debug, Args)]
pub(crate) struct Video {
    /// What the clip shows, and what is heard. It may speak of what it is made from as `<Picture 1>`, `<Video 1>` and `<Audio 1>`.
    #[arg(short, long, value_name = "TEXT")]
    pub(crate) prompt: String,

    /// Model folder in the diffusers layout (with a modular_model_index.json), or a .safetensors or .gguf file with some or all
    /// parts.
    #[arg(short, long, value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) size: Size,

    /// Frames, 24 a second; the next 17 n + 5 are made [default: the model's, 124].
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) frames: Option<usize>,

    /// Noise levels, from 2 to 1000; the transformer is asked once less [default: the model's, 50].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) steps: Option<usize>,

    #[command(flatten)]
    pub(crate) noise: Noise,

    /// File to write. Its ending says what: .avi (JPEG pictures and plain samples, which every player knows) needs no other
    /// program, .mp4, .mkv, .webm, .mov and .gif are written by ffmpeg; .png becomes an animation with a WAV file beside it, and
    /// anything else a new folder of numbered PNGs with the sound in sound.wav.
    #[arg(short, long, value_name = "PATH", default_value = "output.avi")]
    pub(crate) output: PathBuf,

    /// The program that reads and writes videos, and reads sounds other than WAV files.
    #[arg(long, value_name = "PATH", default_value = "ffmpeg")]
    pub(crate) ffmpeg: PathBuf,

    /// Print one report in JSON on standard output: sizes, what was adjusted, seconds per stage, and bytes.
    #[arg(long)]
    pub(crate) json: bool,

    // Groups come last: a heading holds for all that follows.
    #[command(flatten, next_help_heading = "What the clip is made from")]
    pub(crate) given: Given,

    #[command(flatten)]
    pub(crate) loading: Loading,

    #[command(flatten, next_help_heading = "Parts of the model")]
    pub(crate) video_parts: VideoParts,
}

/// What a clip is made from beside the prompt.
#[derive(Debug, Args)]
pub(crate) struct Given {
    /// Picture that the clip begins with (PNG, JPEG or WebP).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ref_image", "ref_video", "ref_audio"])]
    pub(crate) first_frame: Option<PathBuf>,

    /// Picture that the clip ends with.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ref_image", "ref_video", "ref_audio"])]
    pub(crate) last_frame: Option<PathBuf>,

    /// Picture of a subject, a style or a scene; may be given up to nine times. Pictures come before clips, clips before sounds.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) ref_image: Vec<PathBuf>,

    /// Clip whose motion or camera is followed, and what is heard in it; may be given up to three times: a video (read by ffmpeg), an
    /// animated PNG with or without a WAV file of its name, or a folder of PNGs with or without sound.wav.
    #[arg(long, value_name = "PATH")]
    pub(crate) ref_video: Vec<PathBuf>,

    /// Voice or music; may be given up to three times, beside pictures or clips: a WAV file, or what ffmpeg reads.
    #[arg(long, value_name = "FILE")]
    pub(crate) ref_audio: Vec<PathBuf>,
}

/// Files of single parts that only models of clips have.
#[derive(Debug, Args)]
pub(crate) struct VideoParts {
    /// Transformer of a model of clips that takes references, in place of the model's.
    #[arg(long, value_name = "PATH")]
    pub(crate) reference_transformer: Option<PathBuf>,

    /// VAE of a model of clips for sound, in place of the model's: a file or a folder.
    #[arg(long, value_name = "PATH")]
    pub(crate) sound_vae: Option<PathBuf>,

    /// How queries, keys and values lie in files that keep them as one matrix, which such files do not say: `stacked` as in those for
    /// ComfyUI, `by-head` as in those of MiniMax H3's authors.
    #[arg(long, value_name = "ORDER", default_value = "stacked")]
    qkv_order: Order,
}

/// Orders of queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    /// All queries, all keys, all values.
    Stacked,
    /// Those of one head, then those of the next.
    ByHead,
}

impl From<Order> for QkvOrder {
    fn from(order: Order) -> QkvOrder {
        match order {
            Order::Stacked => QkvOrder::Stacked,
            Order::ByHead => QkvOrder::ByHead,
        }
    }
}

impl VideoParts {
    /// Adds them to the files of a model.
    pub(crate) fn add_to(&self, mut files: ModelFiles) -> ModelFiles {
        if let Some(path) = &self.reference_transformer {
            files = files.reference_transformer(path);
        }
        if let Some(path) = &self.sound_vae {
            files = files.sound_vae(path);
        }
        files
    }

    /// Passes on how the transformer's file is laid out.
    pub(crate) fn apply(
        &self,
        builder: PipelineBuilder<VideoPipeline>,
    ) -> PipelineBuilder<VideoPipeline> {
        builder.qkv_order(self.qkv_order.into())
    }
}
