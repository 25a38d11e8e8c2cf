//! Backends that are loaded when the program runs.

use std::path::Path;

use sd_backend::Device;

use crate::error::Error;

/// Loads the backends of `folder`, or of the place where a program without any of its own finds them.
pub(crate) fn load(folder: Option<&Path>) -> Result<(), Error> {
    match folder {
        Some(folder) => {
            Device::load_backends(folder)?;
            Ok(())
        }
        None => load_usual(),
    }
}

/// A program with its backends linked needs no others.
#[cfg(not(all(feature = "dynamic-backends", not(feature = "system"))))]
fn load_usual() -> Result<(), Error> {
    Ok(())
}

/// Where people put libraries of a program: beside it. While developing they lie where they were built; the name of that
/// folder must not be followed on other machines, where anybody might make it.
#[cfg(all(feature = "dynamic-backends", not(feature = "system")))]
fn load_usual() -> Result<(), Error> {
    let program = std::env::current_exe().unwrap_or_default();
    let beside = program.parent().unwrap_or(Path::new("."));
    let error = match Device::load_backends(beside) {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    match sd_backend::built_backends().filter(|_| cfg!(debug_assertions)) {
        Some(built) => {
            Device::load_backends(built)?;
            Ok(())
        }
        None => Err(error.into()),
    }
}
