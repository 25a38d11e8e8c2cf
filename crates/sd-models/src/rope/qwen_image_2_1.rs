//! Qwen-Image 2.1: text and pictures share one running position.

use super::embedding::{Embedding, Precision, TooLarge};
use super::frequency::axes;
use super::qwen_image::centred_picture;
use super::sequence::{Sequence, Size};

/// A run of tokens of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// Tokens of text.
    Text(usize),
    /// A picture's latents, a token each.
    Picture(Size),
}

impl Part {
    /// Tokens in this run.
    pub fn tokens(self) -> usize {
        match self {
            Part::Text(tokens) => tokens,
            Part::Picture(size) => size.height * size.width,
        }
    }
}

/// Qwen-Image 2.1: text and pictures in the order of the prompt, the target last.
///
/// Text moves on all axes together. A picture keeps the frame that the text before it reached and spreads over a grid
/// centred on zero, an odd row or column on the negative side; what follows goes on further by its longer side. `dims`
/// are the channels that frame, height and width turn: (16, 56, 56) in the release.
///
/// Source: [`QwenImage21Rope`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_qwenimage21.py#L655).
///
/// # Errors
/// [`TooLarge`].
pub fn qwen_image_2_1(
    parts: impl IntoIterator<Item = Part>,
    dims: [usize; 3],
    batch: usize,
) -> Result<Embedding, TooLarge> {
    let mut sequence = Sequence::new();
    let mut next = 0_usize;
    for part in parts {
        match part {
            Part::Text(tokens) => {
                sequence.tokens(tokens, |index| [(next + index) as f32; 3]);
                next = next.saturating_add(tokens);
            }
            Part::Picture(size) => {
                centred_picture(&mut sequence, size, next as f32);
                next = next.saturating_add(size.longer());
            }
        }
    }
    sequence.embed(
        axes(dims, [10_000.0; 3], Precision::Single),
        Precision::Single,
        batch,
    )
}
