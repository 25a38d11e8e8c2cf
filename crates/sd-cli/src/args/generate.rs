//! Arguments of `sd generate`.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use sd_models::{Circular, PreviewBy, Request, Sampler, Schedule, Scheduler};

use super::{Loading, Model, Noise, Size};

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
    pub(crate) size: Size,

    /// Number of steps, from 1 to 1000.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) steps: Option<usize>,

    /// Leave out calls of the model whose answer is estimated to change by less than this part: 0.05 hardly changes a picture,
    /// 0.2 shows [default: 0, none].
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) step_cache: Option<f32>,

    /// Guidance scale: 1 follows the prompt as it is, more exaggerates it and doubles the time.
    #[arg(short, long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) guidance: Option<f32>,

    #[command(flatten)]
    pub(crate) noise: Noise,

    /// Make so many pictures, of this seed and the following ones; the prompt is computed once.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        allow_negative_numbers = true
    )]
    pub(crate) count: u64,

    /// Sides that continue at the opposite one, so that the picture tiles without a seam.
    #[arg(long, value_name = "SIDES")]
    pub(crate) circular: Option<Sides>,

    /// Decode the picture in overlapping squares of so many pixels, at least 64: less memory, more time [default: at once,
    /// or in the largest squares that memory allows].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) vae_tile: Option<usize>,

    /// File to write; {seed} in its name is the seed. Several pictures are numbered (output-1.png, output-2.png) where the
    /// name does not say so.
    #[arg(short, long, value_name = "FILE.png", default_value = "output.png")]
    pub(crate) output: PathBuf,

    /// Print one report in JSON on standard output: sizes, seconds per stage, bytes, and all pictures.
    #[arg(long)]
    pub(crate) json: bool,

    // Groups come last: a heading holds for all that follows.
    #[command(flatten, next_help_heading = "Pictures that the prompt is about")]
    pub(crate) references: References,

    #[command(flatten, next_help_heading = "Sampling")]
    pub(crate) sampling: Sampling,

    #[command(flatten, next_help_heading = "Previews")]
    pub(crate) preview: Preview,

    #[command(flatten)]
    pub(crate) loading: Loading,

    #[command(flatten, next_help_heading = "Options of single models")]
    pub(crate) options: Model,
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
