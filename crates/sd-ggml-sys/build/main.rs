//! Finds, patches and compiles ggml, or links an installed one. Every step has its own file; every error is one
//! sentence.

#![cfg_attr(
    any(feature = "_cmake", feature = "system"),
    allow(dead_code, reason = "one way of building leaves the others unused")
)]

mod arch;
#[cfg(feature = "bindgen")]
mod bindings;
mod cargo;
#[cfg(feature = "_cmake")]
mod cmake;
mod copy;
mod cpu;
mod digest;
mod env;
mod failure;
mod link;
mod locate;
mod patches;
#[cfg(any(feature = "_cmake", feature = "bindgen"))]
mod quietly;
mod source;
#[cfg(feature = "system")]
mod system;
#[cfg(feature = "_cmake")]
mod tools;

use std::path::PathBuf;
use std::process::ExitCode;

use env::Settings;
use failure::Result;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            cargo::error(failure);
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let settings = Settings::read()?;
    for input in ["build", "cmake", "src/wrapper.h"] {
        cargo::rerun_if_changed(&settings.manifest.join(input));
    }
    if settings.docs_only {
        return Ok(());
    }
    let headers = build(&settings)?;
    #[cfg(feature = "bindgen")]
    generate_bindings(&settings, &headers)?;
    describe(&headers);
    Ok(())
}

/// The backends of this build besides ggml itself, those that need others first.
fn backends() -> Vec<&'static str> {
    let all = [
        ("cuda", cfg!(feature = "cuda")),
        ("metal", cfg!(feature = "metal")),
        ("vulkan", cfg!(feature = "vulkan")),
        ("rpc", cfg!(feature = "rpc")),
        ("cpu", true),
    ];
    all.iter()
        .filter(|(_, wanted)| *wanted)
        .map(|(name, _)| *name)
        .collect()
}

/// Finds the installed ggml and returns the folders of its headers.
#[cfg(feature = "system")]
fn build(settings: &Settings) -> Result<Vec<PathBuf>> {
    let mut headers = vec![system::link(settings)?];
    // The header of the backend interface is never installed; the version was compared, so ours describes it.
    if cfg!(feature = "bindgen") && !headers[0].join("ggml-backend-impl.h").is_file() {
        headers.push(locate::tree(settings)?.root.join("src"));
    }
    Ok(headers)
}

/// Builds ggml and returns the folders of its headers, the public ones first.
#[cfg(not(feature = "system"))]
fn build(settings: &Settings) -> Result<Vec<PathBuf>> {
    let tree = locate::tree(settings)?;
    compile(settings, &tree)?;
    cargo::metadata("ROOT", tree.root.display());
    cargo::metadata("VERSION", &tree.version);
    cargo::metadata("BACKENDS", backends().join(","));
    Ok(vec![tree.root.join("include"), tree.root.join("src")])
}

/// Cargo features only add, so a build with a GPU backend has the CPU backend from the same cmake files.
#[cfg(all(feature = "_cmake", not(feature = "system")))]
fn compile(settings: &Settings, tree: &locate::Tree) -> Result<()> {
    if let Some(loadable) = cmake::build(settings, tree)? {
        cargo::metadata("LIB_DIR", loadable.libraries.display());
        cargo::metadata("BACKENDS_DIR", loadable.backends.display());
        cargo::compile_time_env("SD_GGML_BACKENDS_DIR", loadable.backends.display());
    }
    Ok(())
}

#[cfg(not(any(feature = "_cmake", feature = "system")))]
fn compile(settings: &Settings, tree: &locate::Tree) -> Result<()> {
    cpu::build(settings, tree)
}

#[cfg(feature = "bindgen")]
fn generate_bindings(settings: &Settings, headers: &[PathBuf]) -> Result<()> {
    use failure::Failure;
    let wrapper = settings.manifest.join("src/wrapper.h");
    let generated = quietly::run(|| bindings::builder(headers, &wrapper).generate());
    let failed = |reason: String| {
        Failure::new(format!(
            "the feature `bindgen` needs libclang (Debian: `apt-get install libclang-dev`; elsewhere LLVM, with \
             LIBCLANG_PATH naming the folder of the library) ({reason})"
        ))
    };
    let generated = generated
        .map_err(failed)?
        .map_err(|error| failed(error.to_string()))?;
    let path = settings.out.join("bindings.rs");
    generated
        .write_to_file(&path)
        .map_err(|error| Failure::io("write", &path, &error))
}

/// Tells dependents, and the tests of this crate, where the headers are.
fn describe(headers: &[PathBuf]) {
    if let Some(public) = headers.first() {
        cargo::metadata("INCLUDE", public.display());
    }
    let all = std::env::join_paths(headers).unwrap_or_default();
    cargo::compile_time_env("SD_GGML_HEADERS", all.to_string_lossy());
    // Not a dev-dependency on `cc`: sharing a crate with the build script changes how cargo compiles the script, and
    // ggml would be built once for `cargo build` and once more for `cargo test`.
    if let Ok(compiler) = cc::Build::new().cargo_metadata(false).try_get_compiler() {
        cargo::compile_time_env("SD_GGML_CC", compiler.path().display());
    }
}
