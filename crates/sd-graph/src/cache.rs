//! A few plans kept for the shapes that are used again.

use std::sync::{Arc, Mutex};

use sd_backend::Backend;

use crate::acquire::Pool;
use crate::error::Result;
use crate::graph::Graph;
use crate::plan::Plan;
use crate::relief::{Relief, with_relief};
use crate::run::{Cancel, Progress, Reporter};

/// Plans by the shapes they were built for. Equal shapes share a plan; beyond its room the plan used longest ago goes.
///
/// Plans of one cache share weights that come and go, if they need the same ones in the same order.
#[derive(Debug)]
pub struct PlanCache<K> {
    // The most recently used is last.
    plans: Vec<(K, Plan)>,
    room: usize,
    pool: Arc<Mutex<Pool>>,
}

impl<K> Relief for PlanCache<K> {
    fn release_plans(&mut self) -> bool {
        let had_any = !self.plans.is_empty();
        self.plans.clear();
        had_any
    }
}

impl<K: PartialEq> PlanCache<K> {
    /// A cache for up to `room` plans, at least one.
    pub fn new(room: usize) -> PlanCache<K> {
        let room = room.max(1);
        PlanCache {
            plans: Vec::new(),
            room,
            pool: Arc::new(Mutex::new(Pool::new(room))),
        }
    }

    /// The plan for `key`, built by `build` if there is none.
    ///
    /// If memory runs out while building, all other plans are given up and it is tried once more ([`with_relief`]).
    ///
    /// # Errors
    /// Those of [`Plan::build`].
    pub fn get_or_build(
        &mut self,
        key: K,
        backend: &Backend,
        build: impl for<'g> Fn(Graph<'g>),
    ) -> Result<&mut Plan> {
        let cancel = Cancel::new();
        self.get_or_build_with(key, backend, &cancel, &mut |_: &Progress| {}, build)
    }

    /// As [`PlanCache::get_or_build`]; what it loads can be cancelled and is told of, as by [`Plan::build_with`].
    ///
    /// # Errors
    /// Those of [`Plan::build`].
    pub fn get_or_build_with(
        &mut self,
        key: K,
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
        build: impl for<'g> Fn(Graph<'g>),
    ) -> Result<&mut Plan> {
        let build = |_: &K, g: Graph<'_>| build(g);
        let plan = match self.plans.iter().any(|(known, _)| *known == key) {
            true => None,
            false => Some(with_relief(self, |cache| {
                cache.build(&key, cache.room, backend, (cancel, &mut *progress), &build)
            })?),
        };
        let index = self.keep(key, plan);
        Ok(&mut self.plans[index].1)
    }

    /// The plans for all `keys`, which differ, in their order, to be [run together](Plan::run_together). What is loaded can
    /// be cancelled and is told of, as by [`Plan::build_with`].
    ///
    /// If memory runs out while building, all plans are given up and it is tried once more ([`with_relief`]).
    ///
    /// # Errors
    /// Those of [`Plan::build`].
    pub fn get_or_build_all(
        &mut self,
        keys: &[K],
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
        build: impl for<'g> Fn(&K, Graph<'g>),
    ) -> Result<Vec<&mut Plan>>
    where
        K: Clone,
    {
        let room = self.room.max(keys.len());
        with_relief(self, |cache| {
            cache.ensure_all(keys, room, backend, (cancel, &mut *progress), &build)
        })?;
        let mut found: Vec<(usize, &mut Plan)> = self
            .plans
            .iter_mut()
            .filter_map(|(known, plan)| {
                let position = keys.iter().position(|key| key == known)?;
                Some((position, plan))
            })
            .collect();
        found.sort_by_key(|(position, _)| *position);
        Ok(found.into_iter().map(|(_, plan)| plan).collect())
    }

    fn ensure_all(
        &mut self,
        keys: &[K],
        room: usize,
        backend: &Backend,
        (cancel, progress): (&Cancel, &mut dyn Reporter),
        build: &impl for<'g> Fn(&K, Graph<'g>),
    ) -> Result<()>
    where
        K: Clone,
    {
        // Those that are there are moved out of the way of what makes room first.
        let (known, new): (Vec<&K>, Vec<&K>) = keys
            .iter()
            .partition(|key| self.plans.iter().any(|(known, _)| known == *key));
        for key in known {
            self.keep(key.clone(), None);
        }
        for key in new {
            let plan = self.build(key, room, backend, (cancel, progress), build)?;
            self.keep(key.clone(), Some(plan));
        }
        Ok(())
    }

    /// A new plan, for which old ones beyond `room` are given up.
    fn build(
        &mut self,
        key: &K,
        room: usize,
        backend: &Backend,
        (cancel, progress): (&Cancel, &mut dyn Reporter),
        build: &impl for<'g> Fn(&K, Graph<'g>),
    ) -> Result<Plan> {
        while self.plans.len() >= room {
            self.plans.remove(0);
        }
        Plan::build_in(&self.pool, backend, cancel, progress, |g| build(key, g))
    }

    /// Where the plan for `key`, new or known, is as the most recently used.
    fn keep(&mut self, key: K, plan: Option<Plan>) -> usize {
        if let Some(plan) = plan {
            self.plans.push((key, plan));
        } else if let Some(index) = self.plans.iter().position(|(known, _)| *known == key) {
            let entry = self.plans.remove(index);
            self.plans.push(entry);
        }
        self.plans.len() - 1
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

    /// Gives up the plans whose keys are not `wanted`.
    pub fn retain(&mut self, wanted: impl Fn(&K) -> bool) {
        self.plans.retain(|(key, _)| wanted(key));
    }

    /// Gives up all plans and their memory.
    pub fn clear(&mut self) {
        self.plans.clear();
    }
}
