//! Integration tests of `sd-graph`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

mod blocks;
mod caches;
mod checkpoint;
mod conversion;
mod convert;
mod convolutions;
mod corpus;
mod frames;
mod gguf_file;
mod loading;
mod mapping;
mod ops;
mod plans;
mod quantized;
mod queues;
mod reference;
#[cfg(feature = "rpc")]
mod rpc;
mod segments;
mod selection;
mod snakes;
mod split;
mod streaming;
mod weight_types;

/// The devices that everything is tested on: those of the build, and those of the libraries in the folder that the
/// environment names.
fn devices() -> Vec<sd_backend::Device> {
    if let Some(folder) = std::env::var_os("SD_TEST_BACKENDS") {
        sd_backend::Device::load_backends(folder).unwrap();
    }
    #[cfg(feature = "rpc")]
    rpc::join_devices();
    sd_backend::Device::all()
}
