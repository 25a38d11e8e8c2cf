//! What the parts of a picture need of memory, before any of it is taken.

use sd_backend::{Component, Device, Need, Residence, Seat};
use sd_graph::{Estimate, Fallback};

use super::layout::Segment;
use super::model::{IN_ORDER, QwenImage21};
use crate::canvas::Canvas;
use crate::error::Result;
use crate::rope::Size;
use crate::seating::{Backends, DeviceNeed, PrefixNeed, Runs, Seating, Wishes, passing_need};

/// What a picture needs, found without loading anything.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Pixels along a side of what is decoded at once, where memory does not suffice for all.
    pub vae_tile: Option<usize>,
    /// Where each part goes, and why, in the order in which they run.
    pub seats: Vec<Seat>,
    /// What reads reference pictures before that, if there are any: the vision tower, and the VAE's encoder. Their weights
    /// are loaded for it alone.
    pub readers: Vec<Seat>,
    /// Width and height in pixels that reference pictures are scaled to.
    pub references: Vec<(usize, usize)>,
    /// What each device has to hold; the one that runs the steps is first.
    pub devices: Vec<DeviceNeed>,
    /// Weights that cannot be given the type asked for, and what they get.
    pub fallbacks: Vec<Fallback>,
    /// What is kept of each prompt while its steps run, if anything is to be.
    pub prefix_cache: Option<PrefixNeed>,
}

impl MemoryPlan {
    /// Whether it fits now.
    pub fn fits(&self) -> bool {
        self.devices.iter().all(DeviceNeed::fits)
    }
}

/// What a picture is like, as far as memory goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scene<'s> {
    /// The prompt, reference pictures included.
    pub(crate) prompt: &'s [Segment],
    /// Pixels of the reference pictures that have to be read first.
    pub(crate) reading: &'s [Size],
    /// Passes of a step: two with guidance.
    pub(crate) passes: u64,
    pub(crate) canvas: Canvas,
    /// Whether keeping keys and values of the prompt saves anything.
    pub(crate) reads_prefix: bool,
}

/// Finds places for the parts of `model`, for a picture of `scene`.
///
/// What is kept between steps only saves time: it is kept if everything else stays where it would be without.
/// `held` says how much of a device's memory is held already by the pipeline that asks and would be given back.
fn find(
    model: &QwenImage21,
    wishes: &Wishes,
    backends: &mut Backends,
    scene: Scene<'_>,
    held: impl Fn(Device) -> u64,
) -> Result<Seating> {
    let prefix = model.prefix_type(wishes.prefix);
    let prefix = prefix.filter(|_| scene.reads_prefix);
    let mut runs = Vec::with_capacity(IN_ORDER.len());
    for component in IN_ORDER {
        let wish = wishes.placement.of(component);
        let choice = wish.device.as_ref().unwrap_or(&wishes.device);
        let backend = backends.on(choice.resolve()?)?;
        let estimate = model.estimate(component, backend, scene.prompt, scene.canvas, prefix)?;
        runs.push((backend.device(), estimate));
    }
    let readers = readers(model, backends, &runs, scene.reading, &held)?;
    let runs = Runs {
        parts: runs,
        readers,
        passes: scene.passes,
    };
    let weights = IN_ORDER.map(|component| model.weights(component));
    let without = Seating::with_runs(weights, wishes, backends.ledger(), &runs, false, &held)?;
    let parts = runs.parts.iter();
    let stored = parts.map(|(_, estimate)| estimate.cache_bytes).sum();
    let Some(dtype) = prefix.filter(|_| stored > 0) else {
        return Ok(without);
    };
    let with = Seating::with_runs(weights, wishes, backends.ledger(), &runs, true, &held)?;
    let fits = with.devices.iter().all(DeviceNeed::fits) && with.is_like(&without);
    let prefix = Some(PrefixNeed {
        dtype,
        bytes: stored,
        fits,
    });
    let found = if fits {
        with.with_smallest_of(&without)
    } else {
        without
    };
    Ok(Seating { prefix, ..found })
}

/// As [`find`]; where its canvas does not fit, for the largest squares of it that do, or else for the smallest. The
/// smallest budgets are those for the smallest squares.
pub(crate) fn find_largest(
    model: &QwenImage21,
    wishes: &Wishes,
    backends: &mut Backends,
    scene: Scene<'_>,
    held: impl Fn(Device) -> u64,
) -> Result<(Seating, Canvas)> {
    let mut find_on = |canvas| {
        let scene = Scene { canvas, ..scene };
        find(model, wishes, backends, scene, &held)
    };
    let canvas = scene.canvas;
    let mut found = (find_on(canvas)?, canvas);
    for smaller in canvas.smaller() {
        if found.0.fits() {
            break;
        }
        found = (find_on(smaller)?, smaller);
    }
    let (seating, found) = found;
    match canvas.smaller().last() {
        Some(smallest) if smallest != found => {
            let smallest = find_on(smallest)?;
            Ok((seating.with_smallest_of(&smallest), found))
        }
        _ => Ok((seating, found)),
    }
}

/// What reading reference pictures of so many pixels needs: each by itself, the largest needs most. The vision tower runs
/// where the text encoder does, the VAE's encoder where its decoder does; their weights are loaded for that alone.
fn readers(
    model: &QwenImage21,
    backends: &mut Backends,
    parts: &[(Device, Estimate)],
    reading: &[Size],
    held: &impl Fn(Device) -> u64,
) -> Result<Vec<Need>> {
    let largest = reading.iter().max_by_key(|size| size.height * size.width);
    let device_of = |component| {
        let mut parts = IN_ORDER.into_iter().zip(parts);
        parts.find_map(|(found, (device, _))| (found == component).then_some(*device))
    };
    let (Some(&size), Some(looks), Some(encodes)) = (
        largest,
        device_of(Component::TextEncoder),
        device_of(Component::Vae),
    ) else {
        return Ok(Vec::new());
    };
    let reader = model.reader()?;
    let estimate = reader.tower_estimate(backends.on(looks)?, size)?;
    let weights = reader.sight().weights();
    let tower = passing_need(Component::TextEncoder, looks, weights, &estimate)?;
    let left = backends.ledger().report(encodes).available;
    let room = left.map(|left| left.saturating_add(held(encodes)));
    let (weights, compute) = reader.encoder_bytes(backends.on(encodes)?, size, room)?;
    let encoder = Need {
        component: Component::Vae,
        device: encodes,
        residence: Some(Residence::Disk),
        weights,
        compute,
        streamed: None,
    };
    Ok(vec![tower, encoder])
}
