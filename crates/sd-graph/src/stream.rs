//! Weights that come and go while a graph runs. Safe code: [`crate::transfer`] does the moving.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use sd_backend::{Backend, Buffer, CopyQueue, Device, Event, MemoryKind};

use crate::error::{Allocation, Error, Result};
use crate::load::allocate;
use crate::load_plan::{Staging, Step, step};
use crate::param::{Home, Param, Place};
use crate::raw::{Arena, bytes_for};
use crate::ring::Ring;
use crate::run::{Cancel, Progress, Reporter};
use crate::transfer::{Job, Lanes, MEMORY_PIECE, Road, Source, Target};

/// Segments that may be queued before the host waits for the first of them: so many are computed before a run that is
/// cancelled ends, and progress is late by as many. Two keep a device busy; one more is for a host that reads files
/// meanwhile.
pub(crate) const IN_FLIGHT: usize = 3;

/// The weights of segments that run one after the other, again and again: some stay, the others pass through a ring.
///
/// Every parameter has one place for each segment, so that graphs are bound once.
#[derive(Debug)]
pub(crate) struct Stream {
    // Field order is drop order: the queue waits for its copies before anything they need goes.
    carrier: Carrier,
    /// For what was queued with its weights: see [`Stream::bring`].
    marks: Vec<Event>,
    /// For each segment, the parameters it needs that were not on the device by themselves.
    order: Vec<Vec<usize>>,
    segments: Vec<Passing>,
    /// By parameter: where what stays lies.
    stays: HashMap<usize, Place>,
    device: Device,
    /// The description of what targets point to.
    _arena: Arena,
}

/// What passes through the ring for one segment.
#[derive(Debug)]
struct Passing {
    loads: Vec<Load>,
    places: HashMap<usize, Place>,
    range: Range<u64>,
    /// Whether its weights are there, or the queue was told to bring them.
    is_loaded: bool,
    /// With a queue: happens when they are there.
    ready: Option<Event>,
}

/// One parameter to bring.
#[derive(Debug)]
struct Load {
    param: Param,
    home: Home,
    step: Option<Step>,
    target: Target,
}

impl Load {
    fn new(param: &Param, place: &Place, arena: &Arena, backend: &Backend) -> Result<Load> {
        let home = param.home().ok_or_else(|| Error::NotLoaded {
            name: param.name().to_owned(),
        })?;
        let step = step_of(&home, param, backend.device())?;
        Ok(Load {
            target: Target::new(arena, param, place, backend)?,
            param: param.clone(),
            home,
            step,
        })
    }

    /// Whether a queue copies it from where it is.
    fn is_pinned(&self) -> bool {
        matches!(&self.home, Home::Host(place) if place.buffer.is_pinned())
    }

    /// Whether it lies in memory of the host that no queue copies from by itself.
    fn is_in_memory(&self) -> bool {
        matches!(&self.home, Home::Host(place) if !place.buffer.is_pinned())
    }

    /// What threads have to do for it: read it from its file, or copy it to where a queue can copy from.
    fn job(&self, has_queue: bool) -> Option<Job<'_>> {
        let source = match (&self.home, &self.step) {
            (Home::File(checkpoint), Some(step)) => Source::File(checkpoint, step),
            (Home::Host(place), _) if has_queue && self.is_in_memory() => Source::Memory(place),
            _ => return None,
        };
        Some(Job {
            source,
            param: &self.param,
            target: self.target,
        })
    }
}

/// How a parameter comes from its file, if it does.
fn step_of(home: &Home, param: &Param, device: Device) -> Result<Option<Step>> {
    let Home::File(checkpoint) = home else {
        return Ok(None);
    };
    let mut step = step(checkpoint, param, device)?;
    step.in_file = None;
    Ok(Some(step))
}

/// Memory of the host that the parameters of `segments` pass through on their way to `device`.
pub(crate) fn staging(segments: &[Vec<Param>], device: Device) -> Result<Staging> {
    let mut steps = Vec::new();
    for param in segments.iter().flatten() {
        if let Some(home) = param.home()
            && let Some(step) = step_of(&home, param, device)?
        {
            steps.push((param, step));
        }
    }
    let steps = steps.iter().map(|(param, step)| (*param, step));
    Ok(Staging::of(steps, device))
}

/// Bytes that each segment's `params` take on `device`, by the parameter's key.
pub(crate) fn sizes(segments: &[Vec<Param>], device: Device) -> Result<Vec<Vec<(usize, u64)>>> {
    let alignment = Buffer::alignment(device);
    let mut known: HashMap<usize, u64> = HashMap::new();
    let mut sizes = Vec::with_capacity(segments.len());
    for segment in segments {
        let mut list = Vec::with_capacity(segment.len());
        for param in segment {
            let bytes = match known.get(&param.key()) {
                Some(&bytes) => bytes,
                None => bytes_for(param.dtype(), param.shape(), device)
                    .and_then(|bytes| bytes.checked_next_multiple_of(alignment))
                    .ok_or_else(|| sd_backend::Ledger::default().refused(device, u64::MAX))?
                    as u64,
            };
            known.insert(param.key(), bytes);
            list.push((param.key(), bytes));
        }
        sizes.push(list);
    }
    Ok(sizes)
}

impl Stream {
    /// Makes places for the parameters of `segments` on the device of `backend`, and brings what stays. `ring` was laid
    /// out for them, and `staging` is what [`staging`] says.
    pub(crate) fn new(
        segments: &[Vec<Param>],
        ring: &Ring,
        staging: Staging,
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Stream> {
        let no_room = |_| backend.out_of_memory(0);
        let params: HashMap<usize, &Param> =
            segments.iter().flatten().map(|p| (p.key(), p)).collect();
        let loads = ring.stays.len() + ring.passes.iter().map(Vec::len).sum::<usize>();
        let arena = Arena::new(loads, false).map_err(no_room)?;
        let load = |&(key, _): &(usize, u64), place: &Place| match params.get(&key) {
            Some(param) => Load::new(param, place, &arena, backend),
            None => Err(backend.out_of_memory(0).into()),
        };
        let sizes = ring.stays.iter().map(|&(_, bytes)| bytes as usize);
        let places = allocate(backend, sizes, MemoryKind::Weights)?;
        let resident: Vec<Load> = ring
            .stays
            .iter()
            .zip(&places)
            .map(|(stays, place)| load(stays, place))
            .collect::<Result<_>>()?;
        let buffer = match ring.bytes {
            0 => None,
            bytes => Some(Arc::new(Buffer::allocate(
                backend.ledger(),
                backend.device(),
                bytes as usize,
                MemoryKind::Weights,
            )?)),
        };
        let mut passing = Vec::with_capacity(segments.len());
        for (passes, range) in ring.passes.iter().zip(&ring.ranges) {
            let mut offset = range.start as usize;
            let mut segment = Passing {
                loads: Vec::new(),
                places: HashMap::new(),
                range: range.clone(),
                is_loaded: false,
                ready: None,
            };
            for (passes, buffer) in passes.iter().zip(std::iter::repeat(&buffer)) {
                let Some(buffer) = buffer else { continue };
                let place = Place {
                    buffer: Arc::clone(buffer),
                    offset,
                };
                segment.loads.push(load(passes, &place)?);
                segment.places.insert(passes.0, place);
                offset += passes.1 as usize;
            }
            segment.is_loaded = segment.loads.is_empty();
            passing.push(segment);
        }
        let (carrier, marks) = Carrier::new(&resident, &mut passing, staging, backend)
            .map_err(|error| error.of(Allocation::Host))?;
        let keys = ring.stays.iter().map(|&(key, _)| key);
        let mut stream = Stream {
            carrier,
            marks,
            order: keys_of(segments),
            segments: passing,
            stays: keys.zip(places).collect(),
            device: backend.device(),
            _arena: arena,
        };
        stream.carrier.settle(&resident, cancel, progress)?;
        Ok(stream)
    }

    /// Whether it has the parameters of `segments` on `device`, each segment's where it brings that segment's.
    pub(crate) fn serves(&self, segments: &[Vec<Param>], device: Device) -> bool {
        let has_all = |(have, wanted): (&Vec<usize>, &Vec<Param>)| {
            wanted.iter().all(|param| have.contains(&param.key()))
        };
        self.device == device
            && self.order.len() == segments.len()
            && self.order.iter().zip(segments).all(has_all)
    }

    /// Whether everything stays.
    pub(crate) fn is_resident(&self) -> bool {
        self.segments.iter().all(|segment| segment.loads.is_empty())
    }

    /// Where `segment` finds a parameter.
    pub(crate) fn place(&self, segment: usize, param: &Param) -> Option<&Place> {
        self.stays
            .get(&param.key())
            .or_else(|| self.segments.get(segment)?.places.get(&param.key()))
    }

    /// Whether a queue of the device brings weights by itself.
    pub(crate) fn has_queue(&self) -> bool {
        self.carrier.queue.is_some()
    }

    /// Events for what is computed with its weights, to be given to [`Stream::bring`]; none without a queue.
    pub(crate) fn marks(&self) -> &[Event] {
        &self.marks
    }

    /// Whether the weights of `segment` are there, or on their way by the queue.
    pub(crate) fn is_loaded(&self, segment: usize) -> bool {
        let segment = self.segments.get(segment);
        segment.is_none_or(|segment| segment.is_loaded)
    }

    /// What happens when the weights of `segment`, which the queue brings, are there.
    pub(crate) fn ready(&self, segment: usize) -> Option<&Event> {
        self.segments.get(segment)?.ready.as_ref()
    }

    /// Whether bringing the weights of `segment` keeps the host busy.
    pub(crate) fn takes_long(&self, segment: usize) -> bool {
        let segment = self.segments.get(segment);
        segment.is_some_and(|segment| !segment.loads.iter().all(Load::is_pinned))
    }

    /// The segment whose weights should be brought next when everything before `first` has been queued: the first of those
    /// to come, of the next run in the end, that are not loaded, if nothing that comes before it needs its place.
    pub(crate) fn next(&self, first: usize) -> Option<usize> {
        let total = self.segments.len();
        let nth = |ahead: usize| (first + ahead) % total;
        let ahead = (0..total).find(|&ahead| !self.is_loaded(nth(ahead)))?;
        let range = &self.segments.get(nth(ahead))?.range;
        let is_free = (0..ahead).all(|before| !overlap(range, &self.segments[nth(before)].range));
        is_free.then(|| nth(ahead))
    }

    /// Sees to it that the weights of `segment` are in memory, or will be when [`Stream::ready`] happens, and says how many
    /// bytes that moved. What lay there is gone: nobody computes with it any more except for what was queued for the
    /// segments in `in_flight`, each with the event behind it.
    pub(crate) fn bring(
        &mut self,
        segment: usize,
        in_flight: &[(usize, Event)],
        cancel: &Cancel,
    ) -> Result<u64> {
        if self.is_loaded(segment) {
            return Ok(0);
        }
        let Some(range) = self.segments.get(segment).map(|s| s.range.clone()) else {
            return Ok(0);
        };
        for other in &mut self.segments {
            if overlap(&other.range, &range) {
                other.is_loaded = false;
            }
        }
        if let Some(queue) = &mut self.carrier.queue {
            for (other, computed) in in_flight {
                if overlap(&self.segments[*other].range, &range) {
                    queue.wait_for(computed)?;
                }
            }
        }
        let Some(wanted) = self.segments.get_mut(segment) else {
            return Ok(0);
        };
        let brought = self.carrier.bring(&wanted.loads, cancel, &mut |_, _| {});
        let queue = &mut self.carrier.queue;
        let outcome = match (brought, queue.as_mut().zip(wanted.ready.as_ref())) {
            (Ok(bytes), Some((queue, ready))) => Ok(queue.mark(ready).map(|()| bytes)?),
            (brought, _) => brought,
        };
        // What a failure left in the queue does no harm: it is done before anything that is queued later.
        wanted.is_loaded = outcome.is_ok();
        outcome
    }

    /// Waits until everything that was brought is there.
    pub(crate) fn settle(&mut self) -> Result<()> {
        match &mut self.carrier.queue {
            Some(queue) => Ok(queue.synchronize()?),
            None => Ok(()),
        }
    }

    /// Forgets what was brought: somebody may have written there.
    pub(crate) fn forget(&mut self) -> Result<()> {
        self.settle()?;
        for segment in &mut self.segments {
            segment.is_loaded = segment.loads.is_empty();
        }
        Ok(())
    }

    /// The last segment before `segment` whose weights lie where its own will be.
    pub(crate) fn waits_for(&self, segment: usize) -> Option<usize> {
        let range = &self.segments.get(segment)?.range;
        self.segments[..segment]
            .iter()
            .rposition(|other| overlap(&other.range, range))
    }
}

/// Whether both have a byte in common.
fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start.max(other.start) < one.end.min(other.end)
}

fn keys_of(segments: &[Vec<Param>]) -> Vec<Vec<usize>> {
    segments
        .iter()
        .map(|segment| segment.iter().map(Param::key).collect())
        .collect()
}

/// What carries weights to the device.
#[derive(Debug)]
struct Carrier {
    // Field order is drop order: what the queue copies from and to goes after it has waited.
    queue: Option<CopyQueue>,
    staging: Lanes,
    device: Device,
}

impl Carrier {
    /// A way for what stays and what passes, by a queue of its own where the device has one; and then events for what is
    /// computed, while `passing` get theirs.
    fn new(
        resident: &[Load],
        passing: &mut [Passing],
        staging: Staging,
        backend: &Backend,
    ) -> Result<(Carrier, Vec<Event>)> {
        let device = backend.device();
        let all = passing.iter().flat_map(|segment| &segment.loads);
        let beside = match Buffer::is_host(device) || all.clone().next().is_none() {
            true => None,
            false => CopyQueue::new(device),
        };
        if let Some(queue) = beside {
            let mut staging = staging;
            for load in all.chain(resident).filter(|load| load.is_in_memory()) {
                let bytes = load.param.bytes();
                staging.add_pieces(bytes.div_ceil(MEMORY_PIECE) as u64, bytes.min(MEMORY_PIECE));
            }
            let streamed = passing.iter_mut().filter(|segment| !segment.is_loaded);
            let mut has_all = true;
            for segment in streamed {
                segment.ready = Event::new(device);
                has_all &= segment.ready.is_some();
            }
            let marks: Vec<Event> = (0..IN_FLIGHT).filter_map(|_| Event::new(device)).collect();
            if has_all
                && marks.len() == IN_FLIGHT
                && let Some(staging) = Lanes::to_queue(staging, device, backend.ledger())?
            {
                let queue = Some(queue);
                let carrier = Carrier {
                    queue,
                    staging,
                    device,
                };
                return Ok((carrier, marks));
            }
            tracing::warn!("{device} gave no events; weights are brought between computing");
            for segment in passing {
                segment.ready = None;
            }
        }
        let carrier = Carrier {
            queue: None,
            staging: Lanes::new(staging, backend.ledger())?,
            device,
        };
        Ok((carrier, Vec::new()))
    }

    /// Brings parameters to their places, or has them brought by the queue, and says how many bytes that were. `brought`
    /// hears of parts of them, and whether they are the last of their parameter.
    fn bring(
        &mut self,
        loads: &[Load],
        cancel: &Cancel,
        brought: &mut dyn FnMut(u64, bool),
    ) -> Result<u64> {
        let has_queue = self.queue.is_some();
        let mut moved = 0;
        let jobs: Vec<Job<'_>> = loads.iter().filter_map(|l| l.job(has_queue)).collect();
        if !jobs.is_empty() {
            let road = Road::new(self.queue.as_mut());
            self.staging
                .bring(&jobs, &road, self.device, cancel, &mut |bytes, is_last| {
                    moved += bytes;
                    brought(bytes, is_last);
                })?;
        }
        for load in loads {
            if let Home::Host(from) = &load.home
                && (load.is_pinned() || !has_queue)
            {
                cancel.check()?;
                load.target
                    .copy_from(from, &load.param, self.queue.as_mut())?;
                moved += load.param.bytes() as u64;
                brought(load.param.bytes() as u64, true);
            }
            load.target.clear_padding(&load.param, self.queue.as_mut());
        }
        self.device.check_connection()?;
        Ok(moved)
    }

    /// Brings what stays, and waits until it is there.
    fn settle(
        &mut self,
        loads: &[Load],
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<()> {
        /// Parameters that are brought before somebody may cancel.
        const TURN: usize = 16;
        let (mut done, mut bytes) = (0, 0);
        for turn in loads.chunks(TURN) {
            let brought = self.bring(turn, cancel, &mut |part, is_last| {
                bytes += part;
                if is_last {
                    done += 1;
                    progress.report(&Progress::Loading {
                        done,
                        total: loads.len(),
                        bytes,
                    });
                }
            });
            if let Some(queue) = &mut self.queue {
                queue.synchronize()?;
            }
            brought?;
        }
        Ok(())
    }
}
