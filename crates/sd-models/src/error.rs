//! What can go wrong between a request and a picture.

use std::path::PathBuf;

use sd_graph::{Allocation, FailureKind};

use crate::qwen_image_2_1::{MOST_REFERENCES, RESOLUTIONS, SIZE_MULTIPLE};
use crate::request::SMALLEST_TILE;

/// Short for a [`std::result::Result`] with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure of opening a model, encoding a prompt or making a picture.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The graph engine failed: a bad weight file, a model that does not fit it, no memory, a cancelled run.
    #[error(transparent)]
    Engine(#[from] sd_graph::Error),
    /// Memory does not suffice, and this budget for the device would.
    #[error("{source}; a budget of {} would do", sd_backend::Bytes(*smallest))]
    TooLittleMemory {
        /// What was refused.
        source: sd_backend::Error,
        /// Bytes of the smallest budget with which it works.
        smallest: u64,
    },
    /// A file or folder of a model cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Something of a model's folder is not there.
    #[error("{}: no {what} here", path.display())]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
        /// What was looked for.
        what: &'static str,
    },
    /// A configuration is not JSON, or not what this kind of model has.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file of weights does not hold the part of a model that it was given for.
    #[error("{}: looked for the {looked_for}; found {found}", path.display())]
    UnknownFile {
        /// The file.
        path: PathBuf,
        /// Parts, and the tensors by which they are known.
        looked_for: String,
        /// What is there instead.
        found: String,
    },
    /// Weights whose numbers mean something only together with other tensors.
    #[error(
        "{}: the weights are scaled by tensors of their own ({}), which is not supported; files in BF16, F16 or F8 without scales and \
        GGUF files are", path.display(), tensor.escape_debug()
    )]
    UnsupportedWeights {
        /// The file.
        path: PathBuf,
        /// One of the scales.
        tensor: String,
    },
    /// A part of a model was neither given nor found.
    #[error("{}: no {part} here; it can be given with {hint}", path.display())]
    MissingPart {
        /// Where it was looked for.
        path: PathBuf,
        /// The part.
        part: &'static str,
        /// The option that gives it.
        hint: &'static str,
    },
    /// A LoRA that changes nothing of the model, or cannot be read as one.
    #[error("{}: {reason}", path.display())]
    Lora {
        /// The file.
        path: PathBuf,
        /// What was looked for and what was found.
        reason: String,
    },
    /// The folder holds a model of a class that this version does not know.
    #[error("{}: the class `{class}` is not supported; supported: {}", path.display(), supported.join(", "))]
    UnsupportedModel {
        /// The file that names the class.
        path: PathBuf,
        /// The class.
        class: String,
        /// Classes that are.
        supported: &'static [&'static str],
    },
    /// The tokenizer cannot be loaded or refuses a text.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// Width or height cannot be made.
    #[error(
        "a picture of {width}x{height} cannot be made: both sides must be from {SIZE_MULTIPLE} to {limit} pixels, in multiples of {SIZE_MULTIPLE}"
    )]
    Size {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// Most pixels along a side.
        limit: usize,
    },
    /// Tiles that are too small to be decoded by themselves.
    #[error("tiles of {0} pixels are too small: at least {SMALLEST_TILE} are needed")]
    Tile(usize),
    /// Frames that a VAE cannot encode.
    #[error(
        "frames of {width}x{height} cannot be encoded: both sides must be multiples of {multiple} pixels"
    )]
    FrameSize {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// What both must be a multiple of.
        multiple: usize,
    },
    /// Frames that are smaller than an encoder's kernels.
    #[error(
        "frames of {width}x{height} cannot be encoded: both sides must have at least {least} pixels"
    )]
    SmallFrame {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// What both must have at least.
        least: usize,
    },
    /// Frames that are larger than any.
    #[error(
        "frames of {width}x{height} are too large: at most {most} pixels along a side are possible"
    )]
    LargeFrame {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// What both may have at most.
        most: usize,
    },
    /// Tiles that a VAE cannot work in.
    #[error(
        "tiles of {size} pixels that overlap by {overlap} cannot be: both must be multiples of {multiple}, a tile twice that at \
        least and longer than the overlap"
    )]
    Tiles {
        /// Pixels along a side.
        size: usize,
        /// Pixels that neighbours have in common at least.
        overlap: usize,
        /// What both must be a multiple of.
        multiple: usize,
    },
    /// A clip, or a piece of one, that is not what was announced or what a VAE takes.
    #[error("{found} {what} instead of {wanted}")]
    Clip {
        /// What there is a wrong number of.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many there should be.
        wanted: usize,
    },
    /// A sequence of text, pictures, sound and video that is longer than any that can be computed.
    #[error("text, references and clip together have {rows} rows: at most {most} are possible")]
    TooManyRows {
        /// How many there are.
        rows: usize,
        /// How many there may be.
        most: usize,
    },
    /// A step at a time, or with text, that nothing was prepared for.
    #[error("nothing was prepared for this text and these times")]
    NotPrepared,
    /// A clip whose chunk before was cancelled, or failed, in the middle: what layers kept of it cannot be relied on.
    #[error("the clip was interrupted; it must be begun again")]
    Interrupted,
    /// A number of steps that no schedule has.
    #[error("{0} steps: at least 1 and at most 1000 are possible")]
    Steps(usize),
    /// A noise level that no schedule has.
    #[error("a noise level of {value} at position {position}: {reason}")]
    Sigma {
        /// The level.
        value: f32,
        /// Where it stands, counted from 1.
        position: usize,
        /// Why it cannot be.
        reason: &'static str,
    },
    /// A way to lay out noise levels for a model whose author fixed them.
    #[error(
        "the model's author fixed its noise levels, which cannot be laid out as `{0}`; exact ones can be given"
    )]
    FixedSchedule(&'static str),
    /// A name that nothing of its kind has.
    #[error("`{name}` is no {what}; there are {}", known.join(", "))]
    UnknownName {
        /// What was looked for.
        what: &'static str,
        /// What was given.
        name: String,
        /// What there is.
        known: Vec<&'static str>,
    },
    /// A guidance scale that is no number from 1 up.
    #[error("a guidance of {0}: it must be a number from 1 (no guidance) up")]
    Guidance(f32),
    /// A threshold of the step cache that is no number from 0 up.
    #[error("a step cache threshold of {0}: it must be a number from 0 (none) up")]
    StepCache(f32),
    /// Options of a model that are not known or cannot have this value.
    #[error(
        "`{0}` is no option of a model; possible are qwen_image_2_1_prefix_cache=true|false and qwen_image_2_1_prefix_cache_type=f32|f16|q8_0"
    )]
    ModelArgs(String),
    /// A prompt that the model cannot read.
    #[error("the prompt {0}")]
    Prompt(String),
    /// Sides of a picture or a canvas that the model was not made for.
    #[error("{width}x{height} is no picture whose sides are at most 4 to 1")]
    Aspect {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
    },
    /// A clip of no frames, or of more than are possible.
    #[error("{frames} frames: from 1 to {most} are possible")]
    Frames {
        /// How many were asked for.
        frames: usize,
        /// How many are possible.
        most: usize,
    },
    /// A shift of noise levels that is no number above 0.
    #[error("a shift of {0} is not possible: it is a number above 0")]
    Shift(f32),
    /// A checkpoint without the transformer that a request needs.
    #[error("this checkpoint has no transformer for {0}")]
    NoTransformer(&'static str),
    /// Keyframes, pictures, clips and sounds that a model of clips cannot be asked about together, or one of them.
    #[error("references: {0}")]
    ClipReferences(String),
    /// More reference pictures than a prompt can have.
    #[error("{0} reference pictures: at most {MOST_REFERENCES} are possible")]
    TooManyReferences(usize),
    /// A picture that cannot be referred to.
    #[error("reference picture {number}, {width}x{height}: {reason}")]
    Reference {
        /// Its place among the references, from 1.
        number: usize,
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// Why not.
        reason: String,
    },
    /// A side of the square whose area reference pictures are scaled to that cannot be.
    #[error(
        "references cannot be as large as a square of {side} pixels by side: from {} to {} are possible",
        RESOLUTIONS.start(),
        RESOLUTIONS.end()
    )]
    Resolution {
        /// Pixels along a side.
        side: usize,
    },
    /// A checkpoint that cannot look at pictures.
    #[error("the checkpoint has no {0}: it makes pictures from text alone")]
    NoReferences(&'static str),
    /// The latents stopped being numbers: broken weights, or values beyond what their type holds.
    #[error(
        "after step {step} the latents are no longer finite numbers; the weights may be damaged"
    )]
    NotFinite {
        /// The step, counted from 1.
        step: usize,
    },
    /// A file is not the picture that it should be.
    #[error("{} cannot be read as a picture: {reason}", path.display())]
    Picture {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A file is not the sound that it should be.
    #[error("{} cannot be read as sound: {reason}", path.display())]
    Sound {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A file does not hold the latents of a picture or clip.
    #[error("{} holds no latents: {reason}", path.display())]
    Latents {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A picture cannot be written.
    #[error("{} cannot be written: {reason}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

impl Error {
    /// What kind of failure this is: memory that ran out, and for what, or anything else.
    pub fn failure(&self) -> FailureKind {
        match self {
            Error::Engine(error) => error.failure(),
            Error::TooLittleMemory { .. } => FailureKind::Allocation(Allocation::Reserving),
            _ => FailureKind::Other,
        }
    }

    /// Whether this is memory that ran out.
    pub fn is_out_of_memory(&self) -> bool {
        self.failure() != FailureKind::Other
    }

    /// Whether the run was cancelled by its caller.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Error::Engine(error) if error.is_cancelled())
    }
}

impl sd_graph::Failure for Error {
    fn failure(&self) -> FailureKind {
        Error::failure(self)
    }
}

impl From<sd_backend::Error> for Error {
    fn from(error: sd_backend::Error) -> Error {
        Error::Engine(error.into())
    }
}

impl From<sd_graph::CheckpointError> for Error {
    fn from(error: sd_graph::CheckpointError) -> Error {
        Error::Engine(error.into())
    }
}

impl From<sd_graph::Mismatch> for Error {
    fn from(error: sd_graph::Mismatch) -> Error {
        Error::Engine(error.into())
    }
}
