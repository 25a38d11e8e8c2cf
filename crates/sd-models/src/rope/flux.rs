//! FLUX and its kin: text, target, references; pictures count from their corner.

use super::embedding::{Embedding, Precision, TooLarge};
use super::frequency::axes;
use super::references::{ReferenceMode, place};
use super::sequence::{Joint, Sequence, Size};

const AXES: [usize; 3] = [16, 56, 56];
const THETA: f64 = 10_000.0;

/// What differs between models with FLUX's positions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FluxOptions {
    /// Side of a square of latents that makes one token: 2, or 16 where pixels take the place of latents (Chroma
    /// Radiance).
    pub patch: usize,
    /// How reference pictures are told apart.
    pub references: ReferenceMode,
    /// What their indices are multiplied by.
    pub scale: f32,
}

impl Default for FluxOptions {
    /// FLUX.1 Kontext.
    fn default() -> Self {
        FluxOptions {
            patch: 2,
            references: ReferenceMode::Fixed,
            scale: 1.0,
        }
    }
}

/// FLUX.1, its editing model Kontext, and Chroma: text at the origin, the target's rows and columns at index 0,
/// references from index 1 on.
///
/// Sources: [`FluxPosEmbed`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_flux.py#L500),
/// [`_prepare_latent_image_ids`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/flux/pipeline_flux_kontext.py#L560);
/// reference modes: [`gen_flux_ids`](https://github.com/leejet/stable-diffusion.cpp/blob/97d2990807fe6d558e395f8764198d7c7e7b411c/src/model/common/rope.hpp#L398).
///
/// # Errors
/// [`TooLarge`].
pub fn flux(joint: &Joint<'_>, options: &FluxOptions) -> Result<Embedding, TooLarge> {
    let mut sequence = Sequence::new();
    sequence.tokens(joint.text, |_| [0.0; 3]);
    pictures(&mut sequence, joint, options, 0, 0.0);
    embed(sequence, joint.batch)
}

/// Ovis-Image: FLUX with text that walks along rows and columns.
///
/// Source: [`_prepare_prompt_embeds`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/ovis_image/pipeline_ovis_image.py#L263).
///
/// # Errors
/// [`TooLarge`].
pub fn ovis_image(joint: &Joint<'_>, options: &FluxOptions) -> Result<Embedding, TooLarge> {
    let mut sequence = Sequence::new();
    walking_text(&mut sequence, joint.text);
    pictures(&mut sequence, joint, options, 0, 0.0);
    embed(sequence, joint.batch)
}

/// LongCat-Image: text that walks along rows and columns, pictures that begin where it ends, the target at index 1 and
/// references from index 2 on.
///
/// Source: [`prepare_pos_ids`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/longcat_image/pipeline_longcat_image_edit.py#L107).
///
/// # Errors
/// [`TooLarge`].
pub fn longcat_image(joint: &Joint<'_>, options: &FluxOptions) -> Result<Embedding, TooLarge> {
    let mut sequence = Sequence::new();
    walking_text(&mut sequence, joint.text);
    pictures(&mut sequence, joint, options, 1, joint.text as f32);
    embed(sequence, joint.batch)
}

/// FLUX.2: four axes, the last of them for text; one latent to a token; references at indices 10, 20, ...
///
/// Sources: [`Flux2PosEmbed`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_flux2.py#L971),
/// [`_prepare_image_ids`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/flux2/pipeline_flux2.py#L407).
///
/// # Errors
/// [`TooLarge`].
pub fn flux_2(joint: &Joint<'_>) -> Result<Embedding, TooLarge> {
    let mut sequence = Sequence::new();
    sequence.tokens(joint.text, |index| [0.0, 0.0, 0.0, index as f32]);
    let mut grid = |size: Size, index: f32| {
        sequence.picture(size, |row, column| [index, row as f32, column as f32, 0.0]);
    };
    grid(joint.target, 0.0);
    for placed in place(joint.references, ReferenceMode::Increase, 1, 10.0) {
        grid(placed.latents, placed.index);
    }
    let frequencies = axes([32; 4], [2_000.0; 4], Precision::Double);
    sequence.embed(frequencies, Precision::Double, joint.batch)
}

fn walking_text(sequence: &mut Sequence<3>, text: usize) {
    sequence.tokens(text, |index| [0.0, index as f32, index as f32]);
}

/// The target at `index` and the references behind it, all rows and columns from `start` on.
pub(crate) fn pictures(
    sequence: &mut Sequence<3>,
    joint: &Joint<'_>,
    options: &FluxOptions,
    index: i32,
    start: f32,
) {
    let mut grid = |latents: Size, at: [f32; 3]| {
        sequence.picture(latents.patches(options.patch), |row, column| {
            [at[0], at[1] + row as f32, at[2] + column as f32]
        });
    };
    grid(joint.target, [index as f32, start, start]);
    for placed in place(
        joint.references,
        options.references,
        index + 1,
        options.scale,
    ) {
        let at = [placed.index, start + placed.row, start + placed.column];
        grid(placed.latents, at);
    }
}

fn embed(sequence: Sequence<3>, batch: usize) -> Result<Embedding, TooLarge> {
    sequence.embed(
        axes(AXES, [THETA; 3], Precision::Double),
        Precision::Double,
        batch,
    )
}
