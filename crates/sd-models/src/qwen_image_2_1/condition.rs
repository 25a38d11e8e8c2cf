//! An encoded prompt, and what is kept with it.

use sd_backend::Device;

use super::prefix::Prefixes;

/// An encoded prompt. May be kept and used for any number of pictures.
///
/// It owns the keys and values that the transformer keeps of it between steps. Clones share them.
#[derive(Debug, Clone, PartialEq)]
pub struct Condition {
    pub(crate) prompt: String,
    pub(crate) token_ids: Vec<i32>,
    /// Hidden states `[tokens, context]` of the prompt without the system message.
    pub(crate) hidden: Vec<f32>,
    pub(crate) tokens: usize,
    pub(crate) prefixes: Prefixes,
}

impl Condition {
    /// The prompt this was made from.
    pub fn prompt(&self) -> &str {
        &self.prompt
    }

    /// Token numbers that the text encoder read, template and system message included.
    pub fn token_ids(&self) -> &[i32] {
        &self.token_ids
    }

    /// Hidden states `[tokens, context]`, row by row, the system message's left out.
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
