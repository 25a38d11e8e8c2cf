//! Backends as libraries that are loaded at run time.

use std::ffi::CString;

use sd_ggml_sys as sys;

/// Loads every backend this crate built.
pub(crate) fn load() {
    let Some(folder) = sys::BACKENDS_DIR else {
        return;
    };
    let folder = CString::new(folder).unwrap();
    // SAFETY: the string is terminated and lives until the call returns.
    unsafe { sys::ggml_backend_load_all_from_path(folder.as_ptr()) };
}
