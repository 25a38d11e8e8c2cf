//! The video VAE of WAN 2.1 and 2.2, of Qwen-Image (the same network as WAN 2.1's) and, for one frame, of Qwen-Image 2.1.
//!
//! A clip goes through chunk by chunk: first one frame, then as many as make one latent frame more (four). Convolutions in
//! time look back only, at what they kept of the chunks before; so a clip of any length takes the same memory, and a
//! picture is a clip's first chunk, for which all kernels are two-dimensional.
//!
//! Reference: diffusers'
//! [`autoencoder_kl_wan.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/autoencoder_kl_wan.py),
//! [`autoencoder_kl_qwenimage.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/autoencoder_kl_qwenimage.py) and
//! [`autoencoder_kl_qwenimage21.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/autoencoder_kl_qwenimage21.py).

mod chunk;
mod clip;
mod config;
mod decoder;
mod detect;
mod encoder;
mod files;
mod fit;
mod layers;
mod names;
mod resample;
mod shortcut;
mod statistics;
mod stream;
mod vae;

pub(crate) use chunk::{Chunk, Kept, Memory, Place};
pub use clip::Clip;
pub use config::Config;
pub use decoder::Decoder;
pub use encoder::Encoder;
pub use files::{Latents, picture_files};
pub use fit::{ClipReport, Fit, Tiling, Work};
pub(crate) use names::{Names, VAE};
pub use stream::{Decoding, Encoding};
pub use vae::WanVae;
