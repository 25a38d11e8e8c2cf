//! Memory for what segments keep for each other: few slots, used again as soon as nobody needs what is in them.

use std::collections::HashMap;

use crate::graph::TensorId;
use crate::segment::{Segment, last_uses};

/// Which slot each kept tensor lies in, and how large the slots are.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Slots {
    /// Bytes.
    pub sizes: Vec<usize>,
    pub of: HashMap<TensorId, usize>,
}

impl Slots {
    /// Gives a slot to every kept tensor; `bytes` says how large each is.
    ///
    /// A segment writes what it keeps while it still reads what it takes, so those never share a slot. A chain of blocks
    /// needs two.
    pub(crate) fn plan(segments: &[Segment], bytes: impl Fn(TensorId) -> usize) -> Slots {
        let last_uses = last_uses(segments);
        let mut slots = Slots::default();
        let mut free: Vec<usize> = Vec::new();
        for (index, segment) in segments.iter().enumerate() {
            for &id in &segment.keeps {
                let bytes = bytes(id);
                let slot = slots.take(&mut free, bytes);
                slots.of.insert(id, slot);
            }
            let done = segment
                .takes
                .iter()
                .filter(|id| last_uses.get(id) == Some(&index));
            free.extend(done.filter_map(|id| slots.of.get(id)));
        }
        slots
    }

    /// The smallest free slot that is large enough, else the largest one grown, else a new one.
    fn take(&mut self, free: &mut Vec<usize>, bytes: usize) -> usize {
        let fitting = free.iter().enumerate();
        let fitting = fitting
            .filter(|&(_, &slot)| self.sizes[slot] >= bytes)
            .min_by_key(|&(_, &slot)| self.sizes[slot]);
        let largest = free.iter().enumerate();
        let largest = largest.max_by_key(|&(_, &slot)| self.sizes[slot]);
        match fitting.or(largest).map(|(position, _)| position) {
            Some(position) => {
                let slot = free.swap_remove(position);
                self.sizes[slot] = self.sizes[slot].max(bytes);
                slot
            }
            None => {
                self.sizes.push(bytes);
                self.sizes.len() - 1
            }
        }
    }
}
