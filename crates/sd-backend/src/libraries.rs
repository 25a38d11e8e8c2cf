//! Backends as libraries that are loaded at run time: one program that runs with and without a graphics card.
//!
//! ggml can load them too, but in a release build it does not say why it did not, and it lists a processor twice that is
//! linked and loaded.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};

use libloading::Library;
use sd_ggml_sys as sys;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::log::{self, LogSet};
use crate::registry::{self, Driver};

/// How ggml names the files of backends: `libggml-cuda.so`, `ggml-cuda.dll`.
const PREFIX: &str = if cfg!(windows) { "ggml-" } else { "libggml-" };
const EXTENSION: &str = if cfg!(windows) { "dll" } else { "so" };

impl Device {
    /// Loads the backends of `folder` (`libggml-*.so`, on Windows `ggml-*.dll`; the folder is not searched deeper) and
    /// returns the devices that they have here. From then on these are listed and chosen like any other.
    ///
    /// Of a backend with variants for several processors the best is taken. A backend that is there already, linked or
    /// loaded before, is not loaded a second time. One that cannot be loaded here, such as CUDA's where there is no
    /// driver, is passed over with a line in the log; none of it is an error as long as some backend is there.
    ///
    /// The libraries run with all rights of this process: name a folder as you would name a program to run. They stay
    /// loaded until the process ends. They must come from the version of ggml that [`sd_ggml_sys::VERSION`] names; where
    /// they tell their version, another is refused.
    ///
    /// # Errors
    /// [`Error::Libraries`] for a folder that cannot be listed, or in which there is nothing that can be loaded: it then
    /// says what was tried and why that failed.
    pub fn load_backends(folder: impl AsRef<Path>) -> Result<Vec<Device>> {
        let folder = folder.as_ref();
        let failed = |reason: String| Error::Libraries {
            folder: folder.to_path_buf(),
            reason,
        };
        let backends = list(folder).map_err(|error| failed(error.to_string()))?;
        if backends.is_empty() {
            return Err(failed(format!("there is no {PREFIX}*.{EXTENSION}")));
        }
        let mut drivers = Vec::new();
        let mut reasons = Vec::new();
        for (name, files) in backends {
            let there = registry::lock().driver(&name);
            let driver = match there {
                Some(driver) => {
                    tracing::debug!("backend {name} is there already");
                    driver
                }
                None => match load(&files) {
                    Ok(driver) => registry::lock().add_unless_there(driver),
                    Err(reason) => {
                        tracing::info!("backend {name} is not loaded: {reason}");
                        reasons.push(reason);
                        continue;
                    }
                },
            };
            drivers.push(driver);
        }
        if drivers.is_empty() {
            return Err(failed(reasons.join("; ")));
        }
        Ok(drivers.into_iter().flat_map(Driver::devices).collect())
    }
}

/// The folder of the backends that were built together with this crate, on the machine that built it. For tests and
/// trials: a program that is handed on has them beside itself.
#[cfg(all(feature = "dynamic-backends", not(feature = "system")))]
pub fn built_backends() -> Option<&'static Path> {
    sys::BACKENDS_DIR.map(Path::new)
}

/// The files of backends in a folder by the backend's name, in the order in which they are loaded: the processor's last, as
/// in ggml's own lists.
fn list(folder: &Path) -> std::io::Result<Vec<(String, Vec<PathBuf>)>> {
    let mut found: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path
            .extension()
            .is_none_or(|extension| extension != EXTENSION)
        {
            continue;
        }
        let Some(rest) = path
            .file_stem()
            .and_then(|stem| stem.to_str()?.strip_prefix(PREFIX))
        else {
            continue;
        };
        // `cpu-haswell` is a variant of `cpu`; `base` is what all backends need, and is none.
        let name = rest.split('-').next().unwrap_or(rest).to_owned();
        if name != "base" {
            found.entry(name).or_default().push(path);
        }
    }
    let mut backends: Vec<_> = found.into_iter().collect();
    for (_, files) in &mut backends {
        files.sort();
    }
    backends.sort_by_key(|(name, _)| name == "cpu");
    Ok(backends)
}

/// Loads the best of a backend's files.
fn load(files: &[PathBuf]) -> Result<Driver, String> {
    let mut reasons = Vec::new();
    let mut best: Option<(c_int, Library, &Path)> = None;
    for path in files {
        match open(path) {
            // The first of equals, so that the same folder gives the same choice.
            Ok((score, library)) if best.as_ref().is_none_or(|(most, ..)| score > *most) => {
                best = Some((score, library, path));
            }
            Ok(_) => {}
            Err(reason) => reasons.push(format!("{}: {reason}", file_name(path))),
        }
    }
    let Some((_, library, path)) = best else {
        return Err(reasons.join("; "));
    };
    start(library).map_err(|reason| format!("{}: {reason}", file_name(path)))
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// Opens a library with everything that it needs found. Finding functions when they are first called, as is the usual
/// way, would end the process where one is missing.
#[cfg(unix)]
fn bind(path: &Path) -> Result<Library, libloading::Error> {
    use libloading::os::unix::{Library as Unix, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: this runs the library's initialisers. Who named its folder vouches for them, as `Device::load_backends`
    // says.
    unsafe { Unix::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map(Library::from)
}

#[cfg(not(unix))]
fn bind(path: &Path) -> Result<Library, libloading::Error> {
    // SAFETY: as above.
    unsafe { Library::new(path) }
}

/// Opens a library and asks how well it suits this machine, 1 if it has no opinion.
fn open(path: &Path) -> Result<(c_int, Library), String> {
    let library = bind(path).map_err(|error| error.to_string())?;
    // SAFETY: the types are those of the functions of these names in ggml's headers; they are called while the library
    // is open, and the version is a zero-terminated constant in it.
    unsafe {
        if let Ok(version) =
            library.get::<unsafe extern "C" fn() -> *const c_char>(b"ggml_version\0")
        {
            let version = CStr::from_ptr(version()).to_string_lossy().into_owned();
            if version != sys::VERSION {
                return Err(format!(
                    "is of ggml {version}, and this program of {}",
                    sys::VERSION
                ));
            }
        }
        match library.get::<unsafe extern "C" fn() -> c_int>(b"ggml_backend_score\0") {
            Err(_) => Ok((1, library)),
            Ok(score) => match score() {
                ..=0 => Err("is for another kind of processor".to_owned()),
                score => Ok((score, library)),
            },
        }
    }
}

/// Starts the backend in a library, which then stays loaded.
fn start(library: Library) -> Result<Driver, String> {
    // SAFETY: the types are those of the functions of these names in ggml's headers. From here on the library is never
    // closed: the backend may have threads of its own, and what it registered lies in it.
    unsafe {
        if let Ok(set) = library.get::<LogSet>(b"ggml_log_set\0") {
            // A library that found this program's ggml has nothing of its own to route.
            if *set as usize != sys::ggml_log_set as *const () as usize {
                log::route_copy(*set);
            }
        }
        let init = library
            .get::<unsafe extern "C" fn() -> sys::ggml_backend_reg_t>(b"ggml_backend_init\0")
            .map_err(|_| "is no backend (it has no function ggml_backend_init)".to_owned())?;
        let driver = Driver::from_raw(init());
        std::mem::forget(library);
        let driver = driver.ok_or_else(|| "did not start".to_owned())?;
        let (found, ours) = (driver.api_version(), sys::GGML_BACKEND_API_VERSION as c_int);
        if found == ours {
            Ok(driver)
        } else {
            Err(format!(
                "has version {found} of ggml's interface of backends, and this program {ours}"
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn assert_refused(folder: &Path, parts: &[&str]) {
        let error = Device::load_backends(folder).unwrap_err();
        assert!(matches!(error, Error::Libraries { .. }), "{error}");
        for part in parts {
            assert!(error.to_string().contains(part), "`{part}` in `{error}`");
        }
    }

    #[test]
    fn what_cannot_be_loaded_says_what_was_tried() {
        let folder = std::env::temp_dir().join(format!("sd-libraries-{}", std::process::id()));
        assert_refused(&folder, &["sd-libraries"]);
        std::fs::create_dir(&folder).unwrap();
        assert_refused(&folder, &["there is no", "ggml-*"]);
        for name in ["base", "nothing"] {
            let path = folder.join(format!("{PREFIX}{name}.{EXTENSION}"));
            std::fs::write(path, "not a library").unwrap();
        }
        assert_refused(&folder, &["ggml-nothing"]);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
