//! ggml with its CPU backend, compiled by the C and C++ compiler alone: no cmake, no Python, no libclang.

use std::path::{Path, PathBuf};

use crate::cargo;
use crate::env::{Cpu, Settings, Target};
use crate::failure::{Failure, Result};

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

const CPU: [&str; 14] = [
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
    "tiled/tiled.cpp",
    "tiled/tiled-kernel.cpp",
    "traits.cpp",
    "unary-ops.cpp",
];

const RPC: [&str; 2] = ["ggml-rpc.cpp", "transport.cpp"];

/// Compiles everything into one static library and tells cargo to link it.
pub(crate) fn build(settings: &Settings, ggml: &Path, generated: &Path) -> Result<()> {
    let source = ggml.join("src");
    let cpu = source.join("ggml-cpu");
    let mut files: Vec<PathBuf> = BASE.iter().map(|file| source.join(file)).collect();
    files.extend(CPU.iter().map(|file| cpu.join(file)));
    files.push(cpu.join("vec.cpp"));
    files.extend(arch_files(&cpu, &settings.target.arch));
    if settings.rpc {
        files.extend(RPC.iter().map(|file| source.join("ggml-rpc").join(file)));
    }
    let (cpp, c): (Vec<_>, Vec<_>) = files.into_iter().partition(|file| file.extension().is_some_and(|e| e == "cpp"));

    let mut objects = Vec::new();
    for (language, files) in [(Language::C, c), (Language::Cpp, cpp)] {
        let mut build = compiler(settings, ggml, generated, language);
        // Objects of `ggml-cpu.c` and `ggml-cpu.cpp` would otherwise have one name.
        build.out_dir(settings.out.join(language.folder()));
        build.files(files);
        objects.extend(build.try_compile_intermediates().map_err(|error| failed(&error))?);
    }
    let mut archive = compiler(settings, ggml, generated, Language::Cpp);
    archive.objects(objects);
    archive.try_compile("ggml").map_err(|error| failed(&error))?;
    link_system_libraries(settings);
    Ok(())
}

fn failed(error: &cc::Error) -> Failure {
    Failure::new(format!("ggml did not compile; a C11 and C++17 compiler is needed (set CC and CXX to choose one): {error}"))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Language {
    C,
    Cpp,
}

impl Language {
    fn folder(self) -> &'static str {
        match self {
            Self::C => "objects-c",
            Self::Cpp => "objects-cpp",
        }
    }
}

/// The kernels written for one processor family.
fn arch_files(cpu: &Path, arch: &str) -> Vec<PathBuf> {
    let (folder, files): (&str, &[&str]) = match arch {
        "x86" | "x86_64" => ("x86", &["quants.c", "repack.cpp"]),
        "arm" | "aarch64" => ("arm", &["quants.c", "repack.cpp"]),
        "riscv64" => ("riscv", &["quants.c", "repack.cpp"]),
        "s390x" => ("s390", &["quants.c", "repack.cpp"]),
        "powerpc64" => ("powerpc", &["quants.c"]),
        "loongarch64" => ("loongarch", &["quants.c"]),
        _ => return Vec::new(),
    };
    files.iter().map(|file| cpu.join("arch").join(folder).join(file)).collect()
}

fn compiler(settings: &Settings, ggml: &Path, generated: &Path, language: Language) -> cc::Build {
    let target = &settings.target;
    let mut build = cc::Build::new();
    // The speed of the kernels must not depend on the profile of the program around them.
    build.opt_level(3).debug(false).define("NDEBUG", None);
    build.warnings(false).extra_warnings(false);
    let msvc = target.env == "msvc";
    match (language, msvc) {
        (Language::C, false) => build.std("gnu11"),
        (Language::C, true) => build.std("c11"),
        (Language::Cpp, false) => build.cpp(true).std("gnu++17"),
        (Language::Cpp, true) => build.cpp(true).std("c++17"),
    };
    build.include(ggml.join("include"));
    build.include(ggml.join("src"));
    build.include(ggml.join("src/ggml-cpu"));
    build.include(generated);
    build.define("GGML_SCHED_MAX_COPIES", "4");
    build.define("GGML_USE_CPU", None);
    build.define("GGML_USE_CPU_REPACK", None);
    build.define("GGML_USE_LLAMAFILE", None);
    if settings.rpc {
        build.define("GGML_USE_RPC", None);
    }
    platform_defines(&mut build, target);
    if msvc {
        build.flag("/utf-8").define("_CRT_SECURE_NO_WARNINGS", None);
    } else {
        // Assertions name the source file: without the folder of this machine.
        build.flag_if_supported(format!("-fmacro-prefix-map={}=ggml", ggml.display()));
    }
    arch_flags(&mut build, &settings.cpu, target);
    if settings.openmp {
        build.define("GGML_USE_OPENMP", None);
        build.flag(if msvc { "/openmp" } else { "-fopenmp" });
    }
    build
}

fn platform_defines(build: &mut cc::Build, target: &Target) {
    build.define("_XOPEN_SOURCE", if target.os == "openbsd" { "700" } else { "600" });
    match target.os.as_str() {
        "linux" | "android" => build.define("_GNU_SOURCE", None),
        "macos" | "ios" | "tvos" | "visionos" | "dragonfly" => build.define("_DARWIN_C_SOURCE", None),
        "freebsd" => build.define("__BSD_VISIBLE", None),
        "netbsd" => build.define("_NETBSD_SOURCE", None),
        "openbsd" => build.define("_BSD_SOURCE", None),
        _ => build,
    };
}

fn arch_flags(build: &mut cc::Build, cpu: &Cpu, target: &Target) {
    let x86 = matches!(target.arch.as_str(), "x86" | "x86_64");
    match cpu {
        Cpu::Named(name) => {
            build.flag(format!("-march={name}"));
        }
        Cpu::Native if x86 => {
            build.flag("-march=native");
        }
        Cpu::Native => {
            build.flag_if_supported("-mcpu=native");
        }
        Cpu::Portable if x86 => {
            for flag in ["-msse4.2", "-mavx", "-mavx2", "-mfma", "-mf16c", "-mbmi2"] {
                build.flag(flag);
            }
        }
        Cpu::Portable => {}
    }
}

fn link_system_libraries(settings: &Settings) {
    match settings.target.os.as_str() {
        "windows" => cargo::link_library("advapi32"),
        "macos" => cargo::link_library("framework=Accelerate"),
        _ => {}
    }
    if settings.openmp && settings.target.env != "msvc" {
        cargo::link_library("gomp");
    }
}
