//! What a forward pass knows of the chunks before.

use std::cell::RefCell;
use std::collections::BTreeMap;

use sd_backend::{Backend, Buffer, DType, Device};
use sd_graph::{Shape, State, Tensor};

use crate::error::Result;
use crate::rope::Circular;

/// Place of a chunk in its clip, as far as graphs differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    /// One frame, with nothing before.
    First,
    /// With one frame before, the first chunk's.
    Second,
    /// With more frames before than a kernel looks back at.
    Later,
}

/// One chunk on its way through the network.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chunk<'m> {
    pub(crate) place: Place,
    /// Sides that join.
    pub(crate) circular: Circular,
    /// What goes from chunk to chunk; nothing for a picture by itself.
    pub(crate) memory: Option<&'m Memory>,
}

/// What a layer keeps of the frames that it saw.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kept {
    /// Frames at most.
    pub(crate) most: usize,
    /// Whether they are rounded to half precision, as kernels in it do with what they see.
    pub(crate) in_half: bool,
}

/// The last frames that each convolution in time saw, by the names of their weights.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    states: RefCell<BTreeMap<String, State>>,
}

impl Chunk<'_> {
    /// A picture by itself.
    pub(crate) fn picture(circular: Circular) -> Chunk<'static> {
        Chunk {
            place: Place::First,
            circular,
            memory: None,
        }
    }

    pub(crate) fn is_first(&self) -> bool {
        self.place == Place::First
    }

    /// `x [t, channels, height, width]` behind the `past` frames that the layer `name`, which looks back at up to `most`,
    /// kept of the chunks before.
    pub(crate) fn recall<'g>(
        &self,
        name: &str,
        x: Tensor<'g>,
        past: usize,
        kept: Kept,
    ) -> Tensor<'g> {
        match self.memory {
            Some(memory) if past > 0 => {
                let state = x.graph().state(&memory.state(name, x, kept));
                let before = state.slice(0, 0, past);
                let before = match kept.in_half {
                    true => before.cast(DType::F32),
                    false => before,
                };
                before.concat(x, 0)
            }
            _ => x,
        }
    }

    /// Keeps the last of `frames` for the chunk to come.
    pub(crate) fn keep<'g>(&self, name: &str, frames: Tensor<'g>, kept: Kept) {
        if let Some(memory) = self.memory {
            let state = memory.state(name, frames, kept);
            let count = frames.dim(0).min(kept.most);
            let last = match frames.dim(0) - count {
                0 => frames,
                before => frames.slice(0, before, count),
            };
            frames.graph().keep(&state, last);
        }
    }
}

impl Memory {
    /// The state of the layer `name`, frames of the size of those in `x`.
    fn state(&self, name: &str, x: Tensor<'_>, kept: Kept) -> State {
        let mut states = self.states.borrow_mut();
        if let Some(state) = states.get(name) {
            return state.clone();
        }
        let mut dims = x.shape().dims().to_vec();
        if let Some(frames) = dims.first_mut() {
            *frames = kept.most;
        }
        // A shape that cannot be is told by what made `x`.
        let shape = Shape::new(&dims).unwrap_or(Shape::ONE);
        let state = match kept.in_half {
            true => State::in_half_precision(name, shape),
            false => State::new(name, shape),
        };
        states.insert(name.to_owned(), state.clone());
        state
    }

    /// Bytes of `device` for all states that were asked for so far.
    pub(crate) fn bytes(&self, device: Device) -> u64 {
        let states = self.states.borrow();
        let sizes = states.values().map(|state| {
            let bytes = state.bytes();
            bytes.next_multiple_of(Buffer::alignment(device)) as u64
        });
        sizes.sum()
    }

    /// Takes memory for all states that were asked for so far.
    ///
    /// # Errors
    /// Memory that runs out.
    pub(crate) fn allocate(&self, backend: &Backend) -> Result<()> {
        Ok(State::allocate(self.states.borrow().values(), backend)?)
    }
}
