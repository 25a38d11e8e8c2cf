//! `sd plan`: what a picture needs of a device's memory, without loading anything.

use std::io::Write;

use sd_backend::Bytes;
use sd_models::{MemoryPlan, Pipeline};
use serde::Serialize;

use crate::args::Plan;
use crate::error::Error;

/// What `--json` prints. All sizes are bytes.
#[derive(Debug, Serialize)]
struct Report<'a> {
    device: &'a str,
    width: usize,
    height: usize,
    weights: Vec<Part<'a>>,
    stages: Vec<Part<'a>>,
    smallest_budget: u64,
    available: Option<u64>,
    fits: bool,
}

#[derive(Debug, Serialize)]
struct Part<'a> {
    name: &'a str,
    bytes: u64,
}

pub(crate) fn run(arguments: &Plan) -> Result<(), Error> {
    let mut builder = Pipeline::open(&arguments.model)?.device(&arguments.device);
    if let Some(budgets) = &arguments.memory_budget {
        builder = builder.memory_budget(budgets.clone());
    }
    let size = crate::generate::size(arguments.width, arguments.height);
    let plan = builder.plan(size, arguments.tokens)?;

    let stages = [
        ("encode", plan.stages.encode),
        ("denoise", plan.stages.denoise),
        ("decode", plan.stages.decode),
    ]
    .map(|(name, estimate)| Part {
        name,
        bytes: estimate.compute_bytes + estimate.constant_bytes,
    });
    let report = Report {
        device: &plan.device,
        width: plan.width,
        height: plan.height,
        weights: plan
            .weights
            .iter()
            .map(|&(name, bytes)| Part { name, bytes })
            .collect(),
        stages: stages.into(),
        smallest_budget: plan.smallest,
        available: plan.available,
        fits: plan.fits(),
    };
    let mut out = std::io::stdout().lock();
    if arguments.json {
        serde_json::to_writer_pretty(&mut out, &report).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        print(&mut out, &report, &plan)?;
    }
    Ok(())
}

fn print(out: &mut impl Write, report: &Report<'_>, plan: &MemoryPlan) -> std::io::Result<()> {
    writeln!(
        out,
        "a picture of {}x{} on {}",
        report.width, report.height, report.device
    )?;
    for part in &report.weights {
        writeln!(
            out,
            "  weights, {:14} {:>12}",
            part.name,
            Bytes(part.bytes).to_string()
        )?;
    }
    for part in &report.stages {
        writeln!(
            out,
            "  compute, {:14} {:>12}",
            part.name,
            Bytes(part.bytes).to_string()
        )?;
    }
    writeln!(
        out,
        "smallest budget: {} (all weights and the stage that needs most)",
        Bytes(report.smallest_budget)
    )?;
    match plan.available {
        Some(available) if plan.fits() => writeln!(out, "fits: {} may be used", Bytes(available)),
        Some(available) => writeln!(out, "does not fit: {} may be used", Bytes(available)),
        None => writeln!(out, "the device does not say what is free"),
    }
}
