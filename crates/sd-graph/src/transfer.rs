//! Moving parameters from files and host memory to where they are computed with. One of the places of this crate with
//! `unsafe` in it.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;
use sd_backend::{Backend, Device, Ledger, MemoryKind, Reservation};
use sd_ggml_sys as sys;

use crate::checkpoint::Checkpoint;
use crate::convert::convert;
use crate::error::{Error, Result};
use crate::load::bind;
use crate::load_plan::{PIECE, Staging, Step};
use crate::param::{Param, Place};
use crate::raw::{Arena, RawTensor};
use crate::run::Cancel;

/// Staging memory of all threads that bring pieces, on the host's account.
#[derive(Debug)]
pub(crate) struct Lanes {
    lanes: Vec<Lane>,
    _reservation: Option<Reservation>,
}

impl Lanes {
    /// Takes into account what `staging` says.
    pub(crate) fn new(staging: Staging, ledger: &Ledger) -> Result<Lanes> {
        let reservation = match Device::cpu() {
            Ok(cpu) if staging.bytes() > 0 => {
                Some(ledger.reserve(cpu, staging.bytes(), MemoryKind::Staging)?)
            }
            _ => None,
        };
        Ok(Lanes {
            lanes: (0..staging.lanes).map(|_| Lane::default()).collect(),
            _reservation: reservation,
        })
    }

    /// Reads, converts and stores everything that `jobs` are for, in pieces and on several threads. `brought` hears of
    /// each piece's bytes, and whether it was the last of its parameter.
    pub(crate) fn bring(
        &mut self,
        jobs: &[Job<'_>],
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
        let one_at_a_time = Mutex::new(());
        for batch in pieces.chunks(self.lanes.len().max(1) * TURN) {
            cancel.check()?;
            self.lanes
                .par_iter_mut()
                .zip(batch.par_chunks(TURN))
                .try_for_each(|(lane, pieces)| {
                    pieces
                        .iter()
                        .try_for_each(|piece| piece.bring(lane, &one_at_a_time))
                })?;
            device.check_connection()?;
            for piece in batch {
                brought(piece.written.len() as u64, piece.is_last);
            }
        }
        Ok(cancel.check()?)
    }
}

/// One parameter that has to be copied.
pub(crate) struct Job<'p> {
    pub checkpoint: &'p Checkpoint,
    pub param: &'p Param,
    pub step: &'p Step,
    pub target: Target,
}

/// Where a parameter's bytes go.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    /// To this address, if the processor can write there.
    Host(NonNull<u8>),
    /// Through the device's driver.
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

impl Target {
    /// Copies a parameter's values there, which lie at `from` in the memory of the host.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] if they do not.
    pub(crate) fn copy_from(self, from: &Place, param: &Param) -> Result<()> {
        let elsewhere = || Error::WrongDevice {
            what: param.name().to_owned(),
            found: from.buffer.device().name(),
            wanted: "the host".to_owned(),
        };
        let address = from.buffer.host_address().ok_or_else(elsewhere)?;
        // SAFETY: the parameter's bytes lie at its place in a buffer that the processor can read and that the caller
        // keeps; the target is memory of its own with room for as many, which nobody reads meanwhile.
        unsafe {
            let address = address.as_ptr().add(from.offset);
            match self {
                Target::Host(into) => {
                    into.as_ptr()
                        .copy_from_nonoverlapping(address, param.bytes());
                }
                Target::Device(tensor) => {
                    sys::ggml_backend_tensor_set(tensor.as_ptr(), address.cast(), 0, param.bytes())
                }
            }
        }
        Ok(())
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
#[derive(Debug, Default)]
struct Lane {
    /// In words, since converting wants blocks aligned.
    stored: Vec<u64>,
    converted: Vec<u8>,
}

impl Piece<'_> {
    /// Reads it, converts it if need be, and puts it where it belongs.
    fn bring(&self, lane: &mut Lane, one_at_a_time: &Mutex<()>) -> Result<()> {
        let Job {
            checkpoint,
            param,
            step,
            ..
        } = *self.job;
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
