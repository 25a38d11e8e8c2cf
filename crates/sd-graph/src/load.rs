//! Bringing declared parameters into a device's memory. One of the places of this crate with `unsafe` in it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use rayon::prelude::*;
use sd_backend::{Backend, Buffer, Device, HostMapping, Mapping, MemoryKind, Reservation};
use sd_ggml_sys as sys;

use crate::checkpoint::Checkpoint;
use crate::convert::convert;
use crate::error::{Error, Result};
use crate::load_plan::{LoadPlan, PIECE, Staging, Step};
use crate::param::{Param, Place};
use crate::raw::{Arena, RawTensor};
use crate::run::{Cancel, Progress, Reporter};

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
        let (places, report) = self.fetch(backend, cancel, progress)?;
        for (param, place) in self.params.iter().zip(places) {
            param.set_place(Some(place));
        }
        Ok(report)
    }

    /// As [`LoadPlan::load`], but the parameters are not told where their values are.
    pub(crate) fn fetch(
        &self,
        backend: &Backend,
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
        let taken = allocate(backend, sizes)?;
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
                param,
                step,
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
        /// Pieces that each thread takes before progress is told.
        const TURN: usize = 4;
        let mut pieces = Vec::new();
        for job in jobs {
            job.cut(&mut pieces)?;
        }
        let staging = Staging::of(jobs.iter().map(|job| (job.param, job.step)), self.device);
        let _reservation = reserve(staging, backend)?;
        let mut lanes: Vec<Lane> = (0..staging.lanes).map(|_| Lane::default()).collect();
        let one_at_a_time = Mutex::new(());

        let (mut done, mut bytes) = (loaded, 0);
        if jobs.is_empty() {
            progress.report(&Progress::Loading {
                done,
                total: self.params.len(),
                bytes: 0,
            });
        }
        for batch in pieces.chunks(lanes.len().max(1) * TURN) {
            cancel.check()?;
            lanes
                .par_iter_mut()
                .zip(batch.par_chunks(TURN))
                .try_for_each(|(lane, pieces)| {
                    pieces
                        .iter()
                        .try_for_each(|piece| piece.bring(self.checkpoint, lane, &one_at_a_time))
                })?;
            self.device.check_connection()?;
            for piece in batch {
                bytes += piece.written.len() as u64;
                if piece.is_last {
                    done += 1;
                    progress.report(&Progress::Loading {
                        done,
                        total: self.params.len(),
                        bytes,
                    });
                }
            }
        }
        Ok(cancel.check()?)
    }
}

/// Takes staging memory into account, which is the host's.
fn reserve(staging: Staging, backend: &Backend) -> Result<Option<Reservation>> {
    let (true, Ok(cpu)) = (staging.bytes() > 0, Device::cpu()) else {
        return Ok(None);
    };
    let ledger = backend.ledger();
    Ok(Some(ledger.reserve(
        cpu,
        staging.bytes(),
        MemoryKind::Staging,
    )?))
}

/// Takes memory of the device of `backend` for tensors of these sizes in bytes, in as few buffers as it allows, and says
/// where each lies.
pub(crate) fn allocate(
    backend: &Backend,
    sizes: impl Iterator<Item = usize>,
) -> Result<Vec<Place>> {
    allocate_as(backend, MemoryKind::Weights, sizes)
}

/// As [`allocate`], on the account of `kind`.
pub(crate) fn allocate_as(
    backend: &Backend,
    kind: MemoryKind,
    sizes: impl Iterator<Item = usize>,
) -> Result<Vec<Place>> {
    let device = backend.device();
    let alignment = Buffer::alignment(device);
    let most = Buffer::largest(device);
    let too_much = || Error::from(backend.out_of_memory(u64::MAX));
    // Bytes of each buffer, and the offsets of the tensors in it.
    let mut layout: Vec<(usize, Vec<usize>)> = Vec::new();
    for bytes in sizes {
        let bytes = bytes
            .checked_next_multiple_of(alignment)
            .ok_or_else(too_much)?;
        match layout.last_mut() {
            Some((taken, offsets)) if taken.checked_add(bytes).is_some_and(|sum| sum <= most) => {
                offsets.push(*taken);
                *taken += bytes;
            }
            _ => layout.push((bytes, vec![0])),
        }
    }
    let mut places = Vec::new();
    for (bytes, offsets) in layout {
        let buffer = Arc::new(Buffer::allocate(backend.ledger(), device, bytes, kind)?);
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

/// One parameter that has to be copied.
struct Job<'p> {
    param: &'p Param,
    step: &'p Step,
    target: Target,
}

/// Where a parameter's bytes go.
#[derive(Clone, Copy)]
enum Target {
    /// To this address, if the processor can write there.
    Host(NonNull<u8>),
    /// Through the device's driver.
    Device(RawTensor),
}

// SAFETY: both pointers lead into a buffer that only this load knows, kept alive by its places; threads write pieces of
// it that do not overlap, and through the driver one at a time.
unsafe impl Send for Target {}
// SAFETY: as for `Send`.
unsafe impl Sync for Target {}

impl Target {
    fn new(arena: &Arena, param: &Param, place: &Place, backend: &Backend) -> Result<Target> {
        let no_room = |_| backend.out_of_memory(0);
        let tensor = arena
            .tensor(param.dtype(), param.shape())
            .map_err(no_room)?;
        bind(tensor, place, backend)?;
        Ok(match place.buffer.host_address() {
            // SAFETY: the offset lies inside the buffer.
            Some(base) => Target::Host(unsafe { base.add(place.offset) }),
            None => Target::Device(tensor),
        })
    }
}

impl<'p> Job<'p> {
    /// Cuts it into pieces.
    fn cut(&'p self, pieces: &mut Vec<Piece<'p>>) -> Result<()> {
        let (mut read, mut written) = (0, 0);
        for first in (0..self.step.elements).step_by(PIECE) {
            let count = (self.step.elements - first).min(PIECE as u64);
            let sizes = self
                .step
                .stored
                .bytes(count)
                .zip(self.param.dtype().row_bytes(count as usize));
            let Some((stored, memory)) = sizes else {
                return Err(self.not_declared());
            };
            pieces.push(Piece {
                job: self,
                read,
                stored: stored as usize,
                written: written..written + memory,
                is_last: first + count == self.step.elements,
            });
            read += stored;
            written += memory;
        }
        if written == self.param.bytes() {
            Ok(())
        } else {
            Err(self.not_declared())
        }
    }

    fn not_declared(&self) -> Error {
        Error::NotDeclared {
            name: self.param.name().to_owned(),
        }
    }
}

/// Part of a parameter: whole blocks of it.
struct Piece<'p> {
    job: &'p Job<'p>,
    /// First byte in the tensor as stored.
    read: u64,
    /// Bytes as stored.
    stored: usize,
    /// Bytes in memory, inside the parameter's.
    written: Range<usize>,
    is_last: bool,
}

/// Staging memory of one thread.
#[derive(Default)]
struct Lane {
    /// In words, since converting wants blocks aligned.
    stored: Vec<u64>,
    converted: Vec<u8>,
}

impl Piece<'_> {
    /// Reads it, converts it if need be, and puts it where it belongs.
    fn bring(
        &self,
        checkpoint: &Checkpoint,
        lane: &mut Lane,
        one_at_a_time: &Mutex<()>,
    ) -> Result<()> {
        let (param, step) = (self.job.param, self.job.step);
        let kept = step.is_kept(param.dtype());
        let in_place = match self.job.target {
            // SAFETY: the range lies inside the parameter's bytes (`Job::cut`), which lie inside a fresh buffer that
            // nobody reads before the load is over; no other piece has the same range. The memory was made by ggml, so
            // that it counts as initialised.
            Target::Host(address) => Some(unsafe {
                std::slice::from_raw_parts_mut(
                    address.as_ptr().add(self.written.start),
                    self.written.len(),
                )
            }),
            Target::Device(_) => None,
        };
        let Lane {
            stored: words,
            converted,
        } = lane;
        let bytes: &[u8] = match (kept, in_place) {
            (true, Some(into)) => return Ok(checkpoint.read_at(param.name(), self.read, into)?),
            (kept, in_place) => {
                words.resize(self.stored.div_ceil(size_of::<u64>()), 0);
                let stored = &mut bytemuck::cast_slice_mut(words)[..self.stored];
                checkpoint.read_at(param.name(), self.read, stored)?;
                if kept {
                    stored
                } else {
                    let into = in_place.unwrap_or_else(|| {
                        converted.resize(self.written.len(), 0);
                        converted.as_mut_slice()
                    });
                    convert(stored, step.stored, param.dtype(), into).map_err(|source| {
                        Error::Unconvertible {
                            name: param.name().to_owned(),
                            source,
                        }
                    })?;
                    into
                }
            }
        };
        if let Target::Device(tensor) = self.job.target {
            let _turn = one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: the tensor lies in a live buffer; the bytes come from a slice of that length and end inside it.
            unsafe {
                sys::ggml_backend_tensor_set(
                    tensor.as_ptr(),
                    bytes.as_ptr().cast(),
                    self.written.start,
                    bytes.len(),
                );
            }
        }
        Ok(())
    }
}
