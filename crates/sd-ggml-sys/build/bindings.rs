//! How the bindings are generated: one set of options for the feature `bindgen` and for `cargo xtask bindgen`, which
//! compiles this file too.

use std::path::{Path, PathBuf};

/// Bindings of everything in `wrapper`, with ggml's headers in `folders`.
pub(crate) fn builder(folders: &[PathBuf], wrapper: &Path) -> bindgen::Builder {
    let mut builder = bindgen::Builder::default();
    // The workspace's edition, and the oldest Rust that has it: not what bindgen or the machine would choose.
    if let Ok(oldest) = bindgen::RustTarget::stable(85, 0) {
        builder = builder
            .rust_target(oldest)
            .rust_edition(bindgen::RustEdition::Edition2024);
    }
    builder
        .header(wrapper.to_string_lossy())
        .clang_args(
            folders
                .iter()
                .map(|folder| format!("-I{}", folder.display())),
        )
        .allowlist_item("(ggml|gguf|GGML|GGUF|RPC)_.*")
        // Constants carry their own prefix already (`GGML_TYPE_F32`).
        .prepend_enum_name(false)
        // C's `FILE` is opaque to us, and its layout belongs to the C library.
        .blocklist_type("FILE|_IO_.*|__off.*_t|_?_?sFILE|_iobuf")
        .raw_line("/// C's `FILE`, opaque.")
        .raw_line("pub type FILE = ::core::ffi::c_void;")
        // Sizes and offsets are compared with the C compiler's in `tests/it/layout.rs`.
        .layout_tests(false)
        .use_core()
        .merge_extern_blocks(true)
}
