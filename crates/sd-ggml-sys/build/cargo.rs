//! What the build script tells cargo, which listens on the standard output.

#![allow(
    clippy::print_stdout,
    reason = "a build script talks to cargo through its standard output"
)]

use std::fmt::Display;
use std::path::Path;

pub(crate) fn rerun_if_env_changed(name: &str) {
    println!("cargo::rerun-if-env-changed={name}");
}

pub(crate) fn rerun_if_changed(path: &Path) {
    println!("cargo::rerun-if-changed={}", path.display());
}

/// A value that build scripts of direct dependents read as `DEP_GGML_<KEY>`.
pub(crate) fn metadata(key: &str, value: impl Display) {
    println!("cargo::metadata={key}={value}");
}

/// A value that this crate and its tests read with `env!`.
pub(crate) fn compile_time_env(name: &str, value: impl Display) {
    println!("cargo::rustc-env={name}={value}");
}

/// Links a library, named as `[KIND=]NAME`.
pub(crate) fn link_library(kind_and_name: impl Display) {
    println!("cargo::rustc-link-lib={kind_and_name}");
}

#[cfg(any(feature = "_cmake", feature = "system"))]
pub(crate) fn link_search(folder: &Path) {
    println!("cargo::rustc-link-search=native={}", folder.display());
}

pub(crate) fn warning(message: impl Display) {
    println!("cargo::warning={message}");
}

pub(crate) fn error(message: impl Display) {
    println!("cargo::error={message}");
}
