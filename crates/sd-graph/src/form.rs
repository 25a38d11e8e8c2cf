//! A recording in ggml's form, drafted and then in memory. One of the places of this crate with `unsafe` in it.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use sd_backend::{Backend, Buffer, MemoryKind};
use sd_ggml_sys as sys;

use crate::error::{Error, Result};
use crate::graph::{Recording, TensorId};
use crate::load::{allocate, bind};
use crate::lower::{Lowered, Slot, lower, unsupported};
use crate::op::Op;
use crate::param::Place;
use crate::raw::{RawTensor, bytes_on};
use crate::segment::Segment;
use crate::slots::Slots;
use crate::workspace::{Layout, Workspace};

/// Segments in ggml's form, measured for one device. Nothing is allocated.
#[derive(Debug)]
pub(crate) struct Draft {
    segments: Vec<Segment>,
    lowered: Vec<Lowered>,
    /// Where each segment computes.
    layouts: Vec<Layout>,
    /// What lies outside of what is computed in: constants first, then inputs, then slots. Bytes.
    constants: Vec<(TensorId, usize)>,
    inputs: Vec<(TensorId, usize)>,
    slots: Slots,
    workspace_bytes: u64,
    alignment: usize,
}

/// Segments in memory, ready to run.
#[derive(Debug)]
pub(crate) struct Form {
    // Field order is drop order: ggml's allocator frees memory that tensors of the graphs point into, nothing reads it.
    lowered: Vec<Lowered>,
    names: Vec<String>,
    workspace: Workspace,
    /// Constants, and what outlives a segment.
    _kept: Vec<Arc<Buffer>>,
    /// The memory of the parameters, which may be unloaded meanwhile.
    _weights: Vec<Arc<Buffer>>,
    /// One of the leaves for each input that is used.
    inputs: HashMap<TensorId, RawTensor>,
    outliving_bytes: u64,
    /// The memory of the caches that the graphs point into now.
    attached: Option<Vec<Arc<Buffer>>>,
}

// SAFETY: all pointers lead into arenas that the form owns, as `Lowered` says.
unsafe impl Send for Form {}

impl Draft {
    /// Puts `segments` of a recording into ggml's form and measures them.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; memory for descriptions that runs out.
    pub(crate) fn of(
        recording: &Recording,
        segments: Vec<Segment>,
        backend: &Backend,
    ) -> Result<Draft> {
        let device = backend.device();
        let is_whole = segments.len() == 1;
        let mut draft = Draft {
            lowered: Vec::with_capacity(segments.len()),
            layouts: Vec::with_capacity(segments.len()),
            constants: Vec::new(),
            inputs: Vec::new(),
            slots: Slots::default(),
            workspace_bytes: 0,
            alignment: Buffer::alignment(device),
            segments,
        };
        // Inputs of a graph in one piece may be computed over; those that several segments read may not.
        let is_elsewhere = |id: TensorId| !(is_whole && matches!(recording.node(id).op, Op::Input));
        let mut kept_bytes: HashMap<TensorId, usize> = HashMap::new();
        for segment in &draft.segments {
            let lowered =
                lower(recording, segment, backend).map_err(|_| backend.out_of_memory(0))?;
            if let Some(operation) = unsupported(&lowered, backend) {
                return Err(Error::Unsupported {
                    device: device.name(),
                    operation,
                });
            }
            for &(id, tensor) in &lowered.leaves {
                let list = match recording.node(id).op {
                    Op::Constant(_) => &mut draft.constants,
                    Op::Input if !is_whole => &mut draft.inputs,
                    _ => continue,
                };
                if list.iter().all(|&(found, _)| found != id) {
                    // SAFETY: the arena of `lowered` is alive.
                    list.push((id, unsafe { bytes_on(tensor, device) }));
                }
            }
            for &(id, tensor) in &lowered.kept {
                // SAFETY: the arena of `lowered` is alive.
                kept_bytes.insert(id, unsafe { bytes_on(tensor, device) });
            }
            draft
                .layouts
                .push(Layout::of(backend, &lowered, is_elsewhere));
            draft.lowered.push(lowered);
        }
        draft.slots = Slots::plan(&draft.segments, |id| {
            kept_bytes.get(&id).copied().unwrap_or(0)
        });
        draft.workspace_bytes = Workspace::bytes_for(&draft.layouts);
        let all = draft.outside().map(|bytes| bytes as u64);
        if all.fold(draft.workspace_bytes, u64::saturating_add) > isize::MAX as u64 {
            return Err(backend.out_of_memory(u64::MAX).into());
        }
        Ok(draft)
    }

    /// Bytes of everything that does not lie in the workspace.
    fn outside(&self) -> impl Iterator<Item = usize> {
        let leaves = self.constants.iter().chain(&self.inputs);
        leaves
            .map(|&(_, bytes)| bytes)
            .chain(self.slots.sizes.iter().copied())
    }

    fn aligned(&self, bytes: impl Iterator<Item = usize>) -> u64 {
        bytes
            .map(|bytes| bytes.next_multiple_of(self.alignment) as u64)
            .sum()
    }

    /// Bytes for everything that is computed, inputs included.
    pub(crate) fn compute_bytes(&self) -> u64 {
        self.workspace_bytes + self.outliving_bytes()
    }

    fn outliving_bytes(&self) -> u64 {
        self.aligned(self.outside().skip(self.constants.len()))
    }

    /// Bytes of the constants.
    pub(crate) fn constant_bytes(&self) -> u64 {
        self.aligned(self.constants.iter().map(|&(_, bytes)| bytes))
    }

    /// Bytes of all that it takes beside parameters.
    pub(crate) fn bytes(&self) -> u64 {
        self.compute_bytes() + self.constant_bytes()
    }

    /// Operations in ggml's graphs.
    pub(crate) fn nodes(&self) -> usize {
        self.lowered.iter().map(Lowered::nodes).sum()
    }

    /// Takes memory for it. `place` says for a segment and the number of a parameter where that lies.
    ///
    /// # Errors
    /// [`Error::NotLoaded`] for a parameter without a place; [`Error::Backend`] when memory runs out, and nothing stays
    /// allocated.
    pub(crate) fn allocate(
        self,
        recording: &Recording,
        backend: &Backend,
        place: impl Fn(usize, usize) -> Option<Place>,
    ) -> Result<Form> {
        let kept = allocate(backend, self.outside(), MemoryKind::Compute)?;
        let leaves = self.constants.iter().chain(&self.inputs);
        let places: HashMap<TensorId, &Place> =
            leaves.map(|&(id, _)| id).zip(kept.iter()).collect();
        let slots = &kept[self.constants.len() + self.inputs.len()..];
        let slot = |id: &TensorId| self.slots.of.get(id).and_then(|&slot| slots.get(slot));

        let mut weights: Vec<Arc<Buffer>> = Vec::new();
        let mut filled: Vec<TensorId> = Vec::new();
        for (number, lowered) in self.lowered.iter().enumerate() {
            for &(id, tensor) in &lowered.leaves {
                let node = recording.node(id);
                match node.op {
                    Op::Param(index) => {
                        let place = place(number, index).ok_or_else(|| Error::NotLoaded {
                            name: recording.params[index].name().to_owned(),
                        })?;
                        bind(tensor, &place, backend)?;
                        weights.push(place.buffer);
                    }
                    Op::Constant(index) => {
                        let Some(place) = places.get(&id) else {
                            continue;
                        };
                        bind(tensor, place, backend)?;
                        if !filled.contains(&id) {
                            filled.push(id);
                            write(tensor, &recording.constants[index]);
                        }
                    }
                    _ => {
                        if let Some(place) = places.get(&id).copied().or_else(|| slot(&id)) {
                            bind(tensor, place, backend)?;
                        }
                    }
                }
            }
            for (id, tensor) in &lowered.kept {
                if let Some(place) = slot(id) {
                    bind(*tensor, place, backend)?;
                }
            }
        }
        for slot in self.lowered.iter().flat_map(|lowered| &lowered.slots) {
            // SAFETY: the leaf is live and has no memory. With an address and without a buffer the allocator takes it for
            // placed elsewhere, and leaves its views alone; nobody follows the address before `attach` has given it memory.
            unsafe { (*slot.leaf.as_ptr()).data = NonNull::<u128>::dangling().as_ptr().cast() };
        }
        let workspace = Workspace::allocate(backend, &self.lowered, &self.layouts)?;

        let mut inputs = HashMap::new();
        for (id, tensor) in self.lowered.iter().flat_map(|lowered| &lowered.leaves) {
            if matches!(recording.node(*id).op, Op::Input) {
                inputs.entry(*id).or_insert(*tensor);
            }
        }
        weights.sort_by_key(Arc::as_ptr);
        weights.dedup_by(|one, other| Arc::ptr_eq(one, other));
        Ok(Form {
            outliving_bytes: self.outliving_bytes(),
            names: self.segments.into_iter().map(|s| s.name).collect(),
            workspace,
            _kept: kept.into_iter().map(|place| place.buffer).collect(),
            _weights: weights,
            inputs,
            attached: None,
            lowered: self.lowered,
        })
    }
}

impl Form {
    /// Number of segments.
    pub(crate) fn len(&self) -> usize {
        self.lowered.len()
    }

    /// Their names.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// Operations in ggml's graphs.
    pub(crate) fn nodes(&self) -> usize {
        self.lowered.iter().map(Lowered::nodes).sum()
    }

    /// Bytes that are held for everything that is computed.
    pub(crate) fn compute_bytes(&self) -> u64 {
        self.workspace.bytes() + self.outliving_bytes
    }

    /// Gives an input its bytes, and says how many that were: none if nothing needs it.
    pub(crate) fn set(&self, input: TensorId, bytes: &[u8]) -> u64 {
        match self.inputs.get(&input) {
            Some(&tensor) => write(tensor, bytes),
            None => 0,
        }
    }

    /// Whether it reads or stores something in a cache.
    fn has_slots(&self) -> bool {
        self.lowered.iter().any(|lowered| !lowered.slots.is_empty())
    }

    /// Lets the graphs point into a cache: `place` says where what they read and store lies, which is memory of this device
    /// that was made for it. It is kept until [`Form::detach`].
    ///
    /// # Errors
    /// [`Error::NotAttached`] for what has no place; memory that the driver needs to prepare a tensor.
    pub(crate) fn attach(
        &mut self,
        backend: &Backend,
        place: impl Fn(Slot) -> Option<Place>,
    ) -> Result<()> {
        self.attached = None;
        let mut buffers = Vec::new();
        for tensors in self.lowered.iter().flat_map(|lowered| &lowered.slots) {
            let place = place(tensors.slot).ok_or(Error::NotAttached)?;
            // SAFETY: all tensors live in the arenas of this form, and nothing computes with them now (`&mut self`). As
            // fresh tensors they are given memory again; each view lies within its leaf, which has its memory first.
            unsafe {
                for tensor in [&tensors.leaf].into_iter().chain(&tensors.views) {
                    (*tensor.as_ptr()).buffer = std::ptr::null_mut();
                    (*tensor.as_ptr()).data = std::ptr::null_mut();
                }
                bind(tensors.leaf, &place, backend)?;
                for view in &tensors.views {
                    if sys::ggml_backend_view_init(view.as_ptr()) != sys::GGML_STATUS_SUCCESS {
                        return Err(backend.out_of_memory(0).into());
                    }
                }
            }
            buffers.push(place.buffer);
        }
        self.attached = Some(buffers);
        Ok(())
    }

    /// Lets go of the memory of caches. It cannot run before it is attached again.
    pub(crate) fn detach(&mut self) {
        self.attached = None;
    }

    /// Computes one segment.
    ///
    /// # Errors
    /// Those of [`Backend::compute`]; [`Error::NotAttached`] without the cache that it needs.
    pub(crate) fn compute(
        &self,
        segment: usize,
        backend: &mut Backend,
        cancel: &AtomicBool,
    ) -> Result<()> {
        let outcome = self.queue(segment, backend, cancel);
        backend.finish()?;
        outcome
    }

    /// As [`Form::compute`], but a device that works by itself may not be done, or not even have begun: whoever calls this
    /// waits for the backend before the form is read, given other inputs or dropped.
    ///
    /// # Errors
    /// Those of [`Backend::enqueue`].
    pub(crate) fn queue(
        &self,
        segment: usize,
        backend: &mut Backend,
        cancel: &AtomicBool,
    ) -> Result<()> {
        let Some(lowered) = self.lowered.get(segment) else {
            return Ok(());
        };
        if self.attached.is_none() && self.has_slots() {
            return Err(Error::NotAttached);
        }
        // SAFETY: all tensors of the graph were bound or allocated on this device when the form was made and are kept by
        // it, those of slots when they were attached; all its operations were found to be supported. `running` waits for
        // the backend before a run ends, and events order it with what brings weights.
        Ok(unsafe { backend.enqueue(lowered.graph, Some(cancel)) }?)
    }

    /// Copies output `index` to `bytes`, which is as long as it.
    pub(crate) fn read(&self, index: usize, bytes: &mut [u8]) {
        let outputs = self.lowered.last().map(|lowered| &lowered.outputs);
        if let Some(tensor) = outputs.and_then(|outputs| outputs.get(index)) {
            // SAFETY: outputs are contiguous and allocated for the life of the form; ggml checks the range against the
            // tensor, and the recording's shape has given `bytes` its length.
            unsafe {
                let bytes = (bytes.as_mut_ptr().cast(), bytes.len());
                sys::ggml_backend_tensor_get(tensor.as_ptr(), bytes.0, 0, bytes.1);
            }
        }
    }
}

/// Fills a tensor, and says with how many bytes: none if it has no memory, because nothing needs it.
fn write(tensor: RawTensor, bytes: &[u8]) -> u64 {
    // SAFETY: the tensor is live in the arena of the form that calls this. If it has a buffer, it was bound or allocated
    // there with room for its elements, of which `bytes` has as many (checked when recorded or set).
    unsafe {
        if tensor.as_ref().buffer.is_null() {
            return 0;
        }
        sys::ggml_backend_tensor_set(tensor.as_ptr(), bytes.as_ptr().cast(), 0, bytes.len());
    }
    bytes.len() as u64
}
