//! Every environment variable the build script reads, and nothing else reads one.

use std::env;
use std::path::PathBuf;

use crate::cargo;
use crate::failure::{Failure, Result};

/// Takes a variable set by the user; a change of it runs the build script again.
fn user(name: &str) -> Option<String> {
    cargo::rerun_if_env_changed(name);
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// Takes a variable that cargo always sets.
fn from_cargo(name: &str) -> Result<String> {
    env::var(name).map_err(|_| Failure::new(format!("cargo did not set {name}")))
}

/// For which processor the CPU kernels are compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cpu {
    /// The processor of the machine that builds.
    Native,
    /// What every processor of the target of the last ten years has.
    Portable,
    /// A name for the compiler's `-march`.
    Named(String),
}

/// What is built and for what, as cargo and the user say it.
pub(crate) struct Settings {
    pub(crate) cargo: PathBuf,
    pub(crate) manifest: PathBuf,
    pub(crate) out: PathBuf,
    /// docs.rs builds: no compiler, no network, bindings only.
    pub(crate) docs_only: bool,
    /// `DEP_*`-independent facts about the target.
    pub(crate) target: Target,
    pub(crate) cpu: Cpu,
    /// A ggml tree of the user's own, taken as it is.
    pub(crate) source: Option<PathBuf>,
    pub(crate) openmp: bool,
    pub(crate) rpc: bool,
}

/// The machine that is built for.
pub(crate) struct Target {
    pub(crate) arch: String,
    pub(crate) os: String,
    pub(crate) env: String,
}

impl Settings {
    pub(crate) fn read() -> Result<Self> {
        let native = feature("NATIVE") && from_cargo("HOST")? == from_cargo("TARGET")?;
        let cpu = match user("SD_GGML_CPU").as_deref() {
            None if native => Cpu::Native,
            None | Some("portable") => Cpu::Portable,
            Some("native") => Cpu::Native,
            Some(name) => Cpu::Named(name.to_owned()),
        };
        Ok(Self {
            cargo: from_cargo("CARGO")?.into(),
            manifest: from_cargo("CARGO_MANIFEST_DIR")?.into(),
            out: from_cargo("OUT_DIR")?.into(),
            docs_only: user("DOCS_RS").is_some(),
            target: Target {
                arch: from_cargo("CARGO_CFG_TARGET_ARCH")?,
                os: from_cargo("CARGO_CFG_TARGET_OS")?,
                env: env::var("CARGO_CFG_TARGET_ENV").unwrap_or_default(),
            },
            cpu,
            source: user("SD_GGML_SOURCE").map(PathBuf::from),
            openmp: feature("OPENMP"),
            rpc: feature("RPC"),
        })
    }
}

fn feature(name: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{name}")).is_some()
}
