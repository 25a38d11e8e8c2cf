//! Named tensors that a runner keeps between runs: keys and values of a prefix, say.
//!
//! A run reads what the cache held when it was attached, and stores into memory of its own. What it stored takes the place
//! of what was there when all of the run has succeeded, and never before: a run that fails or is cancelled leaves the
//! cache as it was, and one that reads what it replaces does not see it change.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sd_backend::{Backend, Buffer, DType, Device, MemoryKind};

use crate::error::{Allocation, Error, Result};
use crate::graph::Recording;
use crate::load::allocate;
use crate::param::Place;
use crate::raw::bytes_for;
use crate::shape::{Reason, Shape};

/// What a cache holds, or is to hold, under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheEntry {
    /// The name.
    pub name: String,
    /// The shape, outermost first.
    pub shape: Shape,
    /// The element type: F32, F16, BF16 or Q8_0.
    pub dtype: DType,
}

/// Named tensors that outlive a run, in the memory of the device that ran it. A cheap shared handle: clones are the same
/// cache, and what it holds is given back with the last of them.
///
/// Graphs write it with [`Graph::store`](crate::Graph::store) and read it with [`Graph::cached`](crate::Graph::cached);
/// which cache they mean is said for each run with [`Plan::attach`](crate::Plan::attach). So one plan serves any number
/// of caches, and a cache any number of plans.
#[derive(Debug, Clone, Default)]
pub struct RunnerCache(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    held: Mutex<Held>,
    /// Held by whoever stores into it, from before the run to behind it.
    storing: Mutex<()>,
}

#[derive(Debug, Default)]
struct Held {
    entries: BTreeMap<String, (CacheEntry, Place)>,
    commits: u64,
}

impl PartialEq for RunnerCache {
    /// Whether both are the same cache, whatever they hold.
    fn eq(&self, other: &RunnerCache) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for RunnerCache {}

impl RunnerCache {
    /// A cache that holds nothing.
    pub fn new() -> RunnerCache {
        RunnerCache::default()
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // The map is whole after every statement that changes it.
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it holds, by name.
    pub fn entries(&self) -> Vec<CacheEntry> {
        let held = self.held();
        held.entries
            .values()
            .map(|(entry, _)| entry.clone())
            .collect()
    }

    /// Whether it holds a tensor of this name, shape and type.
    pub fn holds(&self, entry: &CacheEntry) -> bool {
        let held = self.held();
        let found = held.entries.get(&entry.name);
        found.is_some_and(|(found, _)| found == entry)
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.held().entries.is_empty()
    }

    /// How many runs have stored into it.
    pub fn commits(&self) -> u64 {
        self.held().commits
    }

    /// Bytes of `device` that it holds. What a run is storing belongs to the run until it has succeeded.
    pub fn resident_bytes(&self, device: Device) -> u64 {
        let held = self.held();
        let places = held.entries.values().map(|(_, place)| &place.buffer);
        let mut buffers: Vec<&Arc<Buffer>> = places.filter(|b| b.device() == device).collect();
        buffers.sort_by_key(|buffer| Arc::as_ptr(buffer));
        buffers.dedup_by(|one, other| Arc::ptr_eq(one, other));
        buffers.iter().map(|buffer| buffer.len() as u64).sum()
    }

    /// Gives up all that it holds. Runs that read it go on, and keep the memory to their end.
    pub fn clear(&self) {
        let entries = std::mem::take(&mut self.held().entries);
        // Freed without the lock.
        drop(entries);
    }

    /// Where the entries that a graph reads lie on `device`, in its order.
    ///
    /// # Errors
    /// [`Error::Cache`] for the first that is not there, or not as the graph wants it.
    pub(crate) fn find(&self, wanted: &[CacheEntry], device: Device) -> Result<Vec<Place>> {
        let held = self.held();
        let find = |wanted: &CacheEntry| {
            let reason = match held.entries.get(&wanted.name) {
                None => "is not there".to_owned(),
                Some((found, _)) if found != wanted => format!(
                    "is {} {}, not {} {}",
                    found.dtype, found.shape, wanted.dtype, wanted.shape
                ),
                Some((_, place)) if place.buffer.device() != device => format!(
                    "lies on {}, not on {}",
                    place.buffer.device().name(),
                    device.name()
                ),
                Some((_, place)) => return Ok(place.clone()),
            };
            Err(Error::Cache {
                name: wanted.name.clone(),
                reason,
            })
        };
        wanted.iter().map(find).collect()
    }

    /// Takes over what a run has stored.
    pub(crate) fn commit(&self, pending: Pending) {
        if pending.0.is_empty() {
            return;
        }
        let mut held = self.held();
        let replaced: Vec<_> = pending
            .0
            .into_iter()
            .filter_map(|(entry, place)| held.entries.insert(entry.name.clone(), (entry, place)))
            .collect();
        held.commits += 1;
        drop(held);
        // Freed without the lock.
        drop(replaced);
    }
}

/// Memory for what a run stores. Given back if the run does not succeed.
#[derive(Debug, Default)]
pub(crate) struct Pending(Vec<(CacheEntry, Place)>);

impl Pending {
    /// Takes memory for all that a run of `recording` stores.
    ///
    /// # Errors
    /// Memory that runs out: [`Allocation::Capture`].
    pub(crate) fn allocate(recording: &Recording, backend: &Backend) -> Result<Pending> {
        let entries = recording.stores.iter().map(|store| &store.entry);
        let sizes: Option<Vec<usize>> = entries
            .clone()
            .map(|entry| bytes_for(entry.dtype, entry.shape, backend.device()))
            .collect();
        let sizes = sizes.ok_or_else(|| backend.out_of_memory(0));
        let places = sizes
            .map_err(Error::from)
            .and_then(|sizes| allocate(backend, sizes.into_iter(), MemoryKind::Cache))
            .map_err(|error| error.of(Allocation::Capture))?;
        Ok(Pending(entries.cloned().zip(places).collect()))
    }

    /// Where each stored value goes, in the order of the recording.
    pub(crate) fn places(&self) -> impl Iterator<Item = &Place> {
        self.0.iter().map(|(_, place)| place)
    }
}

/// Bytes of `device` that a run of `recording` stores.
pub(crate) fn stored_bytes(recording: &Recording, device: Device) -> u64 {
    let alignment = Buffer::alignment(device);
    let bytes = recording.stores.iter().map(|store| {
        let bytes = bytes_for(store.entry.dtype, store.entry.shape, device);
        bytes.map_or(u64::MAX, |bytes| bytes.next_multiple_of(alignment) as u64)
    });
    bytes.fold(0, u64::saturating_add)
}

/// Refuses what a cache cannot hold.
pub(crate) fn storable(shape: Shape, dtype: DType) -> Result<(), Reason> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0 => {}
        other => return Err(format!("a cache holds f32, f16, bf16 or q8_0, not {other}").into()),
    }
    match dtype.row_bytes(shape.inner()) {
        Some(_) => Ok(()),
        None => Err(format!("rows of {} are no whole blocks of {dtype}", shape.inner()).into()),
    }
}

/// Waits until nobody stores into any of `caches`, which differ, and keeps others from doing so.
pub(crate) fn lock(caches: &[RunnerCache]) -> Vec<MutexGuard<'_, ()>> {
    let mut caches: Vec<&RunnerCache> = caches.iter().collect();
    // In one order everywhere, so that two runs do not wait for each other.
    caches.sort_by_key(|cache| Arc::as_ptr(&cache.0));
    caches
        .into_iter()
        .map(|cache| {
            let storing = cache.0.storing.lock();
            storing.unwrap_or_else(PoisonError::into_inner)
        })
        .collect()
}
