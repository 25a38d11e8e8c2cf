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
    /// The vision tower, if there is one.
    #[serde(default)]
    pub vision_config: Option<VisionConfig>,
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
    /// What older files have instead.
    #[serde(default)]
    rope_scaling: Option<RopeParameters>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
struct RopeParameters {
    #[serde(default)]
    rope_theta: Option<f32>,
    #[serde(default)]
    rope_type: Option<String>,
    #[serde(default)]
    mrope_section: Option<[usize; 3]>,
}

/// The vision tower's sizes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct VisionConfig {
    /// Blocks.
    pub depth: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward.
    pub intermediate_size: usize,
    /// Heads.
    pub num_heads: usize,
    /// Channels of a picture.
    #[serde(default = "three")]
    pub in_channels: usize,
    /// Pixels along a side of a patch.
    pub patch_size: usize,
    /// Patches along a side of the square that becomes one token.
    pub spatial_merge_size: usize,
    /// Frames of a patch; a picture is shown that often.
    pub temporal_patch_size: usize,
    /// Width of what the language model is given.
    pub out_hidden_size: usize,
    /// Rows of the table of positions, a square.
    pub num_position_embeddings: usize,
    /// Blocks behind which features are taken for the first layers of the language model.
    pub deepstack_visual_indexes: Vec<usize>,
    #[serde(default)]
    hidden_act: Option<String>,
    #[serde(default)]
    rope_parameters: Option<RopeParameters>,
}

fn three() -> usize {
    3
}

impl VisionConfig {
    /// Channels of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads.max(1)
    }

    /// Base of the rotary frequencies.
    pub fn rope_theta(&self) -> f32 {
        let parameters = self.rope_parameters.as_ref();
        let theta = parameters.and_then(|parameters| parameters.rope_theta);
        theta.unwrap_or(10_000.0)
    }

    /// Positions along a side of the table.
    pub fn positions_by_side(&self) -> usize {
        self.num_position_embeddings.isqrt()
    }

    /// Pixels along a side of what becomes one token.
    pub fn token_side(&self) -> usize {
        self.patch_size.saturating_mul(self.spatial_merge_size)
    }

    /// Values of a patch.
    pub fn patch_values(&self) -> usize {
        let sides = [self.temporal_patch_size, self.patch_size, self.patch_size];
        let values = sides.into_iter();
        values.fold(self.in_channels, usize::saturating_mul)
    }

    /// Width of the patches that become one token, side by side.
    pub fn merged_size(&self) -> usize {
        let patches = self.spatial_merge_size.saturating_pow(2);
        self.hidden_size.saturating_mul(patches)
    }

    fn rules(&self, text: &TextConfig) -> [(&'static str, bool); 12] {
        let side = self.positions_by_side();
        let act = self.hidden_act.as_deref();
        let parameters = self.rope_parameters.as_ref();
        let rope = parameters.and_then(|parameters| parameters.rope_type.as_deref());
        let mut taken = self.deepstack_visual_indexes.iter();
        let sizes = [
            self.depth,
            self.hidden_size,
            self.intermediate_size,
            self.num_heads,
            self.num_position_embeddings,
        ];
        [
            (
                "vision_config: all sizes > 0, depth <= 1024",
                sizes.into_iter().all(|size| size > 0) && self.depth <= 1024,
            ),
            ("vision_config.in_channels = 3", self.in_channels == 3),
            (
                "vision_config.patch_size is from 1 to 64",
                (1..=64).contains(&self.patch_size),
            ),
            (
                "vision_config.spatial_merge_size is from 1 to 8",
                (1..=8).contains(&self.spatial_merge_size),
            ),
            (
                "vision_config.temporal_patch_size is from 1 to 8",
                (1..=8).contains(&self.temporal_patch_size),
            ),
            (
                "vision_config.hidden_size is a multiple of num_heads",
                self.hidden_size.is_multiple_of(self.num_heads.max(1)),
            ),
            (
                "vision_config: the channels of a head are a multiple of 4",
                self.head_dim() > 0 && self.head_dim().is_multiple_of(4),
            ),
            (
                "vision_config.num_position_embeddings is a square",
                side * side == self.num_position_embeddings,
            ),
            (
                "vision_config.out_hidden_size = text_config.hidden_size",
                self.out_hidden_size == text.hidden_size,
            ),
            (
                "vision_config.deepstack_visual_indexes are blocks, as many as the language model has layers or fewer",
                taken.all(|&index| index < self.depth)
                    && self.deepstack_visual_indexes.is_sorted_by(|a, b| a < b)
                    && self.deepstack_visual_indexes.len() <= text.num_hidden_layers,
            ),
            (
                "vision_config.hidden_act = gelu_pytorch_tanh",
                act.is_none_or(|act| act == "gelu_pytorch_tanh"),
            ),
            (
                "vision_config: rope_type = axial",
                rope.is_none_or(|kind| matches!(kind, "axial" | "default"))
                    && self.rope_theta() > 0.0,
            ),
        ]
    }
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

    /// Pairs of channels that follow time, height and width in turns; those beyond follow time.
    pub fn rope_sections(&self) -> [usize; 3] {
        let mut parameters = [&self.rope_parameters, &self.rope_scaling].into_iter();
        let sections = parameters.find_map(|parameters| parameters.as_ref()?.mrope_section);
        sections.unwrap_or([24, 20, 20])
    }
}

impl Config {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) or [`Error::Config`](crate::Error::Config).
    pub fn read(path: &Path) -> Result<Config> {
        Config::checked(read_json(path)?, path)
    }

    /// Refuses what makes no sense, of the file `path`.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config).
    pub(crate) fn checked(config: Config, path: &Path) -> Result<Config> {
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
                (
                    "text_config.num_hidden_layers <= 1024",
                    text.num_hidden_layers <= 1024,
                ),
                ("text_config.vocab_size > 0", text.vocab_size > 0),
                ("text_config.hidden_act = silu", text.hidden_act == "silu"),
                (
                    "rope_type = default",
                    rope_type.is_none_or(|kind| kind == "default"),
                ),
                ("rope_theta > 0", text.rope_theta() > 0.0),
            ],
        )?;
        if let Some(vision) = &config.vision_config {
            check(path, &vision.rules(text))?;
        }
        Ok(config)
    }
}
