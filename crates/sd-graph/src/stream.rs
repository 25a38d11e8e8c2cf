//! Weights that come and go while a graph runs. Safe code: [`crate::transfer`] does the moving.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use sd_backend::{Backend, Buffer, Device, MemoryKind};

use crate::error::{Allocation, Error, Result};
use crate::load::allocate;
use crate::load_plan::{Staging, Step, step};
use crate::param::{Home, Param, Place};
use crate::raw::{Arena, bytes_for};
use crate::ring::Ring;
use crate::run::Cancel;
use crate::transfer::{Job, Lanes, Target};

/// The weights of segments that run one after the other, again and again: some stay, the others pass through a ring.
///
/// Every parameter has one place for each segment, so that graphs are bound once.
#[derive(Debug)]
pub(crate) struct Stream {
    /// For each segment, the parameters it needs that were not on the device by themselves.
    order: Vec<Vec<usize>>,
    segments: Vec<Passing>,
    /// By parameter: where what stays lies.
    stays: HashMap<usize, Place>,
    lanes: Lanes,
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
    is_loaded: bool,
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

    fn job(&self) -> Option<Job<'_>> {
        match (&self.home, &self.step) {
            (Home::File(checkpoint), Some(step)) => Some(Job {
                checkpoint,
                param: &self.param,
                step,
                target: self.target,
            }),
            _ => None,
        }
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
        let mut lanes =
            Lanes::new(staging, backend.ledger()).map_err(|error| error.of(Allocation::Host))?;
        bring(&resident, &mut lanes, backend.device(), cancel)?;
        let keys = ring.stays.iter().map(|&(key, _)| key);
        Ok(Stream {
            order: keys_of(segments),
            segments: passing,
            stays: keys.zip(places).collect(),
            lanes,
            device: backend.device(),
            _arena: arena,
        })
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

    /// Sees to it that the weights of `segment` are in memory, and says how many bytes that moved. What lay there is gone,
    /// so nobody may be computing with it.
    pub(crate) fn bring(&mut self, segment: usize, cancel: &Cancel) -> Result<u64> {
        let Some(wanted) = self.segments.get(segment) else {
            return Ok(0);
        };
        if wanted.is_loaded {
            return Ok(0);
        }
        let range = wanted.range.clone();
        for other in &mut self.segments {
            if other.range.start < range.end && range.start < other.range.end {
                other.is_loaded = false;
            }
        }
        let Some(wanted) = self.segments.get_mut(segment) else {
            return Ok(0);
        };
        let bytes = bring(&wanted.loads, &mut self.lanes, self.device, cancel)?;
        wanted.is_loaded = true;
        Ok(bytes)
    }

    /// The last segment before `segment` whose weights lie where its own will be.
    pub(crate) fn waits_for(&self, segment: usize) -> Option<usize> {
        let range = &self.segments.get(segment)?.range;
        self.segments[..segment]
            .iter()
            .rposition(|other| other.range.start < range.end && range.start < other.range.end)
    }
}

fn keys_of(segments: &[Vec<Param>]) -> Vec<Vec<usize>> {
    segments
        .iter()
        .map(|segment| segment.iter().map(Param::key).collect())
        .collect()
}

/// Brings parameters to their places, and says how many bytes that were.
fn bring(loads: &[Load], lanes: &mut Lanes, device: Device, cancel: &Cancel) -> Result<u64> {
    let jobs: Vec<Job<'_>> = loads.iter().filter_map(Load::job).collect();
    let mut moved = 0;
    if !jobs.is_empty() {
        lanes.bring(&jobs, device, cancel, &mut |bytes, _| moved += bytes)?;
    }
    for load in loads {
        if let Home::Host(from) = &load.home {
            cancel.check()?;
            load.target.copy_from(from, &load.param)?;
            moved += load.param.bytes() as u64;
        }
    }
    device.check_connection()?;
    Ok(moved)
}
