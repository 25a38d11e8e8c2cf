//! A few plans kept for the shapes that are used again.

use sd_backend::Backend;

use crate::error::Result;
use crate::graph::Graph;
use crate::plan::Plan;

/// Plans by the shapes they were built for. Equal shapes share a plan; beyond its room the plan used longest ago goes.
#[derive(Debug)]
pub struct PlanCache<K> {
    // The most recently used is last.
    plans: Vec<(K, Plan)>,
    room: usize,
}

impl<K: PartialEq> PlanCache<K> {
    /// A cache for up to `room` plans, at least one.
    pub fn new(room: usize) -> PlanCache<K> {
        PlanCache {
            plans: Vec::new(),
            room: room.max(1),
        }
    }

    /// The plan for `key`, built by `build` if there is none.
    ///
    /// If memory runs out while building, all other plans are given up and it is tried once more.
    ///
    /// # Errors
    /// Those of [`Plan::build`].
    pub fn get_or_build(
        &mut self,
        key: K,
        backend: &Backend,
        build: impl for<'g> Fn(Graph<'g>),
    ) -> Result<&mut Plan> {
        let index = match self.plans.iter().position(|(known, _)| *known == key) {
            Some(index) => {
                let entry = self.plans.remove(index);
                self.plans.push(entry);
                self.plans.len() - 1
            }
            None => {
                while self.plans.len() >= self.room {
                    self.plans.remove(0);
                }
                let plan = match Plan::build(backend, &build) {
                    Err(error) if error.is_out_of_memory() && !self.plans.is_empty() => {
                        tracing::warn!("{error}; giving up {} idle plans", self.plans.len());
                        self.plans.clear();
                        Plan::build(backend, &build)?
                    }
                    other => other?,
                };
                self.plans.push((key, plan));
                self.plans.len() - 1
            }
        };
        Ok(&mut self.plans[index].1)
    }

    /// Bytes that all plans hold for what they compute.
    pub fn compute_bytes(&self) -> u64 {
        self.plans
            .iter()
            .map(|(_, plan)| plan.compute_bytes())
            .sum()
    }

    /// Number of plans.
    pub fn len(&self) -> usize {
        self.plans.len()
    }

    /// Whether there are no plans.
    pub fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    /// Gives up all plans and their memory.
    pub fn clear(&mut self) {
        self.plans.clear();
    }
}
