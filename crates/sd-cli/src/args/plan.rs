//! Arguments of `sd plan`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::TypedValueParser;

use super::{Loading, Model, Size, VideoParts};

/// Arguments of `sd plan`.
#[derive(Debug, Args)]
pub(crate) struct Plan {
    /// Model folder in the diffusers layout, or a file with some or all parts.
    #[arg(value_name = "MODEL", required_unless_present = "transformer")]
    pub(crate) model: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) size: Size,

    /// Frames of a clip [default: the model's].
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) frames: Option<usize>,

    /// Pictures that a clip begins and ends with.
    #[arg(long, value_name = "0|1|2", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2).map(usize::from))]
    pub(crate) keyframes: usize,

    /// Noise levels of a clip [default: the model's].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) steps: Option<usize>,

    /// Tokens of the prompt.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) tokens: usize,

    /// Size of a picture that the prompt is about; may be given up to four times, and of a clip up to nine times.
    #[arg(long, value_name = "WxH", value_parser = dimensions)]
    pub(crate) reference: Vec<(u32, u32)>,

    /// Scale reference pictures to the area of a square of so many pixels by side [default: that of the model's own pictures].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) ref_size: Option<usize>,

    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,

    // Groups come last: a heading holds for all that follows.
    #[command(flatten)]
    pub(crate) loading: Loading,

    #[command(flatten, next_help_heading = "Parts of the model")]
    pub(crate) video_parts: VideoParts,

    #[command(flatten, next_help_heading = "Options of single models")]
    pub(crate) options: Model,
}

fn dimensions(text: &str) -> Result<(u32, u32), String> {
    let (width, height) = text.split_once(['x', 'X']).unwrap_or_default();
    match (width.trim().parse(), height.trim().parse()) {
        (Ok(width), Ok(height)) => Ok((width, height)),
        _ => Err("width and height in pixels are expected, such as 1200x800".to_owned()),
    }
}
