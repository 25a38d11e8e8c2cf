//! Which processor the kernels are compiled for, in the words of the compiler.

use std::path::{Path, PathBuf};

use crate::env::{Cpu, Target};
use crate::failure::{Failure, Result};

/// Instruction sets of a portable x86 build: what ggml itself takes when it is not told otherwise. Processors without
/// them are older than 2013; `SD_GGML_CPU=x86-64-v2` builds for those.
pub(crate) const PORTABLE_X86: [&str; 6] = ["sse4.2", "avx", "avx2", "bmi2", "f16c", "fma"];

/// The kernel files written for one family of processors, relative to `src/ggml-cpu`; none for a family ggml does not
/// know.
pub(crate) fn kernels(arch: &str) -> Vec<PathBuf> {
    let (folder, files): (&str, &[&str]) = match arch {
        "x86" | "x86_64" => ("x86", &["quants.c", "repack.cpp"]),
        "arm" | "aarch64" => ("arm", &["quants.c", "repack.cpp"]),
        "riscv64" => ("riscv", &["quants.c", "repack.cpp"]),
        "s390x" => ("s390", &["quants.c", "repack.cpp"]),
        "powerpc64" => ("powerpc", &["quants.c"]),
        "loongarch64" => ("loongarch", &["quants.c"]),
        _ => ("", &[]),
    };
    files
        .iter()
        .map(|file| Path::new("arch").join(folder).join(file))
        .collect()
}

/// Adds the flags for `cpu` to a compiler.
pub(crate) fn flags(build: &mut cc::Build, cpu: &Cpu, target: &Target) -> Result<()> {
    if kernels(&target.arch).is_empty() {
        build.define("GGML_CPU_GENERIC", None);
    }
    if target.msvc() {
        return msvc_flags(build, cpu, target);
    }
    match cpu {
        Cpu::Named(name) => {
            build.flag(format!("-march={name}"));
        }
        Cpu::Native => match target.arch.as_str() {
            "x86" | "x86_64" | "s390x" | "loongarch64" => {
                build.flag("-march=native");
            }
            // Compilers disagree about these, and an unknown one builds the baseline.
            _ => {
                build.flag_if_supported("-mcpu=native");
            }
        },
        Cpu::Portable | Cpu::Variants if target.x86() => {
            for set in PORTABLE_X86 {
                build.flag(format!("-m{set}"));
            }
        }
        Cpu::Portable | Cpu::Variants => {}
    }
    Ok(())
}

/// Microsoft's compiler has a few whole levels, and defines no macro for BMI2.
fn msvc_flags(build: &mut cc::Build, cpu: &Cpu, target: &Target) -> Result<()> {
    if !target.x86() {
        return Err(Failure::new(
            "ggml's ARM kernels do not compile with Microsoft's cl: set CC and CXX to clang-cl, or use a gnu target",
        ));
    }
    let level = match cpu {
        Cpu::Named(name) => Some(name.as_str()),
        Cpu::Native => msvc_native(),
        Cpu::Portable | Cpu::Variants => Some("AVX2"),
    };
    if let Some(level) = level {
        build.flag(format!("/arch:{level}"));
        if level.starts_with("AVX2") || level.starts_with("AVX512") {
            build.define("__BMI2__", None);
        }
    }
    Ok(())
}

/// The highest level of Microsoft's compiler that the building machine has. Extensions of AVX-512 beyond the level
/// stay off: cl gives no way to ask for them one by one.
#[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
fn msvc_native() -> Option<&'static str> {
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512cd")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    if avx512 {
        Some("AVX512")
    } else if is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("bmi2")
    {
        Some("AVX2")
    } else if is_x86_feature_detected!("avx") {
        Some("AVX")
    } else {
        None
    }
}

#[cfg(not(any(target_arch = "x86", target_arch = "x86_64")))]
fn msvc_native() -> Option<&'static str> {
    None
}
