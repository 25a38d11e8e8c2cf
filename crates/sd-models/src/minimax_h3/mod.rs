//! MiniMax H3: text, pictures, clips and sound to a clip with sound, with one transformer over packed rows of all of them.
//!
//! Reference: diffusers'
//! [`transformer_minimax_h3.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_minimax_h3.py),
//! [`scheduling_minimax_h3.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/schedulers/scheduling_minimax_h3.py) and
//! [`modular_pipelines/minimax_h3`](https://github.com/huggingface/diffusers/tree/v0.42.1/src/diffusers/modular_pipelines/minimax_h3).

mod config;
mod denoise;
mod files;
mod layers;
mod layout;
mod model;
mod names;
mod preparation;
mod refiner;
mod schedule;
mod time;
mod transformer;
pub mod sound_vae;
pub mod video_vae;

pub use config::TransformerConfig;
pub use denoise::{ClipLatents, Denoising, DenoisingReport, Start, distinct_times};
pub use layout::{Conditions, Layout, Tag, patchify, unpatchify};
pub use model::{Denoiser, Noisy, Prepared, Stage, Velocity};
pub(crate) use names::TRANSFORMER;
pub use names::{QkvOrder, transformer_in};
pub use preparation::{Modulations, Preparation};
pub use schedule::{Schedule, Shifts};
pub use transformer::{Rows, Transformer, Velocities};
