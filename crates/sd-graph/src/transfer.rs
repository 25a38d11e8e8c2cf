//! Moving parameters from files and host memory to where they are computed with. One of the places of this crate with
//! `unsafe` in it.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;
use sd_backend::{
    Backend, Buffer, CopyQueue, DType, Device, Event, Ledger, MemoryKind, Reservation,
};
use sd_ggml_sys as sys;

use crate::checkpoint::Checkpoint;
use crate::convert::convert;
use crate::error::{Error, Result};
use crate::load::bind;
use crate::load_plan::{PIECE, Staging, Step};
use crate::param::{Param, Place};
use crate::raw::{Arena, RawTensor, bytes_for};
use crate::run::Cancel;
use crate::shape::Shape;

/// Pieces of each lane that may be on their way to a device with a queue while the next one is read.
const SLOTS: usize = 2;

/// Alignment in bytes of what a queue copies from.
const SLOT_ALIGNMENT: usize = 64;

/// Bytes of what lies in memory that one thread copies at once.
pub(crate) const MEMORY_PIECE: usize = 2 << 20;

/// How pieces get to a device's memory.
pub(crate) enum Road<'q> {
    /// By the device's driver, one at a time.
    Driver(Mutex<()>),
    /// By a queue that copies by itself.
    Queue(Mutex<&'q mut CopyQueue>),
}

impl<'q> Road<'q> {
    pub(crate) fn new(queue: Option<&'q mut CopyQueue>) -> Road<'q> {
        match queue {
            Some(queue) => Road::Queue(Mutex::new(queue)),
            None => Road::Driver(Mutex::default()),
        }
    }
}

/// Staging memory of all threads that bring pieces, on the host's account.
#[derive(Debug)]
pub(crate) struct Lanes {
    lanes: Vec<Lane>,
    /// What the slots of the lanes lie in. A queue may copy from it until it was waited for.
    _slots: Option<Buffer>,
    _reservation: Option<Reservation>,
}

impl Lanes {
    /// Takes memory as `staging` says.
    pub(crate) fn new(staging: Staging, ledger: &Ledger) -> Result<Lanes> {
        Ok(Lanes {
            lanes: (0..staging.lanes).map(|_| Lane::default()).collect(),
            _slots: None,
            _reservation: reserve(staging.bytes(), ledger)?,
        })
    }

    /// As [`Lanes::new`], for pieces that a queue copies to `device`, from memory that is pinned where that can be. `None`
    /// if there are no events.
    pub(crate) fn to_queue(
        staging: Staging,
        device: Device,
        ledger: &Ledger,
    ) -> Result<Option<Lanes>> {
        let mut lanes = Lanes {
            lanes: (0..staging.lanes).map(|_| Lane::default()).collect(),
            _slots: None,
            _reservation: reserve((staging.lanes * staging.stored) as u64, ledger)?,
        };
        let slot_bytes = staging.sent.next_multiple_of(SLOT_ALIGNMENT);
        let bytes = staging.lanes * SLOTS * slot_bytes;
        if bytes == 0 {
            return Ok(Some(lanes));
        }
        let buffer = Buffer::allocate_on_host(ledger, device, bytes, MemoryKind::Staging)?;
        let Some(base) = buffer.host_address() else {
            return Ok(None);
        };
        for number in 0..staging.lanes * SLOTS {
            let Some(is_copied) = Event::new(device) else {
                return Ok(None);
            };
            lanes.lanes[number / SLOTS].slots.push(Slot {
                // SAFETY: the buffer has this many bytes for each slot of each lane.
                address: unsafe { base.add(number * slot_bytes) },
                bytes: slot_bytes,
                is_copied,
            });
        }
        lanes._slots = Some(buffer);
        Ok(Some(lanes))
    }

    /// Reads, converts and stores everything that `jobs` are for, in pieces and on several threads; a queue may still have
    /// to copy them. `brought` hears of each piece's bytes, and whether it was the last of its parameter.
    pub(crate) fn bring(
        &mut self,
        jobs: &[Job<'_>],
        road: &Road<'_>,
        device: Device,
        cancel: &Cancel,
        brought: &mut dyn FnMut(u64, bool),
    ) -> Result<()> {
        /// Pieces that each thread takes before progress is told.
        const TURN: usize = 4;
        let mut pieces = Vec::new();
        for job in jobs {
            job.cut(&mut pieces)?;
        }
        for batch in pieces.chunks(self.lanes.len().max(1) * TURN) {
            cancel.check()?;
            self.lanes
                .par_iter_mut()
                .zip(batch.par_chunks(TURN))
                .try_for_each(|(lane, pieces)| {
                    pieces.iter().try_for_each(|piece| piece.bring(lane, road))
                })?;
            device.check_connection()?;
            for piece in batch {
                brought(piece.written.len() as u64, piece.is_last);
            }
        }
        Ok(cancel.check()?)
    }
}

/// Takes staging memory of the host into account.
fn reserve(bytes: u64, ledger: &Ledger) -> Result<Option<Reservation>> {
    match Device::cpu() {
        Ok(cpu) if bytes > 0 => Ok(Some(ledger.reserve(cpu, bytes, MemoryKind::Staging)?)),
        _ => Ok(None),
    }
}

/// One parameter that has to be copied.
pub(crate) struct Job<'p> {
    pub source: Source<'p>,
    pub param: &'p Param,
    pub target: Target,
}

/// Where a parameter's values are.
#[derive(Clone, Copy)]
pub(crate) enum Source<'p> {
    /// In a file, perhaps as another type.
    File(&'p Checkpoint, &'p Step),
    /// In the host's memory.
    Memory(&'p Place),
}

/// Where a parameter's bytes go.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    /// To this address, if the processor can write there.
    Host(NonNull<u8>),
    /// Through the device's driver: a row of all the bytes that the parameter takes there.
    Device(RawTensor),
}

// SAFETY: both pointers lead into a buffer that only one load or stream writes, kept alive by it; threads write pieces of
// it that do not overlap, and through the driver one at a time.
unsafe impl Send for Target {}
// SAFETY: as for `Send`.
unsafe impl Sync for Target {}

impl Target {
    /// A parameter's place in a buffer that nobody else writes.
    pub(crate) fn new(
        arena: &Arena,
        param: &Param,
        place: &Place,
        backend: &Backend,
    ) -> Result<Target> {
        if let Some(base) = place.buffer.host_address() {
            // SAFETY: the offset lies inside the buffer.
            return Ok(Target::Host(unsafe { base.add(place.offset) }));
        }
        let no_room = || Error::from(backend.out_of_memory(0));
        let bytes = bytes_for(param.dtype(), param.shape(), backend.device());
        let row = bytes.and_then(|bytes| Shape::new(&[bytes]).ok());
        let tensor = arena.tensor(DType::I8, row.ok_or_else(no_room)?);
        let tensor = tensor.map_err(|_| no_room())?;
        bind(tensor, place, backend)?;
        Ok(Target::Device(tensor))
    }

    /// Bytes behind a parameter's own that the device reads as if they belonged to its last row.
    pub(crate) fn padding(self, param: &Param) -> usize {
        match self {
            Target::Host(_) => 0,
            // SAFETY: the tensor lives in an arena that the load or stream keeps.
            Target::Device(tensor) => unsafe { sys::ggml_nbytes(tensor.as_ptr()) - param.bytes() },
        }
    }

    /// Writes zeros to its padding, over what lay there before.
    pub(crate) fn clear_padding(self, param: &Param, queue: Option<&mut CopyQueue>) {
        static ZEROS: [u8; 4096] = [0; 4096];
        let Target::Device(tensor) = self else { return };
        let (start, end) = (param.bytes(), param.bytes() + self.padding(param));
        let mut queue = queue;
        for offset in (start..end).step_by(ZEROS.len()) {
            let bytes = ZEROS.len().min(end - offset);
            // SAFETY: the range ends inside the tensor, which lies in a live buffer; the zeros live for ever. Whoever
            // calls this has seen to it that nobody reads what lies there, or that the queue waits until nobody does.
            unsafe {
                match &mut queue {
                    Some(queue) => queue.copy(tensor.as_ptr(), offset, ZEROS.as_ptr(), bytes),
                    None => sys::ggml_backend_tensor_set(
                        tensor.as_ptr(),
                        ZEROS.as_ptr().cast(),
                        offset,
                        bytes,
                    ),
                }
            }
        }
    }

    /// Copies a parameter's values there, which lie at `from` in the memory of the host; by `queue` if there is one, from
    /// where `from` must stay until that has copied them.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] if they lie elsewhere.
    pub(crate) fn copy_from(
        self,
        from: &Place,
        param: &Param,
        queue: Option<&mut CopyQueue>,
    ) -> Result<()> {
        let address = address_of(from, param)?;
        // SAFETY: the parameter's bytes lie at its place in a buffer that the processor can read and that the caller
        // keeps; the target is memory of its own with room for as many, which nobody reads before the copy is done.
        unsafe {
            match (self, queue) {
                (Target::Host(into), _) => {
                    into.as_ptr()
                        .copy_from_nonoverlapping(address.as_ptr(), param.bytes());
                }
                (Target::Device(tensor), Some(queue)) => {
                    queue.copy(tensor.as_ptr(), 0, address.as_ptr(), param.bytes());
                }
                (Target::Device(tensor), None) => sys::ggml_backend_tensor_set(
                    tensor.as_ptr(),
                    address.as_ptr().cast(),
                    0,
                    param.bytes(),
                ),
            }
        }
        Ok(())
    }
}

/// The address of a parameter's values at `place`.
fn address_of(place: &Place, param: &Param) -> Result<NonNull<u8>> {
    let base = place
        .buffer
        .host_address()
        .ok_or_else(|| Error::WrongDevice {
            what: param.name().to_owned(),
            found: place.buffer.device().name(),
            wanted: "the host".to_owned(),
        })?;
    // SAFETY: the parameter lies inside the buffer at its offset.
    Ok(unsafe { base.add(place.offset) })
}

impl<'p> Job<'p> {
    /// Cuts it into pieces.
    fn cut(&'p self, pieces: &mut Vec<Piece<'p>>) -> Result<()> {
        let Source::File(_, step) = self.source else {
            let bytes = self.param.bytes();
            pieces.extend((0..bytes).step_by(MEMORY_PIECE).map(|start| {
                let end = bytes.min(start + MEMORY_PIECE);
                Piece {
                    job: self,
                    read: start as u64,
                    stored: end - start,
                    written: start..end,
                    is_last: end == bytes,
                }
            }));
            return Ok(());
        };
        let (mut read, mut written) = (0, 0);
        for first in (0..step.elements).step_by(PIECE) {
            let count = (step.elements - first).min(PIECE as u64);
            let sizes = step
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
                is_last: first + count == step.elements,
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
#[derive(Debug, Default)]
struct Lane {
    /// In words, since converting wants blocks aligned.
    stored: Vec<u64>,
    sent: Vec<u8>,
    /// What a queue copies from, in turn.
    slots: Vec<Slot>,
    next_slot: usize,
}

/// Memory that a queue copies one piece from.
#[derive(Debug)]
struct Slot {
    address: NonNull<u8>,
    bytes: usize,
    /// Happens when the piece was copied.
    is_copied: Event,
}

// SAFETY: each slot is memory of its own, used by the one thread that has its lane.
unsafe impl Send for Slot {}

impl Slot {
    /// Its memory, once nothing is copied from it any more.
    fn wait(&mut self) -> &mut [u8] {
        self.is_copied.wait();
        // SAFETY: the slot's bytes lie inside the buffer that `Lanes` keeps, made by ggml, so that they count as
        // initialised; no other slot has them, and the queue is done with them.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes) }
    }
}

impl Piece<'_> {
    /// Reads it, converts it if need be, and puts it where it belongs or has it copied there.
    fn bring(&self, lane: &mut Lane, road: &Road<'_>) -> Result<()> {
        match (self.job.target, road) {
            (Target::Host(address), _) => {
                // SAFETY: the range lies inside the parameter's bytes (`Job::cut`), which lie inside a fresh buffer that
                // nobody reads before the load is over; no other piece has the same range. The memory was made by ggml,
                // so that it counts as initialised.
                let into = unsafe {
                    std::slice::from_raw_parts_mut(
                        address.as_ptr().add(self.written.start),
                        self.written.len(),
                    )
                };
                self.read(&mut lane.stored, into)
            }
            (Target::Device(tensor), Road::Driver(one_at_a_time)) => {
                lane.sent.resize(self.written.len(), 0);
                self.read(&mut lane.stored, &mut lane.sent)?;
                let _turn = one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner);
                // SAFETY: the tensor lies in a live buffer; the bytes come from a slice of that length and end inside it.
                unsafe {
                    sys::ggml_backend_tensor_set(
                        tensor.as_ptr(),
                        lane.sent.as_ptr().cast(),
                        self.written.start,
                        lane.sent.len(),
                    );
                }
                Ok(())
            }
            (Target::Device(tensor), Road::Queue(queue)) => {
                let slot = lane.slots.get_mut(lane.next_slot);
                let slot = slot.ok_or_else(|| self.job.not_declared())?;
                lane.next_slot = (lane.next_slot + 1) % SLOTS;
                let into = slot.wait().get_mut(..self.written.len());
                let into = into.ok_or_else(|| self.job.not_declared())?;
                self.read(&mut lane.stored, into)?;
                let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
                // SAFETY: as above. The slot's memory lives as long as the lanes, who outlive what the queue has to copy,
                // and is written again only after the event.
                unsafe {
                    queue.copy(
                        tensor.as_ptr(),
                        self.written.start,
                        into.as_ptr(),
                        into.len(),
                    );
                }
                Ok(queue.mark(&slot.is_copied)?)
            }
        }
    }

    /// Reads it to `into`, by way of `words` if it is stored as another type.
    fn read(&self, words: &mut Vec<u64>, into: &mut [u8]) -> Result<()> {
        let param = self.job.param;
        let (checkpoint, step) = match self.job.source {
            Source::File(checkpoint, step) => (checkpoint, step),
            Source::Memory(place) => {
                let address = address_of(place, param)?;
                // SAFETY: the piece lies inside the parameter's bytes, which lie at its place in a buffer that the job
                // keeps; nobody writes there.
                unsafe {
                    let from = address.as_ptr().add(self.written.start);
                    into.as_mut_ptr().copy_from_nonoverlapping(from, into.len());
                }
                return Ok(());
            }
        };
        if step.is_kept(param.dtype()) {
            return Ok(checkpoint.read_at(param.name(), self.read, into)?);
        }
        words.resize(self.stored.div_ceil(size_of::<u64>()), 0);
        let stored = &mut bytemuck::cast_slice_mut(words)[..self.stored];
        checkpoint.read_at(param.name(), self.read, stored)?;
        convert(stored, step.stored, param.dtype(), into).map_err(|source| Error::Unconvertible {
            name: param.name().to_owned(),
            source,
        })
    }
}
