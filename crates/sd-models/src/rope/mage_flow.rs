//! Mage-Flow: centred pictures, text at the origin.

use super::embedding::{Embedding, Precision, TooLarge};
use super::frequency::axes;
use super::qwen_image::centred_picture;
use super::sequence::{Joint, Sequence};

/// Mage-Flow: text at the origin, the target at index 0, references at 1, 2, ..., each centred on zero; one latent to a
/// token.
///
/// Source: [`gen_mage_flow_pe`](https://github.com/leejet/stable-diffusion.cpp/blob/97d2990807fe6d558e395f8764198d7c7e7b411c/src/model/common/rope.hpp).
///
/// # Errors
/// [`TooLarge`].
pub fn mage_flow(joint: &Joint<'_>) -> Result<Embedding, TooLarge> {
    let mut sequence = Sequence::new();
    sequence.tokens(joint.text, |_| [0.0; 3]);
    centred_picture(&mut sequence, joint.target, 0.0);
    for (index, &latents) in joint.references.iter().enumerate() {
        centred_picture(&mut sequence, latents, (index + 1) as f32);
    }
    sequence.embed(
        axes([16, 56, 56], [10_000.0; 3], Precision::Double),
        Precision::Double,
        joint.batch,
    )
}
