//! Devices and memory against a device that fails on demand.
#![allow(clippy::unwrap_used, clippy::panic)]

mod ledger;
mod mapping;
