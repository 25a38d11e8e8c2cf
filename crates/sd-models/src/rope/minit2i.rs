//! MiniT2I: a square picture; text has an embedding of its own.

use super::embedding::{Embedding, Precision, TooLarge};
use super::frequency::{Frequency, omegas};
use super::sequence::{Sequence, Size};

/// The picture of MiniT2I: `side x side` tokens from the corner, in heads of `head_dim` channels, the first quarter of
/// whose channel pairs' halves follows rows and the second columns under the same frequencies. Halves are turned.
///
/// Text comes before it, with [`one_axis`](super::one_axis) over the whole head and a base of 10000, and never wraps.
///
/// Source: [`make_vision_rope`](https://github.com/leejet/stable-diffusion.cpp/blob/97d2990807fe6d558e395f8764198d7c7e7b411c/src/model/diffusion/minit2i.hpp).
///
/// # Errors
/// [`TooLarge`].
pub fn minit2i(side: usize, head_dim: usize) -> Result<Embedding, TooLarge> {
    let mut sequence = Sequence::new();
    sequence.picture(Size::new(side, side), |row, column| {
        [0.0, row as f32, column as f32]
    });
    let frequencies = [1, 2]
        .into_iter()
        .flat_map(|axis| {
            omegas(head_dim / 2, 10_000.0, Precision::Double)
                .map(move |omega| Frequency { axis, omega })
        })
        .collect();
    sequence.embed(frequencies, Precision::Double, 1)
}
