//! The arena that ggml's tensors and graphs live in. One of the places of this crate with `unsafe` in it.

use std::ptr::NonNull;

use sd_backend::{DType, Device};
use sd_ggml_sys as sys;

use crate::shape::Shape;

/// Pointer to a tensor of an [`Arena`], valid as long as the arena.
pub(crate) type RawTensor = NonNull<sys::ggml_tensor>;

/// A ggml context without tensor data: only descriptions, in memory that was sized for them beforehand.
///
/// ggml aborts when a context is full, so the arena counts what it was made for and refuses to go beyond.
#[derive(Debug)]
pub(crate) struct Arena {
    context: NonNull<sys::ggml_context>,
    room: std::cell::Cell<usize>,
}

// SAFETY: a ggml context is plain memory without thread affinity.
unsafe impl Send for Arena {}

/// An arena could not be made, or was asked for more than it was made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ArenaFull;

impl Arena {
    /// An arena for `tensors` tensors and, where `graph` says so, one graph of up to that many nodes.
    pub(crate) fn new(tensors: usize, graph: bool) -> Result<Arena, ArenaFull> {
        // SAFETY: these functions compute sizes from numbers.
        let (tensor_bytes, graph_bytes) = unsafe {
            let graph_bytes = if graph {
                sys::ggml_graph_overhead_custom(tensors.max(1), false)
            } else {
                0
            };
            (sys::ggml_tensor_overhead(), graph_bytes)
        };
        let bytes = tensors
            .checked_add(1)
            .and_then(|count| count.checked_mul(tensor_bytes))
            .and_then(|bytes| bytes.checked_add(graph_bytes))
            .ok_or(ArenaFull)?;
        let params = sys::ggml_init_params {
            mem_size: bytes,
            mem_buffer: std::ptr::null_mut(),
            no_alloc: true,
        };
        // SAFETY: ggml allocates the memory itself and gives null when it cannot.
        let context = NonNull::new(unsafe { sys::ggml_init(params) }).ok_or(ArenaFull)?;
        Ok(Arena {
            context,
            room: std::cell::Cell::new(tensors),
        })
    }

    /// Takes room for `tensors` more tensors.
    pub(crate) fn take(&self, tensors: usize) -> Result<(), ArenaFull> {
        self.room
            .set(self.room.get().checked_sub(tensors).ok_or(ArenaFull)?);
        Ok(())
    }

    /// A new tensor without data.
    pub(crate) fn tensor(&self, dtype: DType, shape: Shape) -> Result<RawTensor, ArenaFull> {
        self.take(1)?;
        let ne = shape.to_ne();
        // SAFETY: the context is live and has room for one tensor more; all four sizes are positive, their product
        // does not overflow (`Shape`), and a quantised row is whole blocks (`Param` and `Element` see to it).
        let raw = unsafe { sys::ggml_new_tensor(self.as_ptr(), dtype.to_ggml(), 4, ne.as_ptr()) };
        NonNull::new(raw).ok_or(ArenaFull)
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::ggml_context {
        self.context.as_ptr()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the context is live and nobody else frees it.
        unsafe { sys::ggml_free(self.context.as_ptr()) };
    }
}

/// Bytes that `tensor` takes in the memory of `device`: some want the rows of weights padded.
///
/// # Safety
/// The arena of `tensor` is alive.
pub(crate) unsafe fn bytes_on(tensor: RawTensor, device: Device) -> usize {
    // SAFETY: the device and its buffer type live for ever; the tensor is live as the caller promises.
    unsafe {
        let kind = sys::ggml_backend_dev_buffer_type(device.as_ptr());
        sys::ggml_backend_buft_get_alloc_size(kind, tensor.as_ptr())
    }
}

/// Bytes that a tensor of this type and shape takes in the memory of `device`; `None` if there is no memory to describe
/// it.
pub(crate) fn bytes_for(dtype: DType, shape: Shape, device: Device) -> Option<usize> {
    let arena = Arena::new(1, false).ok()?;
    let tensor = arena.tensor(dtype, shape).ok()?;
    // SAFETY: the arena is alive to the end of this function.
    Some(unsafe { bytes_on(tensor, device) })
}
