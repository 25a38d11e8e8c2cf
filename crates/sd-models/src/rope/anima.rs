//! Anima: a picture alone; its text is attended to across.

use super::embedding::{Embedding, Precision, TooLarge};
use super::flux::{FluxOptions, pictures};
use super::frequency::{axes, ntk_theta};
use super::sequence::{Joint, Sequence, Size};

const AXES: [usize; 3] = [44, 42, 42];
/// How much further than in training frames, rows and columns reach.
const RATIOS: [f64; 3] = [1.0, 4.0, 4.0];

/// Anima: the target's latents padded to whole squares of two at index 0, references laid out from index 1; rows and
/// columns under a base stretched to reach four times as far. There is no text in the sequence.
///
/// Sources: [`CosmosRotaryPosEmbed`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_cosmos.py#L457);
/// references and padding: [`anima.hpp`](https://github.com/leejet/stable-diffusion.cpp/blob/97d2990807fe6d558e395f8764198d7c7e7b411c/src/model/diffusion/anima.hpp).
///
/// # Errors
/// [`TooLarge`].
pub fn anima(latents: Size, references: &[Size], batch: usize) -> Result<Embedding, TooLarge> {
    let padded = latents.padded_patches(2);
    let target = Size::new(
        padded.height.checked_mul(2).ok_or(TooLarge)?,
        padded.width.checked_mul(2).ok_or(TooLarge)?,
    );
    let joint = Joint::new(0, target).references(references).batch(batch);
    let mut sequence = Sequence::new();
    pictures(&mut sequence, &joint, &FluxOptions::default(), 0, 0.0);
    // The reference multiplies the base in double precision, and takes its power in single.
    let thetas = [0, 1, 2].map(|axis| ntk_theta(10_000.0, AXES[axis], RATIOS[axis]));
    sequence.embed(
        axes(AXES, thetas, Precision::Single),
        Precision::Single,
        batch,
    )
}
