//! The command `sd`: pictures from a diffusion checkpoint.
//!
//! A thin front end: arguments in, files out. Everything it does is a call into `sd-models`.

mod args;
mod backends;
mod clips;
mod convert;
mod devices;
mod error;
mod figures;
mod generate;
mod info;
mod interrupt;
mod json;
mod makes;
mod plan;
mod preview;
mod progress;
mod rpc_server;
mod terminal;
mod tiny;
mod vae;
mod video;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use sd_graph::Cancel;

use crate::args::{Command, Sd};
use crate::error::Error;
use crate::terminal::Protocol;

/// What ends with an error ends with this code, as a wrong argument does.
const FAILURE: u8 = 2;

fn main() -> ExitCode {
    let arguments = Sd::parse();
    start_logging(arguments.verbose, arguments.quiet);
    let variable = std::env::var_os("SD_BACKENDS").filter(|folder| !folder.is_empty());
    let folder = arguments.backends.clone().or(variable.map(PathBuf::from));
    let cancel = match arguments.command {
        Command::Generate(_) | Command::Video(_) | Command::Vae(_) | Command::Convert(_) => {
            interrupt::cancel()
        }
        // They are short, or have nothing to clear away.
        _ => Cancel::new(),
    };
    match run(&arguments, folder.as_deref(), &cancel) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if cancel.is_cancelled() => {
            error::print(&Error::Interrupted);
            ExitCode::from(interrupt::INTERRUPTED)
        }
        Err(error) => {
            error::print(&error);
            ExitCode::from(FAILURE)
        }
    }
}

fn run(arguments: &Sd, backends: Option<&Path>, cancel: &Cancel) -> Result<(), Error> {
    let command = &arguments.command;
    // What a checkpoint is, and its bytes, no device needs to know.
    if !matches!(command, Command::Info(_) | Command::Convert(_)) {
        backends::load(backends)?;
    }
    match command {
        Command::Generate(options) => {
            let variable = |name: &str| std::env::var(name).ok();
            let terminal = Protocol::detect(variable).filter(|_| !arguments.quiet);
            generate::run(options, arguments.quiet, terminal, cancel)
        }
        Command::Video(options) => video::run(options, arguments.quiet, cancel),
        Command::Plan(arguments) => plan::run(arguments),
        Command::Info(arguments) => info::run(arguments),
        Command::Convert(options) => convert::run(options, arguments.quiet, cancel),
        Command::Devices(arguments) => devices::run(arguments),
        Command::Vae(arguments) => vae::run(arguments, cancel),
        Command::RpcServer(arguments) => rpc_server::run(arguments),
    }
}

/// Log lines go to standard error. `SD_LOG` says which (`debug`, `sd_graph=trace`); `-v` and `-q` move the level.
fn start_logging(verbose: u8, quiet: bool) {
    let level = match (quiet, verbose) {
        (true, _) => "error",
        (false, 0) => "warn",
        (false, 1) => "info",
        (false, 2) => "debug",
        (false, _) => "trace",
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("SD_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Colours are for terminals, not for files.
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
}
