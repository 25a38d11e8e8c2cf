//! The sizes of the transformer.

use std::path::Path;

use serde::Deserialize;

use crate::config::{check, read_json};
use crate::error::Result;
use crate::rope::H3Axis;

/// Modalities, each with a modulation of its own: video, text and sound.
pub(super) const MODALITIES: usize = 3;
/// The square of latents that makes a row of video: frames, rows and columns.
pub(super) const PATCH: [usize; 3] = [1, 2, 2];

/// `transformer/config.json`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct TransformerConfig {
    /// Heads.
    pub num_attention_heads: usize,
    /// Channels of a head.
    pub attention_head_dim: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Blocks.
    pub num_layers: usize,
    /// Blocks that refine text before it joins the others.
    pub num_refiner_layers: usize,
    /// Width of the feed-forward.
    pub ffn_dim: usize,
    /// Channels of the video's latents.
    pub in_channels: usize,
    /// Channels of the sound's latents.
    pub audio_in_channels: usize,
    /// Frames, rows and columns of latents that make a row.
    patch_size: [usize; 3],
    /// Channels of the text encoder's hidden states.
    pub text_dim: usize,
    /// Channels of the sinusoidal embedding of time.
    pub freq_dim: usize,
    /// Width of the layer within the time embedder.
    pub time_embed_hidden_dim: usize,
    /// Channels of the embedded time, from which all modulations are made.
    pub time_embed_dim: usize,
    /// Pairs of channels of a head that each of time, rows and columns turns.
    pub rope_freq_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the mean square in the norms of blocks.
    pub norm_eps: f32,
    /// The same in the norms of queries and keys.
    pub qk_norm_eps: f32,
    /// The same in the norms behind the refiner and the last block.
    pub final_norm_eps: f32,
    /// Rows of the table of embedded times, in smaller variants that have it in place of the time embedder. No field of the
    /// reference's.
    #[serde(default)]
    pub time_table: Option<usize>,
}

impl TransformerConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) or [`Error::Config`](crate::Error::Config).
    pub fn read(path: &Path) -> Result<TransformerConfig> {
        TransformerConfig::checked(read_json(path)?, path)
    }

    /// Refuses what makes no sense, of the file `path`.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config).
    pub(crate) fn checked(config: TransformerConfig, path: &Path) -> Result<TransformerConfig> {
        let sizes = [
            ("num_attention_heads > 0", config.num_attention_heads),
            ("attention_head_dim > 0", config.attention_head_dim),
            ("hidden_size > 0", config.hidden_size),
            ("ffn_dim > 0", config.ffn_dim),
            ("in_channels > 0", config.in_channels),
            ("audio_in_channels > 0", config.audio_in_channels),
            ("text_dim > 0", config.text_dim),
            ("freq_dim > 0", config.freq_dim),
            ("time_embed_hidden_dim > 0", config.time_embed_hidden_dim),
            ("time_embed_dim > 0", config.time_embed_dim),
            ("rope_freq_dim > 0", config.rope_freq_dim),
        ];
        let sizes = sizes.map(|(rule, size)| (rule, size > 0));
        let turned = config.rope_freq_dim.saturating_mul(6);
        let others = [
            ("patch_size = [1, 2, 2]", config.patch_size == PATCH),
            ("freq_dim is even", config.freq_dim.is_multiple_of(2)),
            (
                "6 * rope_freq_dim <= attention_head_dim",
                turned <= config.attention_head_dim,
            ),
            ("rope_theta > 0", config.rope_theta > 0.0),
            ("norm_eps >= 0", config.norm_eps >= 0.0),
            ("qk_norm_eps >= 0", config.qk_norm_eps >= 0.0),
            ("final_norm_eps >= 0", config.final_norm_eps >= 0.0),
            (
                "a table of times has two rows or more",
                config.time_table.is_none_or(|rows| rows >= 2),
            ),
        ];
        check(path, &[&sizes[..], &others].concat())?;
        Ok(config)
    }

    /// Width of queries, keys and values of all heads.
    pub fn inner_dim(&self) -> usize {
        self.num_attention_heads
            .saturating_mul(self.attention_head_dim)
    }

    /// Channels of a row of video.
    pub fn video_channels(&self) -> usize {
        let [frames, rows, columns] = PATCH;
        self.in_channels.saturating_mul(frames * rows * columns)
    }

    /// Channels of all modulations of one block at one time.
    pub(super) fn modulation_dim(&self) -> usize {
        self.hidden_size.saturating_mul(6 * MODALITIES)
    }

    /// How positions turn queries and keys.
    pub fn rope(&self) -> H3Axis {
        H3Axis {
            pairs: self.rope_freq_dim,
            theta: self.rope_theta,
        }
    }
}
