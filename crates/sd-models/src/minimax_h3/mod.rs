//! MiniMax H3: text, pictures, clips and sound to a clip with sound, with one transformer over packed rows of all of them.
//!
//! Reference: diffusers'
//! [`transformer_minimax_h3.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_minimax_h3.py),
//! [`scheduling_minimax_h3.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/schedulers/scheduling_minimax_h3.py) and
//! [`modular_pipelines/minimax_h3`](https://github.com/huggingface/diffusers/tree/v0.42.1/src/diffusers/modular_pipelines/minimax_h3).

mod builder;
mod conditioning;
mod config;
mod denoise;
mod diffusion;
mod files;
mod layers;
mod layout;
mod model;
mod names;
mod parts;
mod pipeline;
mod preparation;
mod prompt;
mod references;
mod refiner;
mod request;
mod schedule;
mod seating;
mod sizes;
pub mod sound_vae;
mod stages;
mod statistics;
mod time;
mod transformer;
pub mod video_vae;

pub use builder::VideoShape;
pub use conditioning::TextRows;
pub use config::TransformerConfig;
pub use denoise::{ClipLatents, Denoising, DenoisingReport, Start, distinct_times};
pub use layout::{Conditions, Layout, Tag, patchify, unpatchify};
pub use model::{Denoiser, Noisy, Prepared, Stage, Velocity};
pub(crate) use names::TRANSFORMER;
pub use names::{QkvOrder, transformer_in};
pub use pipeline::{GivenLatents, Made, VideoPipeline};
pub use preparation::{Modulations, Preparation};
pub use prompt::{Mention, Presentation, Tokens};
pub use references::{MOST_OF_EACH, MOST_REFERENCES, Reference};
pub use request::{VideoDefaults, VideoReport, VideoRequest};
pub use schedule::{Schedule, Shifts};
pub use seating::VideoMemoryPlan;
pub use sizes::{
    Adjustment, CanvasRule, Extent, FRAME_RATE, SAMPLE_RATE, SIZE_MULTIPLE,
    SOUND_LATENTS_PER_SECOND, USUAL_FRAMES, frames_down, frames_up, latent_frames,
};
pub use transformer::{Rows, Transformer, Velocities};
