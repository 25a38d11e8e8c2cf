//! Finds, patches and compiles ggml. Each step has its own file; every error is one sentence.

mod cargo;
mod copy;
mod cpu;
mod env;
mod failure;
mod patches;
mod source;

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
    cargo::rerun_if_changed(&settings.manifest.join("build"));
    if settings.docs_only {
        return Ok(());
    }
    let stub = settings.manifest.join("../../vendor/ggml-source");
    let original = source::from_stub(&settings.cargo, &stub)?;
    let ggml = settings.out.join("ggml");
    copy::patched(&original, &ggml, None)?;
    let generated = settings.out.join("generated");
    copy::write_if_new(
        &generated.join("ggml-version.h"),
        b"#pragma once\n#define GGML_VERSION \"0.26.0\"\n#define GGML_COMMIT \"unknown\"\n",
    )?;
    cpu::build(&settings, &ggml, &generated)?;
    cargo::metadata("root", ggml.display());
    cargo::metadata("include", ggml.join("include").display());
    Ok(())
}
