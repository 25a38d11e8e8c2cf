//! Low-rank additions to matrices (LoRA): which there are, and declaring them beside the weights that they add to.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use crate::param::Param;

/// A low-rank addition to a matrix `W [out, in]`: to `x W^T` is added `scale * (x down^T) up^T`.
#[derive(Debug, Clone)]
pub struct LowRank {
    /// `[rank, in]`.
    pub down: Param,
    /// `[out, rank]`.
    pub up: Param,
    /// What the product is multiplied by.
    pub scale: f32,
}

/// Low-rank additions by the name of the matrix that they add to.
///
/// Their factors are tensors of the checkpoint that is declared against, under names that no weight has. They keep the type of
/// their file whatever is asked for: they are small, and what they change is too.
#[derive(Debug, Default)]
pub struct Adapters {
    by_weight: BTreeMap<String, Vec<Adapter>>,
    used: RefCell<BTreeSet<String>>,
}

/// One addition.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// Name of the tensor `[rank, in]`.
    pub down: String,
    /// Name of the tensor `[out, rank]`.
    pub up: String,
    /// The rank.
    pub rank: usize,
    /// What the product is multiplied by.
    pub scale: f32,
}

impl Adapters {
    /// Adds `adapter` to the matrix called `weight`, behind those that it has.
    pub fn add(&mut self, weight: &str, adapter: Adapter) {
        self.by_weight
            .entry(weight.to_owned())
            .or_default()
            .push(adapter);
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.by_weight.is_empty()
    }

    /// What adds to `weight`, which thereby counts as used.
    pub(crate) fn of(&self, weight: &str) -> &[Adapter] {
        let Some(found) = self.by_weight.get(weight) else {
            return &[];
        };
        self.used.borrow_mut().insert(weight.to_owned());
        found
    }

    /// Whether a tensor is a factor of one.
    pub(crate) fn has_factor(&self, name: &str) -> bool {
        let mut all = self.by_weight.values().flatten();
        all.any(|adapter| adapter.down == name || adapter.up == name)
    }

    /// Names of matrices that nothing of the model asked the additions of.
    pub(crate) fn unused(&self) -> Vec<String> {
        let used = self.used.borrow();
        let weights = self.by_weight.keys();
        weights
            .filter(|weight| !used.contains(*weight))
            .cloned()
            .collect()
    }
}
