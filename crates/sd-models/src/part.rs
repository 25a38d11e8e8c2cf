//! One part of a model, opened.

use sd_graph::{Checkpoint, Declarations, Fallback, LoadOptions, Scope, Weights};

use crate::error::Result;

/// One part of a model, or a half of a VAE: what it computes, and the weights that it declared to need.
#[derive(Debug)]
pub(crate) struct Part<M> {
    pub(crate) module: M,
    pub(crate) weights: Weights,
    /// Weights that could not be given the type asked for.
    pub(crate) fallbacks: Vec<Fallback>,
}

impl<M> Part<M> {
    /// Declares what `new` needs of the tensors of `checkpoint`.
    pub(crate) fn open(
        checkpoint: &Checkpoint,
        options: LoadOptions,
        new: impl FnOnce(&Scope<'_>) -> M,
    ) -> Result<Part<M>> {
        Part::declared(checkpoint, Declarations::new(checkpoint, options), new)
    }

    /// As [`Part::open`], against what was begun to declare.
    pub(crate) fn declared(
        checkpoint: &Checkpoint,
        declarations: Declarations<'_>,
        new: impl FnOnce(&Scope<'_>) -> M,
    ) -> Result<Part<M>> {
        let module = new(&declarations.root());
        let fallbacks = declarations.fallbacks();
        let unused = declarations.unused_adapters();
        let params = declarations.finish()?;
        if let [first, ..] = &unused[..] {
            tracing::warn!(weights = unused.len(), %first, "LoRAs add to weights that are no linear layer; this is left out");
        }
        Ok(Part {
            module,
            weights: Weights::new(checkpoint.clone(), params),
            fallbacks,
        })
    }
}
