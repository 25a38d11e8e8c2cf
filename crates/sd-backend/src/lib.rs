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
//! | type | may be sent | may be shared | why |
//! |---|---|---|---|
//! | [`Device`] | yes | yes | lives as long as the process; only constants and reports are read from it |
//! | [`Buffer`], [`HostMapping`], [`MappedFile`] | yes | yes | through a shared one only addresses and sizes are read |
//! | [`Ledger`], [`Reservation`] | yes | yes | counters under a lock |
//! | [`Backend`], [`CopyQueue`] | yes | no | one queue of work: ggml's backends are not made for two threads at once |
//! | [`Event`] | yes | yes | used under a lock |
//!
//! ```
//! fn sent<T: Send>() {}
//! fn shared<T: Sync>() {}
//! sent::<sd_backend::Backend>();
//! sent::<sd_backend::Buffer>();
//! shared::<sd_backend::Buffer>();
//! shared::<sd_backend::HostMapping>();
//! shared::<sd_backend::Device>();
//! shared::<sd_backend::Ledger>();
//! ```
//!
//! ```compile_fail,E0277
//! fn shared<T: Sync>() {}
//! shared::<sd_backend::Backend>();
//! ```
//!
//! Two runs at once on one backend do not compile either, since running takes it exclusively:
//!
//! ```compile_fail,E0499
//! # fn run(backend: &mut sd_backend::Backend) {}
//! # fn both(mut backend: sd_backend::Backend) {
//! std::thread::scope(|scope| {
//!     scope.spawn(|| run(&mut backend));
//!     scope.spawn(|| run(&mut backend));
//! });
//! # }
//! ```

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
mod queue;
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
pub use ledger::{Ledger, MemoryKind, MemoryReport, Reservation, Usage, Watch};
#[cfg(all(feature = "dynamic-backends", not(feature = "system")))]
pub use libraries::built_backends;
pub use mapped_file::{Access, AccessHint, MapOptions, MappedFile, Mapping, is_local, pages};
pub use placement::{
    Component, DeviceChoice, Need, Placement, Residence, Seat, Streamed, Wish, peak, seats,
};
pub use queue::{CopyQueue, Event};
pub use serve::{RpcServer, RpcServerOptions};
