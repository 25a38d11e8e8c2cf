//! Programs that a build with cmake calls: found before anything starts, and named in one sentence when missing.

use std::path::{Path, PathBuf};

use crate::env::{Cmake, Settings};
use crate::failure::{Failure, Result};

/// Looks for a program in `first`, then in the search path.
pub(crate) fn find(asked: &Cmake, program: &str, first: Option<&Path>) -> Option<PathBuf> {
    let file = format!("{program}{}", std::env::consts::EXE_SUFFIX);
    first
        .into_iter()
        .chain(asked.path.iter().map(PathBuf::as_path))
        .map(|folder| folder.join(&file))
        .find(|path| path.is_file())
}

/// Fails with what to install when a program is missing.
pub(crate) fn check(settings: &Settings, asked: &Cmake) -> Result<()> {
    if asked.program.is_none() && find(asked, "cmake", None).is_none() {
        return Err(missing(
            "the features `cuda`, `metal`, `vulkan` and `dynamic-backends` need",
            "cmake 3.19 or newer (Debian: `apt-get install cmake`; macOS: `brew install cmake`), or CMAKE naming one",
        ));
    }
    if cfg!(feature = "metal") && !settings.target.apple() {
        return Err(Failure::new(format!(
            "the feature `metal` needs an Apple target, and this is {}",
            settings.target.os
        )));
    }
    if cfg!(feature = "cuda") {
        cuda_toolkit(asked)?;
    }
    if cfg!(feature = "vulkan") {
        let sdk = asked
            .vulkan_sdk
            .as_ref()
            .map(|sdk| sdk.join(if cfg!(windows) { "Bin" } else { "bin" }));
        if find(asked, "glslc", sdk.as_deref()).is_none() {
            return Err(missing(
                "the feature `vulkan` needs",
                "glslc, the Vulkan headers and loader and the SPIR-V headers (Debian: `apt-get install glslc libvulkan-dev \
                 spirv-headers`; elsewhere the Vulkan SDK, with VULKAN_SDK naming it)",
            ));
        }
    }
    Ok(())
}

/// The folder of the CUDA toolkit: as named by the user, or around the `nvcc` in the search path.
pub(crate) fn cuda_toolkit(asked: &Cmake) -> Result<PathBuf> {
    let named = asked
        .cuda_toolkit
        .as_ref()
        .map(|toolkit| toolkit.join("bin"));
    let usual = Path::new("/usr/local/cuda/bin");
    let nvcc = find(asked, "nvcc", named.as_deref().or(Some(usual)));
    let nvcc = nvcc.and_then(|nvcc| nvcc.canonicalize().ok());
    nvcc.as_deref()
        .and_then(Path::parent)
        .and_then(Path::parent)
        .map(Path::to_path_buf)
        .ok_or_else(|| {
            missing(
                "the feature `cuda` needs",
                "the CUDA toolkit with nvcc, on the PATH or named by CUDA_PATH",
            )
        })
}

fn missing(who_needs: &str, what: &str) -> Failure {
    Failure::new(format!("{who_needs} {what}"))
}

/// What the backends of this build need, for the message when cmake fails.
pub(crate) fn needed() -> &'static str {
    if cfg!(feature = "vulkan") {
        "Vulkan needs glslc, the Vulkan headers and loader, and the SPIR-V headers with their cmake files"
    } else if cfg!(feature = "cuda") {
        "CUDA needs a toolkit whose nvcc supports this C++ compiler and the asked architectures"
    } else {
        "a C11 and C++17 compiler and cmake 3.19 are needed"
    }
}
