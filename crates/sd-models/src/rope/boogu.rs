//! Boogu: text, references, target, each picture behind the one before it.

use super::embedding::{Embedding, Precision, TooLarge};
use super::frequency::axes;
use super::sequence::{Joint, Sequence};

/// Boogu: text walking on all axes together, then references, then the target, each from its corner at the index that
/// text and pictures before it reached; a picture takes its longer side. Latents are padded to whole squares of two.
///
/// Source: [`gen_boogu_pe`](https://github.com/leejet/stable-diffusion.cpp/blob/97d2990807fe6d558e395f8764198d7c7e7b411c/src/model/diffusion/boogu.hpp).
///
/// # Errors
/// [`TooLarge`].
pub fn boogu(joint: &Joint<'_>) -> Result<Embedding, TooLarge> {
    let mut sequence = Sequence::new();
    sequence.tokens(joint.text, |index| [index as f32; 3]);
    let mut next = joint.text;
    for latents in joint.references.iter().chain([&joint.target]) {
        let size = latents.padded_patches(2);
        sequence.picture(size, |row, column| [next as f32, row as f32, column as f32]);
        next = next.saturating_add(size.longer());
    }
    sequence.embed(
        axes([40; 3], [10_000.0; 3], Precision::Double),
        Precision::Double,
        joint.batch,
    )
}
