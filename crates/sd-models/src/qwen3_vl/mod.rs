//! Qwen3-VL as a text encoder: what diffusion models read is the hidden state behind its last decoder layer, before
//! the final norm.
//!
//! Reference: [`modeling_qwen3_vl.py`](https://github.com/huggingface/transformers/blob/v5.17.0/src/transformers/models/qwen3_vl/modeling_qwen3_vl.py).

mod config;
mod text;

pub use config::{Config, TextConfig};
pub use text::TextModel;
