//! Devices, buffers and memory for inference on ggml.
//!
//! This crate owns every ggml handle and frees each exactly once. What it promises:
//!
//! - a failed allocation is a value ([`Error::OutOfMemory`]), never an abort;
//! - a budget is a promise: every allocation asks a [`Ledger`] first, which a caller owns;
//! - an element type, a device and a buffer are plain Rust values with names, sizes and reasons in their errors;
//! - a device of another machine ([`Device::add_server`]) whose server is lost is a value too ([`Error::DeviceLost`]);
//! - ggml's own log goes to [`tracing`], never to standard error.
//!
//! # Threads
//!
//! [`Device`] and [`Buffer`] may be shared between threads. A [`Backend`] is one stream of work: it can be sent to
//! another thread, and running it takes `&mut`.

mod backend;
mod budget;
mod buffer;
mod device;
mod dtype;
mod error;
#[cfg(feature = "fake-device")]
pub mod fake;
mod host_mapping;
mod ledger;
mod libraries;
mod log;
mod mapped_file;
mod placement;
mod processor;
mod registry;
mod rpc;
mod serve;

pub use backend::{Backend, BackendOptions};
pub use budget::{MemoryBudget, MemoryBudgets};
pub use buffer::Buffer;
pub use device::{Capabilities, Device, DeviceKind, Memory};
pub use dtype::DType;
pub use error::{Bytes, Error, Result};
pub use host_mapping::HostMapping;
pub use ledger::{Ledger, MemoryKind, MemoryReport, Reservation, Usage};
#[cfg(all(feature = "dynamic-backends", not(feature = "system")))]
pub use libraries::built_backends;
pub use mapped_file::{Access, AccessHint, MapOptions, MappedFile, Mapping, is_local, pages};
pub use placement::{Component, DeviceChoice, Need, Placement, Residence, Seat, Wish, peak, seats};
pub use serve::{RpcServer, RpcServerOptions};
