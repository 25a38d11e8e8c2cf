//! Rotary position embeddings: where each token lies, how fast each pair of channels turns, and pictures that wrap.
//!
//! An [`Embedding`] is built once for each shape of a sequence, on the host, by a function named after its model
//! ([`flux`], [`qwen_image_2_1`], ...), and holds everything that a caller needs to apply it anywhere: the rotations as
//! a plain slice, the positions they came from, which tokens form pictures and how large those are, and the frequency and
//! axis of each pair. [`Embedding::circular`] makes the pictures in it periodic; [`Rotation`] applies it in a graph.
//!
//! Which channels make a pair differs between models, not between embeddings: neighbours or halves
//! ([`Pairing`](sd_graph::Pairing)).
//!
//! Positions follow `diffusers` wherever it has the family, to the precision it computes in. For the others the source
//! is stable-diffusion.cpp, and double precision.

mod anima;
mod apply;
mod boogu;
mod circular;
mod embedding;
mod ernie_image;
mod flux;
mod frequency;
mod ideogram_4;
mod krea_2;
mod lens;
mod llada_image;
mod mage_flow;
mod minimax_h3;
mod minit2i;
mod pid;
mod qwen3_vl;
mod qwen_image;
mod qwen_image_2_1;
mod references;
mod sequence;
mod wan;
mod z_image;

pub use anima::anima;
pub use apply::Rotation;
pub use boogu::boogu;
pub use circular::Circular;
pub use embedding::{Embedding, PositionLayout, Precision, Region, TooLarge, ValueLayout};
pub use ernie_image::ernie_image;
pub use flux::{FluxOptions, flux, flux_2, longcat_image, ovis_image};
pub use frequency::{Frequency, axes, interleaved_axes, ntk_theta, one_axis};
pub use ideogram_4::ideogram_4;
pub use krea_2::krea_2;
pub use lens::lens;
pub use llada_image::{llada_image, llada_image_edit};
pub use mage_flow::mage_flow;
pub use minimax_h3::{H3Axis, H3Clip, H3Keyframe, H3Reference, minimax_h3, minimax_h3_references};
pub use minit2i::minit2i;
pub use pid::pid;
pub use qwen_image::qwen_image;
pub use qwen_image_2_1::{Part, qwen_image_2_1};
pub(crate) use qwen3_vl::merged_order;
pub use qwen3_vl::{qwen3_vl, qwen3_vl_vision};
pub use references::ReferenceMode;
pub use sequence::{Joint, Sequence, Size};
pub use wan::wan;
pub use z_image::z_image;
