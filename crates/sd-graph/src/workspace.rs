//! Memory that graphs compute in, laid out by ggml. One of the places of this crate with `unsafe` in it.

use std::ptr::NonNull;

use sd_backend::{Backend, Buffer, MemoryKind, Reservation};
use sd_ggml_sys as sys;

use crate::error::Result;
use crate::graph::TensorId;
use crate::lower::Lowered;
use crate::raw::RawTensor;

/// Memory that the graphs of one plan compute in, one after the other.
#[derive(Debug)]
pub(crate) struct Workspace {
    // Field order is drop order: memory goes before its account is told.
    allocators: Vec<Allocator>,
    _reservation: Reservation,
}

#[derive(Debug)]
struct Allocator(NonNull<sys::ggml_gallocr>);

// SAFETY: ggml's graph allocator has no thread affinity.
unsafe impl Send for Allocator {}

impl Workspace {
    /// Bytes that a graph will need on the device of `backend`, beside the leaves that `is_elsewhere` and what it keeps.
    ///
    /// Measured by an allocator of its own: afterwards ggml's takes its buffers for allocated and would follow null
    /// pointers.
    pub(crate) fn measure(
        backend: &Backend,
        lowered: &Lowered,
        is_elsewhere: impl Fn(TensorId) -> bool,
    ) -> Result<usize> {
        let allocator = Allocator::new(backend)?;
        let leaves = lowered.leaves.iter().filter(|(id, _)| is_elsewhere(*id));
        let elsewhere: Vec<RawTensor> = leaves
            .chain(&lowered.kept)
            .map(|&(_, tensor)| tensor)
            .chain(lowered.slots.iter().map(|slot| slot.leaf))
            // A graph may be measured after some of its leaves were bound.
            // SAFETY: the tensors live in the arena of `lowered`.
            .filter(|tensor| unsafe { tensor.as_ref() }.data.is_null())
            .collect();
        let mut bytes = 0;
        // SAFETY: graph and allocator are live. The allocator takes every tensor with an address as placed elsewhere and
        // never follows the address, which is taken back before anybody could. Without lists of buffers every other
        // tensor goes to the one buffer, whose size is written to `bytes`.
        unsafe {
            for tensor in &elsewhere {
                (*tensor.as_ptr()).data = NonNull::<u128>::dangling().as_ptr().cast();
            }
            sys::ggml_gallocr_reserve_n_size(
                allocator.0.as_ptr(),
                lowered.graph,
                std::ptr::null(),
                std::ptr::null(),
                &mut bytes,
            );
            for tensor in &elsewhere {
                (*tensor.as_ptr()).data = std::ptr::null_mut();
            }
        }
        Ok(bytes)
    }

    /// Bytes that graphs of these sizes need if they run one after the other.
    pub(crate) fn bytes_for(backend: &Backend, sizes: &[usize]) -> u64 {
        let largest = Buffer::largest(backend.device());
        let (small, large): (Vec<u64>, Vec<u64>) = sizes
            .iter()
            .map(|&size| size as u64)
            .partition(|&size| size <= largest as u64);
        small.into_iter().max().unwrap_or(0) + large.into_iter().sum::<u64>()
    }

    /// Takes memory for graphs of these measured sizes and gives every tensor its place in it. All leaves that were
    /// measured as elsewhere, and all that is kept, have theirs already.
    ///
    /// The graphs share memory: nothing in it outlives the run of one. Only a graph that does not fit into one buffer of
    /// the device has memory of its own, since ggml lays several buffers out anew for each graph.
    pub(crate) fn allocate(
        backend: &Backend,
        graphs: &[&Lowered],
        sizes: &[usize],
    ) -> Result<Workspace> {
        let bytes = Workspace::bytes_for(backend, sizes);
        let device = backend.device();
        let reservation = backend
            .ledger()
            .reserve(device, bytes, MemoryKind::Compute)?;
        let mut workspace = Workspace {
            allocators: Vec::new(),
            _reservation: reservation,
        };
        let largest = Buffer::largest(device);
        let mut order: Vec<usize> = (0..graphs.len()).collect();
        // The largest first: no later one can make the allocator give up memory that graphs point into.
        order.sort_by_key(|&index| std::cmp::Reverse(sizes[index]));
        let mut is_shared = false;
        for index in order {
            let may_share = sizes[index] <= largest;
            if !(may_share && is_shared) {
                workspace.allocators.push(Allocator::new(backend)?);
                is_shared = may_share;
            }
            let Some(allocator) = workspace.allocators.last() else {
                continue;
            };
            let graph = graphs[index].graph;
            // SAFETY: the graph and the allocator are live; refusal is `false`. Reserving anew keeps the memory, which is
            // at least as large as this graph needs, and makes a layout for this graph alone.
            let placed = unsafe {
                sys::ggml_gallocr_reserve(allocator.0.as_ptr(), graph)
                    && sys::ggml_gallocr_alloc_graph(allocator.0.as_ptr(), graph)
            };
            if !placed {
                return Err(backend.out_of_memory(sizes[index] as u64).into());
            }
        }
        Ok(workspace)
    }

    /// Bytes that are held.
    pub(crate) fn bytes(&self) -> u64 {
        self.allocators
            .iter()
            // SAFETY: the allocators are live and have one buffer type each.
            .map(|a| unsafe { sys::ggml_gallocr_get_buffer_size(a.0.as_ptr(), 0) as u64 })
            .sum()
    }
}

impl Allocator {
    fn new(backend: &Backend) -> Result<Allocator> {
        // SAFETY: the device and its buffer type live for ever.
        let raw = unsafe {
            sys::ggml_gallocr_new(sys::ggml_backend_dev_buffer_type(backend.device().as_ptr()))
        };
        NonNull::new(raw)
            .map(Allocator)
            .ok_or_else(|| backend.out_of_memory(0).into())
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        // SAFETY: the allocator is live and nobody else frees it.
        unsafe { sys::ggml_gallocr_free(self.0.as_ptr()) };
    }
}
