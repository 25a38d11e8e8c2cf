//! Integration tests of `sd-backend`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ledger;
mod mapping;
#[cfg(feature = "rpc")]
mod rpc;
#[cfg(not(feature = "rpc"))]
mod without_rpc;
