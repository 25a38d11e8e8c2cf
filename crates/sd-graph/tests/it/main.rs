//! Integration tests of `sd-graph`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

mod checkpoint;
mod convert;
mod gguf_file;
mod loading;
mod mapping;
mod ops;
mod plans;
mod quantized;
mod reference;
mod weight_types;
