//! Memory that graphs compute in. One of the places of this crate with `unsafe` in it.
//!
//! ggml's own allocator gives memory as operations come, without a look at what follows, so that tensors that grow from
//! level to level leave holes: see ADR 25.

use std::collections::{HashMap, HashSet};

use sd_backend::{Backend, Buffer, MemoryKind};
use sd_ggml_sys as sys;

use crate::error::Result;
use crate::graph::TensorId;
use crate::layout::{Part, Tenant, place};
use crate::lower::Lowered;
use crate::raw::{RawTensor, bytes_on};

/// Operations whose result may be computed in the place of an operand of the same layout that nobody needs afterwards: each
/// element of it is made of elements of the operands at that place, or of rows that are read before they are written.
const IN_PLACE: &[sys::ggml_op] = &[
    sys::GGML_OP_SCALE,
    sys::GGML_OP_ADD,
    sys::GGML_OP_SUB,
    sys::GGML_OP_MUL,
    sys::GGML_OP_DIV,
    sys::GGML_OP_SQR,
    sys::GGML_OP_UNARY,
    sys::GGML_OP_ROPE,
    sys::GGML_OP_RMS_NORM,
    sys::GGML_OP_SOFT_MAX,
];

/// Where the tensors of one graph lie.
#[derive(Debug)]
pub(crate) struct Layout {
    places: Vec<(RawTensor, usize)>,
    /// Bytes in all.
    bytes: usize,
    /// Bytes of one buffer: places are within the first of that size, the second, and so on.
    block: usize,
}

/// Memory that the graphs of one plan compute in, one after the other: nothing in it outlives the run of one.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// More than one where the device has none so large.
    buffers: Vec<Buffer>,
}

impl Layout {
    /// Lays out all tensors of a graph but the leaves that `is_elsewhere` and what it keeps.
    pub(crate) fn of(
        backend: &Backend,
        lowered: &Lowered,
        is_elsewhere: impl Fn(TensorId) -> bool,
    ) -> Layout {
        let leaves = lowered.leaves.iter().filter(|(id, _)| is_elsewhere(*id));
        let elsewhere: HashSet<RawTensor> = leaves
            .chain(&lowered.kept)
            .map(|&(_, tensor)| tensor)
            .chain(lowered.slots.iter().map(|slot| slot.leaf))
            .collect();
        let nodes = lowered.tensors();
        let end = nodes.len();
        let alignment = Buffer::alignment(backend.device());
        // With what an operation needs beside its result.
        // SAFETY: all tensors live in the arena of `lowered`.
        let needed = |tensor| unsafe { bytes_on(tensor, backend.device()) };

        let mut last_uses: HashMap<RawTensor, usize> = HashMap::new();
        for (index, &node) in nodes.iter().enumerate() {
            let is_output = flags(node) & sys::GGML_TENSOR_FLAG_OUTPUT != 0;
            for tensor in operands(node) {
                let last = last_uses.entry(root(tensor)).or_default();
                *last = index.max(*last);
            }
            // Copies write into what they are a view of.
            let last = last_uses.entry(root(node)).or_default();
            *last = if is_output { end } else { index.max(*last) };
        }
        let last_use = |tensor: RawTensor| last_uses.get(&tensor).copied().unwrap_or(end);

        let mut tenants: Vec<Tenant> = Vec::new();
        let mut homes: HashMap<RawTensor, usize> = HashMap::new();
        for (index, &node) in nodes.iter().enumerate() {
            for leaf in operands(node).map(root) {
                if is_unplaced(leaf) && !elsewhere.contains(&leaf) && !homes.contains_key(&leaf) {
                    // Whoever runs the graph fills it before.
                    homes.insert(leaf, tenants.len());
                    let mut tenant = Tenant::default();
                    tenant.push(Part {
                        first: 0,
                        last: last_use(leaf),
                        bytes: needed(leaf).next_multiple_of(alignment),
                    });
                    tenants.push(tenant);
                }
            }
            if is_view(node) || !is_unplaced(node) || elsewhere.contains(&node) {
                continue;
            }
            let home = lends(node, index, last_use).and_then(|lender| homes.get(&lender));
            let home = home.copied().unwrap_or_else(|| {
                tenants.push(Tenant::default());
                tenants.len() - 1
            });
            homes.insert(node, home);
            let (all, own) = (needed(node), own_bytes(node));
            let last = last_use(node);
            let mut push = |first, last, bytes: usize| {
                tenants[home].push(Part {
                    first,
                    last,
                    bytes: bytes.next_multiple_of(alignment),
                });
            };
            // What an operation needs beside its result is free when it is done. Behind blocks of numbers drivers want
            // zeros for as long as somebody reads them.
            if all > own && last > index && !is_quantized(node) {
                push(index, index, all);
                push(index + 1, last, own);
            } else {
                push(index, last, all);
            }
        }
        // What is larger than buffers are said to be is tried all the same.
        let largest = tenants.iter().map(Tenant::bytes).max().unwrap_or(0);
        let block = Buffer::largest(backend.device()).max(largest).max(1);
        let (offsets, bytes) = place(&tenants, block);
        Layout {
            places: homes
                .into_iter()
                .map(|(tensor, home)| (tensor, offsets[home]))
                .collect(),
            bytes,
            block,
        }
    }

    /// Bytes of its buffers.
    fn buffers(&self) -> impl Iterator<Item = usize> {
        let count = self.bytes.div_ceil(self.block);
        (0..count).map(|index| (self.bytes - index * self.block).min(self.block))
    }
}

/// The least buffers that graphs of these layouts fit into, one after the other.
fn shared_buffers(layouts: &[Layout]) -> Vec<usize> {
    let mut sizes: Vec<usize> = Vec::new();
    for layout in layouts {
        for (index, bytes) in layout.buffers().enumerate() {
            match sizes.get_mut(index) {
                Some(size) => *size = bytes.max(*size),
                None => sizes.push(bytes),
            }
        }
    }
    sizes
}

impl Workspace {
    /// Bytes for graphs of these layouts that run one after the other.
    pub(crate) fn bytes_for(layouts: &[Layout]) -> u64 {
        let sizes = shared_buffers(layouts).into_iter();
        sizes.fold(0, |sum, bytes| sum.saturating_add(bytes as u64))
    }

    /// Takes memory for graphs of these layouts and gives every tensor its place in it. All leaves that were elsewhere, and
    /// all that is kept, have theirs already.
    pub(crate) fn allocate(
        backend: &Backend,
        graphs: &[Lowered],
        layouts: &[Layout],
    ) -> Result<Workspace> {
        let device = backend.device();
        let kind = MemoryKind::Compute;
        let buffers = shared_buffers(layouts)
            .into_iter()
            .map(|bytes| Buffer::allocate(backend.ledger(), device, bytes, kind))
            .collect::<Result<Vec<Buffer>, _>>()?;
        for buffer in &buffers {
            // SAFETY: the buffer is live. Drivers need not prepare what is computed anew each time.
            unsafe {
                sys::ggml_backend_buffer_set_usage(
                    buffer.as_ptr(),
                    sys::GGML_BACKEND_BUFFER_USAGE_COMPUTE,
                );
            }
        }
        for (graph, layout) in graphs.iter().zip(layouts) {
            for &(tensor, offset) in &layout.places {
                // What takes no bytes may lie behind the last.
                let Some(buffer) = buffers.get(offset / layout.block).or(buffers.last()) else {
                    continue;
                };
                // SAFETY: tensor and buffer are live; the tensor has no memory yet and is no view; `place` left room for
                // what it needs between this offset and the end of this buffer.
                let status = unsafe {
                    let base = sys::ggml_backend_buffer_get_base(buffer.as_ptr());
                    let address = base.cast::<u8>().wrapping_add(offset % layout.block);
                    sys::ggml_backend_tensor_alloc(buffer.as_ptr(), tensor.as_ptr(), address.cast())
                };
                if status != sys::GGML_STATUS_SUCCESS {
                    return Err(backend.out_of_memory(own_bytes(tensor) as u64).into());
                }
            }
            for tensor in graph.tensors() {
                for view in operands(tensor).chain([tensor]) {
                    // SAFETY: all tensors live in the arena of the graph. A view of something without a buffer (a slot's
                    // leaf) is left to whoever gives that one memory.
                    unsafe {
                        let waits = view.as_ref().buffer.is_null();
                        if waits && is_view(view) && !root(view).as_ref().buffer.is_null() {
                            sys::ggml_backend_view_init(view.as_ptr());
                        }
                    }
                }
            }
        }
        Ok(Workspace { buffers })
    }

    /// Bytes that are held.
    pub(crate) fn bytes(&self) -> u64 {
        self.buffers.iter().map(|buffer| buffer.len() as u64).sum()
    }
}

/// The operand in whose place `node` at `index` may be computed.
fn lends(
    node: RawTensor,
    index: usize,
    last_use: impl Fn(RawTensor) -> usize,
) -> Option<RawTensor> {
    // SAFETY: all tensors live in the arena of the graph.
    let is_able = IN_PLACE.contains(&unsafe { node.as_ref() }.op);
    let lender = |operand: &RawTensor| {
        let lender = root(*operand);
        let is_last = last_use(lender) == index;
        let once = operands(node)
            .filter(|&other| root(other) == lender)
            .count()
            == 1;
        // SAFETY: as above.
        let (a, b) = unsafe { (node.as_ref(), operand.as_ref()) };
        let is_alike = a.type_ == b.type_ && a.ne == b.ne && a.nb == b.nb && b.view_offs == 0;
        is_last && once && is_alike
    };
    let mut operands = operands(node).filter(|_| is_able);
    operands.find(lender).map(root)
}

/// What `node` reads. Casts name themselves as the second.
fn operands(node: RawTensor) -> impl Iterator<Item = RawTensor> {
    // SAFETY: all tensors live in the arena of the graph.
    let sources = unsafe { node.as_ref() }.src;
    let sources = sources.into_iter().filter_map(RawTensor::new);
    sources.filter(move |&source| source != node)
}

/// What a view is of, or the tensor itself.
fn root(tensor: RawTensor) -> RawTensor {
    // SAFETY: all tensors live in the arena of the graph.
    RawTensor::new(unsafe { tensor.as_ref() }.view_src).unwrap_or(tensor)
}

fn is_view(tensor: RawTensor) -> bool {
    root(tensor) != tensor
}

/// Whether it has no memory yet.
fn is_unplaced(tensor: RawTensor) -> bool {
    // SAFETY: all tensors live in the arena of the graph.
    let tensor = unsafe { tensor.as_ref() };
    tensor.data.is_null() && tensor.buffer.is_null()
}

fn flags(tensor: RawTensor) -> u32 {
    // SAFETY: all tensors live in the arena of the graph.
    unsafe { tensor.as_ref() }.flags as u32
}

fn is_quantized(tensor: RawTensor) -> bool {
    // SAFETY: the type is one of ggml's.
    unsafe { sys::ggml_is_quantized(tensor.as_ref().type_) }
}

fn own_bytes(tensor: RawTensor) -> usize {
    // SAFETY: the tensor is live.
    unsafe { sys::ggml_nbytes(tensor.as_ptr()) }
}
