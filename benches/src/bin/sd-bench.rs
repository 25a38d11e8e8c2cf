//! `sd-bench`: the benchmarks as one program, which runs on a machine without Rust. `cargo xtask bench` builds it and runs it.
//!
//! Without a command it measures its groups, prints a table and writes results; with one it answers one question.
#![allow(clippy::print_stdout)]

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use sd_benches::results::Results;
use sd_benches::{conv, groups, h3_step, memory, plot, quality, step, stream, table, vae};

/// Measures the engine, and judges nothing: the exit code says whether it could be measured.
#[derive(Debug, Parser)]
#[command(name = "sd-bench", version, args_conflicts_with_subcommands = true)]
struct CommandLine {
    #[command(flatten)]
    groups: groups::Arguments,
    /// Results that ratios are to.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Where to write the results as JSON.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Measure nothing: print the table of these results.
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Measure nothing: draw these results as SVG.
    #[arg(long, value_name = "FILE", requires = "to")]
    plot: Option<PathBuf>,
    /// Where drawings go.
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
    #[command(subcommand)]
    question: Option<Question>,
}

#[derive(Debug, Subcommand)]
enum Question {
    /// What one call of the published transformer takes.
    Step(step::Arguments),
    /// What a step of the published MiniMax H3 transformer takes, and what comes before the first.
    H3Step(h3_step::Arguments),
    /// What streaming weights costs.
    Stream(stream::Arguments),
    /// What a VAE of a published shape takes.
    Vae(vae::Arguments),
    /// What convolutions cost, by how they are computed.
    Conv(conv::Arguments),
    /// What loading costs, beside other programs.
    Memory(memory::Arguments),
    /// How many pictures of the tiny checkpoint show what was asked for.
    Quality(quality::Arguments),
}

fn main() -> Result<()> {
    let arguments = CommandLine::parse();
    match &arguments.question {
        Some(Question::Step(arguments)) => step::run(arguments).map(drop),
        Some(Question::H3Step(arguments)) => h3_step::run(arguments).map(drop),
        Some(Question::Stream(arguments)) => stream::run(arguments),
        Some(Question::Vae(arguments)) => vae::compare(arguments),
        Some(Question::Conv(arguments)) => conv::run(arguments),
        Some(Question::Memory(arguments)) => memory::run(arguments),
        Some(Question::Quality(arguments)) => quality::run(arguments),
        None => measure(&arguments),
    }
}

/// Groups, tables and drawings.
fn measure(arguments: &CommandLine) -> Result<()> {
    if let (Some(file), Some(folder)) = (&arguments.plot, &arguments.to) {
        let name = file.file_stem().context("--plot wants a file")?;
        let files = plot::draw(&Results::read(file)?, &name.to_string_lossy(), folder)?;
        files.iter().for_each(|file| println!("{}", file.display()));
        return Ok(());
    }
    // Before anything is measured for an hour.
    let baseline = arguments.compare.as_deref().map(Results::read);
    let baseline = baseline.transpose()?;
    let (results, failed) = match &arguments.table {
        Some(file) => (Results::read(file)?, 0),
        None => groups::run(&arguments.groups)?,
    };
    println!("\n{}", table::markdown(&results, baseline.as_ref()));
    if let Some(file) = &arguments.out {
        results.write(file)?;
    }
    ensure!(failed == 0, "{failed} groups failed");
    Ok(())
}
