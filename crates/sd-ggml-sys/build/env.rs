//! Every environment variable the build script reads by itself. The table in `README.md` documents each.

use std::env;
use std::path::PathBuf;

use crate::cargo;
use crate::failure::{Failure, Result};

/// What is built and for what, as cargo and the user say it.
pub(crate) struct Settings {
    /// The cargo that runs this build.
    pub(crate) cargo: PathBuf,
    /// The folder of this package.
    pub(crate) manifest: PathBuf,
    /// The folder this build may write to.
    pub(crate) out: PathBuf,
    pub(crate) target: Target,
    /// docs.rs is building: no compiler, no network, bindings only.
    pub(crate) docs_only: bool,
    pub(crate) cpu: Cpu,
    /// A ggml tree of the user's own, taken as it is.
    pub(crate) source: Option<PathBuf>,
}

/// What only a build with cmake asks for.
#[cfg(feature = "_cmake")]
pub(crate) struct Cmake {
    /// The cmake to run; the `cmake` crate reads the same variable.
    pub(crate) program: Option<PathBuf>,
    pub(crate) generator: Option<String>,
    /// Further definitions, as name and value.
    pub(crate) definitions: Vec<(String, String)>,
    /// CUDA architectures in cmake's words, `;` between them.
    pub(crate) cuda_architectures: Option<String>,
    pub(crate) cuda_toolkit: Option<PathBuf>,
    pub(crate) vulkan_sdk: Option<PathBuf>,
    /// Where programs are looked for.
    pub(crate) path: Vec<PathBuf>,
}

#[cfg(feature = "_cmake")]
impl Cmake {
    pub(crate) fn read() -> Result<Self> {
        Ok(Self {
            program: user("CMAKE").map(PathBuf::from),
            generator: user("CMAKE_GENERATOR"),
            definitions: cmake_definitions()?,
            cuda_architectures: cuda_architectures()?,
            cuda_toolkit: user("CUDA_PATH")
                .or_else(|| user("CUDA_HOME"))
                .map(PathBuf::from),
            vulkan_sdk: user("VULKAN_SDK").map(PathBuf::from),
            path: env::var_os("PATH")
                .map(|path| env::split_paths(&path).collect())
                .unwrap_or_default(),
        })
    }
}

/// Where an installed ggml lies.
#[cfg(feature = "system")]
pub(crate) struct System {
    pub(crate) libraries: Option<PathBuf>,
    pub(crate) headers: Option<PathBuf>,
}

#[cfg(feature = "system")]
impl System {
    pub(crate) fn read() -> Self {
        Self {
            libraries: user("SD_GGML_LIB_DIR").map(PathBuf::from),
            headers: user("SD_GGML_INCLUDE_DIR").map(PathBuf::from),
        }
    }
}

/// The machine that is built for.
pub(crate) struct Target {
    pub(crate) arch: String,
    pub(crate) os: String,
    pub(crate) env: String,
    pub(crate) vendor: String,
}

impl Target {
    pub(crate) fn msvc(&self) -> bool {
        self.env == "msvc"
    }

    pub(crate) fn apple(&self) -> bool {
        self.vendor == "apple"
    }

    pub(crate) fn x86(&self) -> bool {
        matches!(self.arch.as_str(), "x86" | "x86_64")
    }
}

/// For which processor the CPU kernels are compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cpu {
    /// The processor of the machine that builds.
    Native,
    /// What ggml calls its default: AVX2 on x86, the baseline elsewhere.
    Portable,
    /// A name for the compiler's `-march`.
    Named(String),
    /// One loadable library for each generation of processors, chosen when the program starts.
    Variants,
}

impl Settings {
    pub(crate) fn read() -> Result<Self> {
        let cross = from_cargo("TARGET")? != from_cargo("HOST")?;
        Ok(Self {
            cargo: from_cargo("CARGO")?.into(),
            manifest: from_cargo("CARGO_MANIFEST_DIR")?.into(),
            out: from_cargo("OUT_DIR")?.into(),
            target: Target {
                arch: from_cargo("CARGO_CFG_TARGET_ARCH")?,
                os: from_cargo("CARGO_CFG_TARGET_OS")?,
                env: env::var("CARGO_CFG_TARGET_ENV").unwrap_or_default(),
                vendor: env::var("CARGO_CFG_TARGET_VENDOR").unwrap_or_default(),
            },
            docs_only: user("DOCS_RS").is_some(),
            cpu: cpu(user("SD_GGML_CPU"), cross)?,
            source: user("SD_GGML_SOURCE").map(PathBuf::from),
        })
    }
}

/// Whether the CPU backend takes its threads from OpenMP.
pub(crate) const OPENMP: bool = cfg!(feature = "openmp");

/// A variable that cargo always sets.
fn from_cargo(name: &str) -> Result<String> {
    env::var(name).map_err(|_| Failure::new(format!("cargo did not set {name}")))
}

/// A variable set by the user; a change of it runs the build script again. Empty is the same as unset.
fn user(name: &str) -> Option<String> {
    cargo::rerun_if_env_changed(name);
    env::var(name).ok().filter(|value| !value.trim().is_empty())
}

fn cpu(asked: Option<String>, cross: bool) -> Result<Cpu> {
    let dynamic = cfg!(feature = "dynamic-backends");
    match asked.as_deref() {
        None if dynamic => Ok(Cpu::Variants),
        None if cfg!(feature = "native") && !cross => Ok(Cpu::Native),
        None | Some("portable") => Ok(Cpu::Portable),
        Some("native") if cross => Err(Failure::new(
            "SD_GGML_CPU=native names the building machine's processor, and this build is for another target: \
             say `portable` or a name for the compiler's -march",
        )),
        Some("native") if dynamic => Err(Failure::new(
            "SD_GGML_CPU=native does not go with the feature `dynamic-backends`: ggml builds loadable CPU backends \
             for named processors only",
        )),
        Some("native") => Ok(Cpu::Native),
        Some(name) => Ok(Cpu::Named(name.to_owned())),
    }
}

/// `CMAKE_CUDA_ARCHITECTURES` as it is, or `CUDA_COMPUTE_CAP` (`90`, `9.0`, or several with commas) in cmake's words.
#[cfg(feature = "_cmake")]
fn cuda_architectures() -> Result<Option<String>> {
    let capability = user("CUDA_COMPUTE_CAP");
    if let Some(architectures) = user("CMAKE_CUDA_ARCHITECTURES") {
        return Ok(Some(architectures));
    }
    let Some(capability) = capability else {
        return Ok(None);
    };
    let mut architectures = Vec::new();
    for one in capability.split([',', ';']) {
        let number = one.trim().replace('.', "");
        if !number.starts_with(|first: char| first.is_ascii_digit()) {
            return Err(Failure::new(format!(
                "CUDA_COMPUTE_CAP={capability} is no compute capability such as 90 or 8.6"
            )));
        }
        architectures.push(number);
    }
    Ok(Some(architectures.join(";")))
}

#[cfg(feature = "_cmake")]
fn cmake_definitions() -> Result<Vec<(String, String)>> {
    let text = user("SD_GGML_CMAKE_DEFINES").unwrap_or_default();
    text.split_whitespace()
        .map(|definition| {
            let (name, value) = definition.split_once('=').ok_or_else(|| {
                Failure::new(format!(
                    "SD_GGML_CMAKE_DEFINES: `{definition}` is not NAME=VALUE"
                ))
            })?;
            Ok((name.to_owned(), value.to_owned()))
        })
        .collect()
}

/// The C++ standard library to link, `Some("")` for none: the same variable as the `cc` crate reads.
#[cfg(any(feature = "_cmake", feature = "system"))]
pub(crate) fn cpp_library() -> Option<String> {
    cargo::rerun_if_env_changed("CXXSTDLIB");
    env::var("CXXSTDLIB").ok()
}
