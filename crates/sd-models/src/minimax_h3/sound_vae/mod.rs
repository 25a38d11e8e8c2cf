//! The VAE of MiniMax H3 for sound: 40 latents of 32 numbers a second of each channel, from and to samples at 32 kHz.
//!
//! Each channel goes through by itself. The encoder is a stack of strided convolutions, behind which causal attention over all latents
//! narrows 2048 channels to 32; the decoder is BigVGAN: transposed convolutions, between them residual blocks whose
//! activations are computed at twice the rate, so that what they bend does not fold back into what can be heard. All of it in single
//! precision: in half precision the reference comes out 20 dB too quiet.
//!
//! Sound of any length takes the same memory: convolutions run over pieces that reach as far beyond what is kept of them as anything in
//! it depends on (`docs/adr/0032-sound-in-pieces.md`).
//!
//! Reference: diffusers'
//! [`autoencoder_kl_minimax_h3_audio.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/autoencoder_kl_minimax_h3_audio.py).

mod activation;
mod attention;
mod config;
mod decoder;
mod encoder;
mod layers;
mod names;
mod pieces;
mod vae;

pub use config::Config;
pub(crate) use names::VAE;
pub use vae::{Latents, SoundVae};
