//! x
#[test]
fn v() {
    // SAFETY: x
    unsafe {
        let backend = sd_ggml_sys::ggml_backend_init_by_type(sd_ggml_sys::GGML_BACKEND_DEVICE_TYPE_CPU, core::ptr::null());
        assert!(!backend.is_null());
        println!("{:?}", core::ffi::CStr::from_ptr(sd_ggml_sys::ggml_version()));
    }
}
