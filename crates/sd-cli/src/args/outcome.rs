//! Arguments about what is made, a picture or a clip.

use clap::Args;
use sd_models::Rng;

/// How large it is.
#[derive(Debug, Args)]
pub(crate) struct Size {
    /// Width in pixels, brought to a multiple of 32; one side alone makes a square [default: by the pictures that are given, or the
    /// model's].
    #[arg(short = 'W', long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) width: Option<usize>,

    /// Height in pixels, brought to a multiple of 32.
    #[arg(short = 'H', long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) height: Option<usize>,
}

impl Size {
    /// Width and height, if either was asked for.
    pub(crate) fn sides(&self) -> Option<(usize, usize)> {
        let Size { width, height } = *self;
        Some((width.or(height)?, height.or(width)?))
    }
}

/// The noise that it starts from.
#[derive(Debug, Args)]
pub(crate) struct Noise {
    /// Seed of all noise: the same seed and settings give the same picture or clip.
    #[arg(
        short,
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true
    )]
    pub(crate) seed: u64,

    /// Whose random numbers the seed stands for: PyTorch's on a processor (cpu), or on a graphics card of NVIDIA (cuda, and
    /// cuda:THREADS for one that runs fewer threads at once than there are latents: 196608 on an RTX 4090).
    #[arg(long, value_name = "cpu|cuda", default_value_t = Rng::default())]
    pub(crate) rng: Rng,
}
