//! ggml with its CPU backend (and the one for remote devices), compiled by the C and C++ compiler alone: no cmake, no
//! Python, no libclang.

use std::path::PathBuf;

use crate::env::{Cpu, OPENMP, Settings, Target};
use crate::failure::{Failure, Result};
use crate::locate::Tree;
use crate::{arch, copy, link};

/// In `src`: tensors, graphs, the allocator, files, the registry of backends.
const BASE: [&str; 11] = [
    "ggml.c",
    "ggml.cpp",
    "ggml-alloc.c",
    "ggml-backend.cpp",
    "ggml-backend-dl.cpp",
    "ggml-backend-meta.cpp",
    "ggml-backend-reg.cpp",
    "ggml-opt.cpp",
    "ggml-quants.c",
    "ggml-threading.cpp",
    "gguf.cpp",
];

/// In `src/ggml-cpu`, besides the kernels of one processor family.
const CPU: [&str; 15] = [
    "amx/amx.cpp",
    "amx/mmq.cpp",
    "binary-ops.cpp",
    "ggml-cpu.c",
    "ggml-cpu.cpp",
    "hbm.cpp",
    "llamafile/sgemm.cpp",
    "ops.cpp",
    "quants.c",
    "repack.cpp",
    "tiled/tiled-kernel.cpp",
    "tiled/tiled.cpp",
    "traits.cpp",
    "unary-ops.cpp",
    "vec.cpp",
];

/// In `src/ggml-rpc`.
const RPC: [&str; 2] = ["ggml-rpc.cpp", "transport.cpp"];

#[derive(Clone, Copy)]
enum Language {
    C,
    Cpp,
}

/// Compiles everything into one static library and tells cargo to link it.
pub(crate) fn build(settings: &Settings, tree: &Tree) -> Result<()> {
    let generated = settings.out.join("generated");
    let version = format!(
        "#pragma once\n#define GGML_VERSION \"{}\"\n#define GGML_COMMIT \"unknown\"\n",
        tree.version
    );
    copy::write_if_new(&generated.join("ggml-version.h"), version.as_bytes())?;

    let (cpp, c): (Vec<_>, Vec<_>) = files(settings, tree)
        .into_iter()
        .partition(|file| file.extension().is_some_and(|name| name == "cpp"));
    let mut objects = Vec::new();
    // In folders of their own: `ggml-cpu.c` and `ggml-cpu.cpp` would make one object file.
    for (language, files, folder) in [
        (Language::C, c, "objects-c"),
        (Language::Cpp, cpp, "objects-cpp"),
    ] {
        let mut build = compiler(settings, tree, language)?;
        build.out_dir(settings.out.join(folder)).files(files);
        objects.extend(
            build
                .try_compile_intermediates()
                .map_err(|error| failed(settings, &error))?,
        );
    }
    // The archiving call also links the C++ standard library.
    let mut archive = compiler(settings, tree, Language::Cpp)?;
    if OPENMP {
        link::openmp(&archive, &settings.target)?;
    }
    archive
        .objects(objects)
        .try_compile("ggml")
        .map_err(|error| failed(settings, &error))?;
    link::platform(settings);
    Ok(())
}

fn files(settings: &Settings, tree: &Tree) -> Vec<PathBuf> {
    let source = tree.root.join("src");
    let cpu = source.join("ggml-cpu");
    let mut files: Vec<PathBuf> = BASE.iter().map(|file| source.join(file)).collect();
    files.extend(CPU.iter().map(|file| cpu.join(file)));
    files.extend(
        arch::kernels(&settings.target.arch)
            .iter()
            .map(|file| cpu.join(file)),
    );
    if cfg!(feature = "rpc") {
        files.extend(RPC.iter().map(|file| source.join("ggml-rpc").join(file)));
    }
    files
}

fn failed(settings: &Settings, error: &cc::Error) -> Failure {
    let hint = match settings.cpu {
        Cpu::Native => "; if this compiler does not know this processor, set SD_GGML_CPU=portable",
        _ => "",
    };
    // Without the command line: it is long, and the compiler's own words are above.
    let error = error.to_string();
    let reason = error.split(": \"").next().unwrap_or_default();
    Failure::new(format!(
        "ggml did not compile: a C11 and C++17 compiler is needed (CC and CXX choose one){hint} ({reason})"
    ))
}

fn compiler(settings: &Settings, tree: &Tree, language: Language) -> Result<cc::Build> {
    let target = &settings.target;
    let mut build = cc::Build::new();
    // The speed of the kernels must not depend on the profile of the program around them.
    build.opt_level(3).debug(false).define("NDEBUG", None);
    build.warnings(false);
    // GNU dialects, as ggml's own build has them: the strict ones forbid fused multiply-add.
    match (language, target.msvc()) {
        (Language::C, false) => build.std("gnu11"),
        (Language::C, true) => build.std("c11"),
        (Language::Cpp, false) => build.cpp(true).std("gnu++17"),
        (Language::Cpp, true) => build.cpp(true).std("c++17"),
    };
    for folder in ["include", "src", "src/ggml-cpu"] {
        build.include(tree.root.join(folder));
    }
    build.include(settings.out.join("generated"));
    build.define("GGML_SCHED_MAX_COPIES", "4");
    build
        .define("GGML_USE_CPU", None)
        .define("GGML_USE_CPU_REPACK", None)
        .define("GGML_USE_LLAMAFILE", None);
    if cfg!(feature = "rpc") {
        build.define("GGML_USE_RPC", None);
    }
    if target.msvc() {
        build.flag("/utf-8");
    } else {
        // ggml's assertions print the name of the source file: without the folders of this machine.
        build.flag_if_supported(format!("-fmacro-prefix-map={}=ggml", tree.root.display()));
    }
    platform_defines(&mut build, target);
    arch::flags(&mut build, &settings.cpu, target)?;
    if OPENMP {
        build
            .define("GGML_USE_OPENMP", None)
            .flag(if target.msvc() { "/openmp" } else { "-fopenmp" });
    }
    Ok(build)
}

/// Which parts of the C library are visible, as ggml's own build asks for them.
fn platform_defines(build: &mut cc::Build, target: &Target) {
    if target.os != "windows" {
        build.define(
            "_XOPEN_SOURCE",
            if target.os == "openbsd" { "700" } else { "600" },
        );
    }
    match target.os.as_str() {
        "linux" | "android" => build.define("_GNU_SOURCE", None),
        "macos" | "ios" | "tvos" | "dragonfly" => build.define("_DARWIN_C_SOURCE", None),
        "freebsd" => build.define("__BSD_VISIBLE", None),
        "netbsd" => build.define("_NETBSD_SOURCE", None),
        "openbsd" => build.define("_BSD_SOURCE", None),
        "windows" => build.define("_CRT_SECURE_NO_WARNINGS", None),
        _ => build,
    };
    if target.apple() {
        build.define("GGML_USE_ACCELERATE", None);
        build
            .define("ACCELERATE_NEW_LAPACK", None)
            .define("ACCELERATE_LAPACK_ILP64", None);
    }
}
