//! Finding out where the parts of any model go and what that takes, before anything is loaded. What they need is each family's own
//! `seating.rs`.

use sd_backend::{
    Backend, BackendOptions, Component, DType, Device, DeviceChoice, DeviceKind, Ledger, Mapping,
    Need, Placement, Residence, Seat, Streamed, peak, seats,
};
use sd_graph::{Estimate, Weights};

use crate::error::{Error, Result};
use crate::qwen_image_2_1::{IN_ORDER, PrefixCache};

/// What keys and values of a prompt, its reference pictures included, take while its steps run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefixNeed {
    /// The element type.
    pub dtype: DType,
    /// Bytes for each condition; a guided picture has two.
    pub bytes: u64,
    /// Whether there is room: nothing else makes room for it.
    pub fits: bool,
}

/// What one device has to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceNeed {
    /// The device.
    pub device: Device,
    /// The most bytes at once, with the parts where the plan puts them.
    pub peak: u64,
    /// Bytes of the smallest budget that does, with parts that come and go.
    pub smallest: u64,
    /// Bytes that may be taken now, if anything is known.
    pub available: Option<u64>,
}

impl DeviceNeed {
    /// Whether the plan fits now.
    pub fn fits(&self) -> bool {
        self.available
            .is_none_or(|available| self.peak <= available)
    }
}

/// The streams of work of one pipeline, one for each device that it uses.
#[derive(Debug)]
pub(crate) struct Backends {
    options: BackendOptions,
    started: Vec<Backend>,
}

impl Backends {
    pub(crate) fn new(options: BackendOptions) -> Backends {
        Backends {
            options,
            started: Vec::new(),
        }
    }

    /// The stream of work on `device`, started if it was not.
    pub(crate) fn on(&mut self, device: Device) -> Result<&mut Backend> {
        let index = match self
            .started
            .iter()
            .position(|found| found.device() == device)
        {
            Some(index) => index,
            None => {
                self.started.push(Backend::new(device, &self.options)?);
                self.started.len() - 1
            }
        };
        Ok(&mut self.started[index])
    }

    /// Threads that compute on `device`.
    pub(crate) fn threads(&self, device: Device) -> usize {
        let mut started = self.started.iter();
        started
            .find(|backend| backend.device() == device)
            .map_or(1, Backend::threads)
    }

    pub(crate) fn options(&self) -> &BackendOptions {
        &self.options
    }

    pub(crate) fn ledger(&self) -> &Ledger {
        &self.options.ledger
    }
}

/// Where the parts of a model go.
#[derive(Debug, Clone)]
pub(crate) struct Seating {
    /// In the order of [`IN_ORDER`].
    pub(crate) seats: Vec<Seat>,
    /// The vision tower and the VAE's encoder, while there is something to read.
    pub(crate) readers: Vec<Seat>,
    pub(crate) mapping: Mapping,
    pub(crate) devices: Vec<DeviceNeed>,
    /// What is to be kept of each condition, and whether it is.
    pub(crate) prefix: Option<PrefixNeed>,
}

impl Seating {
    /// Finds places for parts with these `weights`, in the order of [`IN_ORDER`], that take what `runs` says, with or without
    /// what is kept between steps.
    pub(crate) fn with_runs(
        weights: [&Weights; 3],
        wishes: &Wishes,
        ledger: &Ledger,
        runs: &Runs,
        is_cached: bool,
        held: &impl Fn(Device) -> u64,
    ) -> Result<Seating> {
        let find = |mapping| {
            Seating::with_mapping(weights, wishes, ledger, (runs, is_cached), mapping, held)
        };
        let found = find(wishes.mapping)?;
        if wishes.mapping != Mapping::Auto {
            return Ok(found);
        }
        // Mapped files count as a whole, used or not: where that is too much, copying what is used may fit.
        let read = find(Mapping::Never)?;
        if found.fits() {
            Ok(found.with_smallest_of(&read))
        } else {
            Ok(read.with_smallest_of(&found))
        }
    }

    /// Whether all parts are where `other` has them.
    pub(crate) fn is_like(&self, other: &Seating) -> bool {
        let place = |seat: &Seat| (seat.device, seat.residence, seat.is_streamed);
        let mut seats = self.seats.iter().zip(&other.seats);
        self.mapping == other.mapping && seats.all(|(one, other)| place(one) == place(other))
    }

    /// Whether it fits now.
    pub(crate) fn fits(&self) -> bool {
        self.devices.iter().all(DeviceNeed::fits)
    }

    /// With the smaller of the smallest budgets of both.
    pub(crate) fn with_smallest_of(mut self, other: &Seating) -> Seating {
        for (need, other) in self.devices.iter_mut().zip(&other.devices) {
            need.smallest = need.smallest.min(other.smallest);
        }
        self
    }

    /// As [`Seating::with_runs`], with weights mapped or not.
    fn with_mapping(
        weights: [&Weights; 3],
        wishes: &Wishes,
        ledger: &Ledger,
        (runs, is_cached): (&Runs, bool),
        mapping: Mapping,
        held: &impl Fn(Device) -> u64,
    ) -> Result<Seating> {
        let passes = runs.passes;
        let mut needs = Vec::with_capacity(IN_ORDER.len() + runs.readers.len());
        let parts = IN_ORDER.into_iter().zip(weights).zip(&runs.parts);
        for ((component, weights), &(device, estimate)) in parts {
            // The processor's own memory is the host's.
            let wish = match (wishes.placement.of(component).residence, device.kind()) {
                (Some(Residence::Host), DeviceKind::Cpu) => Some(Residence::Device),
                (wish, _) => wish,
            };
            let residence = wish.unwrap_or(Residence::Device);
            let cost = weights.cost(device, residence, mapping)?;
            let kept = if is_cached { estimate.cache_bytes } else { 0 };
            let compute = estimate.compute_bytes + estimate.constant_bytes + passes * kept;
            // Staging is the host's, and over before anything is computed.
            let compute = match device.kind() {
                DeviceKind::Cpu => compute.max(cost.staging),
                _ => compute,
            };
            needs.push(Need {
                component,
                device,
                residence: wish,
                weights: cost.resident(),
                compute,
                streamed: streamed(weights, component, device, &estimate, (passes, kept))?,
            });
        }
        needs.extend(&runs.readers);
        let available = |device: Device| {
            let left = ledger.report(device).available?;
            Some(left.saturating_add(held(device)))
        };
        let mut found = seats(&needs, available, host_spare(ledger));
        let small: Vec<Need> = needs
            .iter()
            .map(|need| Need {
                residence: need.residence.or(Some(Residence::Disk)),
                ..*need
            })
            .collect();
        let small = seats(&small, |_| Some(0), None);

        let mut devices: Vec<DeviceNeed> = Vec::new();
        let diffusion_first = Component::ALL
            .into_iter()
            .filter_map(|component| found.iter().find(|seat| seat.component == component));
        for seat in diffusion_first {
            let device = seat.device;
            if devices.iter().all(|need| need.device != device) {
                devices.push(DeviceNeed {
                    device,
                    peak: peak(&found, device),
                    smallest: peak(&small, device).min(peak(&found, device)),
                    available: available(device),
                });
            }
        }
        let mut readers = found.split_off(IN_ORDER.len());
        for seat in &mut readers {
            let wished = seat.reason.strip_prefix("as asked for").unwrap_or_default();
            seat.reason = format!("is loaded to read references{wished}");
        }
        Ok(Seating {
            seats: found,
            readers,
            mapping,
            devices,
            prefix: None,
        })
    }

    /// The device that runs `component`.
    pub(crate) fn device(&self, component: Component) -> Option<Device> {
        let mut seats = self.seats.iter();
        seats
            .find(|seat| seat.component == component)
            .map(|seat| seat.device)
    }

    /// What `held_on` says of each device, noted for when its owner is borrowed otherwise; 0 for others.
    pub(crate) fn held(&self, held_on: &dyn Fn(Device) -> u64) -> impl Fn(Device) -> u64 + use<> {
        let devices = self.devices.iter().map(|need| need.device);
        let noted: Vec<(Device, u64)> = devices.map(|device| (device, held_on(device))).collect();
        move |device| {
            let found = noted.iter().find(|(noted, _)| *noted == device);
            found.map_or(0, |(_, bytes)| *bytes)
        }
    }

    /// Whether what `found` says needs weights to leave where they are. Nothing that fits is moved: what stays may go, and what is
    /// mapped may be read, never the other way.
    pub(crate) fn gives_way_to(&self, found: &Seating) -> bool {
        let stays = |seat: &Seat| seat.residence == Residence::Device;
        let mut seats = self.seats.iter().zip(&found.seats);
        seats.any(|(was, is)| stays(was) && !stays(is))
            || (found.mapping == Mapping::Never && self.mapping != Mapping::Never)
    }

    /// Leaves things where they are, and takes over from `found` what they need, and whether they stream for it.
    pub(crate) fn settle(&mut self, found: Seating) {
        for (kept, found) in self.seats.iter_mut().zip(&found.seats) {
            kept.is_streamed = found.is_streamed && kept.residence != Residence::Device;
        }
        self.readers = found.readers;
        self.devices = found.devices;
        self.prefix = found.prefix;
    }

    /// Adds to memory that ran out which budget would do.
    pub(crate) fn explain(&self, error: Error) -> Error {
        let Error::Engine(engine) = &error else {
            return error;
        };
        let Some(source @ sd_backend::Error::OutOfMemory { device, .. }) = engine.refusal() else {
            return error;
        };
        let mut needs = self.devices.iter();
        match needs.find(|need| need.device.name() == *device) {
            Some(need) => Error::TooLittleMemory {
                smallest: need.smallest,
                source: source.clone(),
            },
            None => error,
        }
    }

    /// The error of the first device that has too little, if one has.
    pub(crate) fn check(&self, ledger: &Ledger) -> Result<()> {
        match self.devices.iter().find(|need| !need.fits()) {
            None => Ok(()),
            Some(need) => Err(Error::TooLittleMemory {
                source: ledger.refused(need.device, need.smallest),
                smallest: need.smallest,
            }),
        }
    }
}

/// What the parts of a picture or clip take, found before anything is placed.
pub(crate) struct Runs {
    /// In the order of [`IN_ORDER`]: the device, and what it computes in.
    pub(crate) parts: Vec<(Device, Estimate)>,
    /// What is in memory only for a while: what reads reference pictures.
    pub(crate) readers: Vec<Need>,
    pub(crate) passes: u64,
}

/// What needs these `weights` on `device` while it runs, and has them there for that alone.
pub(crate) fn passing_need(
    component: Component,
    device: Device,
    weights: &Weights,
    estimate: &Estimate,
) -> Result<Need> {
    let cost = weights.cost(device, Residence::Disk, Mapping::Never)?;
    let compute = estimate.compute_bytes + estimate.constant_bytes;
    Ok(Need {
        component,
        device,
        residence: Some(Residence::Disk),
        weights: cost.resident(),
        compute: match device.kind() {
            DeviceKind::Cpu => compute.max(cost.staging),
            _ => compute,
        },
        streamed: streamed(weights, component, device, estimate, (1, 0))?,
    })
}

/// What `component` needs if its weights come and go while it runs, for `passes` at once that keep so many bytes each.
fn streamed(
    weights: &Weights,
    component: Component,
    device: Device,
    estimate: &Estimate,
    (passes, kept): (u64, u64),
) -> Result<Option<Streamed>> {
    if estimate.segments < 2 {
        return Ok(None);
    }
    let passes = match component {
        Component::Diffusion => passes,
        _ => 1,
    };
    // What weights pass through is the host's, and there all the time.
    let cost = weights.cost(device, Residence::Disk, Mapping::Never)?;
    let staging = match device.kind() {
        DeviceKind::Cpu => cost.staging,
        _ => 0,
    };
    let compute = estimate.segmented_bytes + estimate.constant_bytes + kept;
    Ok(Some(Streamed {
        weights: estimate.streamed_weight_bytes,
        compute: passes * compute + staging,
    }))
}

/// What a caller wants of where things go.
#[derive(Debug, Clone)]
pub(crate) struct Wishes {
    pub(crate) device: DeviceChoice,
    pub(crate) placement: Placement,
    pub(crate) mapping: Mapping,
    pub(crate) prefix: PrefixCache,
}

impl Default for Wishes {
    fn default() -> Self {
        Wishes {
            device: "auto".into(),
            placement: Placement::default(),
            mapping: Mapping::Auto,
            prefix: PrefixCache::default(),
        }
    }
}

/// Bytes of host memory that parameters may live in: what is free, less 2 GiB or a tenth of all for everything else.
fn host_spare(ledger: &Ledger) -> Option<u64> {
    const LEFT_FREE: u64 = 2 << 30;
    let report = ledger.report(Device::cpu().ok()?);
    let total = report.memory?.total;
    Some(report.available?.saturating_sub(LEFT_FREE.max(total / 10)))
}
