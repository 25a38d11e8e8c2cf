//! Lens: the picture first, then text.

use super::embedding::{Embedding, Precision, TooLarge};
use super::frequency::axes;
use super::qwen_image::centred_above;
use super::sequence::{Sequence, Size};

/// Lens: a picture of `latents` centred on zero (an odd row or column on the positive side), then `text` tokens from half
/// its longer side on.
///
/// Text is spread from its start to `text` units further with both ends included, so that its steps are a little longer
/// than one: `text / (text - 1)`. The model was trained so.
///
/// Source: [`gen_lens_ids`](https://github.com/leejet/stable-diffusion.cpp/blob/97d2990807fe6d558e395f8764198d7c7e7b411c/src/model/common/rope.hpp).
///
/// # Errors
/// [`TooLarge`].
pub fn lens(text: usize, latents: Size, batch: usize) -> Result<Embedding, TooLarge> {
    let mut sequence = Sequence::new();
    sequence.picture(latents, |row, column| {
        [
            0.0,
            centred_above(row, latents.height),
            centred_above(column, latents.width),
        ]
    });
    let start = latents.longer() / 2;
    let step = if text > 1 {
        text as f64 / (text - 1) as f64
    } else {
        0.0
    };
    sequence.tokens(text, |index| {
        [(start as f64 + index as f64 * step) as f32; 3]
    });
    sequence.embed(
        axes([8, 28, 28], [10_000.0; 3], Precision::Double),
        Precision::Double,
        batch,
    )
}
