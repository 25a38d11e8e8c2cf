//! LLaDA-Image: Z-Image's axes, text padded at the origin, and for editing two copies of everything.

use super::embedding::{Embedding, Precision, TooLarge};
use super::frequency::axes;
use super::sequence::{Sequence, Size};
use super::z_image::{AXES, MULTIPLE, THETA, grid};

/// LLaDA-Image, making a picture of `latents`, a token each: text on the index axis from 1 on and its padding at the
/// origin, the target one index behind the padded text, its padding at the origin.
///
/// Source: [`gen_llada_image_ids`](https://github.com/leejet/stable-diffusion.cpp/pull/2039/files).
///
/// # Errors
/// [`TooLarge`].
pub fn llada_image(text: usize, latents: Size, batch: usize) -> Result<Embedding, TooLarge> {
    let mut sequence = Sequence::new();
    sequence.tokens(text, |index| [(index + 1) as f32, 0.0, 0.0]);
    sequence.pad(0, MULTIPLE);
    let padded = sequence.len();
    grid(&mut sequence, latents, padded + 1);
    sequence.pad(padded, MULTIPLE);
    embed(sequence, batch)
}

/// LLaDA-Image, editing a picture of `latents`: two copies of the text, then source and target, then `semantic` tokens,
/// each padded at the origin to a multiple of 32.
///
/// The copies of the text follow each other on the index axis with two places free after each; the first of these is the
/// index of a picture, the source's after the first copy, the target's after the second. Semantic tokens go on from one
/// beyond the number of all tokens before them. None of the padding and none of the semantic tokens are spatial.
///
/// Source: [`gen_llada_image_edit_ids`](https://github.com/leejet/stable-diffusion.cpp/pull/2039/files).
///
/// # Errors
/// [`TooLarge`].
pub fn llada_image_edit(
    text: usize,
    latents: Size,
    semantic: usize,
    batch: usize,
) -> Result<Embedding, TooLarge> {
    let mut sequence = Sequence::new();
    let mut next = 1_usize;
    let mut picture_indices = [0; 2];
    for index_of_picture in &mut picture_indices {
        let start = sequence.len();
        sequence.tokens(text, |index| [(next + index) as f32, 0.0, 0.0]);
        sequence.pad(start, MULTIPLE);
        next = next.saturating_add(text);
        *index_of_picture = next;
        next = next.saturating_add(2);
    }
    for index in picture_indices {
        let start = sequence.len();
        grid(&mut sequence, latents, index);
        sequence.pad(start, MULTIPLE);
    }
    let start = sequence.len();
    sequence.tokens(semantic, |index| [(start + 1 + index) as f32, 0.0, 0.0]);
    sequence.pad(start, MULTIPLE);
    embed(sequence, batch)
}

fn embed(sequence: Sequence<3>, batch: usize) -> Result<Embedding, TooLarge> {
    sequence.embed(
        axes(AXES, [THETA; 3], Precision::Double),
        Precision::Double,
        batch,
    )
}
