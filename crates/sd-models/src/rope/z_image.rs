//! Z-Image: text and picture padded to a multiple of 32 tokens.

use super::embedding::{Embedding, Precision, TooLarge};
use super::frequency::axes;
use super::sequence::{Sequence, Size};

/// Tokens that text and picture are padded to a multiple of.
pub(crate) const MULTIPLE: usize = 32;
pub(crate) const AXES: [usize; 3] = [32, 48, 48];
pub(crate) const THETA: f64 = 256.0;

/// Z-Image: text on the index axis from 1 on, which goes on through its padding; the target one index behind it, from its
/// corner, and its padding at the origin. Reference pictures are not known to this model.
///
/// diffusers puts the picture before the text; here text comes first, as in the other families. Attention does not mind.
///
/// Source: [`patchify_and_embed`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_z_image.py#L586).
///
/// # Errors
/// [`TooLarge`].
pub fn z_image(text: usize, latents: Size, batch: usize) -> Result<Embedding, TooLarge> {
    let padded = text.checked_next_multiple_of(MULTIPLE).ok_or(TooLarge)?;
    let mut sequence = Sequence::new();
    sequence.tokens(padded, |index| [(index + 1) as f32, 0.0, 0.0]);
    grid(&mut sequence, latents.patches(2), padded + 1);
    sequence.pad(padded, MULTIPLE);
    sequence.embed(
        axes(AXES, [THETA; 3], Precision::SingleAngle),
        Precision::SingleAngle,
        batch,
    )
}

/// A picture at `index`, its rows and columns from 0 on.
pub(crate) fn grid(sequence: &mut Sequence<3>, size: Size, index: usize) {
    sequence.picture(size, |row, column| {
        [index as f32, row as f32, column as f32]
    });
}
