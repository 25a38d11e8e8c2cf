//! The video VAE of MiniMax H3: frames to latents and back, 16 pixels and 4 frames to a latent.
//!
//! The encoder is a network of convolutions that look back in time; it takes 17 frames at once, with nothing before them, and
//! makes 5 latent frames of these; the last 3 of a clip are left out. The decoder is a transformer that sees 7 latent
//! frames at once, of which neighbours have 2 in common; the 5 frames that both make fade into each other. So a clip of any
//! length takes the same memory. Both work in tiles of 256 pixels unless they are told otherwise: that is how the model was
//! released, and frames that are worked on as a whole look different.
//!
//! Reference: diffusers'
//! [`autoencoder_kl_minimax_h3.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/autoencoder_kl_minimax_h3.py).

mod config;
mod decoder;
mod decoding;
mod encoder;
mod encoding;
mod layers;
mod names;
mod posterior;
mod tiles;
mod vae;

pub use config::Config;
pub use decoder::Decoder;
pub use encoder::Encoder;
pub use encoding::Encoding;
pub(crate) use names::VIDEO_VAE;
pub use posterior::Posterior;
pub use tiles::Tiling;
pub use vae::VideoVae;
