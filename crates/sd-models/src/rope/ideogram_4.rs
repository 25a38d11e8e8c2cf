//! Ideogram 4: interleaved axes, the picture far away from all text.

use super::embedding::{Embedding, Precision, TooLarge, ValueLayout};
use super::frequency::interleaved_axes;
use super::sequence::{Sequence, Size};

/// Where pictures begin on all axes, beyond every text.
const PICTURE_START: f32 = 65_536.0;

/// Ideogram 4: text walking on all axes together, then a picture of `size` tokens that begins at 65536 on all axes.
/// `texts` are the tokens of each item's text; shorter ones are padded in front, at the origin. Halves are turned.
///
/// Source: [`Ideogram4MRoPE`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_ideogram4.py#L50),
/// [`_prepare_ids`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/ideogram4/pipeline_ideogram4.py#L252).
///
/// # Errors
/// [`TooLarge`].
pub fn ideogram_4(texts: &[usize], size: Size) -> Result<Embedding, TooLarge> {
    let longest = texts.iter().copied().max().unwrap_or(0);
    let items: Vec<Sequence<3>> = texts
        .iter()
        .map(|&text| {
            let padding = longest - text;
            let mut sequence = Sequence::new();
            sequence.tokens(longest, |index| [index.saturating_sub(padding) as f32; 3]);
            sequence.picture(size, |row, column| {
                [0.0, row as f32, column as f32].map(|offset| PICTURE_START + offset)
            });
            sequence
        })
        .collect();
    let frequencies = interleaved_axes(256, 5e6, [24, 20, 20], Precision::Single);
    Sequence::embed_items(&items, ValueLayout::Matrix, frequencies, Precision::Single)
}
