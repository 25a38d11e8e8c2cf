//! From a recording to ggml's graph. One of the places of this crate with `unsafe` in it.
//!
//! Everything ggml asserts about shapes and types was asked by the rules of [`crate::shape`] and [`crate::ops`] when
//! the graph was recorded; what it asserts about layout in memory is met by [`crate::lowering`].

use std::cell::RefCell;
use std::collections::HashMap;

use sd_backend::Backend;
use sd_ggml_sys as sys;

use crate::graph::{Recording, TensorId};
use crate::lowering::{Lowering, TENSORS_PER_OPERATION, non_null};
use crate::op::Op;
use crate::raw::{Arena, ArenaFull, RawTensor};
use crate::segment::Segment;

/// A segment in ggml's form, not yet in memory.
#[derive(Debug)]
pub(crate) struct Lowered {
    _arena: Arena,
    pub graph: *mut sys::ggml_cgraph,
    /// Inputs, constants, parameters and what is taken from other segments.
    pub leaves: Vec<(TensorId, RawTensor)>,
    /// What later segments need; never a view, so that it can be put where it is kept.
    pub kept: Vec<(TensorId, RawTensor)>,
    /// One per recorded output if the segment computes them; never a view, so that it can be read in one piece.
    pub outputs: Vec<RawTensor>,
    /// What lies in a cache, where each run has another.
    pub slots: Vec<SlotTensors>,
}

/// A place that each run says anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Number of an entry that is read.
    Cached(usize),
    /// Number of a value that is stored.
    Stored(usize),
}

/// The tensors of a graph that lie in such a place.
#[derive(Debug)]
pub(crate) struct SlotTensors {
    pub slot: Slot,
    pub leaf: RawTensor,
    /// All views of it in the graph. ggml's views are of what has memory, never of one another.
    pub views: Vec<RawTensor>,
}

// SAFETY: all pointers lead into the arena, which is owned and may be sent.
unsafe impl Send for Lowered {}

impl Lowered {
    /// Operations in ggml's graph.
    pub(crate) fn nodes(&self) -> usize {
        // SAFETY: the graph is live.
        unsafe { sys::ggml_graph_n_nodes(self.graph) as usize }
    }

    /// The tensors that they compute, in order.
    pub(crate) fn tensors(&self) -> Vec<RawTensor> {
        let nodes = 0..self.nodes() as i32;
        nodes
            // SAFETY: the graph is live and has nodes of all these numbers.
            .filter_map(|index| RawTensor::new(unsafe { sys::ggml_graph_node(self.graph, index) }))
            .collect()
    }
}

/// Puts a segment of a recording into ggml's form for `backend`.
pub(crate) fn lower(
    recording: &Recording,
    segment: &Segment,
    backend: &Backend,
) -> Result<Lowered, ArenaFull> {
    let named = segment.keeps.len() + recording.outputs.len() + segment.stores.len() * 2;
    let capacity =
        segment.nodes.len() * TENSORS_PER_OPERATION + named * 2 + recording.kept.len() * 4;
    let arena = Arena::new(capacity, true)?;
    let mut tensors: Vec<Option<RawTensor>> = vec![None; recording.nodes.len()];
    let mut leaves = Vec::new();
    let mut slots = Vec::new();
    let lowering = Lowering {
        arena: &arena,
        backend,
        halved: RefCell::default(),
        copies: RefCell::default(),
    };
    for &id in &segment.nodes {
        let node = recording.node(id);
        let lowered = if node.op.is_leaf() || segment.takes.binary_search(&id).is_ok() {
            let leaf = arena.tensor(node.dtype, node.shape)?;
            leaves.push((id, leaf));
            if let Op::Cached(index) = node.op {
                slots.push((Slot::Cached(index), leaf));
            }
            leaf
        } else {
            arena.take(TENSORS_PER_OPERATION)?;
            let sources: Option<Vec<RawTensor>> =
                node.sources.iter().map(|id| tensors[id.index()]).collect();
            lowering.operation(node, &sources.ok_or(ArenaFull)?)?
        };
        if node.op == Op::Input {
            // SAFETY: the tensor was just made in the live arena.
            unsafe { sys::ggml_set_input(lowered.as_ptr()) };
        }
        tensors[id.index()] = Some(lowered);
    }

    // SAFETY: the arena was sized for one graph of this many nodes and is live.
    let graph = unsafe { sys::ggml_new_graph_custom(arena.as_ptr(), capacity.max(1), false) };
    if graph.is_null() {
        return Err(ArenaFull);
    }
    let result = |id: TensorId| -> Result<RawTensor, ArenaFull> {
        let mut tensor = tensors[id.index()].ok_or(ArenaFull)?;
        // SAFETY: all tensors are live; a copy needs one more, which `capacity` holds; the graph holds `capacity` nodes.
        unsafe {
            let is_leaf = tensor.as_ref().op == sys::GGML_OP_NONE;
            if is_leaf || !tensor.as_ref().view_src.is_null() {
                arena.take(1)?;
                tensor = non_null(sys::ggml_cont(arena.as_ptr(), tensor.as_ptr()))?;
            }
            sys::ggml_set_output(tensor.as_ptr());
            sys::ggml_build_forward_expand(graph, tensor.as_ptr());
        }
        Ok(tensor)
    };
    // First, so that each value is stored as soon as it is there and does not wait for the end of the graph.
    for &number in &segment.stores {
        let store = recording.stores.get(number).ok_or(ArenaFull)?;
        let value = tensors[store.value.index()].ok_or(ArenaFull)?;
        let target = arena.tensor(store.entry.dtype, store.entry.shape)?;
        arena.take(2)?;
        // SAFETY: all tensors are live and the graph holds their nodes (`capacity`); room is taken first. The target has
        // the value's shape and is contiguous; rows that become blocks are whole ones (`storable`) and contiguous.
        unsafe {
            let value = match store.entry.dtype.is_quantized() {
                true => lowering.whole(value)?,
                false => value,
            };
            let write = sys::ggml_cpy(arena.as_ptr(), value.as_ptr(), target.as_ptr());
            sys::ggml_build_forward_expand(graph, non_null(write)?.as_ptr());
        }
        slots.push((Slot::Stored(number), target));
    }
    // Likewise, so that what states are to hold does not wait for the end of the graph in all that it is a part of.
    let late = match segment.is_last {
        true => lower_kept(recording, &lowering, graph, &tensors)?,
        false => Vec::new(),
    };
    let keep = |&id: &TensorId| Ok((id, result(id)?));
    let kept = segment.keeps.iter().map(keep).collect::<Result<_, _>>()?;
    let outputs = match segment.is_last {
        true => recording.outputs.iter().map(|o| result(o.tensor)).collect(),
        false => Ok(Vec::new()),
    }?;
    for (state, value) in late {
        write_state(&arena, graph, state, value)?;
    }
    Ok(Lowered {
        slots: with_views(slots, graph),
        graph,
        leaves,
        kept,
        outputs,
        _arena: arena,
    })
}

/// Finds the views of `slots` among the nodes of their graph.
fn with_views(slots: Vec<(Slot, RawTensor)>, graph: *mut sys::ggml_cgraph) -> Vec<SlotTensors> {
    let mut found: Vec<SlotTensors> = Vec::with_capacity(slots.len());
    let mut by_leaf = HashMap::with_capacity(slots.len());
    for (slot, leaf) in slots {
        by_leaf.insert(leaf.as_ptr(), found.len());
        found.push(SlotTensors {
            slot,
            leaf,
            views: Vec::new(),
        });
    }
    if found.is_empty() {
        return found;
    }
    // SAFETY: the graph and its nodes live in the arena; indices stay below the count.
    let nodes = unsafe {
        (0..sys::ggml_graph_n_nodes(graph))
            .filter_map(|index| RawTensor::new(sys::ggml_graph_node(graph, index)))
    };
    for node in nodes {
        // SAFETY: as above.
        let root = unsafe { node.as_ref() }.view_src;
        if let Some(&index) = by_leaf.get(&root) {
            found[index].views.push(node);
        }
    }
    found
}

/// Computes what states are to hold, and writes it where all that read the state come before. Gives the other states and
/// their values, which are to be written behind everything else.
fn lower_kept(
    recording: &Recording,
    lowering: &Lowering<'_>,
    graph: *mut sys::ggml_cgraph,
    tensors: &[Option<RawTensor>],
) -> Result<Vec<(RawTensor, RawTensor)>, ArenaFull> {
    let (mut late, arena) = (Vec::new(), lowering.arena);
    for &(state_id, value_id) in &recording.kept {
        let at = |id: TensorId| tensors[id.index()].ok_or(ArenaFull);
        let (state, mut value) = (at(state_id)?, at(value_id)?);
        // SAFETY: all tensors are live and the graph holds their nodes (`capacity` in `lower`); room is taken first.
        unsafe {
            // A view may be one of the state itself, which is about to be overwritten.
            if value.as_ref().op == sys::GGML_OP_NONE || !value.as_ref().view_src.is_null() {
                arena.take(1)?;
                value = lowering.copy(value)?;
            }
            sys::ggml_build_forward_expand(graph, value.as_ptr());
        }
        if is_read_before(recording, state_id, value_id) {
            write_state(arena, graph, state, value)?;
        } else {
            late.push((state, value));
        }
    }
    Ok(late)
}

/// Whether `value` is made of everything that reads `state`, so that in whatever order nodes run none reads it afterwards.
fn is_read_before(recording: &Recording, state: TensorId, value: TensorId) -> bool {
    let mut is_made_of = vec![false; recording.nodes.len()];
    let mut open = vec![value];
    while let Some(id) = open.pop() {
        if !std::mem::replace(&mut is_made_of[id.index()], true) {
            open.extend(&recording.node(id).sources);
        }
    }
    // Sources come before what is made of them.
    let mut shows = vec![false; recording.nodes.len()];
    for (index, node) in recording.nodes.iter().enumerate() {
        let sees = node.sources.iter().any(|source| shows[source.index()]);
        shows[index] = index == state.index() || (sees && node.op.is_view());
        if sees && !node.op.is_view() && !is_made_of[index] {
            return false;
        }
    }
    // What is written twice is written in order.
    let again = recording.kept.iter().filter(|(other, _)| *other == state);
    if again.count() > 1 {
        return false;
    }
    // What is a view is copied where it is asked for.
    let outputs = recording.outputs.iter().map(|output| output.tensor);
    let others = recording.kept.iter().filter(|(_, other)| *other != value);
    let stored = recording.stores.iter().map(|store| store.value);
    let mut copied = outputs.chain(stored).chain(others.map(|(_, other)| *other));
    copied.all(|id| !shows[id.index()])
}

/// Adds the writing of `value` to `state`.
fn write_state(
    arena: &Arena,
    graph: *mut sys::ggml_cgraph,
    state: RawTensor,
    value: RawTensor,
) -> Result<(), ArenaFull> {
    arena.take(2)?;
    // SAFETY: both tensors are live and the graph holds their nodes (`capacity` in `lower`); room was taken. The value has
    // the state's sizes but for the outermost, which is no larger (`shape::keep`), so the view lies within the state; both
    // are contiguous, the value F32, the state that or F16.
    unsafe {
        let (ne, nb) = (value.as_ref().ne, state.as_ref().nb);
        let part = sys::ggml_view_4d(
            arena.as_ptr(),
            state.as_ptr(),
            ne[0],
            ne[1],
            ne[2],
            ne[3],
            nb[1],
            nb[2],
            nb[3],
            0,
        );
        let part = non_null(part)?;
        let write = sys::ggml_cpy(arena.as_ptr(), value.as_ptr(), part.as_ptr());
        sys::ggml_build_forward_expand(graph, non_null(write)?.as_ptr());
    }
    Ok(())
}

/// The first node of the graph that the backend cannot run, by ggml's name of the operation.
pub(crate) fn unsupported(lowered: &Lowered, backend: &Backend) -> Option<String> {
    // SAFETY: the graph and its nodes live in the arena; indices stay below the count.
    unsafe {
        (0..sys::ggml_graph_n_nodes(lowered.graph))
            .map(|index| sys::ggml_graph_node(lowered.graph, index))
            .find_map(|node| {
                // A function of this process is nothing for another, and no remote device says so.
                let is_own = (*node).op == sys::GGML_OP_CUSTOM;
                if backend.supports(node) && !(is_own && backend.device().is_remote()) {
                    return None;
                }
                Some(
                    std::ffi::CStr::from_ptr(sys::ggml_op_desc(node))
                        .to_string_lossy()
                        .into_owned(),
                )
            })
    }
}
