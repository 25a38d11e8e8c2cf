//! Integration tests of `sd-graph`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

mod checkpoint;
mod convert;
mod corpus;
mod gguf_file;
mod loading;
mod mapping;
mod ops;
mod plans;
mod quantized;
mod reference;
#[cfg(feature = "rpc")]
mod rpc;
mod weight_types;

/// The devices that everything is tested on.
fn devices() -> Vec<sd_backend::Device> {
    #[cfg(feature = "rpc")]
    rpc::join_devices();
    sd_backend::Device::all()
}
