//! How much of each frame is worked on at once, and what that takes of a device's memory.

use sd_backend::{Backend, DeviceKind, Ledger, Residence};
use sd_graph::Weights;

use crate::canvas::Canvas;
use crate::error::{Error, Result};
use crate::rope::Circular;
use crate::tiling;

/// How much of each frame is worked on at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tiling {
    /// All of it.
    Whole,
    /// Overlapping squares of so many latents along a side.
    Squares(usize),
    /// All of it if memory suffices, else the largest squares for which it does, of at least [`Tiling::SMALLEST`]. Where a
    /// device refuses what its ledger granted, squares half as large, again and again.
    Fit,
}

impl Tiling {
    /// Latents along a side of the smallest squares that [`Tiling::Fit`] takes.
    pub const SMALLEST: usize = tiling::SMALLEST;
}

/// How frames are worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// How much of each at once.
    pub tiling: Tiling,
    /// Sides that join: each sees its opposite as what comes next, where otherwise there are zeros.
    pub circular: Circular,
}

impl From<Tiling> for Work {
    /// No sides joined.
    fn from(tiling: Tiling) -> Work {
        Work {
            tiling,
            circular: Circular::NONE,
        }
    }
}

impl Work {
    /// Joins sides.
    pub fn circular(mut self, circular: Circular) -> Work {
        self.circular = circular;
        self
    }

    /// The canvas of frames of so many latents.
    pub(crate) fn canvas(self, (height, width): (usize, usize)) -> Canvas {
        let tile = match self.tiling {
            Tiling::Squares(side) => Some(side),
            Tiling::Whole | Tiling::Fit => None,
        };
        Canvas::from((height, width))
            .circular(self.circular)
            .tile(tile)
    }
}

/// What a clip takes of a device's memory, found without taking it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fit {
    /// Latents along a side of the squares that each frame is worked on in; none if all is worked on at once.
    pub tile: Option<usize>,
    /// Bytes that it takes, weights included.
    pub bytes: u64,
    /// Of them, bytes of weights.
    pub weights: u64,
    /// Bytes of the smallest budget that does, with the smallest squares that the tiling allows.
    pub smallest: u64,
    /// Bytes that it may take, if anything is known: what is free, and what the VAE itself holds.
    pub available: Option<u64>,
}

impl Fit {
    /// Whether it fits now.
    pub fn fits(&self) -> bool {
        self.available.is_none_or(|left| self.bytes <= left)
    }

    /// What working takes in one of several ways that change no number: of `needs`, bytes beside weights, the first that fits, or
    /// else the least. `own` are the weights that are used, `others` bytes that would be given up. Where weights come and go
    /// they are in `needs`.
    pub(crate) fn first_of(
        backend: &Backend,
        (own, others): (&Weights, u64),
        needs: &[u64],
    ) -> Result<Fit> {
        let device = backend.device();
        let cost = own.cost(device, Residence::Device, own.mapping())?;
        let (weights, staging) = match (own.is_streamed(), device.kind()) {
            (true, _) => (0, 0),
            // What weights pass through is the host's, and over before anything is computed.
            (false, DeviceKind::Cpu) => (cost.resident(), cost.staging),
            (false, _) => (cost.resident(), 0),
        };
        let report = backend.ledger().report(device);
        let held = own.device_bytes() + others;
        let available = report.available.map(|left| left.saturating_add(held));
        let ways = needs
            .iter()
            .map(|&need| weights.saturating_add(need.max(staging)));
        let fits = |bytes: &u64| available.is_none_or(|left| *bytes <= left);
        let least = ways.clone().min().unwrap_or(weights);
        Ok(Fit {
            tile: None,
            bytes: ways.clone().find(fits).unwrap_or(least),
            weights,
            smallest: least.saturating_add(report.used.total().saturating_sub(held)),
            available,
        })
    }

    /// Refuses what does not fit. Takes `other` weights, which are not needed for it, out of memory if there is no room for them
    /// beside it; its `own` may be there already.
    pub(crate) fn make_room(
        &self,
        backend: &Backend,
        own: &Weights,
        other: &mut Weights,
    ) -> Result<()> {
        let (device, ledger): (_, &Ledger) = (backend.device(), backend.ledger());
        if !self.fits() {
            return Err(Error::TooLittleMemory {
                source: ledger.refused(device, self.bytes),
                smallest: self.smallest,
            });
        }
        let more = self.bytes.saturating_sub(own.device_bytes());
        if ledger
            .report(device)
            .available
            .is_some_and(|left| more > left)
        {
            other.unload();
        }
        Ok(())
    }

    /// Of `canvas` for `tiling`: the first way of working that fits, or else the last. `need` tells the bytes beside weights;
    /// `own` are the weights that are used, `others` bytes of this VAE's that would be given up.
    pub(crate) fn find(
        backend: &Backend,
        canvas: Canvas,
        tiling: Tiling,
        (own, others): (&Weights, u64),
        need: impl Fn(Canvas) -> Result<u64>,
    ) -> Result<Fit> {
        let device = backend.device();
        let report = backend.ledger().report(device);
        let held = own.device_bytes() + others;
        let cost = own.cost(device, Residence::Device, own.mapping())?;
        // What weights pass through is the host's, and over before anything is computed.
        let staging = match device.kind() {
            DeviceKind::Cpu => cost.staging,
            _ => 0,
        };
        let take = |canvas| Ok::<_, Error>(cost.resident() + need(canvas)?.max(staging));
        let mut found = Fit {
            tile: canvas.tile,
            bytes: take(canvas)?,
            weights: cost.resident(),
            smallest: 0,
            available: report.available.map(|left| left.saturating_add(held)),
        };
        let is_open = tiling == Tiling::Fit;
        for smaller in canvas.smaller().take_while(|_| is_open) {
            if found.fits() {
                break;
            }
            found.tile = smaller.tile;
            found.bytes = take(smaller)?;
        }
        let last = canvas.smaller().filter(|_| is_open).last();
        let least = match last {
            Some(last) if last.tile != found.tile => take(last)?,
            _ => found.bytes,
        };
        let foreign = report.used.total().saturating_sub(held);
        found.smallest = least.saturating_add(foreign);
        Ok(found)
    }
}

/// What working on a clip took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ClipReport {
    /// Latents along a side of the squares that each frame was worked on in; none if all was worked on at once.
    pub tile: Option<usize>,
    /// The most bytes that were held on the device through its ledger.
    pub peak: u64,
}

/// Gives `run` the canvas to work on: again in squares half as large while memory runs out, as far as `tiling` allows.
pub(crate) fn attempt<T>(
    tiling: Tiling,
    mut canvas: Canvas,
    mut run: impl FnMut(Canvas) -> Result<T>,
) -> Result<(T, Option<usize>)> {
    loop {
        let smaller = canvas.halved().filter(|_| tiling == Tiling::Fit);
        match (run(canvas), smaller) {
            (Err(error), Some(smaller)) if error.is_out_of_memory() => {
                tracing::warn!("{error}; working on smaller squares");
                canvas = smaller;
            }
            (outcome, _) => return Ok((outcome?, canvas.tile)),
        }
    }
}
