//! The library behind the bindings computes.

use std::ffi::{CStr, c_void};
use std::ptr;

use sd_ggml_sys as sys;

/// The CPU backend, whether it is linked or loaded, once the registry is filled.
pub(crate) fn cpu_backend() -> sys::ggml_backend_t {
    // SAFETY: the parameter string may be null, and nobody adds to the registry any more.
    let backend =
        unsafe { sys::ggml_backend_init_by_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU, ptr::null()) };
    assert!(!backend.is_null());
    backend
}

#[test]
fn the_linked_library_is_the_bound_version() {
    // SAFETY: ggml returns a pointer to a string constant.
    let version = unsafe { CStr::from_ptr(sys::ggml_version()) };
    assert_eq!(version.to_str(), Ok(sys::VERSION));
}

/// A context for the descriptions of a few tensors and one small graph.
fn context() -> *mut sys::ggml_context {
    // SAFETY: both functions only return sizes.
    let mem_size = unsafe { 16 * sys::ggml_tensor_overhead() + sys::ggml_graph_overhead() };
    let parameters = sys::ggml_init_params {
        mem_size,
        mem_buffer: ptr::null_mut(),
        no_alloc: true,
    };
    // SAFETY: with a null buffer ggml allocates `mem_size` bytes of its own.
    let context = unsafe { sys::ggml_init(parameters) };
    assert!(!context.is_null());
    context
}

/// Computes `weight x input` for a 3 by 2 weight and four rows of two on `backend` and returns the four rows of three.
pub(crate) fn small_product(backend: sys::ggml_backend_t) -> Vec<f32> {
    let weight: [f32; 6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let input: [f32; 8] = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, -1.0, 2.0];
    let mut product = vec![0.0_f32; 12];
    let context = context();
    // SAFETY: the context has room for these three tensors and the graph, and it and the buffer live until the end of the
    // block; every copy has the length of its tensor in bytes, and both shapes have an inner length of two.
    unsafe {
        let a = sys::ggml_new_tensor_2d(context, sys::GGML_TYPE_F32, 2, 3);
        let b = sys::ggml_new_tensor_2d(context, sys::GGML_TYPE_F32, 2, 4);
        let out = sys::ggml_mul_mat(context, a, b);
        let graph = sys::ggml_new_graph(context);
        sys::ggml_build_forward_expand(graph, out);
        let buffer = sys::ggml_backend_alloc_ctx_tensors(context, backend);
        assert!(!buffer.is_null());
        sys::ggml_backend_tensor_set(a, weight.as_ptr().cast::<c_void>(), 0, size_of_val(&weight));
        sys::ggml_backend_tensor_set(b, input.as_ptr().cast::<c_void>(), 0, size_of_val(&input));
        assert_eq!(
            sys::ggml_backend_graph_compute(backend, graph),
            sys::GGML_STATUS_SUCCESS
        );
        let bytes = size_of_val(product.as_slice());
        sys::ggml_backend_tensor_get(out, product.as_mut_ptr().cast::<c_void>(), 0, bytes);
        sys::ggml_backend_buffer_free(buffer);
        sys::ggml_free(context);
    }
    product
}

/// What [`small_product`] must give, by hand: small whole numbers, exact in every element type.
pub(crate) const SMALL_PRODUCT: [f32; 12] =
    [1.0, 3.0, 5.0, 2.0, 4.0, 6.0, 3.0, 7.0, 11.0, 3.0, 5.0, 7.0];

#[test]
fn the_cpu_multiplies_two_matrices() {
    crate::fill_registry();
    let backend = cpu_backend();
    assert_eq!(small_product(backend), SMALL_PRODUCT);
    // SAFETY: the backend came from ggml and nothing uses it any more.
    unsafe { sys::ggml_backend_free(backend) };
}

/// Every device of the build computes the same; on a machine without a GPU only the CPU is here.
#[test]
fn every_device_multiplies_two_matrices() {
    crate::fill_registry();
    // SAFETY: the indices are below the count, the devices live as long as the process, each backend is freed once.
    unsafe {
        for index in 0..sys::ggml_backend_dev_count() {
            let device = sys::ggml_backend_dev_get(index);
            let name = CStr::from_ptr(sys::ggml_backend_dev_name(device)).to_string_lossy();
            // Its own test counts what happens on it.
            if name.starts_with("Fake") {
                continue;
            }
            let backend = sys::ggml_backend_dev_init(device, ptr::null());
            assert!(!backend.is_null(), "{name}");
            assert_eq!(small_product(backend), SMALL_PRODUCT, "{name}");
            sys::ggml_backend_free(backend);
        }
    }
}
