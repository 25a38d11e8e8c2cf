//! Linking an installed ggml in place of building one.

use std::fs;
use std::path::{Path, PathBuf};

use crate::env::{Settings, System, Target};
use crate::failure::{Failure, Result};
use crate::{cargo, link, locate};

/// Libraries of an installed ggml, those that need before those that are needed.
const LIBRARIES: [&str; 8] = [
    "ggml",
    "ggml-cuda",
    "ggml-vulkan",
    "ggml-metal",
    "ggml-rpc",
    "ggml-blas",
    "ggml-cpu",
    "ggml-base",
];

/// Tells cargo what to link and returns the folder of the headers.
pub(crate) fn link(settings: &Settings) -> Result<PathBuf> {
    let asked = System::read();
    let Some(folder) = &asked.libraries else {
        return from_pkg_config(&asked);
    };
    let dynamic = shared(folder, "ggml", &settings.target);
    let archive = |name: &str| {
        folder.join(format!("lib{name}.a")).is_file()
            || folder.join(format!("{name}.lib")).is_file()
    };
    if !dynamic && !archive("ggml") {
        return Err(Failure::new(format!(
            "SD_GGML_LIB_DIR={} holds no ggml library",
            folder.display()
        )));
    }
    cargo::link_search(folder);
    for name in LIBRARIES {
        if dynamic && shared(folder, name, &settings.target) {
            cargo::link_library(format!("dylib={name}"));
        } else if !dynamic && archive(name) {
            cargo::link_library(format!("static={name}"));
        }
    }
    if let Some(version) = stated_version(folder) {
        check_version(&version)?;
    }
    if !dynamic {
        link::platform(settings);
        link::cpp(settings);
    }
    match (&asked.headers, folder.parent()) {
        (Some(headers), _) => Ok(headers.clone()),
        (None, Some(prefix)) => Ok(prefix.join("include")),
        (None, None) => Err(Failure::new(
            "SD_GGML_INCLUDE_DIR must name the folder of ggml.h",
        )),
    }
}

/// Whether `folder` has the shared library `name`. On Windows its import library looks like a static one; a DLL is the
/// usual case there.
fn shared(folder: &Path, name: &str, target: &Target) -> bool {
    let file = match target.os.as_str() {
        "windows" => format!("{name}.lib"),
        _ if target.apple() => format!("lib{name}.dylib"),
        _ => format!("lib{name}.so"),
    };
    folder.join(file).is_file()
}

fn from_pkg_config(asked: &System) -> Result<PathBuf> {
    let library = pkg_config::Config::new().probe("ggml").map_err(|error| {
        let error = error.to_string();
        let reason = error.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
        Failure::new(format!(
            "the feature `system` found no installed ggml: install it with its pkg-config file, or set SD_GGML_LIB_DIR \
             to the folder of its libraries ({reason})"
        ))
    })?;
    check_version(&library.version)?;
    let listed = library.include_paths.into_iter().next();
    // Headers in the compiler's own folders are not listed.
    Ok(asked
        .headers
        .clone()
        .or(listed)
        .unwrap_or_else(|| PathBuf::from("/usr/include")))
}

/// The version in the cmake package file that ggml installs beside its libraries.
fn stated_version(folder: &Path) -> Option<String> {
    let text = fs::read_to_string(folder.join("cmake/ggml/ggml-config-version.cmake")).ok()?;
    let rest = text.split("set(PACKAGE_VERSION \"").nth(1)?;
    rest.split('"').next().map(str::to_owned)
}

/// Another version may have other numbers for operations and other structs: nothing would notice before a crash.
fn check_version(found: &str) -> Result<()> {
    if found == locate::BOUND {
        return Ok(());
    }
    Err(Failure::new(format!(
        "the installed ggml is {found} and the bindings are for {}: install that version, or build without the feature \
         `system`",
        locate::BOUND
    )))
}
