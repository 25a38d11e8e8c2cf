//! Integration tests of `sd-backend`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[cfg(target_os = "linux")]
mod libraries;
// Where nothing is linked, everything else would have to load it first: there, loading is what is tested.
#[cfg(not(feature = "dynamic-backends"))]
mod ledger;
#[cfg(all(feature = "dynamic-backends", not(feature = "system")))]
mod loaded;
#[cfg(not(feature = "dynamic-backends"))]
mod mapping;
#[cfg(all(feature = "rpc", not(feature = "dynamic-backends")))]
mod rpc;
#[cfg(not(any(feature = "rpc", feature = "dynamic-backends")))]
mod without_rpc;
