//! One part of a model, opened.

use sd_graph::{Declarations, Fallback, LoadOptions, Scope, Weights};

use crate::error::Result;
use crate::sources::Source;

/// One part of a model: what it computes, and the weights that it declared to need.
#[derive(Debug)]
pub(crate) struct Part<M> {
    pub(crate) module: M,
    pub(crate) weights: Weights,
    /// Weights that could not be given the type asked for.
    pub(crate) fallbacks: Vec<Fallback>,
}

impl<M> Part<M> {
    /// Declares what `new` needs of the part called `name`, whose tensors are those of `source`.
    pub(crate) fn open<C>(
        source: &Source<C>,
        name: &str,
        options: &LoadOptions,
        new: impl FnOnce(&Scope<'_>, &C) -> M,
    ) -> Result<Part<M>> {
        let declarations = Declarations::new(&source.checkpoint, options.clone().component(name));
        Part::declared(source, declarations, new)
    }

    /// As [`Part::open`], against what was begun to declare.
    pub(crate) fn declared<C>(
        source: &Source<C>,
        declarations: Declarations<'_>,
        new: impl FnOnce(&Scope<'_>, &C) -> M,
    ) -> Result<Part<M>> {
        let module = new(&declarations.root(), &source.config);
        let fallbacks = declarations.fallbacks();
        let unused = declarations.unused_adapters();
        let params = declarations.finish()?;
        if let [first, ..] = &unused[..] {
            tracing::warn!(weights = unused.len(), %first, "LoRAs add to weights that are no linear layer; this is left out");
        }
        Ok(Part {
            module,
            weights: Weights::new(source.checkpoint.clone(), params),
            fallbacks,
        })
    }
}
