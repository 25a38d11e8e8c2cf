//! Queues of a [`Fake`] that do their work late: nothing is computed or copied before somebody waits for it, in an order
//! that events allow and nobody would hope for.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr;

use sd_ggml_sys as sys;

use super::interface::{fake, fake_of};

/// When a [`FakeDevice`](super::FakeDevice) does what was queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Queues {
    /// Before the call returns: it has no queues and no events.
    #[default]
    None,
    /// As late as it can: whoever reads without waiting reads what was there before.
    Late,
    /// Copies as early as they may be, graphs as late: a copy that does not wait for a graph that needs what lies there is
    /// done before it.
    EarlyCopies,
    /// Graphs as early as they may be, copies as late: a graph that does not wait for a copy that it needs is computed
    /// before it.
    EarlyGraphs,
}

/// What was queued and is not done, on all queues of a device.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// By the address of ggml's backend.
    queues: HashMap<usize, Queue>,
    /// By the address of ggml's event: which queue it was last marked on, behind how many of its works.
    marks: HashMap<usize, (usize, u64)>,
    /// Graphs that were computed with something else than zeros in the padding of weights.
    pub(super) misuses: u64,
}

// SAFETY: the pointers are only followed while their owners wait for the work, which may be on any thread.
unsafe impl Send for Waiting {}

#[derive(Debug, Default)]
struct Queue {
    works: VecDeque<Work>,
    done: u64,
}

impl Queue {
    fn queued(&self) -> u64 {
        self.done + self.works.len() as u64
    }
}

/// Something to do.
#[derive(Debug)]
pub(super) enum Work {
    /// A graph on the processor's backend, and the memory it reads and writes.
    Graph {
        processor: sys::ggml_backend_t,
        graph: *mut sys::ggml_cgraph,
        memory: Vec<Range<usize>>,
        /// What weights are padded to.
        padding: usize,
    },
    Copy {
        from: *const u8,
        into: *mut u8,
        bytes: usize,
    },
    /// For so many works of another queue.
    Wait { queue: usize, works: u64 },
}

impl Work {
    fn touches(&self, range: &Range<usize>) -> bool {
        let is_in = |start: usize, end: usize| start < range.end && range.start < end;
        match self {
            Work::Graph { memory, .. } => memory.iter().any(|part| is_in(part.start, part.end)),
            Work::Copy { from, into, bytes } => {
                is_in(*from as usize, *from as usize + bytes)
                    || is_in(*into as usize, *into as usize + bytes)
            }
            Work::Wait { .. } => false,
        }
    }
}

/// Memory that the tensors of `graph` lie in.
///
/// # Safety
/// The graph is live.
pub(super) unsafe fn memory_of(graph: *mut sys::ggml_cgraph) -> Vec<Range<usize>> {
    // SAFETY: as the caller promises, nodes and their operands are live.
    unsafe {
        let nodes = (0..sys::ggml_graph_n_nodes(graph)).map(|n| sys::ggml_graph_node(graph, n));
        let tensors = nodes.flat_map(|node| (*node).src.into_iter().chain([node]));
        tensors
            .filter(|tensor| !tensor.is_null() && !(**tensor).data.is_null())
            .map(|tensor| {
                let start = (*tensor).data as usize;
                start..start + sys::ggml_nbytes(tensor)
            })
            .collect()
    }
}

/// Whether zeros lie behind the weights of `graph` up to multiples of `padding` bytes.
///
/// # Safety
/// The graph is live, and its weights lie in buffers with room for that.
pub(super) unsafe fn is_padding_clear(graph: *mut sys::ggml_cgraph, padding: usize) -> bool {
    // SAFETY: as the caller promises, nodes and their operands are live.
    unsafe {
        let nodes = (0..sys::ggml_graph_n_nodes(graph)).map(|n| sys::ggml_graph_node(graph, n));
        let mut sources = nodes.flat_map(|node| (*node).src);
        sources.all(|source| {
            if source.is_null() || (*source).op != sys::GGML_OP_NONE || (*source).buffer.is_null() {
                return true;
            }
            let usage = sys::ggml_backend_buffer_get_usage((*source).buffer);
            if usage != sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS {
                return true;
            }
            let bytes = sys::ggml_nbytes(source);
            let behind = (*source).data.cast::<u8>().add(bytes);
            (0..bytes.next_multiple_of(padding) - bytes).all(|n| behind.add(n).read() == 0)
        })
    }
}

impl Waiting {
    pub(super) fn add(&mut self, queue: usize, work: Work) {
        self.queues.entry(queue).or_default().works.push_back(work);
    }

    pub(super) fn mark(&mut self, queue: usize, event: usize) {
        let queued = self.queues.entry(queue).or_default().queued();
        self.marks.insert(event, (queue, queued));
    }

    /// Lets `queue` wait for the latest mark of `event`.
    pub(super) fn wait(&mut self, queue: usize, event: usize) {
        if let Some(&(other, works)) = self.marks.get(&event)
            && other != queue
        {
            let work = Work::Wait {
                queue: other,
                works,
            };
            self.add(queue, work);
        }
    }

    /// Does what was queued before the latest mark of `event`.
    pub(super) fn reach(&mut self, event: usize) {
        if let Some(&(queue, works)) = self.marks.get(&event) {
            self.work(queue, works);
        }
    }

    /// Does everything on `queue`.
    pub(super) fn finish(&mut self, queue: usize) {
        self.work(queue, u64::MAX);
    }

    /// Does the first `works` of everything that ever was on `queue`.
    fn work(&mut self, queue: usize, works: u64) {
        while let Some(found) = self.queues.get_mut(&queue)
            && found.done < works
            && let Some(work) = found.works.pop_front()
        {
            found.done += 1;
            match work {
                Work::Graph {
                    processor,
                    graph,
                    padding,
                    ..
                } => {
                    // SAFETY: whoever queued it keeps graph and memory until it is done.
                    unsafe {
                        self.misuses += u64::from(!is_padding_clear(graph, padding));
                        sys::ggml_backend_graph_compute(processor, graph);
                    }
                }
                // SAFETY: as above; the host's memory and the device's do not overlap.
                Work::Copy { from, into, bytes } => unsafe {
                    into.copy_from_nonoverlapping(from, bytes);
                },
                Work::Wait { queue, works } => self.work(queue, works),
            }
        }
    }

    /// Whether something that was queued reads or writes `bytes` at `start`.
    pub(super) fn touches(&self, start: usize, bytes: usize) -> bool {
        let range = start..start + bytes;
        let mut works = self.queues.values().flat_map(|queue| &queue.works);
        works.any(|work| work.touches(&range))
    }

    /// Whether a mark of `event` was not reached, or something waits for it. It is forgotten.
    pub(super) fn forget_event(&mut self, event: usize) -> bool {
        let mark = self.marks.remove(&event);
        mark.is_some_and(|(queue, works)| {
            let done = self.queues.get(&queue).map_or(u64::MAX, |queue| queue.done);
            let waits = |work: &Work| {
                matches!(work, Work::Wait { queue: other, works: wanted }
                    if *other == queue && *wanted == works)
            };
            let mut all = self.queues.values().flat_map(|queue| &queue.works);
            done < works || all.any(waits)
        })
    }

    /// Whether something was left to do on `queue`. It is forgotten.
    pub(super) fn forget_queue(&mut self, queue: usize) -> bool {
        self.queues
            .remove(&queue)
            .is_some_and(|queue| !queue.works.is_empty())
    }
}

pub(super) unsafe extern "C" fn set_tensor_async(
    backend: sys::ggml_backend_t,
    tensor: *mut sys::ggml_tensor,
    data: *const c_void,
    offset: usize,
    bytes: usize,
) {
    // SAFETY: ggml passes a backend that `init_backend` made and checks the range against the tensor.
    unsafe {
        let fake = fake_of(backend);
        fake.lock().counts.uploaded += bytes as u64;
        let mut waiting = fake.lock_waiting();
        let work = Work::Copy {
            from: data.cast(),
            into: (*tensor).data.cast::<u8>().add(offset),
            bytes,
        };
        waiting.add(backend as usize, work);
        if fake.options.queues == Queues::EarlyCopies {
            waiting.finish(backend as usize);
        }
    }
}

pub(super) unsafe extern "C" fn synchronize(backend: sys::ggml_backend_t) {
    // SAFETY: ggml passes a backend that `init_backend` made.
    let fake = unsafe { fake_of(backend) };
    fake.lock_waiting().finish(backend as usize);
}

pub(super) unsafe extern "C" fn event_record(
    backend: sys::ggml_backend_t,
    event: sys::ggml_backend_event_t,
) {
    // SAFETY: ggml passes a backend that `init_backend` made.
    let fake = unsafe { fake_of(backend) };
    fake.lock_waiting().mark(backend as usize, event as usize);
}

pub(super) unsafe extern "C" fn event_wait(
    backend: sys::ggml_backend_t,
    event: sys::ggml_backend_event_t,
) {
    // SAFETY: ggml passes a backend that `init_backend` made.
    let fake = unsafe { fake_of(backend) };
    fake.lock_waiting().wait(backend as usize, event as usize);
}

pub(super) unsafe extern "C" fn event_new(
    device: sys::ggml_backend_dev_t,
) -> sys::ggml_backend_event_t {
    // SAFETY: ggml passes the device of a fake.
    if !unsafe { fake((*device).context) }.options.makes_events {
        return ptr::null_mut();
    }
    Box::into_raw(Box::new(sys::ggml_backend_event {
        device,
        context: ptr::null_mut(),
    }))
}

pub(super) unsafe extern "C" fn event_free(
    device: sys::ggml_backend_dev_t,
    event: sys::ggml_backend_event_t,
) {
    // SAFETY: ggml passes the device of a fake, and an event that `event_new` made, once.
    unsafe {
        let fake = fake((*device).context);
        let is_needed = fake.lock_waiting().forget_event(event as usize);
        fake.misused(is_needed);
        drop(Box::from_raw(event));
    }
}

pub(super) unsafe extern "C" fn event_synchronize(
    device: sys::ggml_backend_dev_t,
    event: sys::ggml_backend_event_t,
) {
    // SAFETY: ggml passes the device of a fake.
    let fake = unsafe { fake((*device).context) };
    fake.lock_waiting().reach(event as usize);
}
