//! WAN: frames from the corner of a clip.

use super::embedding::{Embedding, Precision, TooLarge};
use super::frequency::axes;
use super::sequence::{Sequence, Size};

/// WAN: a clip of `frames` latent frames of `latents`, cut into squares of two; frames, rows and columns count from 0.
/// There is no text in the sequence. `head_dim` is 128 in the releases: (44, 42, 42) channels by axis.
///
/// Source: [`WanRotaryPosEmbed`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_wan.py#L354).
///
/// # Errors
/// [`TooLarge`].
pub fn wan(
    frames: usize,
    latents: Size,
    head_dim: usize,
    batch: usize,
) -> Result<Embedding, TooLarge> {
    let side = 2 * (head_dim / 6);
    let mut sequence = Sequence::new();
    sequence.frames(
        frames,
        latents.patches(2),
        (1.0, 1.0),
        |frame, row, column| [frame as f32, row as f32, column as f32],
    );
    let dims = [head_dim.saturating_sub(2 * side), side, side];
    sequence.embed(
        axes(dims, [10_000.0; 3], Precision::Double),
        Precision::Double,
        batch,
    )
}
