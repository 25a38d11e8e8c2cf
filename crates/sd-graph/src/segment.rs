//! Cutting a recording into segments that run one after the other.
//!
//! Plain rules on plain data: a segment is a list of tensors by number. What a segment computes and later ones need is
//! *kept*; everything else of it is gone when it is done. Views are never kept, what they show is: each segment looks
//! at it in its own way, with the very strides that the whole graph has, so that a cut cannot change a result.

use std::collections::HashMap;

use crate::graph::{Recording, TensorId};
use crate::op::Op;
use crate::param::Param;

/// Name of the segment that computes the outputs.
const FINAL: &str = "final";

/// A recording in pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Partition {
    pub segments: Vec<Segment>,
    /// Tensors that several segments use, kept although nobody marked them.
    pub added_cuts: usize,
    /// Tensors that are computed again by a segment, since keeping them would cost more.
    pub recomputed: usize,
}

/// One piece of a recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    pub name: String,
    /// Everything it refers to, in the order of recording: leaves, what it takes, views, operations.
    pub nodes: Vec<TensorId>,
    /// What earlier segments have kept for it.
    pub takes: Vec<TensorId>,
    /// What it keeps for later ones.
    pub keeps: Vec<TensorId>,
    /// Numbers of the values that it puts into the cache of a run.
    pub stores: Vec<usize>,
    /// Whether the recording's outputs are computed here.
    pub is_last: bool,
}

impl Segment {
    /// All of a recording that its outputs need.
    pub(crate) fn whole(recording: &Recording) -> Segment {
        let nodes = live(recording).into_iter().enumerate();
        Segment {
            name: FINAL.to_owned(),
            nodes: nodes
                .filter(|&(_, live)| live)
                .map(|(index, _)| TensorId::new(index))
                .collect(),
            takes: Vec::new(),
            keeps: Vec::new(),
            stores: (0..recording.stores.len()).collect(),
            is_last: true,
        }
    }
}

impl Partition {
    /// The recording in pieces as it was marked; one piece if it was not.
    ///
    /// # Errors
    /// What is wrong with the pieces: a mistake in this file.
    pub(crate) fn of(recording: &Recording) -> Result<Partition, String> {
        let partition = Cutting::new(recording).cut(&storing(recording));
        partition.validate(recording)?;
        Ok(partition)
    }

    /// All of a recording as one segment.
    pub(crate) fn whole(recording: &Recording) -> Partition {
        Partition {
            segments: vec![Segment::whole(recording)],
            added_cuts: 0,
            recomputed: 0,
        }
    }

    /// For each segment those of its parameters that `is_wanted`.
    pub(crate) fn params(
        &self,
        recording: &Recording,
        is_wanted: impl Fn(&Param) -> bool,
    ) -> Vec<Vec<Param>> {
        let wanted = |segment: &Segment| {
            let params = segment.nodes.iter();
            let params = params.filter_map(|&id| match recording.node(id).op {
                Op::Param(index) => recording.params.get(index),
                _ => None,
            });
            params.filter(|param| is_wanted(param)).cloned().collect()
        };
        self.segments.iter().map(wanted).collect()
    }

    /// Checks everything that lowering and running rely on.
    pub(crate) fn validate(&self, recording: &Recording) -> Result<(), String> {
        let mut kept_in: HashMap<TensorId, usize> = HashMap::new();
        let mut computed = vec![false; recording.nodes.len()];
        let mut stored = vec![false; recording.stores.len()];
        for (index, segment) in self.segments.iter().enumerate() {
            let wrong = |what: &str| Err(format!("segment {index} ({}) {what}", segment.name));
            if segment.is_last != (index + 1 == self.segments.len()) {
                return wrong("is not where the outputs are computed");
            }
            if !segment.is_last && segment.keeps.is_empty() && segment.stores.is_empty() {
                return wrong("keeps and stores nothing");
            }
            for list in [&segment.nodes, &segment.takes, &segment.keeps] {
                if !list.is_sorted_by(|a, b| a < b) {
                    return wrong("lists a tensor twice or out of order");
                }
            }
            let within = |id: &TensorId| segment.nodes.binary_search(id).is_ok();
            if !segment.takes.iter().chain(&segment.keeps).all(within) {
                return wrong("takes or keeps what it does not refer to");
            }
            for &number in &segment.stores {
                match recording.stores.get(number) {
                    Some(store) if within(&store.value) => {}
                    _ => return wrong("stores what it does not refer to"),
                }
                if std::mem::replace(&mut stored[number], true) {
                    return wrong("stores what another has stored");
                }
            }
            for &id in &segment.nodes {
                let node = recording
                    .nodes
                    .get(id.index())
                    .ok_or_else(|| format!("segment {index} refers to a tensor beyond the last"))?;
                let is_taken = segment.takes.binary_search(&id).is_ok();
                if is_taken && !kept_in.contains_key(&id) {
                    return wrong("takes what no earlier segment keeps");
                }
                if !is_taken && !node.sources.iter().all(within) {
                    return wrong("lacks a source");
                }
                computed[id.index()] = true;
            }
            for &id in &segment.keeps {
                let op = &recording.node(id).op;
                if op.is_leaf() || op.is_view() || segment.takes.binary_search(&id).is_ok() {
                    return wrong("keeps what it does not compute");
                }
                if kept_in.insert(id, index).is_some() {
                    return wrong("keeps what another has kept");
                }
            }
        }
        if let Some(number) = stored.iter().position(|stored| !stored) {
            return Err(format!("no segment stores value {number}"));
        }
        let last = last_uses(&self.segments);
        if let Some(id) = kept_in.keys().find(|id| !last.contains_key(*id)) {
            return Err(format!("tensor {} is kept for nobody", id.index()));
        }
        match live(recording)
            .iter()
            .zip(&computed)
            .position(|(live, computed)| *live && !computed)
        {
            Some(index) => Err(format!("tensor {index} is in no segment")),
            None if self.segments.is_empty() => Err("there is no segment".to_owned()),
            None => Ok(()),
        }
    }
}

/// For each kept tensor the last segment that takes it: behind that its memory is free again.
pub(crate) fn last_uses(segments: &[Segment]) -> HashMap<TensorId, usize> {
    let mut last = HashMap::new();
    for (index, segment) in segments.iter().enumerate() {
        last.extend(segment.takes.iter().map(|&id| (id, index)));
    }
    last
}

/// What is computed for those outside, in the last segment: outputs, and what states are to hold, with these.
fn results(recording: &Recording) -> impl Iterator<Item = TensorId> {
    let outputs = recording.outputs.iter().map(|output| output.tensor);
    let kept = recording.kept.iter();
    outputs.chain(kept.flat_map(|&(state, value)| [state, value]))
}

/// Which tensors the outputs need, and what is stored.
fn live(recording: &Recording) -> Vec<bool> {
    let mut live = vec![false; recording.nodes.len()];
    let stores = recording.stores.iter().map(|store| store.value);
    for result in results(recording).chain(stores) {
        live[result.index()] = true;
    }
    // Sources come before what is made of them.
    for index in (0..recording.nodes.len()).rev() {
        if live[index] {
            for source in &recording.nodes[index].sources {
                live[source.index()] = true;
            }
        }
    }
    live
}

/// What a tensor shows: itself, or what it is a view of.
pub(crate) fn root(recording: &Recording, mut id: TensorId) -> TensorId {
    while recording.node(id).op.is_view() {
        match recording.node(id).sources.first() {
            Some(&source) => id = source,
            None => break,
        }
    }
    id
}

/// For each value that is stored the number of the group whose segment does it: the one that computes the last of what it
/// is made of, so that nothing is kept for it.
fn storing(recording: &Recording) -> Vec<usize> {
    if recording.stores.is_empty() {
        return Vec::new();
    }
    // What is computed where if nothing is stored.
    let mut cutting = Cutting::new(recording);
    let groups = cutting.groups();
    let last = groups.len() - 1;
    for (number, (name, targets)) in groups.into_iter().enumerate() {
        cutting.segment(name, &targets, Vec::new(), number == last);
    }
    let stores = recording.stores.iter().map(|store| {
        let mut seen = vec![false; recording.nodes.len()];
        let mut waiting = vec![store.value];
        let mut segment = 0;
        while let Some(id) = waiting.pop() {
            if std::mem::replace(&mut seen[id.index()], true) {
                continue;
            }
            match cutting.computed_in[id.index()] {
                Some(number) => segment = segment.max(number),
                None => waiting.extend(&recording.node(id).sources),
            }
        }
        segment
    });
    stores.collect()
}

/// The state of cutting, all of it by tensor.
struct Cutting<'r> {
    recording: &'r Recording,
    /// The segment that computes it first.
    computed_in: Vec<Option<usize>>,
    /// Whether it is kept as soon as a later segment needs it, whatever that costs.
    is_marked: Vec<bool>,
    is_kept: Vec<bool>,
    partition: Partition,
}

impl<'r> Cutting<'r> {
    fn new(recording: &'r Recording) -> Cutting<'r> {
        let tensors = recording.nodes.len();
        Cutting {
            recording,
            computed_in: vec![None; tensors],
            is_marked: vec![false; tensors],
            is_kept: vec![false; tensors],
            partition: Partition {
                segments: Vec::new(),
                added_cuts: 0,
                recomputed: 0,
            },
        }
    }

    /// The groups of tensors that were marked, in the order of their first marks, and the outputs behind them.
    fn groups(&mut self) -> Vec<(&'r str, Vec<TensorId>)> {
        let recording = self.recording;
        let live = live(recording);
        let mut groups: Vec<(&str, Vec<TensorId>)> = Vec::new();
        for cut in &recording.cuts {
            let id = root(recording, cut.tensor);
            if !live[cut.tensor.index()] || recording.node(id).op.is_leaf() {
                continue;
            }
            self.is_marked[id.index()] = true;
            match groups.iter_mut().find(|(name, _)| *name == cut.group) {
                Some((_, tensors)) => tensors.push(id),
                None => groups.push((&cut.group, vec![id])),
            }
        }
        let outputs: Vec<TensorId> = results(recording).collect();
        for &output in &outputs {
            // What is read after the run is worth keeping.
            self.is_marked[root(recording, output).index()] = true;
        }
        groups.push((FINAL, outputs));
        groups
    }

    /// Makes a segment of each group; `storing` says for each value that is stored which of them does it.
    fn cut(mut self, storing: &[usize]) -> Partition {
        let groups = self.groups();
        let last = groups.len() - 1;
        for (number, (name, mut targets)) in groups.into_iter().enumerate() {
            let stores = storing.iter().enumerate();
            let stores: Vec<usize> = stores
                .filter(|&(_, &segment)| segment == number)
                .map(|(store, _)| store)
                .collect();
            targets.extend(
                stores
                    .iter()
                    .map(|&store| self.recording.stores[store].value),
            );
            self.segment(name, &targets, stores, number == last);
        }
        self.finish()
    }

    /// Drops segments that later ones need nothing of (a group may have been computed by those before it), and says what
    /// the others keep.
    fn finish(mut self) -> Partition {
        let mut segments: Vec<(usize, Segment)> =
            self.partition.segments.drain(..).enumerate().collect();
        loop {
            let before = segments.len();
            for (_, segment) in &mut segments {
                segment.keeps.clear();
            }
            let mut taken: Vec<TensorId> = segments
                .iter()
                .flat_map(|(_, segment)| segment.takes.iter().copied())
                .collect();
            taken.sort_unstable();
            taken.dedup();
            for id in taken {
                let computed_in = self.computed_in[id.index()];
                let mut segments = segments.iter_mut();
                if let Some((_, segment)) = segments.find(|(n, _)| Some(*n) == computed_in) {
                    segment.keeps.push(id);
                }
            }
            segments.retain(|(_, segment)| {
                segment.is_last || !segment.keeps.is_empty() || !segment.stores.is_empty()
            });
            if segments.len() == before {
                break;
            }
        }
        let mut is_computed = vec![false; self.recording.nodes.len()];
        for (_, segment) in &segments {
            for &id in &segment.nodes {
                let op = &self.recording.node(id).op;
                if op.is_leaf() || op.is_view() || segment.takes.binary_search(&id).is_ok() {
                    continue;
                }
                if std::mem::replace(&mut is_computed[id.index()], true) {
                    self.partition.recomputed += 1;
                }
            }
            let unmarked = segment
                .keeps
                .iter()
                .filter(|id| !self.is_marked[id.index()]);
            self.partition.added_cuts += unmarked.count();
        }
        self.partition.segments = segments.into_iter().map(|(_, segment)| segment).collect();
        self.partition
    }

    /// Walks from `targets` back to leaves and to what earlier segments have.
    fn segment(&mut self, name: &str, targets: &[TensorId], stores: Vec<usize>, is_last: bool) {
        let number = self.partition.segments.len();
        let mut seen = vec![false; self.recording.nodes.len()];
        let (mut nodes, mut takes) = (Vec::new(), Vec::new());
        let mut waiting: Vec<TensorId> = targets.to_vec();
        while let Some(id) = waiting.pop() {
            if std::mem::replace(&mut seen[id.index()], true) {
                continue;
            }
            nodes.push(id);
            let node = self.recording.node(id);
            if !node.op.is_leaf() && !node.op.is_view() {
                if self.computed_in[id.index()].is_none() {
                    self.computed_in[id.index()] = Some(number);
                } else if self.keeps(id) {
                    takes.push(id);
                    continue;
                }
            }
            waiting.extend(&node.sources);
        }
        nodes.sort_unstable();
        takes.sort_unstable();
        self.partition.segments.push(Segment {
            name: name.to_owned(),
            nodes,
            takes,
            keeps: Vec::new(),
            stores,
            is_last,
        });
    }

    /// Whether a tensor that an earlier segment has computed is kept rather than computed again.
    fn keeps(&mut self, id: TensorId) -> bool {
        let index = id.index();
        let is_kept = self.is_kept[index] || self.is_marked[index] || !self.is_cheap(id);
        self.is_kept[index] = is_kept;
        is_kept
    }

    /// Whether a tensor is made by little work from things that are at most half as large, so that computing it again
    /// saves more memory than it costs time: rows that are repeated, a padded or enlarged picture.
    fn is_cheap(&self, id: TensorId) -> bool {
        let node = self.recording.node(id);
        if node.op.is_product() {
            return false;
        }
        let mut sources: Vec<TensorId> = node
            .sources
            .iter()
            .map(|&source| root(self.recording, source))
            .collect();
        sources.sort_unstable();
        sources.dedup();
        let made_from: usize = sources
            .into_iter()
            .filter(|&source| {
                // These are there for every segment; a parameter would have to be brought for another one.
                let op = &self.recording.node(source).op;
                !matches!(op, Op::Input | Op::Constant(_) | Op::Cached(_))
            })
            .map(|source| self.recording.node(source).bytes())
            .sum();
        made_from.saturating_mul(2) <= node.bytes()
    }
}
