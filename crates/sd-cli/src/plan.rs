//! `sd plan`: what a picture or clip needs of a device's memory, without loading anything.

use std::io::Write;

use sd_backend::{Bytes, Component, Seat};
use sd_models::{DeviceNeed, ModelFiles, Pipeline, VideoPipeline, VideoShape};
use serde::Serialize;

use crate::args::Plan;
use crate::error::{Error, refuse};
use crate::json;
use crate::makes::Makes;

/// What `--json` prints. All sizes are bytes.
#[derive(Debug, Serialize)]
struct Report {
    width: usize,
    height: usize,
    /// Of a clip.
    #[serde(skip_serializing_if = "Option::is_none")]
    frames: Option<usize>,
    /// Rows of the sequence that the transformer sees of a clip.
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<usize>,
    /// Pixels along a side of what is decoded at once, where memory does not suffice for all.
    vae_tile: Option<usize>,
    /// Width and height that reference pictures are scaled to.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    references: Vec<[usize; 2]>,
    parts: Vec<Part>,
    /// What is loaded for a moment alone: what reads pictures that are given, and in a model of clips what prepares the steps and
    /// makes the sound.
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
    let (model, parts) = (arguments.model.as_deref(), &arguments.loading.parts);
    let files = parts.files(model);
    let report = match Makes::of(model, parts) {
        Some(Makes::Clips) => clip(arguments, arguments.video_parts.add_to(files))?,
        _ => picture(arguments, files)?,
    };
    let mut out = std::io::stdout().lock();
    if arguments.json {
        json::print(&mut out, &report)?;
    } else {
        print(&mut out, &report)?;
    }
    Ok(())
}

fn picture(arguments: &Plan, files: ModelFiles) -> Result<Report, Error> {
    let keyframes = Some(arguments.keyframes).filter(|&keyframes| keyframes > 0);
    let of_clips = [
        ("frames", arguments.frames),
        ("steps", arguments.steps),
        ("keyframes", keyframes),
    ];
    for (option, value) in of_clips {
        if let Some(value) = value {
            return refuse(option, value, "this is a model of pictures");
        }
    }
    let builder = arguments.loading.apply(Pipeline::open(files)?);
    let builder = arguments.options.apply(builder);
    let (size, references) = (arguments.size.sides(), &arguments.reference);
    let plan = builder.plan_with(size, arguments.tokens, references, arguments.ref_size)?;
    Ok(Report {
        width: plan.width,
        height: plan.height,
        frames: None,
        rows: None,
        vae_tile: plan.vae_tile,
        fits: plan.fits(),
        prefix_cache: plan.prefix_cache.map(|prefix| PrefixCache {
            dtype: prefix.dtype.name(),
            bytes: prefix.bytes,
            fits: prefix.fits,
        }),
        references: sizes(&plan.references),
        parts: parts(&plan.seats),
        readers: ["vision-tower", "vae-encoder"]
            .into_iter()
            .zip(&plan.readers)
            .map(|(name, seat)| Part::new(name, seat))
            .collect(),
        devices: needs(&plan.devices),
        fallbacks: fallbacks(&plan.fallbacks),
    })
}

fn clip(arguments: &Plan, files: ModelFiles) -> Result<Report, Error> {
    if let Some(size) = arguments.ref_size {
        let reason = "this is a model of clips, which scales pictures in its own way";
        return refuse("ref-size", size, reason);
    }
    let references = arguments.reference.iter();
    let references = references.map(|&(width, height)| (width as usize, height as usize));
    let builder = arguments.loading.apply(VideoPipeline::open(files)?);
    let plan = arguments.video_parts.apply(builder).plan(&VideoShape {
        size: arguments.size.sides(),
        frames: arguments.frames,
        tokens: arguments.tokens,
        keyframes: arguments.keyframes,
        references: references.collect(),
        steps: arguments.steps,
    })?;
    let (last, others) = match plan.readers.split_last() {
        Some((last, others)) => (Some(last), others),
        None => (None, &[][..]),
    };
    let name = |seat: &Seat| match seat.component {
        Component::TextEncoder => "vision-tower",
        Component::Diffusion => "preparation",
        Component::Vae => "vae-encoder",
    };
    let others = others.iter().map(|seat| Part::new(name(seat), seat));
    Ok(Report {
        width: plan.width,
        height: plan.height,
        frames: Some(plan.frames),
        rows: Some(plan.rows),
        vae_tile: None,
        fits: plan.fits(),
        prefix_cache: None,
        references: sizes(&plan.references),
        parts: parts(&plan.seats),
        readers: others
            .chain(last.map(|seat| Part::new("sound-decoder", seat)))
            .collect(),
        devices: needs(&plan.devices),
        fallbacks: fallbacks(&plan.fallbacks),
    })
}

fn sizes(sizes: &[(usize, usize)]) -> Vec<[usize; 2]> {
    sizes
        .iter()
        .map(|&(width, height)| [width, height])
        .collect()
}

impl Part {
    fn new(name: &'static str, seat: &Seat) -> Part {
        Part {
            name,
            device: seat.device.name(),
            residence: seat.residence.name(),
            weights: seat.weights,
            compute: seat.compute,
            reason: seat.reason.clone(),
        }
    }
}

fn parts(seats: &[Seat]) -> Vec<Part> {
    let parts = seats.iter();
    parts
        .map(|seat| Part::new(seat.component.name(), seat))
        .collect()
}

fn needs(needs: &[DeviceNeed]) -> Vec<Need> {
    let need = |need: &DeviceNeed| Need {
        name: need.device.name(),
        peak: need.peak,
        smallest_budget: need.smallest,
        available: need.available,
        fits: need.fits(),
    };
    needs.iter().map(need).collect()
}

fn fallbacks(fallbacks: &[sd_graph::Fallback]) -> Vec<Fallback> {
    let fallback = |fallback: &sd_graph::Fallback| Fallback {
        name: fallback.name.clone(),
        asked: fallback.asked.name(),
        got: fallback.got.name(),
    };
    fallbacks.iter().map(fallback).collect()
}

fn print(out: &mut impl Write, report: &Report) -> std::io::Result<()> {
    let size = |bytes: u64| Bytes(bytes).to_string();
    let size_of = format!("{}x{}", report.width, report.height);
    match (report.frames, report.rows) {
        (Some(frames), Some(rows)) => {
            writeln!(
                out,
                "a clip of {frames} frames of {size_of}, which the transformer sees as {rows} rows"
            )?;
        }
        _ => writeln!(out, "a picture of {size_of}")?,
    }
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
