//! Builds a pinned ggml and binds it.

#[allow(missing_docs, non_camel_case_types, non_upper_case_globals, non_snake_case, clippy::all, reason = "generated")]
mod bindings;
pub use bindings::*;
