//! Plans: a graph of fixed shapes, in memory, ready to run many times. One of the places with `unsafe` in it.

use std::ptr::NonNull;
use std::sync::Arc;

use sd_backend::{Backend, Buffer, Device, MemoryKind, Reservation};
use sd_ggml_sys as sys;

use crate::error::{Error, Result};
use crate::graph::{Element, Graph, Recording, TensorId, check_index};
use crate::load::bind;
use crate::lower::{Lowered, lower, unsupported};
use crate::op::Op;
use crate::param::Place;
use crate::raw::{RawTensor, bytes_on};
use crate::run::Cancel;

/// A graph that was built, checked and allocated once. Only its inputs change from run to run.
#[derive(Debug)]
pub struct Plan {
    // Field order is drop order: ggml's allocator frees memory that tensors of the graph point into, nothing reads it.
    lowered: Lowered,
    allocator: Allocator,
    _constants: Option<Arc<Buffer>>,
    /// The memory of the parameters, which may be unloaded meanwhile.
    _weights: Vec<Arc<Buffer>>,
    _compute: Reservation,
    recording: Recording,
    /// One per input: whether it was set since the last run.
    is_set: Vec<bool>,
    has_run: bool,
    device: Device,
}

/// What a graph would need, found without allocating anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Estimate {
    /// Operations in ggml's graph.
    pub nodes: usize,
    /// Bytes of the parameters it reads.
    pub weight_bytes: u64,
    /// Bytes of memory for everything that is computed, inputs included.
    pub compute_bytes: u64,
    /// Bytes of constants kept with the plan.
    pub constant_bytes: u64,
}

#[derive(Debug)]
struct Allocator(NonNull<sys::ggml_gallocr>);

// SAFETY: ggml's graph allocator has no thread affinity.
unsafe impl Send for Allocator {}

impl Plan {
    /// Builds the graph that `build` records and allocates it on the device of `backend`.
    ///
    /// # Errors
    /// [`Error::Graph`] with the first mistake in it, [`Error::NotLoaded`], [`Error::WrongDevice`],
    /// [`Error::Unsupported`], or [`Error::Backend`] when memory runs out (nothing stays allocated).
    pub fn build(backend: &Backend, build: impl for<'g> FnOnce(Graph<'g>)) -> Result<Plan> {
        let device = backend.device();
        let recording = Recording::of(build)?;
        let mut places = Vec::with_capacity(recording.params.len());
        for param in &recording.params {
            let Some(place) = param.place() else {
                return Err(Error::NotLoaded {
                    name: param.name().to_owned(),
                });
            };
            if place.buffer.device() != device {
                return Err(Error::WrongDevice {
                    what: param.name().to_owned(),
                    found: place.buffer.device().name(),
                    wanted: device.name(),
                });
            }
            places.push(place);
        }
        let lowered = lower(&recording, backend).map_err(|_| backend.out_of_memory(0))?;
        bind_params(&recording, &places, &lowered, backend)?;
        let constants = place_constants(&recording, &lowered, backend)?;
        if let Some(operation) = unsupported(&lowered, backend) {
            return Err(Error::Unsupported {
                device: device.name(),
                operation,
            });
        }

        let needed = Allocator::measure(backend, &lowered)?;
        let reservation = backend
            .ledger()
            .reserve(device, needed as u64, MemoryKind::Compute)?;
        let allocator = Allocator::new(backend)?;
        // SAFETY: the graph and the allocator are live; refusal is `false`.
        if !unsafe { sys::ggml_gallocr_alloc_graph(allocator.0.as_ptr(), lowered.graph) } {
            return Err(backend.out_of_memory(needed as u64).into());
        }
        let is_set = vec![false; recording.inputs.len()];
        Ok(Plan {
            lowered,
            allocator,
            _constants: constants,
            _weights: buffers_of(places),
            _compute: reservation,
            recording,
            is_set,
            has_run: false,
            device,
        })
    }

    /// Gives an input its values for the next run, innermost dimension fastest.
    ///
    /// # Errors
    /// [`Error::UnknownName`]; [`Error::WrongValues`] for another type or count, or for row numbers beyond a table.
    pub fn set<T: Element>(&mut self, name: &str, values: &[T]) -> Result<()> {
        let (index, id) = find(&self.recording.inputs, "input", name)?;
        let node = self.recording.node(id);
        check_values::<T>(name, node.dtype, node.shape.elements(), values.len())?;
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if let Some(&rows) = self.recording.index_limits.get(&id) {
            check_index(bytes, rows).map_err(|reason| Error::WrongValues {
                name: name.to_owned(),
                reason: format!("holds {reason}"),
            })?;
        }
        let tensor = self.lowered.tensors[id.index()];
        // SAFETY: the tensor is live; if the graph uses it, it lies in a buffer with room for all its bytes, which are
        // as many as `values` has (checked above).
        unsafe {
            if !tensor.as_ref().buffer.is_null() {
                sys::ggml_backend_tensor_set(
                    tensor.as_ptr(),
                    bytes.as_ptr().cast(),
                    0,
                    bytes.len(),
                );
            }
        }
        self.is_set[index] = true;
        Ok(())
    }

    /// Computes all outputs. Inputs are used up: each must be set again before the next run, since ggml reuses their
    /// memory.
    ///
    /// # Errors
    /// [`Error::InputNotSet`], [`Error::WrongDevice`], or [`Error::Backend`]. After an error the plan can be run again.
    pub fn run(&mut self, backend: &mut Backend, cancel: &Cancel) -> Result<()> {
        if backend.device() != self.device {
            return Err(Error::WrongDevice {
                what: "the backend".to_owned(),
                found: backend.device().name(),
                wanted: self.device.name(),
            });
        }
        if let Some(index) = self.is_set.iter().position(|is_set| !is_set) {
            return Err(Error::InputNotSet {
                name: self.recording.inputs[index].name.clone(),
            });
        }
        cancel.check()?;
        self.is_set.fill(false);
        self.has_run = false;
        // Nobody else may read or write the states meanwhile.
        let _alone = crate::state::lock(&self.recording.states);
        // SAFETY: all tensors of the graph were allocated or bound on this device when the plan was built and are kept
        // by it, and all its operations were found to be supported.
        unsafe { backend.compute(self.lowered.graph, Some(cancel.flag())) }?;
        self.has_run = true;
        Ok(())
    }

    /// Reads an output of the last run, innermost dimension fastest.
    ///
    /// # Errors
    /// [`Error::UnknownName`], [`Error::NotRun`], [`Error::WrongValues`] for another type, or [`Error::Backend`] when the
    /// device's server is gone.
    pub fn read<T: Element>(&self, name: &str) -> Result<Vec<T>> {
        let (index, id) = find(&self.recording.outputs, "output", name)?;
        let node = self.recording.node(id);
        let mut values = vec![T::zeroed(); node.shape.elements()];
        check_values::<T>(name, node.dtype, node.shape.elements(), values.len())?;
        if !self.has_run {
            return Err(Error::NotRun {
                name: name.to_owned(),
            });
        }
        let tensor = self.lowered.outputs[index];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        // SAFETY: outputs are contiguous and allocated for the life of the plan; exactly their bytes are read.
        unsafe {
            sys::ggml_backend_tensor_get(tensor.as_ptr(), bytes.as_mut_ptr().cast(), 0, bytes.len())
        };
        self.device.check_connection()?;
        Ok(values)
    }

    /// Shape of an output, outermost first.
    ///
    /// # Errors
    /// [`Error::UnknownName`].
    pub fn output_shape(&self, name: &str) -> Result<crate::Shape> {
        let (_, id) = find(&self.recording.outputs, "output", name)?;
        Ok(self.recording.node(id).shape)
    }

    /// Bytes of device memory that this plan holds for what it computes.
    pub fn compute_bytes(&self) -> u64 {
        // SAFETY: the allocator is live and has one buffer.
        unsafe { sys::ggml_gallocr_get_buffer_size(self.allocator.0.as_ptr(), 0) as u64 }
    }

    /// Operations in ggml's graph.
    pub fn nodes(&self) -> usize {
        // SAFETY: the graph is live.
        unsafe { sys::ggml_graph_n_nodes(self.lowered.graph) as usize }
    }
}

impl Estimate {
    /// Measures the graph that `build` records for `backend`, with parameters that need not be loaded. Allocates
    /// nothing on the device.
    ///
    /// # Errors
    /// [`Error::Graph`], [`Error::Unsupported`].
    pub fn of(backend: &Backend, build: impl for<'g> FnOnce(Graph<'g>)) -> Result<Estimate> {
        let device = backend.device();
        let recording = Recording::of(build)?;
        let lowered = lower(&recording, backend).map_err(|_| backend.out_of_memory(0))?;
        for (node, tensor) in recording.nodes.iter().zip(&lowered.tensors) {
            if matches!(node.op, Op::Param(_) | Op::Constant(_)) {
                // SAFETY: the tensor is live. The allocator takes every tensor with an address as placed elsewhere; it
                // never follows the address, and this graph is never run.
                unsafe { (*tensor.as_ptr()).data = NonNull::<u128>::dangling().as_ptr().cast() };
            }
        }
        if let Some(operation) = unsupported(&lowered, backend) {
            return Err(Error::Unsupported {
                device: device.name(),
                operation,
            });
        }
        let compute_bytes = Allocator::measure(backend, &lowered)? as u64;
        Ok(Estimate {
            // SAFETY: the graph is live.
            nodes: unsafe { sys::ggml_graph_n_nodes(lowered.graph) } as usize,
            weight_bytes: recording
                .params
                .iter()
                .map(|param| param.bytes() as u64)
                .sum(),
            compute_bytes,
            constant_bytes: lay_out_constants(&recording, &lowered, backend)?.1 as u64,
        })
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

    /// Bytes that the graph will need on the backend's device.
    ///
    /// Measured by an allocator of its own: afterwards ggml's takes its buffers for allocated and would follow null
    /// pointers.
    fn measure(backend: &Backend, lowered: &Lowered) -> Result<usize> {
        let allocator = Allocator::new(backend)?;
        let mut bytes = 0;
        // SAFETY: graph and allocator are live; without lists of buffers every tensor goes to the one buffer, whose
        // size is written to `bytes`.
        unsafe {
            sys::ggml_gallocr_reserve_n_size(
                allocator.0.as_ptr(),
                lowered.graph,
                std::ptr::null(),
                std::ptr::null(),
                &mut bytes,
            );
        }
        Ok(bytes)
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        // SAFETY: the allocator is live and nobody else frees it.
        unsafe { sys::ggml_gallocr_free(self.0.as_ptr()) };
    }
}

/// Points the graph's leaves for parameters to `places`, where these lie.
fn bind_params(
    recording: &Recording,
    places: &[Place],
    lowered: &Lowered,
    backend: &Backend,
) -> Result<()> {
    for (node, &tensor) in recording.nodes.iter().zip(&lowered.tensors) {
        let Op::Param(index) = node.op else { continue };
        bind(tensor, &places[index], backend)?;
    }
    Ok(())
}

/// Each buffer among `places` once.
fn buffers_of(places: Vec<Place>) -> Vec<Arc<Buffer>> {
    let mut buffers: Vec<Arc<Buffer>> = places.into_iter().map(|place| place.buffer).collect();
    buffers.sort_by_key(Arc::as_ptr);
    buffers.dedup_by(|one, other| Arc::ptr_eq(one, other));
    buffers
}

/// The constants of a graph as leaf, values and offset in one buffer, and the bytes of that buffer.
type Constants<'r> = (Vec<(RawTensor, &'r [u8], usize)>, usize);

fn lay_out_constants<'r>(
    recording: &'r Recording,
    lowered: &Lowered,
    backend: &Backend,
) -> Result<Constants<'r>> {
    let alignment = Buffer::alignment(backend.device());
    let mut total = 0_usize;
    let mut placed = Vec::new();
    for (node, &tensor) in recording.nodes.iter().zip(&lowered.tensors) {
        let Op::Constant(index) = node.op else {
            continue;
        };
        let bytes = recording.constants[index].as_slice();
        placed.push((tensor, bytes, total));
        // SAFETY: the graph's arena is alive.
        total = unsafe { bytes_on(tensor, backend.device()) }
            .checked_next_multiple_of(alignment)
            .and_then(|bytes| total.checked_add(bytes))
            .ok_or_else(|| backend.out_of_memory(u64::MAX))?;
    }
    Ok((placed, total))
}

/// Allocates and fills the constants of a graph.
fn place_constants(
    recording: &Recording,
    lowered: &Lowered,
    backend: &Backend,
) -> Result<Option<Arc<Buffer>>> {
    let (placed, total) = lay_out_constants(recording, lowered, backend)?;
    if placed.is_empty() {
        return Ok(None);
    }
    let buffer = Arc::new(Buffer::allocate(
        backend.ledger(),
        backend.device(),
        total,
        MemoryKind::Compute,
    )?);
    for (tensor, bytes, offset) in placed {
        let place = Place {
            buffer: Arc::clone(&buffer),
            offset,
        };
        bind(tensor, &place, backend)?;
        // SAFETY: the tensor was just bound to memory of its size, which is that of `bytes` (checked when recorded).
        unsafe {
            sys::ggml_backend_tensor_set(tensor.as_ptr(), bytes.as_ptr().cast(), 0, bytes.len())
        };
    }
    Ok(Some(buffer))
}

fn find(
    named: &[crate::graph::Named],
    what: &'static str,
    name: &str,
) -> Result<(usize, TensorId)> {
    named
        .iter()
        .position(|entry| entry.name == name)
        .map(|index| (index, named[index].tensor))
        .ok_or_else(|| Error::UnknownName {
            what,
            name: name.to_owned(),
            known: named.iter().map(|entry| entry.name.clone()).collect(),
        })
}

fn check_values<T: Element>(
    name: &str,
    dtype: sd_backend::DType,
    wanted: usize,
    found: usize,
) -> Result<()> {
    let reason = if dtype != T::DTYPE {
        format!("holds {dtype}, not {}", T::DTYPE)
    } else if wanted != found {
        format!("holds {wanted} values, not {found}")
    } else {
        return Ok(());
    };
    Err(Error::WrongValues {
        name: name.to_owned(),
        reason,
    })
}
