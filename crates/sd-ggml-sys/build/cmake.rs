//! ggml through its own cmake files, for backends that need more than a C++ compiler.

use std::path::{Path, PathBuf};

use crate::arch::PORTABLE_X86;
use crate::env::{Cmake, Cpu, OPENMP, Settings};
use crate::failure::{Failure, Result};
use crate::locate::Tree;
use crate::{cargo, link, quietly, tools};

const DYNAMIC: bool = cfg!(feature = "dynamic-backends");

/// What a program needs beside itself when its backends are loaded at run time.
pub(crate) struct Loadable {
    /// The folder of `ggml` and `ggml-base`.
    pub(crate) libraries: PathBuf,
    /// The folder of the backends.
    pub(crate) backends: PathBuf,
}

/// Configures, builds and installs ggml into `OUT_DIR`, and tells cargo what to link.
pub(crate) fn build(settings: &Settings, tree: &Tree) -> Result<Option<Loadable>> {
    let asked = Cmake::read()?;
    tools::check(settings, &asked)?;
    let mut config = cmake::Config::new(settings.manifest.join("cmake"));
    // Release whatever cargo's profile is: the speed of the kernels must not depend on it.
    config
        .profile("Release")
        .out_dir(settings.out.join("cmake"));
    if settings.target.msvc() {
        // For Visual Studio the cmake crate sets the release flags itself and drops these.
        for flag in ["/O2", "/Ob2", "/DNDEBUG"] {
            config.cflag(flag).cxxflag(flag);
        }
    } else if asked.generator.is_none() && tools::find(&asked, "ninja", None).is_some() {
        config.generator("Ninja");
    }
    config.define("GGML_TREE", &tree.root);
    for (name, value) in options(settings, &asked) {
        config.define(name, value);
    }
    for (name, value) in &asked.definitions {
        config.define(name, value);
    }
    if let (Cpu::Named(name), true) = (&settings.cpu, settings.target.x86()) {
        let flag = if settings.target.msvc() {
            "/arch:"
        } else {
            "-march="
        };
        config
            .cflag(format!("{flag}{name}"))
            .cxxflag(format!("{flag}{name}"));
    }
    if !settings.target.msvc() {
        let map = format!("-fmacro-prefix-map={}=ggml", tree.root.display());
        config.cflag(&map).cxxflag(&map);
    }
    let installed = quietly::run(|| config.build()).map_err(|error| {
        Failure::new(format!(
            "cmake could not build ggml, its output is above; {} ({error})",
            tools::needed()
        ))
    })?;
    link(settings, &asked, &installed)
}

/// ggml's options. Everything whose default looks at the machine is set, so that a build says what it is.
fn options(settings: &Settings, asked: &Cmake) -> Vec<(String, String)> {
    let mut options: Vec<(String, String)> = plain_options(settings, asked)
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    if settings.target.x86() && settings.cpu != Cpu::Native {
        options.extend(
            PORTABLE_X86.map(|set| (portable_option(set), switch(settings.cpu == Cpu::Portable))),
        );
    }
    options
}

fn switch(on: bool) -> String {
    if on { "ON" } else { "OFF" }.to_owned()
}

fn plain_options(settings: &Settings, asked: &Cmake) -> Vec<(&'static str, String)> {
    let mut options = vec![
        ("BUILD_SHARED_LIBS", switch(DYNAMIC)),
        ("CMAKE_POSITION_INDEPENDENT_CODE", switch(true)),
        ("CMAKE_INSTALL_LIBDIR", "lib".to_owned()),
        ("CMAKE_INSTALL_BINDIR", "bin".to_owned()),
        // ggml asks git for a commit, and would find the one of the repository around it.
        ("GIT_EXE", "IGNORE".to_owned()),
        ("GGML_ALL_WARNINGS", switch(false)),
        ("GGML_BACKEND_DL", switch(DYNAMIC)),
        ("GGML_CCACHE", switch(false)),
        (
            "GGML_CPU_ALL_VARIANTS",
            switch(settings.cpu == Cpu::Variants),
        ),
        ("GGML_NATIVE", switch(settings.cpu == Cpu::Native)),
        ("GGML_LLAMAFILE", switch(true)),
        ("GGML_OPENMP", switch(OPENMP)),
        ("GGML_ACCELERATE", switch(settings.target.apple())),
        ("GGML_BLAS", switch(false)),
        ("GGML_CUDA", switch(cfg!(feature = "cuda"))),
        ("GGML_METAL", switch(cfg!(feature = "metal"))),
        ("GGML_METAL_EMBED_LIBRARY", switch(true)),
        ("GGML_RPC", switch(cfg!(feature = "rpc"))),
        ("GGML_RPC_RDMA", switch(false)),
        ("GGML_VULKAN", switch(cfg!(feature = "vulkan"))),
        // No libraries found by chance, no downloads.
        ("GGML_CUDA_NCCL", switch(false)),
        ("GGML_CUDA_CCCL_VERSION", String::new()),
        ("GGML_OPENMP_FETCH", switch(false)),
    ];
    if let Cpu::Named(name) = &settings.cpu {
        match settings.target.arch.as_str() {
            "arm" | "aarch64" => options.push(("GGML_CPU_ARM_ARCH", name.clone())),
            "powerpc64" => options.push(("GGML_CPU_POWERPC_CPUTYPE", name.clone())),
            _ => {}
        }
    }
    if DYNAMIC {
        let here = if settings.target.apple() {
            "@loader_path"
        } else {
            "$ORIGIN"
        };
        options.push(("CMAKE_INSTALL_RPATH", format!("{here};{here}/../lib")));
    }
    if cfg!(feature = "cuda") {
        if let Some(architectures) = &asked.cuda_architectures {
            options.push(("CMAKE_CUDA_ARCHITECTURES", architectures.clone()));
        }
        if let Some(toolkit) = &asked.cuda_toolkit {
            options.push(("CUDAToolkit_ROOT", toolkit.display().to_string()));
        }
    }
    options
}

/// ggml's name for a compiler's instruction set: `GGML_SSE42` for `sse4.2`.
fn portable_option(set: &str) -> String {
    format!("GGML_{}", set.replace('.', "").to_uppercase())
}

fn link(settings: &Settings, asked: &Cmake, installed: &Path) -> Result<Option<Loadable>> {
    let libraries = installed.join("lib");
    cargo::link_search(&libraries);
    if DYNAMIC {
        cargo::link_library("dylib=ggml");
        cargo::link_library("dylib=ggml-base");
        let backends = installed.join("bin");
        return Ok(Some(Loadable {
            libraries,
            backends,
        }));
    }
    // Who needs comes before who is needed.
    cargo::link_library("static=ggml");
    for backend in crate::backends() {
        cargo::link_library(format!("static=ggml-{backend}"));
    }
    cargo::link_library("static=ggml-base");
    if cfg!(feature = "cuda") {
        link_cuda(settings, asked)?;
    }
    if cfg!(feature = "vulkan") {
        if let Some(sdk) = &asked.vulkan_sdk {
            cargo::link_search(&sdk.join(if settings.target.os == "windows" {
                "Lib"
            } else {
                "lib"
            }));
        }
        cargo::link_library(if settings.target.os == "windows" {
            "vulkan-1"
        } else {
            "vulkan"
        });
    }
    if cfg!(feature = "metal") {
        for framework in ["Foundation", "Metal", "MetalKit"] {
            cargo::link_library(format!("framework={framework}"));
        }
    }
    if OPENMP {
        let mut compiler = cc::Build::new();
        link::openmp(compiler.cpp(true).cargo_metadata(false), &settings.target)?;
    }
    link::platform(settings);
    link::cpp(settings);
    Ok(None)
}

fn link_cuda(settings: &Settings, asked: &Cmake) -> Result<()> {
    let toolkit = tools::cuda_toolkit(asked)?;
    let folders: &[&str] = match settings.target.os.as_str() {
        "windows" => &["lib/x64"],
        // The driver's library is part of the driver; the toolkit has a stub to link against.
        _ => &["lib64", "lib64/stubs", "lib", "lib/stubs"],
    };
    for folder in folders
        .iter()
        .map(|folder| toolkit.join(folder))
        .filter(|folder| folder.is_dir())
    {
        cargo::link_search(&folder);
    }
    for library in ["cudart", "cublas", "cuda"] {
        cargo::link_library(format!("dylib={library}"));
    }
    Ok(())
}
