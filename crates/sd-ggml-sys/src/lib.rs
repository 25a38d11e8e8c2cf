#![doc = include_str!("../README.md")]

/// The version of ggml that the committed bindings describe.
///
/// A program that links or loads a ggml it did not build should compare this with `ggml_version()` first: the numbers of
/// operations and the layout of structs change between versions, and nothing else would notice.
pub const VERSION: &str = "0.26.0";

/// The folder of the loadable backends this crate built, for `ggml_backend_load_all_from_path` while developing.
///
/// It is a folder of the building machine. A program that is handed on keeps its backends beside itself.
#[cfg(all(feature = "dynamic-backends", not(feature = "system")))]
pub const BACKENDS_DIR: Option<&str> = option_env!("SD_GGML_BACKENDS_DIR");

#[cfg(not(feature = "bindgen"))]
#[rustfmt::skip]
#[allow(missing_docs, reason = "generated: its comments are those of ggml's headers")]
#[allow(non_camel_case_types, non_snake_case, non_upper_case_globals, reason = "generated: names as in C")]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks, rustdoc::all, reason = "generated")]
mod bindings;

#[cfg(feature = "bindgen")]
#[allow(
    missing_docs,
    reason = "generated: its comments are those of ggml's headers"
)]
#[allow(
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    reason = "generated: names as in C"
)]
#[allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    rustdoc::all,
    reason = "generated"
)]
mod bindings {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

pub use bindings::*;
