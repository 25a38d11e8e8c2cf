//! Reports for programs.

use std::io::{Error, Write};

use serde::Serialize;

/// Writes a report as `--json` prints it: indented, with a line end.
pub(crate) fn print(out: &mut impl Write, report: &impl Serialize) -> Result<(), Error> {
    serde_json::to_writer_pretty(&mut *out, report)?;
    writeln!(out)
}
