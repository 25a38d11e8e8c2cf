//! Qwen3-VL: text that meets pictures, and the pictures' own patches.

use super::embedding::{Embedding, Precision, TooLarge};
use super::frequency::{axes, interleaved_axes};
use super::qwen_image_2_1::Part;
use super::sequence::{Sequence, Size};

/// The language model of Qwen3-VL: text walks on time, height and width together; a picture stays in time where the text
/// before it ended and spreads over height and width from there; what follows goes on behind its longer side. The
/// `head_dim / 2` frequencies serve the axes in turns, for as many pairs as `sections` says. Halves are turned.
///
/// Source: [`get_rope_index`](https://github.com/huggingface/transformers/blob/v5.17.0/src/transformers/models/qwen3_vl/modeling_qwen3_vl.py#L919).
///
/// # Errors
/// [`TooLarge`].
pub fn qwen3_vl(
    parts: impl IntoIterator<Item = Part>,
    head_dim: usize,
    theta: f64,
    sections: [usize; 3],
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
                sequence.picture(size, |row, column| {
                    [next, next + row, next + column].map(|position| position as f32)
                });
                next = next.saturating_add(size.longer());
            }
        }
    }
    let frequencies = interleaved_axes(head_dim, theta, sections, Precision::Single);
    sequence.embed(frequencies, Precision::Single, 1)
}

/// The vision tower of Qwen3-VL: rows turn the first half of the pairs and columns the second. Patches come square by square
/// of `merge` patches a side, as they are merged. Halves are turned.
///
/// Source: [`Qwen3VLVisionRotaryEmbedding`](https://github.com/huggingface/transformers/blob/v5.17.0/src/transformers/models/qwen3_vl/modeling_qwen3_vl.py#L111).
///
/// # Errors
/// [`TooLarge`].
pub fn qwen3_vl_vision(
    patches: Size,
    merge: usize,
    head_dim: usize,
    theta: f64,
) -> Result<Embedding, TooLarge> {
    let places = merged_order(patches, merge);
    let mut sequence = Sequence::new();
    sequence.tokens(places.len(), |index| {
        places[index].map(|position| position as f32)
    });
    let half = head_dim / 2;
    let frequencies = axes([half, half], [theta; 2], Precision::Single);
    sequence.embed(frequencies, Precision::Single, 1)
}

/// Row and column of each patch, square by square of `merge` patches a side; sides are multiples of it.
pub(crate) fn merged_order(patches: Size, merge: usize) -> Vec<[usize; 2]> {
    let merge = merge.max(1);
    let mut order = Vec::with_capacity(patches.height * patches.width);
    for top in (0..patches.height / merge).map(|row| row * merge) {
        for left in (0..patches.width / merge).map(|column| column * merge) {
            for row in top..top + merge {
                order.extend((left..left + merge).map(|column| [row, column]));
            }
        }
    }
    order
}
