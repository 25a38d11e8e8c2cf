//! Qwen3-VL as an encoder of text and pictures: what diffusion models read is the hidden state behind its last decoder
//! layer, before the final norm.
//!
//! Reference: [`modeling_qwen3_vl.py`](https://github.com/huggingface/transformers/blob/v5.17.0/src/transformers/models/qwen3_vl/modeling_qwen3_vl.py).

mod config;
mod image_processor;
mod names;
mod reading;
mod text;
mod vision;

pub use config::{Config, TextConfig, VisionConfig};
pub use image_processor::{ImageProcessor, VideoProcessor};
pub use names::with_vision;
pub(crate) use names::{IMAGE_TOKEN, TEXT_ENCODER, VIDEO_TOKEN};
pub(crate) use reading::{Seen, Sight, set_pictures, text_graph};
pub use text::{Pictures, TextModel};
pub use vision::VisionTower;
