//! Qwen-Image 2.1: text and reference pictures to picture with a block-causal single-stream transformer.
//!
//! Reference: diffusers'
//! [`pipeline_qwenimage21.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/qwenimage21/pipeline_qwenimage21.py),
//! [`transformer_qwenimage21.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_qwenimage21.py) and
//! [`autoencoder_kl_qwenimage21.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/autoencoder_kl_qwenimage21.py).

mod condition;
mod decoding;
mod encoding;
mod files;
mod layout;
mod model;
mod names;
mod prefix;
mod prompt;
mod reading;
mod references;
mod seating;
mod transformer;
mod velocity;

pub use crate::canvas::Canvas;
pub use crate::wan_vae::{Config as VaeConfig, Decoder as VaeDecoder, Encoder as VaeEncoder};
pub use condition::Condition;
pub use layout::{AttentionRun, Layout, Segment};
pub use model::{IN_ORDER, QwenImage21};
pub(crate) use names::TRANSFORMER;
pub use names::with_loras;
pub(crate) use prefix::ModelIdentity;
pub use prefix::{ModelArgs, Prefix, PrefixCache};
pub use prompt::{PromptTokenizer, TokenizedPrompt};
pub use references::{MOST_REFERENCES, RESOLUTIONS, References};
pub(crate) use references::{Reference, dimensions, reference_sizes, segments_for};
pub use seating::MemoryPlan;
pub(crate) use seating::{Scene, find_largest};
pub use transformer::{Transformer, TransformerConfig, timestep_embedding};
pub use velocity::{Step, StepReport};

/// Sides of a picture are multiples of this many pixels: the VAE's 16, and two latents to an image slot.
pub const SIZE_MULTIPLE: usize = 32;
