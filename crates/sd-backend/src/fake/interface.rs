//! What ggml calls: the functions of a [`Fake`]'s registry, device, buffers and backends.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{c_char, c_int, c_void};
use std::mem::zeroed;
use std::ptr;

use sd_ggml_sys as sys;

use super::queues::{self, Queues, Work, is_padding_clear, memory_of};
use crate::device::Device;
use crate::registry::Driver;

use super::{Fake, GraphFailure, HostPointers, Memory, MemoryStory, Pinned};

/// Alignment of buffers in bytes.
const ALIGNMENT: usize = 64;

/// # Safety
/// `context` is the context of one of the structs of a [`Fake`].
pub(super) unsafe fn fake(context: *mut c_void) -> &'static Fake {
    // SAFETY: as the caller promises; the value is leaked, and nobody has it mutably after it was made.
    unsafe { &*context.cast::<Fake>() }
}

pub(super) unsafe extern "C" fn registry_name(registry: sys::ggml_backend_reg_t) -> *const c_char {
    // SAFETY: ggml passes the registry of a fake.
    unsafe { fake((*registry).context) }.backend.as_ptr()
}

pub(super) unsafe extern "C" fn device_count(_: sys::ggml_backend_reg_t) -> usize {
    1
}

pub(super) unsafe extern "C" fn device_of_registry(
    registry: sys::ggml_backend_reg_t,
    _: usize,
) -> sys::ggml_backend_dev_t {
    // SAFETY: ggml passes the registry of a fake.
    (&raw const unsafe { fake((*registry).context) }.device).cast_mut()
}

pub(super) unsafe extern "C" fn device_name(device: sys::ggml_backend_dev_t) -> *const c_char {
    // SAFETY: ggml passes the device of a fake.
    unsafe { fake((*device).context) }.name.as_ptr()
}

pub(super) unsafe extern "C" fn device_memory(
    device: sys::ggml_backend_dev_t,
    free: *mut usize,
    total: *mut usize,
) {
    // SAFETY: ggml passes the device of a fake, and two places for numbers.
    unsafe {
        let fake = fake((*device).context);
        let script = fake.lock();
        (*free, *total) = match script.story {
            MemoryStory::True => (
                fake.options.memory - script.counts.bytes,
                fake.options.memory,
            ),
            MemoryStory::Of(free, total) => (free as usize, total as usize),
        };
    }
}

pub(super) unsafe extern "C" fn device_type(
    _: sys::ggml_backend_dev_t,
) -> sys::ggml_backend_dev_type {
    sys::GGML_BACKEND_DEVICE_TYPE_GPU
}

pub(super) unsafe extern "C" fn device_props(
    device: sys::ggml_backend_dev_t,
    props: *mut sys::ggml_backend_dev_props,
) {
    // SAFETY: ggml passes the device of a fake, and a place for one struct.
    unsafe {
        (*props).name = device_name(device);
        (*props).description = device_name(device);
        (*props).type_ = device_type(device);
        let options = &fake((*device).context).options;
        (*props).caps.buffer_from_host_ptr = options.says_host_pointers;
        (*props).caps.async_ = options.queues != Queues::None;
        (*props).caps.events = options.queues != Queues::None;
        (*props).caps.host_buffer = options.pinned != Pinned::Missing;
        device_memory(
            device,
            &raw mut (*props).memory_free,
            &raw mut (*props).memory_total,
        );
    }
}

pub(super) unsafe extern "C" fn init_backend(
    device: sys::ggml_backend_dev_t,
    _: *const c_char,
) -> sys::ggml_backend_t {
    // SAFETY: ggml passes the device of a fake. Zero is a valid value of every field of the backend. The processor's
    // device is looked for among those that exist, and a missing one is a null pointer.
    unsafe {
        let fake = fake((*device).context);
        {
            let mut script = fake.lock();
            if script.counts.queues == fake.options.most_queues {
                return ptr::null_mut();
            }
            script.counts.queues += 1;
        }
        let processor =
            sys::ggml_backend_init_by_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU, ptr::null());
        if processor.is_null() {
            return ptr::null_mut();
        }
        // One thread: tests run on machines that are busy with other tests.
        let processors_device = Device::from_raw(sys::ggml_backend_get_device(processor));
        type SetThreads = unsafe extern "C" fn(sys::ggml_backend_t, c_int);
        let set_threads = processors_device
            .and_then(Driver::of)
            .and_then(|driver| driver.function::<SetThreads>(c"ggml_backend_set_n_threads"));
        if let Some(set_threads) = set_threads {
            set_threads(processor, 1);
        }
        let mut backend: Box<sys::ggml_backend> = Box::new(zeroed());
        backend.guid = (&raw const fake.guid).cast_mut();
        backend.device = device;
        backend.context = processor.cast();
        backend.iface.get_name = Some(backend_name);
        backend.iface.free = Some(free_backend);
        backend.iface.graph_compute = Some(graph_compute);
        if fake.options.queues != Queues::None {
            backend.iface.set_tensor_async = Some(queues::set_tensor_async);
            backend.iface.synchronize = Some(queues::synchronize);
            backend.iface.event_record = Some(queues::event_record);
            backend.iface.event_wait = Some(queues::event_wait);
        }
        Box::into_raw(backend)
    }
}

/// # Safety
/// `backend` was made by [`init_backend`].
pub(super) unsafe fn fake_of(backend: sys::ggml_backend_t) -> &'static Fake {
    // SAFETY: as the caller promises, it is for the device of a fake.
    unsafe { fake((*(*backend).device).context) }
}

unsafe extern "C" fn backend_name(backend: sys::ggml_backend_t) -> *const c_char {
    // SAFETY: ggml passes a backend that `init_backend` made.
    unsafe { device_name((*backend).device) }
}

unsafe extern "C" fn free_backend(backend: sys::ggml_backend_t) {
    // SAFETY: `init_backend` made this box, and ggml frees a backend once; its context is the processor's backend.
    unsafe {
        let fake = fake_of(backend);
        let left = fake.lock_waiting().forget_queue(backend as usize);
        fake.misused(left);
        fake.lock().counts.queues -= 1;
        let backend = Box::from_raw(backend);
        sys::ggml_backend_free(backend.context.cast());
    }
}

unsafe extern "C" fn graph_compute(
    backend: sys::ggml_backend_t,
    graph: *mut sys::ggml_cgraph,
) -> sys::ggml_status {
    // SAFETY: ggml passes a backend that `init_backend` made, for the device of a fake.
    let fake = unsafe { fake_of(backend) };
    let delay = {
        let mut script = fake.lock();
        script.counts.graphs += 1;
        if let Some((left, how)) = script.fail_graph {
            script.fail_graph = (left > 1).then_some((left - 1, how));
            if left == 1 {
                return match how {
                    GraphFailure::Allocation => sys::GGML_STATUS_ALLOC_FAILED,
                    GraphFailure::Other => sys::GGML_STATUS_FAILED,
                };
            }
        }
        script.delay
    };
    if !delay.is_zero() {
        std::thread::sleep(delay);
    }
    // SAFETY: the context is the processor's backend, and all tensors lie in host memory.
    unsafe {
        let processor = (*backend).context.cast();
        let padding = fake.options.padding.max(1);
        if fake.options.queues == Queues::None {
            fake.misused(!is_padding_clear(graph, padding));
            return sys::ggml_backend_graph_compute(processor, graph);
        }
        let memory = memory_of(graph);
        let work = Work::Graph {
            processor,
            graph,
            memory,
            padding,
        };
        let mut waiting = fake.lock_waiting();
        waiting.add(backend as usize, work);
        if fake.options.queues == Queues::EarlyGraphs {
            waiting.finish(backend as usize);
        }
    }
    sys::GGML_STATUS_SUCCESS
}

pub(super) unsafe extern "C" fn supports_op(
    _: sys::ggml_backend_dev_t,
    _: *const sys::ggml_tensor,
) -> bool {
    true
}

pub(super) unsafe extern "C" fn supports_buffer_type(
    device: sys::ggml_backend_dev_t,
    kind: sys::ggml_backend_buffer_type_t,
) -> bool {
    // SAFETY: ggml passes the device of a fake.
    kind == unsafe { buffer_type_of_device(device) }
}

pub(super) unsafe extern "C" fn buffer_type_of_device(
    device: sys::ggml_backend_dev_t,
) -> sys::ggml_backend_buffer_type_t {
    // SAFETY: ggml passes the device of a fake.
    (&raw const unsafe { fake((*device).context) }.buffer_type).cast_mut()
}

pub(super) unsafe extern "C" fn host_buffer_type_of_device(
    device: sys::ggml_backend_dev_t,
) -> sys::ggml_backend_buffer_type_t {
    // SAFETY: ggml passes the device of a fake.
    (&raw const unsafe { fake((*device).context) }.host_buffer_type).cast_mut()
}

pub(super) unsafe extern "C" fn is_host(_: sys::ggml_backend_buffer_type_t) -> bool {
    true
}

pub(super) unsafe extern "C" fn buffer_type_name(
    kind: sys::ggml_backend_buffer_type_t,
) -> *const c_char {
    // SAFETY: ggml passes the buffer type of a fake.
    unsafe { fake((*kind).context) }.name.as_ptr()
}

pub(super) unsafe extern "C" fn alignment(_: sys::ggml_backend_buffer_type_t) -> usize {
    ALIGNMENT
}

pub(super) unsafe extern "C" fn max_size(kind: sys::ggml_backend_buffer_type_t) -> usize {
    // SAFETY: ggml passes the buffer type of a fake.
    unsafe { fake((*kind).context) }.options.largest_buffer
}

pub(super) unsafe extern "C" fn alloc_size(
    kind: sys::ggml_backend_buffer_type_t,
    tensor: *const sys::ggml_tensor,
) -> usize {
    // SAFETY: ggml passes the buffer type of a fake, and a live tensor.
    unsafe {
        // ggml allows this for leaves.
        let is_leaf = (*tensor).op == sys::GGML_OP_NONE;
        let padding = fake((*kind).context).options.padding.max(1);
        let bytes = sys::ggml_nbytes(tensor);
        if is_leaf {
            bytes.next_multiple_of(padding)
        } else {
            bytes
        }
    }
}

/// What a buffer's context points to.
struct Block {
    fake: &'static Fake,
    base: *mut u8,
    bytes: usize,
    memory: Memory,
    /// `None` for memory that is somebody else's.
    layout: Option<Layout>,
    reads_wrong: bool,
}

/// # Safety
/// `buffer` was made by [`wrap`] with a block.
unsafe fn block<'b>(buffer: sys::ggml_backend_buffer_t) -> &'b Block {
    // SAFETY: as the caller promises; the block is freed with the buffer.
    unsafe { &*(*buffer).context.cast::<Block>() }
}

/// A ggml buffer with `context`.
fn wrap(
    kind: &'static sys::ggml_backend_buffer_type,
    context: *mut Block,
    bytes: usize,
) -> sys::ggml_backend_buffer_t {
    // SAFETY: zero is valid for every field of the interface, of which ggml keeps a copy.
    unsafe {
        let mut interface: sys::ggml_backend_buffer_i = zeroed();
        interface.free_buffer = Some(free_buffer);
        interface.get_base = Some(base);
        interface.init_tensor = Some(init_tensor);
        interface.memset_tensor = Some(memset_tensor);
        interface.set_tensor = Some(set_tensor);
        interface.get_tensor = Some(get_tensor);
        interface.clear = Some(clear);
        sys::ggml_backend_buffer_init(
            (&raw const *kind).cast_mut(),
            interface,
            context.cast(),
            bytes,
        )
    }
}

pub(super) unsafe extern "C" fn alloc_buffer(
    kind: sys::ggml_backend_buffer_type_t,
    size: usize,
) -> sys::ggml_backend_buffer_t {
    // SAFETY: ggml passes the buffer type of a fake.
    let fake = unsafe { fake((*kind).context) };
    allocate(fake, &fake.buffer_type, Memory::Own, size)
}

pub(super) unsafe extern "C" fn alloc_host_buffer(
    kind: sys::ggml_backend_buffer_type_t,
    size: usize,
) -> sys::ggml_backend_buffer_t {
    // SAFETY: ggml passes the buffer type of a fake.
    let fake = unsafe { fake((*kind).context) };
    if fake.options.pinned == Pinned::FallBack {
        // SAFETY: the processor's buffer type lives for ever.
        return unsafe {
            let processor = sys::ggml_backend_dev_by_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU);
            sys::ggml_backend_buft_alloc_buffer(sys::ggml_backend_dev_buffer_type(processor), size)
        };
    }
    allocate(fake, &fake.host_buffer_type, Memory::Pinned, size)
}

fn allocate(
    fake: &'static Fake,
    kind: &'static sys::ggml_backend_buffer_type,
    memory: Memory,
    size: usize,
) -> sys::ggml_backend_buffer_t {
    let layout = Layout::from_size_align(size.max(1), ALIGNMENT);
    let (Ok(layout), true) = (layout, fake.grant(size, memory)) else {
        return ptr::null_mut();
    };
    // SAFETY: the layout has at least one byte.
    let base = unsafe { alloc_zeroed(layout) };
    if base.is_null() {
        std::alloc::handle_alloc_error(layout);
    }
    let block = Block {
        fake,
        base,
        bytes: size,
        memory,
        layout: Some(layout),
        reads_wrong: false,
    };
    wrap(kind, Box::into_raw(Box::new(block)), size)
}

pub(super) unsafe extern "C" fn buffer_from_host_ptr(
    device: sys::ggml_backend_dev_t,
    address: *mut c_void,
    size: usize,
    _: usize,
) -> sys::ggml_backend_buffer_t {
    // SAFETY: ggml passes the device of a fake.
    let fake = unsafe { fake((*device).context) };
    match fake.options.host_pointers {
        HostPointers::Missing | HostPointers::Refuse => return ptr::null_mut(),
        HostPointers::FailLikeMetal => return wrap(&fake.buffer_type, ptr::null_mut(), size),
        HostPointers::Work | HostPointers::ReadWrong => {}
    }
    if !fake.grant(size, Memory::Mapped) {
        return ptr::null_mut();
    }
    let block = Block {
        fake,
        base: address.cast(),
        bytes: size,
        memory: Memory::Mapped,
        layout: None,
        reads_wrong: fake.options.host_pointers == HostPointers::ReadWrong,
    };
    wrap(&fake.buffer_type, Box::into_raw(Box::new(block)), size)
}

unsafe extern "C" fn free_buffer(buffer: sys::ggml_backend_buffer_t) {
    // SAFETY: the context is a block that was boxed in `alloc_buffer` or `buffer_from_host_ptr`, or the null pointer of a
    // failure: freeing that is what a test must find, so it ends as a real driver would end it. A buffer is freed once.
    unsafe {
        let block = Box::from_raw((*buffer).context.cast::<Block>());
        let waiting = block.fake.lock_waiting();
        let is_needed = waiting.touches(block.base as usize, block.bytes);
        drop(waiting);
        block.fake.misused(is_needed);
        if let Some(layout) = block.layout {
            dealloc(block.base, layout);
        }
        let mut script = block.fake.lock();
        match block.memory {
            Memory::Own => script.counts.bytes -= block.bytes,
            Memory::Mapped => script.counts.mapped_bytes -= block.bytes,
            Memory::Pinned => script.counts.pinned_bytes -= block.bytes,
        }
        script.counts.buffers -= 1;
    }
}

unsafe extern "C" fn base(buffer: sys::ggml_backend_buffer_t) -> *mut c_void {
    // SAFETY: ggml passes a live buffer of ours.
    unsafe { block(buffer) }.base.cast()
}

/// Clears the padding of weights, as CUDA does.
unsafe extern "C" fn init_tensor(
    buffer: sys::ggml_backend_buffer_t,
    tensor: *mut sys::ggml_tensor,
) -> sys::ggml_status {
    // SAFETY: ggml passes a live buffer of ours and a tensor that has a place in it, with room for its padding.
    unsafe {
        let block = block(buffer);
        let usage = sys::ggml_backend_buffer_get_usage(buffer);
        if block.memory == Memory::Own
            && usage == sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS
            && (*tensor).op == sys::GGML_OP_NONE
            && (*tensor).view_src.is_null()
        {
            let bytes = sys::ggml_nbytes(tensor);
            let padded = bytes.next_multiple_of(block.fake.options.padding.max(1));
            let behind = (*tensor).data.cast::<u8>().add(bytes);
            behind.write_bytes(0, padded - bytes);
        }
    }
    sys::GGML_STATUS_SUCCESS
}

unsafe extern "C" fn memset_tensor(
    _: sys::ggml_backend_buffer_t,
    tensor: *mut sys::ggml_tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    // SAFETY: ggml checks the range against the tensor, which lies in the buffer's memory.
    unsafe {
        let place = (*tensor).data.cast::<u8>().add(offset);
        place.write_bytes(value, size);
    }
}

unsafe extern "C" fn set_tensor(
    buffer: sys::ggml_backend_buffer_t,
    tensor: *mut sys::ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: ggml checks the range against the tensor; the caller's data is not in the buffer.
    unsafe {
        let fake = block(buffer).fake;
        let place = (*tensor).data.cast::<u8>().add(offset);
        fake.lock().counts.uploaded += size as u64;
        fake.misused(fake.lock_waiting().touches(place as usize, size));
        place.copy_from_nonoverlapping(data.cast(), size);
    }
}

unsafe extern "C" fn get_tensor(
    buffer: sys::ggml_backend_buffer_t,
    tensor: *const sys::ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: as in `set_tensor`, the other way round.
    unsafe {
        let into = data.cast::<u8>();
        let fake = block(buffer).fake;
        let place = (*tensor).data as usize + offset;
        fake.lock().counts.downloaded += size as u64;
        fake.misused(fake.lock_waiting().touches(place, size));
        into.copy_from_nonoverlapping((*tensor).data.cast::<u8>().add(offset), size);
        if block(buffer).reads_wrong && size > 0 {
            *into ^= 1;
        }
    }
}

unsafe extern "C" fn clear(buffer: sys::ggml_backend_buffer_t, value: u8) {
    // SAFETY: the block holds that many bytes, and memory that is a file's is never cleared.
    unsafe {
        let block = block(buffer);
        if block.layout.is_some() {
            block.base.write_bytes(value, block.bytes);
        }
    }
}
