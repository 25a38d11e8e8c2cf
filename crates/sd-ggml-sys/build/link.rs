//! What ggml needs from the system it runs on.

use crate::cargo;
use crate::env::{Settings, Target};
use crate::failure::{Failure, Result};

/// Libraries of the operating system.
pub(crate) fn platform(settings: &Settings) {
    let target = &settings.target;
    if target.os == "windows" {
        cargo::link_library("advapi32");
        if cfg!(feature = "rpc") {
            cargo::link_library("ws2_32");
        }
    }
    if target.apple() {
        cargo::link_library("framework=Accelerate");
    }
}

/// The runtime library that `compiler` has for OpenMP.
pub(crate) fn openmp(compiler: &cc::Build, target: &Target) -> Result<()> {
    if target.msvc() {
        return Ok(());
    }
    if target.apple() {
        return Err(Failure::new(
            "the feature `openmp` needs a runtime that Apple's compiler lacks: build without it, ggml has its own threads",
        ));
    }
    let tool = compiler
        .try_get_compiler()
        .map_err(|error| Failure::new(format!("no C++ compiler: {error}")))?;
    cargo::link_library(if tool.is_like_clang() { "omp" } else { "gomp" });
    Ok(())
}

/// The C++ standard library, where no call of the `cc` crate links it.
#[cfg(any(feature = "_cmake", feature = "system"))]
pub(crate) fn cpp(settings: &Settings) {
    let target = &settings.target;
    let chosen = crate::env::cpp_library();
    let name = match chosen.as_deref() {
        Some("") => return,
        Some(name) => name,
        None if target.msvc() => return,
        None if target.apple() || target.os.ends_with("bsd") => "c++",
        None if target.os == "android" => "c++_shared",
        None => "stdc++",
    };
    cargo::link_library(name);
}
