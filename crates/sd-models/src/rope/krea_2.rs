//! Krea 2: FLUX's positions under a base of 1000.

use super::embedding::{Embedding, Precision, TooLarge};
use super::flux::{FluxOptions, pictures};
use super::frequency::axes;
use super::sequence::{Joint, Sequence};

/// Krea 2 with heads of `head_dim` channels (128 in the release): text at the origin, the target at index 0, references
/// from index 1 on. Rows and columns turn three eighths of a head each, the rest follows the index.
///
/// Sources: [`prepare_position_ids`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/krea2/pipeline_krea2.py#L382),
/// [`Krea2RotaryPosEmbed`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_krea2.py#L310);
/// references and other head widths: [`krea2.hpp`](https://github.com/leejet/stable-diffusion.cpp/pull/2039/files).
///
/// # Errors
/// [`TooLarge`].
pub fn krea_2(
    joint: &Joint<'_>,
    options: &FluxOptions,
    head_dim: usize,
) -> Result<Embedding, TooLarge> {
    let side = head_dim / 16 * 6;
    let mut sequence = Sequence::new();
    sequence.tokens(joint.text, |_| [0.0; 3]);
    pictures(&mut sequence, joint, options, 0, 0.0);
    let dims = [head_dim.saturating_sub(2 * side), side, side];
    sequence.embed(
        axes(dims, [1_000.0; 3], Precision::Double),
        Precision::Double,
        joint.batch,
    )
}
