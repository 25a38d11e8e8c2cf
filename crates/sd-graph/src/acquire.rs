//! Deciding how a plan runs, from what memory there is when it takes its own: in one piece if that fits, else in
//! segments, else in segments whose weights come and go.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use sd_backend::{Backend, Buffer, DeviceKind};

use crate::error::{Allocation, Error, Result};
use crate::form::{Draft, Form};
use crate::graph::Recording;
use crate::param::{Param, Place};
use crate::ring::Ring;
use crate::run::{Cancel, Reporter};
use crate::runner_cache::stored_bytes;
use crate::segment::{Partition, Segment};
use crate::stream::{Stream, sizes, staging};

/// Weights that come and go, shared by plans that run in turn.
pub(crate) type SharedStream = Arc<Mutex<Stream>>;

/// What plans of the same weights share, and what is known of them.
#[derive(Debug)]
pub(crate) struct Pool {
    stream: Weak<Mutex<Stream>>,
    /// Plans that may be there at once.
    plans: u64,
    /// The most that one of them took beside weights.
    most: u64,
    /// Whether graphs are cut even where the whole fits.
    always_cut: bool,
}

impl Pool {
    /// For up to so many plans.
    pub(crate) fn new(plans: usize) -> Pool {
        Pool {
            stream: Weak::new(),
            plans: plans as u64,
            most: 0,
            always_cut: false,
        }
    }

    /// For plans that run in segments wherever there are cuts.
    pub(crate) fn always_cut(self) -> Pool {
        Pool {
            always_cut: true,
            ..self
        }
    }
}

/// Takes memory for a plan.
pub(crate) fn acquire(
    recording: &Recording,
    partition: &Partition,
    pool: &mut Pool,
    backend: &Backend,
    cancel: &Cancel,
    progress: &mut dyn Reporter,
) -> Result<(Form, Option<SharedStream>)> {
    check_params(recording, backend)?;
    let parts = partition.params(recording, |param| param.place().is_none());
    let acquiring = Acquiring {
        recording,
        partition,
        backend,
        available: backend.ledger().report(backend.device()).available,
        stored: stored_bytes(recording, backend.device()),
        always_cut: pool.always_cut && partition.segments.len() > 1,
    };
    if parts.iter().all(Vec::is_empty) {
        return Ok((acquiring.form(None, 0)?, None));
    }
    let device = backend.device();
    let shared = pool.stream.upgrade().filter(|stream| {
        let stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.serves(&parts, device)
    });
    if let Some(stream) = shared {
        let form = acquiring.form(Some(&stream), 0)?;
        // ggml may have prepared the padding of parameters in places where others are now.
        let mut passing = stream.lock().unwrap_or_else(PoisonError::into_inner);
        passing.forget()?;
        drop(passing);
        return Ok((form, Some(stream)));
    }

    let (sizes, staging) = (sizes(&parts, device)?, staging(&parts, device)?);
    let largest = Buffer::largest(device) as u64;
    let budget = |others: u64| acquiring.available.map(|left| left.saturating_sub(others));
    // What weights pass through is the host's, which may be the device.
    let passage = match device.kind() {
        DeviceKind::Cpu => staging.bytes(),
        _ => 0,
    };
    let stored = acquiring.stored;
    let whole = acquiring.whole()?.bytes().saturating_add(stored);
    let own = match partition.segments.len() {
        1 => whole,
        _ => acquiring.segmented()?.bytes().saturating_add(stored),
    };
    pool.most = pool.most.max(own);
    let plans = |bytes: u64| bytes.saturating_mul(pool.plans).saturating_add(passage);

    // In one piece with all weights, then with as many as leave room for the plans to come, or at least for this one.
    let everything = Ring::lay_out(&sizes, budget(plans(whole)), largest)
        .ok()
        .filter(|ring| ring.bytes == 0 && !acquiring.always_cut);
    let spare = plans(pool.most).saturating_sub(own + passage);
    let (ring, spare) = match everything {
        Some(ring) => (ring, 0),
        None => {
            let ring = Ring::lay_out(&sizes, budget(plans(pool.most)), largest)
                .or_else(|_| Ring::lay_out(&sizes, budget(own + passage), largest))
                .map_err(|least| acquiring.too_little(least.saturating_add(own + passage)))?;
            (ring, spare)
        }
    };
    let least = Ring::lay_out(&sizes, Some(0), largest).err().unwrap_or(0);
    let stream = Stream::new(&parts, &ring, staging, backend, cancel, progress)
        .map_err(|error| error.of(Allocation::Weights))?;
    let stream = Arc::new(Mutex::new(stream));
    let acquiring = Acquiring {
        available: backend.ledger().report(device).available,
        ..acquiring
    };
    let form = acquiring
        .form(Some(&stream), spare)
        .map_err(|error| match error {
            Error::TooLittleMemory { source, .. } => Error::TooLittleMemory {
                source,
                smallest: least.saturating_add(own + passage),
            },
            other => other,
        })?;
    pool.stream = Arc::downgrade(&stream);
    Ok((form, Some(stream)))
}

/// Refuses parameters that cannot be had, or lie on another device.
fn check_params(recording: &Recording, backend: &Backend) -> Result<()> {
    let device = backend.device();
    for param in &recording.params {
        match param.place() {
            Some(place) if place.buffer.device() != device => {
                return Err(Error::WrongDevice {
                    what: param.name().to_owned(),
                    found: place.buffer.device().name(),
                    wanted: device.name(),
                });
            }
            None if param.home().is_none() => {
                return Err(Error::NotLoaded {
                    name: param.name().to_owned(),
                });
            }
            _ => {}
        }
    }
    Ok(())
}

struct Acquiring<'a> {
    recording: &'a Recording,
    partition: &'a Partition,
    backend: &'a Backend,
    /// Bytes that may be taken, if anything is known.
    available: Option<u64>,
    /// Bytes that its runs store in their caches, beside everything else.
    stored: u64,
    always_cut: bool,
}

impl Acquiring<'_> {
    fn whole(&self) -> Result<Draft> {
        let whole = vec![Segment::whole(self.recording)];
        Draft::of(self.recording, whole, self.backend)
            .map_err(|error| error.of(Allocation::Measuring))
    }

    fn segmented(&self) -> Result<Draft> {
        let segments = self.partition.segments.clone();
        Draft::of(self.recording, segments, self.backend)
            .map_err(|error| error.of(Allocation::Measuring))
    }

    /// The graph in one piece if that leaves `spare` bytes, else in segments, with weights where they are or where
    /// `stream` has them.
    fn form(&self, stream: Option<&SharedStream>, spare: u64) -> Result<Form> {
        let stream = stream.map(|stream| stream.lock().unwrap_or_else(PoisonError::into_inner));
        let place = |segment: usize, index: usize| -> Option<Place> {
            let param: &Param = self.recording.params.get(index)?;
            param
                .place()
                .or_else(|| stream.as_ref()?.place(segment, param).cloned())
        };
        let is_cut = self.partition.segments.len() > 1;
        let may_be_whole = stream.as_ref().is_none_or(|stream| stream.is_resident());
        let mut needed = u64::MAX;
        if (may_be_whole && !self.always_cut) || !is_cut {
            let whole = self.whole()?;
            needed = whole.bytes().saturating_add(self.stored);
            let fits = |left| needed.saturating_add(spare) <= left;
            if !is_cut || self.available.is_none_or(fits) {
                // Everything that stays has the same place for every segment.
                match whole.allocate(self.recording, self.backend, place) {
                    Err(error) if error.is_out_of_memory() && is_cut => {
                        tracing::warn!("{error}; the graph runs in segments");
                    }
                    other => return other,
                }
            }
        }
        let segmented = self.segmented()?;
        needed = needed.min(segmented.bytes().saturating_add(self.stored));
        segmented
            .allocate(self.recording, self.backend, place)
            .map_err(|error| match error {
                Error::Backend(source @ sd_backend::Error::OutOfMemory { .. }) => {
                    Error::TooLittleMemory {
                        source,
                        smallest: needed,
                    }
                }
                other => other,
            })
    }

    fn too_little(&self, smallest: u64) -> Error {
        let ledger = self.backend.ledger();
        Error::TooLittleMemory {
            source: ledger.refused(self.backend.device(), smallest),
            smallest,
        }
    }
}
