//! Files of `sd-ggml-sys`'s build script that a task needs as well, compiled here a second time: `xtask` depends on
//! no crate of the workspace.

#[path = "../../crates/sd-ggml-sys/build/bindings.rs"]
pub(crate) mod bindings;
#[path = "../../crates/sd-ggml-sys/build/source.rs"]
pub(crate) mod source;
