//! Files of `sd-ggml-sys`'s build script that tasks need as well, compiled here a second time: `xtask` depends on no
//! crate of the workspace.

#[path = "../../crates/sd-ggml-sys/build/bindings.rs"]
pub(crate) mod bindings;
#[path = "../../crates/sd-ggml-sys/build/digest.rs"]
pub(crate) mod digest;
#[path = "../../crates/sd-ggml-sys/build/failure.rs"]
pub(crate) mod failure;
#[path = "../../crates/sd-ggml-sys/build/quietly.rs"]
pub(crate) mod quietly;
#[path = "../../crates/sd-ggml-sys/build/source.rs"]
pub(crate) mod source;
