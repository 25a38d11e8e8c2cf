//! How the bindings are generated: one set of options for the build script and for `cargo xtask bindgen`, which
//! compiles this file too.

use std::path::Path;

/// Bindings of everything in `wrapper`, for the headers of the tree `ggml`.
pub(crate) fn builder(ggml: &Path, wrapper: &Path) -> bindgen::Builder {
    bindgen::Builder::default()
        .header(wrapper.to_string_lossy())
        .clang_arg(format!("-I{}", ggml.join("include").display()))
        .clang_arg(format!("-I{}", ggml.join("src").display()))
        .allowlist_item("(ggml|gguf|GGML|GGUF|RPC)_.*")
        // Constants carry their own prefix already (`GGML_TYPE_F32`).
        .prepend_enum_name(false)
        // C's `FILE` is opaque to us, and its layout belongs to the C library.
        .blocklist_type("FILE|_IO_.*|__off.*_t|_?_?sFILE")
        .raw_line("/// C's `FILE`, opaque.")
        .raw_line("pub type FILE = ::std::os::raw::c_void;")
        // Sizes and offsets are compared with the C compiler's in `tests/it/layout.rs`.
        .layout_tests(false)
        .generate_comments(true)
        .use_core()
        .merge_extern_blocks(true)
}
