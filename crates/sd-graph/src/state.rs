//! Values that stay on a device from one run to the next. One of the places of this crate with `unsafe` in it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sd_backend::{Backend, DType, MemoryKind};
use sd_ggml_sys as sys;

use crate::error::{Allocation, Result};
use crate::load::allocate;
use crate::param::Param;
use crate::raw::{Arena, bytes_on};
use crate::shape::Shape;

/// A tensor in F32 or F16 that keeps its values between runs, of one plan or of several: what a causal convolution saw of the
/// frames before, say. A cheap shared handle.
///
/// Declared with a shape, given memory by [`State::allocate`]; graphs read it with [`Graph::state`](crate::Graph::state)
/// and write it with [`Graph::keep`](crate::Graph::keep). A plan that was built keeps the memory.
#[derive(Debug, Clone)]
pub struct State {
    param: Param,
    /// Held by whoever runs a plan with it: states are written, and plans may run on several threads.
    in_use: Arc<Mutex<()>>,
}

impl PartialEq for State {
    /// Whether both are the same state, whatever their names.
    fn eq(&self, other: &State) -> bool {
        self.param.key() == other.param.key()
    }
}

impl State {
    /// A state in F32 without memory. Estimates can be made with it.
    pub fn new(name: impl Into<String>, shape: Shape) -> State {
        State::of_type(name, shape, DType::F32)
    }

    /// The same in half precision: half the memory, for values that are rounded to it anyway before they are used. What is
    /// kept is rounded; what reads it [casts](crate::Tensor::cast) it.
    pub fn in_half_precision(name: impl Into<String>, shape: Shape) -> State {
        State::of_type(name, shape, DType::F16)
    }

    fn of_type(name: impl Into<String>, shape: Shape, dtype: DType) -> State {
        State {
            param: Param::new(name.into(), shape, dtype),
            in_use: Arc::default(),
        }
    }

    /// Bytes of its values.
    pub fn bytes(&self) -> usize {
        // Numbers in F32 or F16 fill no blocks, so that there is an answer for any count.
        let bytes = self.param.dtype().row_bytes(self.shape().elements());
        bytes.unwrap_or(usize::MAX)
    }

    /// The shape, outermost first.
    pub fn shape(&self) -> Shape {
        self.param.shape()
    }

    pub(crate) fn param(&self) -> &Param {
        &self.param
    }

    /// Gives all of `states` zeros in memory of the device of `backend`, on the account of caches, in place of memory that
    /// they had.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory); nothing stays allocated then.
    pub fn allocate<'s>(
        states: impl IntoIterator<Item = &'s State>,
        backend: &Backend,
    ) -> Result<()> {
        let states: Vec<&State> = states.into_iter().collect();
        let no_room = |_| backend.out_of_memory(0);
        let arena = Arena::new(states.len(), false).map_err(no_room)?;
        let mut sizes = Vec::with_capacity(states.len());
        for state in &states {
            let dtype = state.param.dtype();
            let tensor = arena.tensor(dtype, state.shape()).map_err(no_room)?;
            // SAFETY: the arena is alive to the end of this function.
            sizes.push(unsafe { bytes_on(tensor, backend.device()) });
        }
        let places = allocate(backend, sizes.into_iter(), MemoryKind::Cache)
            .map_err(|error| error.of(Allocation::Capture))?;
        for (state, place) in states.into_iter().zip(places) {
            if place.offset == 0 {
                // SAFETY: the buffer was just made and nobody else knows it.
                unsafe { sys::ggml_backend_buffer_clear(place.buffer.as_ptr(), 0) };
            }
            state.param.set_place(Some(place));
        }
        backend.device().check_connection()?;
        Ok(())
    }
}

/// Waits until nobody runs with any of `states`, and keeps others from doing so.
pub(crate) fn lock(states: &[State]) -> Vec<MutexGuard<'_, ()>> {
    let mut states: Vec<&State> = states.iter().collect();
    // In one order everywhere, so that two plans do not wait for each other.
    states.sort_by_key(|state| state.param.key());
    states
        .into_iter()
        .map(|state| state.in_use.lock().unwrap_or_else(PoisonError::into_inner))
        .collect()
}
