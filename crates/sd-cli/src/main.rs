//! The command `sd`: pictures from a diffusion checkpoint.
//!
//! A thin front end: arguments in, files out. Everything it does is a call into `sd-models`.

mod args;
mod error;
mod generate;
mod info;
mod plan;
mod progress;
mod rpc_server;
mod tiny;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Command, Sd};

/// What ends with an error ends with this code, as a wrong argument does.
const FAILURE: u8 = 2;

fn main() -> ExitCode {
    let arguments = Sd::parse();
    start_logging(arguments.verbose, arguments.quiet);
    let outcome = match arguments.command {
        Command::Generate(arguments) => generate::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Info(arguments) => info::run(&arguments),
        Command::RpcServer(arguments) => rpc_server::run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error::print(&error);
            ExitCode::from(FAILURE)
        }
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
        .without_time()
        .with_target(false)
        .init();
}
