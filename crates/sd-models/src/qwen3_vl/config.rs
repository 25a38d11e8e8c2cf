//! The text encoder's `config.json`.

use std::path::Path;

use serde::Deserialize;

use crate::config::{check, read_json};
use crate::error::Result;

/// What we need of `text_encoder/config.json`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Config {
    /// The language model.
    pub text_config: TextConfig,
    /// Token that stands for a piece of a picture.
    pub image_token_id: u32,
    /// Token that stands for a piece of a clip.
    #[serde(default)]
    pub video_token_id: Option<u32>,
}

/// The language model's sizes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct TextConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Heads of queries.
    pub num_attention_heads: usize,
    /// Heads of keys and values.
    pub num_key_value_heads: usize,
    /// Channels of a head.
    #[serde(default)]
    head_dim: Option<usize>,
    /// Added to the mean square in norms.
    pub rms_norm_eps: f32,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Longest sequence the model was made for.
    pub max_position_embeddings: usize,
    /// Activation inside the feed-forward.
    hidden_act: String,
    /// Whether the attention's projections have biases.
    #[serde(default)]
    pub attention_bias: bool,
    #[serde(default)]
    rope_theta: Option<f32>,
    #[serde(default)]
    rope_parameters: Option<RopeParameters>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
struct RopeParameters {
    rope_theta: Option<f32>,
    #[serde(default)]
    rope_type: Option<String>,
}

impl TextConfig {
    /// Channels of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Base of the rotary frequencies. Newer files keep it in `rope_parameters`, older ones beside it.
    pub fn rope_theta(&self) -> f32 {
        let nested = self
            .rope_parameters
            .as_ref()
            .and_then(|parameters| parameters.rope_theta);
        nested.or(self.rope_theta).unwrap_or(5_000_000.0)
    }
}

impl Config {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) or [`Error::Config`](crate::Error::Config).
    pub fn read(path: &Path) -> Result<Config> {
        let config: Config = read_json(path)?;
        let text = &config.text_config;
        let rope_type = text
            .rope_parameters
            .as_ref()
            .and_then(|parameters| parameters.rope_type.as_deref());
        check(
            path,
            &[
                ("text_config.hidden_size > 0", text.hidden_size > 0),
                (
                    "text_config.intermediate_size > 0",
                    text.intermediate_size > 0,
                ),
                (
                    "text_config.num_attention_heads > 0",
                    text.num_attention_heads > 0,
                ),
                (
                    "text_config.num_key_value_heads > 0",
                    text.num_key_value_heads > 0,
                ),
                (
                    "num_attention_heads is a multiple of num_key_value_heads",
                    text.num_attention_heads
                        .is_multiple_of(text.num_key_value_heads.max(1)),
                ),
                (
                    "text_config.head_dim is even and above 0",
                    text.head_dim() > 0 && text.head_dim().is_multiple_of(2),
                ),
                ("text_config.rms_norm_eps >= 0", text.rms_norm_eps >= 0.0),
                ("text_config.vocab_size > 0", text.vocab_size > 0),
                ("text_config.hidden_act = silu", text.hidden_act == "silu"),
                (
                    "rope_type = default",
                    rope_type.is_none_or(|kind| kind == "default"),
                ),
                ("rope_theta > 0", text.rope_theta() > 0.0),
            ],
        )?;
        Ok(config)
    }
}
