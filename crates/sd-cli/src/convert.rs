//! `sd convert`: a file of weights as one of another format or with other types.

use std::collections::BTreeMap;
use std::io::Write;

use sd_backend::{Bytes, Ledger};
use sd_graph::{Cancel, Checkpoint, Existing, FileFormat, LoadOptions};
use serde::Serialize;

use crate::args::Convert;
use crate::error::Error;
use crate::json;
use crate::preview::Previews;
use crate::progress::Display;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    output: String,
    tensors: usize,
    converted: usize,
    bytes: u64,
    /// Bytes of what was read.
    read: u64,
    /// Most bytes of memory that pieces of tensors took at once.
    staging: u64,
    /// Number of tensors of each element type.
    types: BTreeMap<String, usize>,
}

pub(crate) fn run(arguments: &Convert, is_quiet: bool, cancel: &Cancel) -> Result<(), Error> {
    let Convert { input, output, .. } = arguments;
    if input.join("model_index.json").is_file() {
        return Err(Error::SeveralParts {
            folder: input.clone(),
        });
    }
    let format = FileFormat::of(output)?;
    let checkpoint = Checkpoint::open(input)?;
    let options = arguments.weights.apply_to(LoadOptions::default());
    let conversion = sd_models::conversion(&checkpoint, input, format, &options)?;
    let existing = match arguments.overwrite {
        true => Existing::Replace,
        false => Existing::Keep,
    };
    let mut display = Display::new(arguments.json || is_quiet, Previews::default());
    let ledger = Ledger::default();
    let outcome = conversion.write(output, existing, &ledger, cancel, &mut display);
    display.finish();
    let written = outcome.map_err(sd_models::Error::from)?;

    let mut types = BTreeMap::new();
    for (_, _, stored) in conversion.tensors() {
        *types.entry(stored.to_string()).or_insert(0) += 1;
    }
    let report = Report {
        output: output.display().to_string(),
        tensors: written.tensors,
        converted: written.converted,
        bytes: written.bytes,
        read: checkpoint.bytes(),
        staging: written.staging,
        types,
    };
    let mut out = std::io::stdout().lock();
    if arguments.json {
        json::print(&mut out, &report)?;
    } else if !is_quiet {
        let types: Vec<String> = (report.types.iter())
            .map(|(name, number)| format!("{number} {name}"))
            .collect();
        writeln!(
            out,
            "{}: {} from {}, tensors: {}",
            report.output,
            Bytes(report.bytes),
            Bytes(report.read),
            types.join(", ")
        )?;
    }
    Ok(())
}
