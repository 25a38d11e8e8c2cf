//! Qwen-Image: centred pictures, text behind the longest side.

use super::embedding::{Embedding, Precision, TooLarge};
use super::frequency::axes;
use super::references::{ReferenceMode, place};
use super::sequence::{Joint, Sequence, Size};

const PATCH: usize = 2;

/// Qwen-Image, its editing and layered models: text, then `frames` target pictures at indices from 0, then references.
///
/// Pictures are centred on zero, an odd row or column lies on the negative side. References count up from 1
/// ([`ReferenceMode::Increase`], editing) or down from -1 ([`ReferenceMode::Decrease`], layered); [`ReferenceMode::Fixed`]
/// lays them out from their corner. Text starts at half the longest side of all pictures, in layered models at least at
/// the number of frames.
///
/// Sources: [`QwenEmbedRope`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_qwenimage.py#L199),
/// [`QwenEmbedLayer3DRope`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_qwenimage.py#L324).
///
/// # Errors
/// [`TooLarge`].
pub fn qwen_image(
    joint: &Joint<'_>,
    frames: usize,
    references: ReferenceMode,
) -> Result<Embedding, TooLarge> {
    let target = joint.target.patches(PATCH);
    let longest = joint
        .references
        .iter()
        .map(|latents| latents.patches(PATCH).longer())
        .fold(target.longer(), usize::max);
    let layers = if references == ReferenceMode::Decrease {
        frames
    } else {
        0
    };
    let text_start = (longest / 2).max(layers);

    let mut sequence = Sequence::new();
    sequence.tokens(joint.text, |index| [(text_start + index) as f32; 3]);
    sequence.frames(frames, target, (1.0, 1.0), |frame, row, column| {
        [
            frame as f32,
            centred(row, target.height),
            centred(column, target.width),
        ]
    });
    let start = i32::from(references != ReferenceMode::Decrease);
    for placed in place(joint.references, references, start, 1.0) {
        let size = placed.latents.patches(PATCH);
        let (row_start, column_start) = if placed.centred {
            (centred(0, size.height), centred(0, size.width))
        } else {
            (placed.row, placed.column)
        };
        sequence.picture(size, |row, column| {
            [
                placed.index,
                row_start + row as f32,
                column_start + column as f32,
            ]
        });
    }
    sequence.embed(
        axes([16, 56, 56], [10_000.0; 3], Precision::Single),
        Precision::Single,
        joint.batch,
    )
}

/// Place `index` of `size` on a row centred on zero, the odd one on the negative side.
pub(crate) fn centred(index: usize, size: usize) -> f32 {
    index as f32 - size.div_ceil(2) as f32
}

/// Place `index` of `size` on a row centred on zero, the odd one on the positive side.
pub(crate) fn centred_above(index: usize, size: usize) -> f32 {
    index as f32 - (size / 2) as f32
}

/// A picture of `size` centred on zero at `index`.
pub(crate) fn centred_picture(sequence: &mut Sequence<3>, size: Size, index: f32) {
    sequence.picture(size, |row, column| {
        [
            index,
            centred(row, size.height),
            centred(column, size.width),
        ]
    });
}
