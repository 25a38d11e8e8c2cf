//! Bringing declared parameters into a device's memory. One of the places of this crate with `unsafe` in it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use sd_backend::{Backend, Buffer, Device, HostMapping, Ledger, Mapping, MemoryKind};
use sd_ggml_sys as sys;

use crate::checkpoint::Checkpoint;
use crate::error::{Allocation, Error, Result};
use crate::load_plan::{LoadPlan, Staging, Step};
use crate::param::{Param, Place};
use crate::raw::{Arena, RawTensor};
use crate::run::{Cancel, Progress, Reporter};
use crate::transfer::{Job, Lanes, Road, Source, Target};

/// What loading did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadReport {
    /// Bytes of the device's memory that the parameters take: buffers, and the pages of mapped files.
    pub bytes: u64,
    /// Bytes of parameters that are used where they lie in a mapped file.
    pub mapped: u64,
    /// Bytes of parameters that were copied as they are.
    pub copied: u64,
    /// Bytes, in memory, of parameters whose type was changed on the way.
    pub converted: u64,
}

impl LoadReport {
    /// Adds what another load did.
    pub fn add(&mut self, other: LoadReport) {
        self.bytes += other.bytes;
        self.mapped += other.mapped;
        self.copied += other.copied;
        self.converted += other.converted;
    }
}

/// Loads `params`, which were declared against `checkpoint`, into the memory of the device of `backend`, on its account;
/// a [`LoadPlan`] with [`Mapping::Auto`].
///
/// # Errors
/// As for [`LoadPlan::new`] and [`LoadPlan::load`].
pub fn load(
    checkpoint: &Checkpoint,
    params: &[Param],
    backend: &Backend,
    cancel: &Cancel,
    progress: &mut dyn Reporter,
) -> Result<LoadReport> {
    LoadPlan::new(checkpoint, params, backend.device(), Mapping::Auto)?
        .load(backend, cancel, progress)
}

/// Takes `params` out of memory, once no [`Plan`](crate::Plan) uses them any more. They can be loaded again.
pub fn unload(params: &[Param]) {
    for param in params {
        param.set_place(None);
    }
}

impl LoadPlan<'_> {
    /// Does it, on the account of `backend`. A file that turns out not to be mappable is read, with one warning.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] if the plan is for another device; [`Error::Backend`] when memory runs out or the load is
    /// cancelled; [`Error::Checkpoint`] when a file cannot be read; [`Error::Unconvertible`] for a value that the wanted
    /// type cannot hold. Nothing stays allocated then, and no parameter has
    /// changed.
    pub fn load(
        &self,
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<LoadReport> {
        let (places, report) = self.fetch(backend, None, cancel, progress)?;
        for (param, place) in self.params.iter().zip(places) {
            param.set_place(Some(place));
        }
        Ok(report)
    }

    /// As [`LoadPlan::load`], but the parameters are not told where their values are. A plan for the host takes memory that
    /// `for_device` copies from, pinned if it offers that.
    pub(crate) fn fetch(
        &self,
        backend: &Backend,
        for_device: Option<Device>,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<(Vec<Place>, LoadReport)> {
        if backend.device() != self.device {
            return Err(Error::WrongDevice {
                what: "the backend".to_owned(),
                found: backend.device().name(),
                wanted: self.device.name(),
            });
        }
        cancel.check()?;
        let mut report = LoadReport::default();
        let mut places = self.map_files(backend, &mut report);
        let copies: Vec<usize> = (0..places.len())
            .filter(|&index| places[index].is_none())
            .collect();
        let sizes = copies.iter().map(|&index| self.steps[index].buffer_bytes);
        let taken = match for_device {
            None => allocate(backend, sizes, MemoryKind::Weights),
            Some(device) => allocate_on_host(backend.ledger(), device, sizes),
        };
        let taken = taken.map_err(|error| error.of(Allocation::Weights))?;
        let mut jobs = Vec::with_capacity(copies.len());
        let arena = Arena::new(copies.len(), false).map_err(|_| backend.out_of_memory(0))?;
        for (&index, place) in copies.iter().zip(taken) {
            let (param, step) = (&self.params[index], &self.steps[index]);
            let bytes = param.bytes() as u64;
            if step.is_kept(param.dtype()) {
                report.copied += bytes;
            } else {
                report.converted += bytes;
            }
            if place.offset == 0 {
                report.bytes += place.buffer.len() as u64;
            }
            jobs.push(Job {
                source: Source::File(self.checkpoint, step),
                param,
                target: Target::new(&arena, param, &place, backend)?,
            });
            places[index] = Some(place);
        }
        let loaded = self.params.len() - copies.len();
        self.copy_all(&jobs, loaded, backend, cancel, progress)?;
        Ok((places.into_iter().flatten().collect(), report))
    }

    /// The places of parameters that lie in mapped files.
    fn map_files(&self, backend: &Backend, report: &mut LoadReport) -> Vec<Option<Place>> {
        let mut by_file: BTreeMap<usize, Vec<Range<u64>>> = BTreeMap::new();
        for (file, range) in self.steps.iter().filter_map(|step| step.in_file.clone()) {
            by_file.entry(file).or_default().push(range);
        }
        let mappings: BTreeMap<usize, Vec<HostMapping>> = by_file
            .into_iter()
            .filter_map(|(file, ranges)| {
                let mappings = self
                    .checkpoint
                    .map(file, self.device, backend.ledger(), &ranges)?;
                Some((file, mappings))
            })
            .collect();
        report.bytes += mappings
            .values()
            .flatten()
            .map(HostMapping::bytes)
            .sum::<u64>();
        let place = |step: &Step| {
            let (file, range) = step.in_file.clone()?;
            let mapping = mappings.get(&file)?;
            mapping.iter().find_map(|mapping| {
                Some(Place {
                    offset: mapping.offset_of(range.clone())?,
                    buffer: Arc::clone(mapping.buffer()),
                })
            })
        };
        let places: Vec<Option<Place>> = self.steps.iter().map(place).collect();
        let in_place = self.params.iter().zip(&places);
        report.mapped = in_place
            .filter(|(_, place)| place.is_some())
            .map(|(param, _)| param.bytes() as u64)
            .sum();
        places
    }

    /// Reads, converts and stores everything that `jobs` are for, in pieces and on several threads. `loaded` parameters
    /// needed nothing.
    fn copy_all(
        &self,
        jobs: &[Job<'_>],
        loaded: usize,
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<()> {
        let copied = jobs.iter().filter_map(|job| match job.source {
            Source::File(_, step) => Some((job.param, step)),
            Source::Memory(_) => None,
        });
        let staging = Staging::of(copied, self.device);
        let mut lanes =
            Lanes::new(staging, backend.ledger()).map_err(|error| error.of(Allocation::Host))?;
        let (mut done, mut bytes) = (loaded, 0);
        if jobs.is_empty() {
            progress.report(&Progress::Loading {
                done,
                total: self.params.len(),
                bytes: 0,
            });
        }
        let road = Road::new(None);
        lanes.bring(jobs, &road, self.device, cancel, &mut |written, is_last| {
            bytes += written;
            if is_last {
                done += 1;
                progress.report(&Progress::Loading {
                    done,
                    total: self.params.len(),
                    bytes,
                });
            }
        })
    }
}

/// Takes memory of the device of `backend` for tensors of these sizes in bytes, on the account of `kind`, in as few buffers
/// as it allows, and says where each lies.
pub(crate) fn allocate(
    backend: &Backend,
    sizes: impl Iterator<Item = usize>,
    kind: MemoryKind,
) -> Result<Vec<Place>> {
    let device = backend.device();
    let limits = (Buffer::largest(device), Buffer::alignment(device));
    let too_much = || Error::from(backend.out_of_memory(u64::MAX));
    let layout = in_buffers(sizes, limits).ok_or_else(too_much)?;
    take(layout, |bytes| {
        Ok(Buffer::allocate(backend.ledger(), device, bytes, kind)?)
    })
}

/// As [`allocate`], for weights in memory of the host that `device` copies from.
fn allocate_on_host(
    ledger: &Ledger,
    device: Device,
    sizes: impl Iterator<Item = usize>,
) -> Result<Vec<Place>> {
    /// Bytes of one buffer: pinning takes its time, and may work for a part.
    const MOST: usize = 1 << 30;
    let (largest, alignment) = Buffer::limits_on_host(device)?;
    let too_much = || Error::from(ledger.refused(device, u64::MAX));
    let layout = in_buffers(sizes, (largest.min(MOST), alignment)).ok_or_else(too_much)?;
    take(layout, |bytes| {
        let kind = MemoryKind::Weights;
        Ok(Buffer::allocate_on_host(ledger, device, bytes, kind)?)
    })
}

/// Bytes of each buffer for tensors of these sizes, and the offsets of the tensors in it; `None` if that is more than there
/// are numbers for.
fn in_buffers(
    sizes: impl Iterator<Item = usize>,
    (most, alignment): (usize, usize),
) -> Option<Vec<(usize, Vec<usize>)>> {
    let mut layout: Vec<(usize, Vec<usize>)> = Vec::new();
    for bytes in sizes {
        let bytes = bytes.checked_next_multiple_of(alignment)?;
        match layout.last_mut() {
            Some((taken, offsets)) if taken.checked_add(bytes).is_some_and(|sum| sum <= most) => {
                offsets.push(*taken);
                *taken += bytes;
            }
            _ => layout.push((bytes, vec![0])),
        }
    }
    Some(layout)
}

/// Takes the buffers of a layout.
fn take(
    layout: Vec<(usize, Vec<usize>)>,
    buffer: impl Fn(usize) -> Result<Buffer>,
) -> Result<Vec<Place>> {
    let mut places = Vec::new();
    for (bytes, offsets) in layout {
        let buffer = Arc::new(buffer(bytes)?);
        places.extend(offsets.into_iter().map(|offset| Place {
            buffer: Arc::clone(&buffer),
            offset,
        }));
    }
    Ok(places)
}

/// Puts `tensor`, a fresh leaf, at `place`, which [`allocate`] made for it or a mapped file has it at.
pub(crate) fn bind(tensor: RawTensor, place: &Place, backend: &Backend) -> Result<()> {
    // SAFETY: the tensor is fresh. Its place has as many bytes inside the buffer as the device wants for it, aligned:
    // that is how places are made. ggml may prepare the padding behind its rows now.
    let status = unsafe {
        let base = sys::ggml_backend_buffer_get_base(place.buffer.as_ptr()).cast::<u8>();
        let address = base.add(place.offset).cast();
        sys::ggml_backend_tensor_alloc(place.buffer.as_ptr(), tensor.as_ptr(), address)
    };
    if status == sys::GGML_STATUS_SUCCESS {
        Ok(())
    } else {
        Err(backend.out_of_memory(0).into())
    }
}
