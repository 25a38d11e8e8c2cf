//! ERNIE-Image: the picture first, then text; cosines and sines apart.

use super::embedding::{Embedding, Precision, TooLarge, ValueLayout};
use super::frequency::axes;
use super::sequence::{Sequence, Size};

/// ERNIE-Image: a picture of `size` tokens from its corner, at the index where its item's text ends; then text on the
/// index axis from 0 on, padded to the longest of the batch. `texts` are the tokens of each item's text.
///
/// The values lie as [`ValueLayout::Split`].
///
/// Source: [`ErnieImageEmbedND3`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_ernie_image.py#L58)
/// and the positions in [`forward`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_ernie_image.py#L395).
///
/// # Errors
/// [`TooLarge`].
pub fn ernie_image(texts: &[usize], size: Size) -> Result<Embedding, TooLarge> {
    let longest = texts.iter().copied().max().unwrap_or(0);
    let items: Vec<Sequence<3>> = texts
        .iter()
        .map(|&text| {
            let mut sequence = Sequence::new();
            sequence.picture(size, |row, column| [text as f32, row as f32, column as f32]);
            sequence.tokens(longest, |index| [index as f32, 0.0, 0.0]);
            sequence
        })
        .collect();
    let frequencies = axes([32, 48, 48], [256.0; 3], Precision::Single);
    Sequence::embed_items(&items, ValueLayout::Split, frequencies, Precision::Single)
}
