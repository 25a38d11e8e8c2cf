//! The command as its users run it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

mod convert;
mod devices;
mod editing;
mod generate;
mod info;
mod plan;
#[cfg(feature = "rpc")]
mod rpc_server;
mod run;
mod sampling;
mod vae;
mod video;

/// The command is there in every build; in one without the feature it says what is missing.
#[cfg(not(feature = "rpc"))]
#[test]
fn the_missing_feature_is_named() {
    let folder = tempfile::tempdir().unwrap();
    run::assert_refused(folder.path(), &["rpc-server"], &["feature `rpc`"]);
}
