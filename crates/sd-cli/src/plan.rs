//! `sd plan`: what a picture needs of a device's memory, without loading anything.

use std::io::Write;

use sd_backend::{Bytes, Seat};
use sd_models::Pipeline;
use serde::Serialize;

use crate::args::Plan;
use crate::error::Error;
use crate::json;

/// What `--json` prints. All sizes are bytes.
#[derive(Debug, Serialize)]
struct Report {
    width: usize,
    height: usize,
    /// Pixels along a side of what is decoded at once, where memory does not suffice for all.
    vae_tile: Option<usize>,
    /// Width and height that reference pictures are scaled to.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    references: Vec<[usize; 2]>,
    parts: Vec<Part>,
    /// What reads reference pictures, before everything else.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    readers: Vec<Part>,
    devices: Vec<Need>,
    fits: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix_cache: Option<PrefixCache>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    fallbacks: Vec<Fallback>,
}

/// Keys and values of a prompt that are kept between steps.
#[derive(Debug, Serialize)]
struct PrefixCache {
    #[serde(rename = "type")]
    dtype: &'static str,
    /// For each condition; a guided picture has two.
    bytes: u64,
    fits: bool,
}

/// One part of the model.
#[derive(Debug, Serialize)]
struct Part {
    name: &'static str,
    device: String,
    /// Where its weights are while it does not run.
    residence: &'static str,
    weights: u64,
    compute: u64,
    reason: String,
}

/// What one device has to hold.
#[derive(Debug, Serialize)]
struct Need {
    name: String,
    peak: u64,
    smallest_budget: u64,
    available: Option<u64>,
    fits: bool,
}

/// A weight that cannot be given the type asked for.
#[derive(Debug, Serialize)]
struct Fallback {
    name: String,
    asked: &'static str,
    got: &'static str,
}

pub(crate) fn run(arguments: &Plan) -> Result<(), Error> {
    let size = crate::generate::size(arguments.width, arguments.height);
    let files = arguments.parts.files(arguments.model.as_deref());
    let builder = arguments.resources.apply(Pipeline::from_files(files)?);
    let builder = arguments.options.apply(arguments.weights.apply(builder));
    let references = &arguments.reference;
    let plan = builder.plan_with(size, arguments.tokens, references, arguments.ref_size)?;
    let part = |name, seat: &Seat| Part {
        name,
        device: seat.device.name(),
        residence: seat.residence.name(),
        weights: seat.weights,
        compute: seat.compute,
        reason: seat.reason.clone(),
    };

    let report = Report {
        width: plan.width,
        height: plan.height,
        vae_tile: plan.vae_tile,
        fits: plan.fits(),
        prefix_cache: plan.prefix_cache.map(|prefix| PrefixCache {
            dtype: prefix.dtype.name(),
            bytes: prefix.bytes,
            fits: prefix.fits,
        }),
        references: plan
            .references
            .iter()
            .map(|&(width, height)| [width, height])
            .collect(),
        parts: plan
            .seats
            .iter()
            .map(|seat| part(seat.component.name(), seat))
            .collect(),
        readers: ["vision-tower", "vae-encoder"]
            .into_iter()
            .zip(&plan.readers)
            .map(|(name, seat)| part(name, seat))
            .collect(),
        devices: plan
            .devices
            .iter()
            .map(|need| Need {
                name: need.device.name(),
                peak: need.peak,
                smallest_budget: need.smallest,
                available: need.available,
                fits: need.fits(),
            })
            .collect(),
        fallbacks: plan
            .fallbacks
            .iter()
            .map(|fallback| Fallback {
                name: fallback.name.clone(),
                asked: fallback.asked.name(),
                got: fallback.got.name(),
            })
            .collect(),
    };
    let mut out = std::io::stdout().lock();
    if arguments.json {
        json::print(&mut out, &report)?;
    } else {
        print(&mut out, &report)?;
    }
    Ok(())
}

fn print(out: &mut impl Write, report: &Report) -> std::io::Result<()> {
    let size = |bytes: u64| Bytes(bytes).to_string();
    writeln!(out, "a picture of {}x{}", report.width, report.height)?;
    writeln!(
        out,
        "  {:14} {:10} {:7} {:>12} {:>12}",
        "part", "runs on", "lives", "weights", "computes in"
    )?;
    for part in report.readers.iter().chain(&report.parts) {
        writeln!(
            out,
            "  {:14} {:10} {:7} {:>12} {:>12}",
            part.name,
            part.device,
            part.residence,
            size(part.weights),
            size(part.compute)
        )?;
        writeln!(out, "    {}", part.reason)?;
    }
    if !report.references.is_empty() {
        let sizes = report.references.iter();
        let sizes: Vec<String> = sizes.map(|[w, h]| format!("{w}x{h}")).collect();
        writeln!(
            out,
            "reference pictures are scaled to {}; what reads them is loaded for that alone",
            sizes.join(", ")
        )?;
    }
    if let Some(prefix) = &report.prefix_cache {
        let fits = match prefix.fits {
            true => "included above",
            false => "no room: they are computed at every step",
        };
        writeln!(
            out,
            "keys and values of the prompt, kept between steps: {} in {} for each condition, {fits}",
            size(prefix.bytes),
            prefix.dtype
        )?;
    }
    if let Some(tile) = report.vae_tile {
        writeln!(
            out,
            "decodes in squares of {tile} pixels: all at once does not fit"
        )?;
    }
    for need in &report.devices {
        let left = match (need.available, need.fits) {
            (Some(available), true) => format!("fits: {} may be used", size(available)),
            (Some(available), false) => format!("does not fit: {} may be used", size(available)),
            (None, _) => "it does not say what is free".to_owned(),
        };
        writeln!(
            out,
            "{}: holds up to {}; smallest budget {}; {left}",
            need.name,
            size(need.peak),
            size(need.smallest_budget)
        )?;
    }
    if let [first, others @ ..] = &report.fallbacks[..] {
        writeln!(
            out,
            "{} weights cannot be given the type asked for: {} gets {} instead of {}{}",
            report.fallbacks.len(),
            first.name,
            first.got,
            first.asked,
            if others.is_empty() { "" } else { ", ..." }
        )?;
    }
    Ok(())
}
