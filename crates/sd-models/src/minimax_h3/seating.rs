//! What the parts of a clip need of memory, before any of it is taken.

use sd_backend::{Component, Device, Need, Residence, Seat};
use sd_graph::{Estimate, Fallback};

use super::diffusion::Diffusion;
use super::layout::Layout;
use super::parts::Readers;
use super::references::Outline;
use super::sizes::{Extent, frames_down};
use super::video_vae::Tiling;
use crate::error::Result;
use crate::rope;
use crate::seating::{Backends, DeviceNeed, Runs, Seating, Wishes, passing_need};

/// What a clip needs, found without loading anything.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VideoMemoryPlan {
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Frames.
    pub frames: usize,
    /// Rows of the sequence that the transformer sees.
    pub rows: usize,
    /// Width and height that pictures which the clip refers to are scaled to.
    pub references: Vec<(usize, usize)>,
    /// Where text encoder, transformer and the decoder of the video VAE go, and why, in the order in which they run.
    pub seats: Vec<Seat>,
    /// What is in memory for a moment only: what reads pictures and sounds that are given, what prepares the transformer's steps,
    /// and what makes the sound.
    pub readers: Vec<Seat>,
    /// What each device has to hold; the one that runs the steps is first.
    pub devices: Vec<DeviceNeed>,
    /// Weights that cannot be given the type asked for, and what they get.
    pub fallbacks: Vec<Fallback>,
}

impl VideoMemoryPlan {
    /// Whether it fits now.
    pub fn fits(&self) -> bool {
        self.devices.iter().all(DeviceNeed::fits)
    }
}

/// What a clip is like, as far as memory goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scene<'s> {
    /// The prompt with what it speaks of, as the text encoder reads it.
    pub(crate) prompt: &'s [rope::Part],
    /// Keyframes or references.
    pub(crate) subjects: &'s [Outline],
    pub(crate) extent: Extent,
    pub(crate) layout: &'s Layout,
    /// Different times of the rows in all steps.
    pub(crate) times: usize,
}

/// Finds places for the parts of a model, for a clip of `scene`. `held` says how much of a device's memory is held already by the
/// pipeline that asks and would be given back.
///
/// # Errors
/// What cannot be read, and the engine's.
pub(crate) fn find(
    (readers, diffusion): (&Readers, &Diffusion),
    wishes: &Wishes,
    backends: &mut Backends,
    scene: Scene<'_>,
    held: impl Fn(Device) -> u64,
) -> Result<Seating> {
    let device_of = |component| {
        let wish = wishes.placement.of(component);
        wish.device.as_ref().unwrap_or(&wishes.device).resolve()
    };
    let reads = device_of(Component::TextEncoder)?;
    let steps = device_of(Component::Diffusion)?;
    let decodes = device_of(Component::Vae)?;
    let latents = scene.extent.latents();
    let size = (latents.height, latents.width);
    let parts: Vec<(Device, Estimate)> = vec![
        (
            reads,
            readers
                .conditioner
                .estimate(backends.on(reads)?, scene.prompt)?,
        ),
        (
            steps,
            diffusion.estimate(backends.on(steps)?, scene.layout, scene.times)?,
        ),
        (
            decodes,
            readers
                .vae
                .decoding_estimate(backends.on(decodes)?, size, Tiling::default())?,
        ),
    ];
    let mut passing = Vec::new();
    let seen = readers
        .conditioner
        .sight_estimate(backends.on(reads)?, scene.subjects)?;
    if let Some(estimate) = seen {
        let weights = readers.conditioner.sight_weights()?;
        passing.push(passing_need(
            Component::TextEncoder,
            reads,
            weights,
            &estimate,
        )?);
    }
    passing.push(diffusion.preparation_need(backends.on(steps)?, scene.layout, scene.times)?);
    let brief = |(weights, compute)| Need {
        component: Component::Vae,
        device: decodes,
        residence: Some(Residence::Disk),
        weights,
        compute,
        streamed: None,
    };
    let backend = backends.on(decodes)?;
    for subject in scene.subjects {
        let pictures = match *subject {
            Outline::Picture(size) => Some((1, size)),
            Outline::Clip { size, frames, .. } => Some((frames_down(frames), size)),
            Outline::Sound(_) => None,
        };
        if let Some((frames, size)) = pictures {
            let size = (size.height, size.width);
            let fit = readers
                .vae
                .fit_encoding(backend, frames, size, Tiling::default())?;
            passing.push(brief((fit.weights, fit.bytes.saturating_sub(fit.weights))));
        }
        if let Some(samples) = subject.samples() {
            passing.push(brief(readers.sound_vae.encoding_need(backend, samples)?));
        }
    }
    let sound = scene.extent.sound_latents();
    passing.push(brief(readers.sound_vae.decoding_need(backend, sound)?));
    let weights = [
        &readers.conditioner.text.weights,
        diffusion.weights(),
        readers.vae.decoder_weights(),
    ];
    let runs = Runs {
        parts,
        readers: passing,
        passes: 1,
    };
    let mut seating = Seating::with_runs(weights, wishes, backends.ledger(), &runs, true, &held)?;
    for seat in &mut seating.readers {
        let wished = seat.reason.strip_prefix("is loaded to read references");
        seat.reason = format!("is loaded for a moment{}", wished.unwrap_or_default());
    }
    Ok(seating)
}
