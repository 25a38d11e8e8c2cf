//! Deciding which device computes which part of a graph, and holds its weights.
//!
//! Plain rules on plain data. Segments stay in their order, each device has a contiguous range of them, and what
//! crosses from one device to another is what segments keep for each other anyway.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use sd_backend::{Backend, Device};

use crate::acquire::Pool;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::form::Draft;
use crate::graph::{Cut, Graph, GraphError, Named, Node, Recording, TensorId};
use crate::op::Op;
use crate::param::Param;
use crate::plan::partition;
use crate::segment::{Partition, Segment, root};
use crate::stream::sizes;
use crate::weights::Weights;

/// Which of several devices computes which segments of a model's graph.
///
/// Made from the graph of one shape; holds for those of other shapes with the same [cuts](crate::Tensor::cut).
#[derive(Debug, Clone)]
pub struct Split {
    shares: Vec<Share>,
}

/// What one device has of a split model.
#[derive(Debug, Clone)]
pub struct Share {
    device: Device,
    /// Name of its first segment; none for a device without segments.
    first: Option<String>,
    segments: usize,
    /// Its parameters by the key of those that were recorded: the same ones, or doubles of those that an earlier device
    /// holds too.
    params: HashMap<usize, Param>,
    weight_bytes: u64,
    /// Shared by all plans of the split, so that weights that come and go do so once for plans that run together.
    pub(crate) pool: Arc<Mutex<Pool>>,
}

impl Share {
    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Number of segments that it computes.
    pub fn segments(&self) -> usize {
        self.segments
    }

    /// Name of the first segment that it computes, if it has any.
    pub fn first(&self) -> Option<&str> {
        self.first.as_deref()
    }

    /// Bytes of the parameters that it needs.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }
}

impl Split {
    /// Gives the segments of the graph that `build` records to the devices of `backends`, in this order, so that the
    /// fullest of them has as much left as possible: each holds weights in proportion to the memory that may be taken
    /// on it now, less what any device computes in. A device may get nothing. Nothing is loaded or allocated.
    ///
    /// # Errors
    /// [`Error::Graph`] with the first mistake in the graph, or if it keeps [states](crate::State) or uses a
    /// [cache](crate::RunnerCache), which lie on one device; [`Error::Unsupported`].
    ///
    /// Where weights come and go, room is left for so many `plans` of one size at once.
    pub fn of(
        backends: &[&Backend],
        plans: usize,
        build: impl for<'g> FnOnce(Graph<'g>),
    ) -> Result<Split> {
        let recording = Recording::of(build)?;
        refuse_kept(&recording)?;
        let partition = partition(&recording);
        let needed = partition.params(&recording, |_| true);
        let mut rooms = Vec::with_capacity(backends.len());
        for backend in backends {
            let segments = partition.segments.clone();
            let work = Draft::of(&recording, segments, backend)?.bytes();
            let available = backend.ledger().report(backend.device()).available;
            rooms.push(available.map(|bytes| bytes.saturating_sub(work)));
        }
        // Of a device that says nothing it is assumed that it has as much as the largest that does.
        let largest = rooms.iter().flatten().max().copied().unwrap_or(1);
        let rooms: Vec<u64> = rooms
            .into_iter()
            .map(|room| room.unwrap_or(largest))
            .collect();
        let bytes = match backends.first() {
            Some(backend) => sizes(&needed, backend.device())?,
            None => Vec::new(),
        };
        let mut held: HashMap<usize, usize> = HashMap::new();
        let ranges = assign(&bytes, &rooms);
        let shares = backends.iter().zip(ranges).enumerate();
        let shares = shares.map(|(number, (backend, range))| {
            let mut params = HashMap::new();
            for param in needed[range.clone()].iter().flatten() {
                let holder = *held.entry(param.key()).or_insert(number);
                params.entry(param.key()).or_insert_with(|| {
                    if holder == number {
                        param.clone()
                    } else {
                        param.double()
                    }
                });
            }
            Share {
                device: backend.device(),
                first: partition.segments[range.clone()]
                    .first()
                    .map(|segment| segment.name.clone()),
                segments: range.len(),
                weight_bytes: params.values().map(|param| param.bytes() as u64).sum(),
                params,
                pool: Arc::new(Mutex::new(Pool::new(plans.max(1)))),
            }
        });
        Ok(Split {
            shares: shares.collect(),
        })
    }

    /// What each device has, in the order in which they compute.
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// `params`, which were declared against `checkpoint`, as each device needs them: to be loaded there. Those that no
    /// segment needs are the first device's.
    pub fn weights(&self, checkpoint: &Checkpoint, params: &[Param]) -> Vec<Weights> {
        let is_needed = |param: &Param| {
            let mut shares = self.shares.iter();
            shares.any(|share| share.params.contains_key(&param.key()))
        };
        let shares = self.shares.iter().enumerate();
        let weights = shares.map(|(number, share)| {
            let mine = params.iter().filter_map(|param| {
                let idle = || (number == 0 && !is_needed(param)).then(|| param.clone());
                share.params.get(&param.key()).cloned().or_else(idle)
            });
            Weights::new(checkpoint.clone(), mine.collect())
        });
        weights.collect()
    }

    /// The recordings of what each device computes of `recording`, and what is handed over between them. Devices without
    /// segments have none.
    pub(crate) fn parts(&self, recording: &Recording) -> Result<Vec<Part>> {
        refuse_kept(recording)?;
        let partition = partition(recording);
        let mut starts = Vec::new();
        for (number, share) in self.shares.iter().enumerate() {
            let Some(first) = &share.first else { continue };
            let mut segments = partition.segments.iter();
            // The first device has what comes before, too.
            let start = match starts.is_empty() {
                true => Some(0),
                false => segments.position(|segment| segment.name == *first),
            };
            let start = start.ok_or_else(|| {
                mistake(format!(
                    "the graph has no segment called `{first}`, at which device {} was to begin",
                    share.device.name()
                ))
            })?;
            starts.push((number, start));
        }
        let ends = starts.iter().skip(1).map(|&(_, start)| start);
        let ends = ends.chain([partition.segments.len()]);
        let ranges: Vec<(usize, Range<usize>)> = starts
            .iter()
            .zip(ends)
            .map(|(&(number, start), end)| (number, start..end))
            .collect();
        if ranges.iter().any(|(_, range)| range.is_empty()) {
            return Err(mistake(
                "the graph's segments are in another order".to_owned(),
            ));
        }
        let parts = ranges.iter().map(|(number, range)| {
            Cutting {
                recording,
                partition: &partition,
                range: range.clone(),
                params: &self.shares[*number].params,
            }
            .part(*number, range.start == 0)
        });
        parts.collect()
    }
}

/// Cuts a sequence of segments, each needing parameters by number and bytes, into one contiguous range for each of
/// `rooms`, so that the largest share of room that any range takes is as small as possible.
fn assign(segments: &[Vec<(usize, u64)>], rooms: &[u64]) -> Vec<Range<usize>> {
    let count = segments.len();
    // By first segment and end: bytes of distinct parameters.
    let bytes = |range: Range<usize>| -> u64 {
        let params: HashMap<usize, u64> = segments[range].iter().flatten().copied().collect();
        params.values().sum()
    };
    let fullness = |range: Range<usize>, room: u64| bytes(range) as f64 / room.max(1) as f64;
    // best[end]: the least fullness in which the devices so far hold the segments before `end`, and where each began.
    let mut best: Vec<Option<(f64, Vec<usize>)>> = vec![None; count + 1];
    best[0] = Some((0.0, Vec::new()));
    for &room in rooms {
        let mut next: Vec<Option<(f64, Vec<usize>)>> = vec![None; count + 1];
        for (start, found) in best.iter().enumerate() {
            let Some((so_far, starts)) = found else {
                continue;
            };
            for (end, next) in next.iter_mut().enumerate().skip(start) {
                let fullest = so_far.max(fullness(start..end, room));
                // Of equals the one that gives most to the devices named first.
                if next.as_ref().is_none_or(|(least, _)| fullest <= *least) {
                    let starts = starts.iter().copied().chain([start]).collect();
                    *next = Some((fullest, starts));
                }
            }
        }
        best = next;
    }
    let starts = best.pop().flatten().map(|(_, starts)| starts);
    let starts = starts.unwrap_or_default();
    let ends = starts.iter().skip(1).copied().chain([count]);
    starts
        .iter()
        .copied()
        .zip(ends)
        .map(|(start, end)| start..end)
        .collect()
}

fn refuse_kept(recording: &Recording) -> Result<()> {
    match recording.states.is_empty() && !recording.uses_cache() {
        true => Ok(()),
        false => Err(mistake(
            "the graph keeps values between runs, which lie on one device".to_owned(),
        )),
    }
}

fn mistake(reason: String) -> Error {
    Error::Graph(GraphError {
        operation: "split",
        operands: "a graph".to_owned(),
        location: format!("{}:{}", file!(), line!()),
        reason,
    })
}

/// What one device computes of a split graph, as a graph of its own.
#[derive(Debug)]
pub(crate) struct Part {
    /// Number of the device among those of the split.
    pub device: usize,
    pub recording: Recording,
    /// Tensors of the whole that come from earlier parts, with the names of the inputs that they are here.
    pub takes: Vec<(TensorId, String)>,
    /// Tensors of the whole that this computes for later parts, with the names of the outputs that they are here.
    pub gives: Vec<(TensorId, String)>,
}

/// Name of what is handed over from one device to another.
fn hand_over(id: TensorId) -> String {
    format!("hand-over {}", id.index())
}

/// A part being taken out of a recording.
struct Cutting<'r> {
    recording: &'r Recording,
    partition: &'r Partition,
    range: Range<usize>,
    /// The device's parameters by the key of the recorded ones.
    params: &'r HashMap<usize, Param>,
}

impl Cutting<'_> {
    /// The segments of the range as a recording. The `first` part has all inputs, so that those that nobody needs may be
    /// set like all others.
    fn part(&self, device: usize, is_first: bool) -> Result<Part> {
        let (before, inside, behind) = (
            &self.partition.segments[..self.range.start],
            &self.partition.segments[self.range.clone()],
            &self.partition.segments[self.range.end..],
        );
        let kept_by = |segments: &[Segment]| -> Vec<TensorId> {
            let kept = segments.iter().flat_map(|segment| &segment.keeps);
            kept.copied().collect()
        };
        let (from_before, own) = (kept_by(before), kept_by(inside));
        let mut wanted: Vec<TensorId> = inside
            .iter()
            .flat_map(|segment| segment.nodes.iter().copied())
            .collect();
        if is_first {
            wanted.extend(self.recording.inputs.iter().map(|input| input.tensor));
        }
        wanted.sort_unstable();
        wanted.dedup();

        let mut part = Recording::default();
        let mut numbers: HashMap<TensorId, TensorId> = HashMap::new();
        let mut takes = Vec::new();
        for id in wanted {
            let mut node = self.recording.node(id).clone();
            if is_taken(inside, id) && from_before.contains(&id) {
                node.op = Op::Input;
                node.sources.clear();
                let name = hand_over(id);
                part.inputs.push(Named {
                    name: name.clone(),
                    tensor: TensorId::new(part.nodes.len()),
                });
                takes.push((id, name));
            } else {
                self.renumber(&mut node, &numbers, &mut part)?;
            }
            numbers.insert(id, TensorId::new(part.nodes.len()));
            part.nodes.push(node);
        }

        for input in &self.recording.inputs {
            if let Some(&tensor) = numbers.get(&input.tensor) {
                let name = input.name.clone();
                part.inputs.push(Named { name, tensor });
                if let Some(&rows) = self.recording.index_limits.get(&input.tensor) {
                    part.index_limits.insert(tensor, rows);
                }
            }
        }
        let later = own.iter().filter(|id| is_taken(behind, **id));
        let gives: Vec<(TensorId, String)> = later.map(|&id| (id, hand_over(id))).collect();
        let results = gives.iter().map(|(id, name)| (id, name));
        let outputs = self.recording.outputs.iter();
        let outputs = outputs
            .filter(|_| behind.is_empty())
            .map(|output| (&output.tensor, &output.name));
        for (id, name) in results.chain(outputs) {
            let tensor = numbers.get(id).copied();
            part.outputs.push(Named {
                name: name.clone(),
                tensor: tensor.ok_or_else(|| mistake(format!("`{name}` is in no part")))?,
            });
        }
        // What the last segment computes is this part's result: no segment of its own is needed for that.
        let last = inside.last().map_or(&[][..], |segment| &segment.keeps);
        let cuts = self.recording.cuts.iter();
        let cuts = cuts.filter(|cut| !last.contains(&root(self.recording, cut.tensor)));
        part.cuts = cuts
            .filter_map(|cut| {
                let group = cut.group.clone();
                let tensor = *numbers.get(&cut.tensor)?;
                Some(Cut { group, tensor })
            })
            .collect();
        Ok(Part {
            device,
            recording: part,
            takes,
            gives,
        })
    }

    /// Makes a node refer to tensors, parameters and constants of `part` instead of the whole's.
    fn renumber(
        &self,
        node: &mut Node,
        numbers: &HashMap<TensorId, TensorId>,
        part: &mut Recording,
    ) -> Result<()> {
        for source in &mut node.sources {
            let number = numbers.get(source).copied();
            *source = number.ok_or_else(|| mistake("a part lacks a tensor".to_owned()))?;
        }
        match &mut node.op {
            Op::Param(index) => {
                let param = &self.recording.params[*index];
                let own = self.params.get(&param.key()).ok_or_else(|| {
                    let name = param.name();
                    mistake(format!(
                        "`{name}` was not needed there when the split was made"
                    ))
                })?;
                *index = part.params.len();
                part.params.push(own.clone());
            }
            Op::Constant(index) => {
                let values = self.recording.constants[*index].clone();
                *index = part.constants.len();
                part.constants.push(values);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Whether any of `segments` takes a tensor.
fn is_taken(segments: &[Segment], id: TensorId) -> bool {
    let mut segments = segments.iter();
    segments.any(|segment| segment.takes.binary_search(&id).is_ok())
}

#[cfg(test)]
mod tests {
    use super::assign;

    fn segments(bytes: &[u64]) -> Vec<Vec<(usize, u64)>> {
        bytes
            .iter()
            .enumerate()
            .map(|(n, &bytes)| vec![(n, bytes)])
            .collect()
    }

    #[test]
    fn ranges_follow_the_room() {
        let even = segments(&[1, 10, 10, 10, 10, 1]);
        assert_eq!(assign(&even, &[100, 100]), [0..3, 3..6]);
        assert_eq!(assign(&even, &[300, 100]), [0..4, 4..6]);
        assert_eq!(assign(&even, &[0, 100]), [0..0, 0..6]);
        assert_eq!(assign(&even, &[100, 0]), [0..6, 6..6]);
        assert_eq!(assign(&even, &[100, 0, 100]), [0..3, 3..3, 3..6]);
        assert_eq!(assign(&segments(&[5]), &[10, 100]), [0..0, 0..1]);
        assert_eq!(assign(&[], &[10, 100]), [0..0, 0..0]);
    }

    #[test]
    fn what_two_segments_share_counts_once_on_a_device() {
        // Both ends need parameter 0: a cut anywhere doubles it.
        let mut shared = segments(&[0, 10, 10, 0]);
        shared[0] = vec![(0, 30)];
        shared[3] = vec![(0, 30)];
        assert_eq!(assign(&shared, &[50, 10]), [0..4, 4..4]);
        assert_eq!(assign(&shared, &[50, 50]), [0..2, 2..4]);
    }
}
