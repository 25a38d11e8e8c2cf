//! A device written in Rust against ggml's backend interface: the structs of function pointers are bound as they are.
//!
//! The device has a mebibyte of memory that is really the host's, refuses what does not fit, counts what is copied to it
//! and lets the CPU backend compute.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{CStr, c_char, c_void};
use std::mem::zeroed;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use sd_ggml_sys as sys;

use crate::product::{SMALL_PRODUCT, cpu_backend, small_product};

const MEMORY: usize = 1 << 20;
const ALIGNMENT: usize = 64;

static USED: AtomicUsize = AtomicUsize::new(0);
static COPIED: AtomicUsize = AtomicUsize::new(0);

/// The structs ggml keeps pointers to, never freed.
struct Fake {
    registry: sys::ggml_backend_reg,
    device: sys::ggml_backend_device,
    buffer_type: sys::ggml_backend_buffer_type,
}

/// A pointer to the one [`Fake`] of the process, as a number so that it may be shared.
fn fake() -> *mut Fake {
    static FAKE: OnceLock<usize> = OnceLock::new();
    *FAKE.get_or_init(build) as *mut Fake
}

fn build() -> usize {
    // SAFETY: every field of these structs is a nullable function pointer, a pointer or a number: zero is valid.
    let fake: &'static mut Fake = Box::leak(Box::new(unsafe { zeroed() }));
    let address = &raw mut *fake;
    fake.registry.api_version = sys::GGML_BACKEND_API_VERSION as i32;
    fake.registry.iface.get_name = Some(registry_name);
    fake.registry.iface.get_device_count = Some(device_count);
    fake.registry.iface.get_device = Some(device);
    fake.device.reg = &raw mut fake.registry;
    fake.device.iface.get_name = Some(device_name);
    fake.device.iface.get_description = Some(device_name);
    fake.device.iface.get_memory = Some(device_memory);
    fake.device.iface.get_type = Some(device_type);
    fake.device.iface.get_props = Some(device_props);
    fake.device.iface.init_backend = Some(init_backend);
    fake.device.iface.get_buffer_type = Some(buffer_type);
    fake.device.iface.supports_op = Some(supports_op);
    fake.device.iface.supports_buft = Some(supports_buffer_type);
    fake.buffer_type.device = &raw mut fake.device;
    fake.buffer_type.iface.get_name = Some(buffer_type_name);
    fake.buffer_type.iface.alloc_buffer = Some(alloc_buffer);
    fake.buffer_type.iface.get_alignment = Some(alignment);
    address as usize
}

extern "C" fn registry_name(_: sys::ggml_backend_reg_t) -> *const c_char {
    c"Fake".as_ptr()
}

extern "C" fn device_count(_: sys::ggml_backend_reg_t) -> usize {
    1
}

extern "C" fn device(_: sys::ggml_backend_reg_t, _: usize) -> sys::ggml_backend_dev_t {
    // SAFETY: the leaked struct lives as long as the process; only the address is taken.
    unsafe { &raw mut (*fake()).device }
}

extern "C" fn device_name(_: sys::ggml_backend_dev_t) -> *const c_char {
    c"Fake0".as_ptr()
}

extern "C" fn device_memory(_: sys::ggml_backend_dev_t, free: *mut usize, total: *mut usize) {
    // SAFETY: ggml passes two places for numbers.
    unsafe {
        *free = MEMORY - USED.load(Ordering::SeqCst);
        *total = MEMORY;
    }
}

extern "C" fn device_type(_: sys::ggml_backend_dev_t) -> sys::ggml_backend_dev_type {
    sys::GGML_BACKEND_DEVICE_TYPE_GPU
}

extern "C" fn device_props(
    device: sys::ggml_backend_dev_t,
    props: *mut sys::ggml_backend_dev_props,
) {
    // SAFETY: ggml passes a place for one struct, valid for writes.
    let props = unsafe { &mut *props };
    props.name = device_name(device);
    props.description = device_name(device);
    props.type_ = device_type(device);
    device_memory(
        device,
        &raw mut props.memory_free,
        &raw mut props.memory_total,
    );
}

extern "C" fn init_backend(
    device: sys::ggml_backend_dev_t,
    _: *const c_char,
) -> sys::ggml_backend_t {
    static GUID: OnceLock<usize> = OnceLock::new();
    let guid = *GUID.get_or_init(|| Box::leak(Box::new([7_u8; 16])).as_mut_ptr() as usize);
    // SAFETY: as in `build`, zero is a valid value of every field.
    let mut backend: Box<sys::ggml_backend> = Box::new(unsafe { zeroed() });
    backend.guid = guid as sys::ggml_guid_t;
    backend.device = device;
    backend.context = cpu_backend().cast::<c_void>();
    backend.iface.get_name = Some(backend_name);
    backend.iface.free = Some(free_backend);
    backend.iface.graph_compute = Some(graph_compute);
    Box::into_raw(backend)
}

extern "C" fn backend_name(_: sys::ggml_backend_t) -> *const c_char {
    c"Fake0".as_ptr()
}

extern "C" fn free_backend(backend: sys::ggml_backend_t) {
    // SAFETY: `init_backend` made this box, and ggml frees a backend once; its context is the CPU backend of the same.
    unsafe {
        let backend = Box::from_raw(backend);
        sys::ggml_backend_free(backend.context.cast());
    }
}

extern "C" fn graph_compute(
    backend: sys::ggml_backend_t,
    graph: *mut sys::ggml_cgraph,
) -> sys::ggml_status {
    // SAFETY: the context is the CPU backend made in `init_backend`, and the tensors lie in host memory.
    unsafe { sys::ggml_backend_graph_compute((*backend).context.cast(), graph) }
}

extern "C" fn supports_op(_: sys::ggml_backend_dev_t, _: *const sys::ggml_tensor) -> bool {
    true
}

extern "C" fn supports_buffer_type(
    _: sys::ggml_backend_dev_t,
    kind: sys::ggml_backend_buffer_type_t,
) -> bool {
    kind == buffer_type(ptr::null_mut())
}

extern "C" fn buffer_type(_: sys::ggml_backend_dev_t) -> sys::ggml_backend_buffer_type_t {
    // SAFETY: the leaked struct lives as long as the process; only the address is taken.
    unsafe { &raw mut (*fake()).buffer_type }
}

extern "C" fn buffer_type_name(_: sys::ggml_backend_buffer_type_t) -> *const c_char {
    c"Fake0".as_ptr()
}

extern "C" fn alignment(_: sys::ggml_backend_buffer_type_t) -> usize {
    ALIGNMENT
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size.max(1), ALIGNMENT).unwrap()
}

extern "C" fn alloc_buffer(
    kind: sys::ggml_backend_buffer_type_t,
    size: usize,
) -> sys::ggml_backend_buffer_t {
    if USED.fetch_add(size, Ordering::SeqCst) + size > MEMORY {
        USED.fetch_sub(size, Ordering::SeqCst);
        return ptr::null_mut();
    }
    // SAFETY: zero is valid for every field of the interface; the layout has at least one byte; ggml keeps a copy of the
    // interface, and `free_buffer` frees the memory with the same layout.
    unsafe {
        let mut interface: sys::ggml_backend_buffer_i = zeroed();
        interface.free_buffer = Some(free_buffer);
        interface.get_base = Some(base);
        interface.memset_tensor = Some(memset_tensor);
        interface.set_tensor = Some(set_tensor);
        interface.get_tensor = Some(get_tensor);
        interface.clear = Some(clear);
        sys::ggml_backend_buffer_init(kind, interface, alloc_zeroed(layout(size)).cast(), size)
    }
}

extern "C" fn free_buffer(buffer: sys::ggml_backend_buffer_t) {
    // SAFETY: the context was allocated in `alloc_buffer` with this layout, and ggml frees a buffer once.
    unsafe {
        USED.fetch_sub((*buffer).size, Ordering::SeqCst);
        dealloc((*buffer).context.cast(), layout((*buffer).size));
    }
}

extern "C" fn base(buffer: sys::ggml_backend_buffer_t) -> *mut c_void {
    // SAFETY: ggml passes a live buffer.
    unsafe { (*buffer).context }
}

extern "C" fn memset_tensor(
    _: sys::ggml_backend_buffer_t,
    tensor: *mut sys::ggml_tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    // SAFETY: ggml checks the range against the tensor, which lies in the buffer's memory.
    unsafe {
        (*tensor)
            .data
            .cast::<u8>()
            .add(offset)
            .write_bytes(value, size)
    };
}

extern "C" fn set_tensor(
    _: sys::ggml_backend_buffer_t,
    tensor: *mut sys::ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    COPIED.fetch_add(size, Ordering::SeqCst);
    // SAFETY: ggml checks the range against the tensor; the caller's data is not in the buffer.
    unsafe {
        (*tensor)
            .data
            .cast::<u8>()
            .add(offset)
            .copy_from_nonoverlapping(data.cast(), size)
    };
}

extern "C" fn get_tensor(
    _: sys::ggml_backend_buffer_t,
    tensor: *const sys::ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: as in `set_tensor`, the other way round.
    unsafe {
        data.cast::<u8>()
            .copy_from_nonoverlapping((*tensor).data.cast::<u8>().add(offset), size)
    };
}

extern "C" fn clear(buffer: sys::ggml_backend_buffer_t, value: u8) {
    // SAFETY: the context holds `size` bytes.
    unsafe {
        (*buffer)
            .context
            .cast::<u8>()
            .write_bytes(value, (*buffer).size)
    };
}

/// Adds the device to ggml's registry.
pub(crate) fn register() {
    // SAFETY: the registry struct is complete and never freed.
    unsafe { sys::ggml_backend_register(&raw mut (*fake()).registry) };
}

#[test]
fn a_device_written_in_rust_is_used_like_any_other() {
    crate::fill_registry();
    // SAFETY: the name is a terminated string.
    let device = unsafe { sys::ggml_backend_dev_by_name(c"Fake0".as_ptr()) };
    assert!(!device.is_null());

    // SAFETY: the device is registered; the two places are valid.
    let backend = unsafe {
        let (mut free, mut total) = (0, 0);
        sys::ggml_backend_dev_memory(device, &raw mut free, &raw mut total);
        assert_eq!((free, total), (MEMORY, MEMORY));
        assert_eq!(
            CStr::from_ptr(sys::ggml_backend_dev_description(device)),
            c"Fake0"
        );
        sys::ggml_backend_dev_init(device, ptr::null())
    };
    assert_eq!(small_product(backend), SMALL_PRODUCT);
    // A 2 by 3 and a 2 by 4 matrix of F32 went over.
    assert_eq!(COPIED.load(Ordering::SeqCst), (6 + 8) * 4);
    assert_eq!(USED.load(Ordering::SeqCst), 0, "the buffer was not freed");

    // SAFETY: the type belongs to the registered device; a null buffer is the answer and is not used; the backend is
    // freed once.
    unsafe {
        let kind = sys::ggml_backend_dev_buffer_type(device);
        let whole = sys::ggml_backend_buft_alloc_buffer(kind, MEMORY);
        assert!(!whole.is_null());
        assert!(sys::ggml_backend_buft_alloc_buffer(kind, ALIGNMENT).is_null());
        sys::ggml_backend_buffer_free(whole);
        sys::ggml_backend_free(backend);
    }
}
