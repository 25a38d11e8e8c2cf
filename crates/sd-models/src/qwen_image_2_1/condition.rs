//! An encoded prompt, and what is kept with it.

use sd_backend::Device;

use super::layout::Segment;
use super::prefix::Prefixes;
use super::references::References;

/// An encoded prompt, with the reference pictures that it speaks of. May be kept and used for any number of pictures.
///
/// It owns the keys and values that the transformer keeps of it between steps. Clones share them.
#[derive(Debug, Clone, PartialEq)]
pub struct Condition {
    pub(crate) prompt: String,
    pub(crate) token_ids: Vec<i32>,
    /// Hidden states `[tokens, context]` of the prompt's text without the system message.
    pub(crate) hidden: Vec<f32>,
    pub(crate) tokens: usize,
    /// Text and reference pictures in order, pictures in latents.
    pub(crate) segments: Vec<Segment>,
    pub(crate) references: References,
    pub(crate) prefixes: Prefixes,
}

impl Condition {
    /// The prompt this was made from.
    pub fn prompt(&self) -> &str {
        &self.prompt
    }

    /// The reference pictures it was made with.
    pub fn references(&self) -> &References {
        &self.references
    }

    /// Tokens of text and latents of reference pictures: what the transformer sees before the picture that is made, and
    /// what is kept of between steps.
    pub fn prefix_tokens(&self) -> usize {
        self.segments.iter().map(|segment| segment.tokens()).sum()
    }

    /// Token numbers that the text encoder read, template and system message included. Each place of a reference picture
    /// has one of its own.
    pub fn token_ids(&self) -> &[i32] {
        &self.token_ids
    }

    /// Hidden states `[tokens, context]` of the text, row by row, the system message's left out, and those in the place of
    /// reference pictures, which the transformer sees as they are.
    pub fn hidden_states(&self) -> &[f32] {
        &self.hidden
    }

    /// Number of rows of [`Condition::hidden_states`].
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes of `device` that keys and values of it take, where a request [keeps them](crate::Request::keep_prefix).
    pub fn prefix_bytes(&self, device: Device) -> u64 {
        self.prefixes.bytes(device)
    }

    /// Gives up keys and values of it, those of clones too; they are computed again when needed.
    pub fn release_prefix(&self) {
        self.prefixes.release(None);
    }
}
