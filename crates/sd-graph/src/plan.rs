//! Plans: a graph of fixed shapes, in memory, ready to run many times.

use std::sync::{Arc, Mutex, PoisonError};

use sd_backend::{Backend, Device};

use crate::acquire::{Pool, SharedStream, acquire};
use crate::error::{Error, Result};
use crate::form::{Draft, Form};
use crate::graph::{Element, Graph, Named, Recording, TensorId, check_index};
use crate::param::{Param, Place};
use crate::ring::Ring;
use crate::run::{Cancel, Progress, Reporter, RunReport};
use crate::runner_cache::{RunnerCache, stored_bytes};
use crate::running;
use crate::segment::{Partition, Segment};
use crate::stream::sizes;

/// A graph that was built, checked and allocated once. Only its inputs change from run to run.
///
/// A graph with [cuts](crate::Tensor::cut) runs in one piece where memory suffices for that when the plan is built, else
/// in segments, else in segments whose weights come and go. The numbers are the same.
#[derive(Debug)]
pub struct Plan {
    // Field order is drop order: graphs go before the weights that they point to.
    pub(crate) form: Option<Form>,
    pub(crate) stream: Option<SharedStream>,
    pool: Arc<Mutex<Pool>>,
    pub(crate) recording: Recording,
    partition: Partition,
    /// One per input: the values of the next run.
    pub(crate) values: Vec<Vec<u8>>,
    /// One per input: whether it was set since the last run.
    pub(crate) is_set: Vec<bool>,
    pub(crate) has_run: bool,
    /// The cache of the next run, and where in it the entries lie that the graph reads.
    pub(crate) attached: Option<Attached>,
    device: Device,
}

/// A cache as it was when a plan was given it.
#[derive(Debug)]
pub(crate) struct Attached {
    pub cache: RunnerCache,
    pub read: Vec<Place>,
}

/// What a graph would need, found without allocating anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Estimate {
    /// Operations in ggml's graph.
    pub nodes: usize,
    /// Bytes of the parameters it reads.
    pub weight_bytes: u64,
    /// Bytes of memory for everything that is computed, inputs included.
    pub compute_bytes: u64,
    /// Bytes of constants kept with the plan.
    pub constant_bytes: u64,
    /// Segments that it can run in: 1 for a graph without cuts.
    pub segments: usize,
    /// As `compute_bytes`, if it runs in segments.
    pub segmented_bytes: u64,
    /// The least bytes in which its parameters can come and go while it runs in segments.
    pub streamed_weight_bytes: u64,
    /// Bytes that a run stores in its cache.
    pub cache_bytes: u64,
}

/// How a plan runs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Segmentation {
    /// Names of the segments in the order in which they run: the groups of the cuts, and the final one. A graph in one
    /// piece has only that.
    pub segments: Vec<String>,
    /// Tensors that several segments use and that are kept although nobody marked them.
    pub added_cuts: usize,
    /// Tensors that are computed again by a segment, since that is cheaper than keeping them.
    pub recomputed: usize,
    /// Whether weights come and go while it runs.
    pub is_streamed: bool,
}

/// The pieces of a recording. Pieces that are wrong, which is a mistake of ours, are not run: the graph has one then.
pub(crate) fn partition(recording: &Recording) -> Partition {
    Partition::of(recording).unwrap_or_else(|mistake| {
        debug_assert!(false, "{mistake}");
        tracing::warn!("a graph runs in one piece: {mistake}");
        Partition::whole(recording)
    })
}

impl Plan {
    /// Builds the graph that `build` records and allocates it on the device of `backend`.
    ///
    /// # Errors
    /// [`Error::Graph`] with the first mistake in it, [`Error::NotLoaded`], [`Error::WrongDevice`],
    /// [`Error::Unsupported`], or when memory runs out (nothing stays allocated) [`Error::TooLittleMemory`] or
    /// [`Error::Backend`].
    pub fn build(backend: &Backend, build: impl for<'g> FnOnce(Graph<'g>)) -> Result<Plan> {
        Plan::build_with(backend, &Cancel::new(), &mut |_: &Progress| {}, build)
    }

    /// As [`Plan::build`]; weights that come and go are loaded as far as they stay, which can be cancelled and is told of
    /// ([`Progress::Loading`]).
    ///
    /// # Errors
    /// Those of [`Plan::build`].
    pub fn build_with(
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
        build: impl for<'g> FnOnce(Graph<'g>),
    ) -> Result<Plan> {
        let pool = Arc::new(Mutex::new(Pool::new(1)));
        Plan::build_in(&pool, backend, cancel, progress, build)
    }

    /// As [`Plan::build`], but in segments even where the whole would fit: where a device cannot stop within a graph, a
    /// run can be cancelled between segments, and tells of each.
    ///
    /// # Errors
    /// Those of [`Plan::build`].
    pub fn build_in_segments(
        backend: &Backend,
        build: impl for<'g> FnOnce(Graph<'g>),
    ) -> Result<Plan> {
        let pool = Pool::new(1).always_cut();
        let pool = Arc::new(Mutex::new(pool));
        Plan::build_in(
            &pool,
            backend,
            &Cancel::new(),
            &mut |_: &Progress| {},
            build,
        )
    }

    /// As [`Plan::build`], sharing weights that come and go with other plans of `pool`.
    pub(crate) fn build_in(
        pool: &Arc<Mutex<Pool>>,
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
        build: impl for<'g> FnOnce(Graph<'g>),
    ) -> Result<Plan> {
        Plan::of(Recording::of(build)?, pool, backend, (cancel, progress))
    }

    /// As [`Plan::build_in`] for what was recorded.
    pub(crate) fn of(
        recording: Recording,
        pool: &Arc<Mutex<Pool>>,
        backend: &Backend,
        (cancel, progress): (&Cancel, &mut dyn Reporter),
    ) -> Result<Plan> {
        let mut plan = Plan {
            form: None,
            stream: None,
            pool: Arc::clone(pool),
            partition: partition(&recording),
            values: vec![Vec::new(); recording.inputs.len()],
            is_set: vec![false; recording.inputs.len()],
            recording,
            has_run: false,
            attached: None,
            device: backend.device(),
        };
        plan.acquire(backend, cancel, progress)?;
        Ok(plan)
    }

    /// Takes memory, if it has none: for the whole graph if that fits now, else for its segments.
    pub(crate) fn acquire(
        &mut self,
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<()> {
        if self.form.is_none() {
            let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
            let (recording, partition) = (&self.recording, &self.partition);
            let (form, stream) =
                acquire(recording, partition, &mut pool, backend, cancel, progress)?;
            self.form = Some(form);
            self.stream = stream;
        }
        Ok(())
    }

    /// Gives all memory of the device back. The next run takes it again, and decides anew how the graph runs.
    pub fn release(&mut self) {
        self.form = None;
        self.stream = None;
        self.has_run = false;
    }

    /// Gives an input its values for the next run, innermost dimension fastest.
    ///
    /// # Errors
    /// [`Error::UnknownName`]; [`Error::WrongValues`] for another type or count, or for row numbers beyond a table.
    pub fn set<T: Element>(&mut self, name: &str, values: &[T]) -> Result<()> {
        let (index, id) = find(&self.recording.inputs, "input", name)?;
        let node = self.recording.node(id);
        check_values::<T>(name, node.dtype, node.shape.elements(), values.len())?;
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if let Some(&rows) = self.recording.index_limits.get(&id) {
            check_index(bytes, rows).map_err(|reason| Error::WrongValues {
                name: name.to_owned(),
                reason: format!("holds {reason}"),
            })?;
        }
        self.values[index].clear();
        self.values[index].extend_from_slice(bytes);
        self.is_set[index] = true;
        Ok(())
    }

    /// Gives the next run the cache that its graph reads with [`Graph::cached`] and stores into with [`Graph::store`]. It is
    /// used up by the run, like an input. What is read is what the cache holds now; what is stored takes its place when all
    /// of the run, of other plans that [run together](Plan::run_together) too, has succeeded.
    ///
    /// # Errors
    /// [`Error::Cache`] when the cache lacks an entry, or has it in another shape or type or on another device.
    pub fn attach(&mut self, cache: &RunnerCache) -> Result<()> {
        self.attached = None;
        let read = cache.find(&self.recording.cached, self.device)?;
        self.attached = Some(Attached {
            cache: cache.clone(),
            read,
        });
        Ok(())
    }

    /// Computes all outputs. Inputs are used up: each must be set again before the next run.
    ///
    /// # Errors
    /// [`Error::InputNotSet`], [`Error::NotAttached`], [`Error::WrongDevice`], or [`Error::Backend`]; when memory runs out
    /// for what it stores, [`Error::OutOfMemory`]. After an error the plan can be run again.
    pub fn run(&mut self, backend: &mut Backend, cancel: &Cancel) -> Result<RunReport> {
        self.run_with(backend, cancel, &mut |_: &crate::Progress| {})
    }

    /// As [`Plan::run`], telling of every segment that is done.
    ///
    /// # Errors
    /// Those of [`Plan::run`].
    pub fn run_with(
        &mut self,
        backend: &mut Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<RunReport> {
        running::run(&mut [self], backend, cancel, progress)
    }

    /// Runs several plans as one: segment by segment, each plan's in turn, so that weights that come and go do so once
    /// for all of them. Plans of different segments or weights run one after the other.
    ///
    /// # Errors
    /// Those of [`Plan::run`] of any of them.
    pub fn run_together(
        plans: &mut [&mut Plan],
        backend: &mut Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<RunReport> {
        running::run(plans, backend, cancel, progress)
    }

    /// Gives an input of the right length its bytes.
    pub(crate) fn give(&mut self, name: &str, bytes: Vec<u8>) -> Result<()> {
        let (index, _) = find(&self.recording.inputs, "input", name)?;
        self.values[index] = bytes;
        self.is_set[index] = true;
        Ok(())
    }

    /// Whether it has an input of this name.
    pub(crate) fn has_input(&self, name: &str) -> bool {
        self.recording.inputs.iter().any(|input| input.name == name)
    }

    /// Refuses to run on another device, or without inputs but those that are `given_later`.
    pub(crate) fn check(
        &self,
        backend: &Backend,
        given_later: impl Fn(&str) -> bool,
    ) -> Result<()> {
        if backend.device() != self.device {
            return Err(Error::WrongDevice {
                what: "the backend".to_owned(),
                found: backend.device().name(),
                wanted: self.device.name(),
            });
        }
        if self.attached.is_none() && self.recording.uses_cache() {
            return Err(Error::NotAttached);
        }
        let inputs = self.recording.inputs.iter().zip(&self.is_set);
        let mut missing = inputs.filter(|(input, is_set)| !**is_set && !given_later(&input.name));
        match missing.next() {
            Some((input, _)) => Err(Error::InputNotSet {
                name: input.name.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Reads an output of the last run, innermost dimension fastest.
    ///
    /// # Errors
    /// [`Error::UnknownName`], [`Error::NotRun`], [`Error::WrongValues`] for another type, or [`Error::Backend`] when the
    /// device's server is gone.
    pub fn read<T: Element>(&self, name: &str) -> Result<Vec<T>> {
        let (index, id) = find(&self.recording.outputs, "output", name)?;
        let node = self.recording.node(id);
        let mut values = vec![T::zeroed(); node.shape.elements()];
        check_values::<T>(name, node.dtype, node.shape.elements(), values.len())?;
        self.read_bytes_into(name, index, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// As [`Plan::read`], into memory that is there: large results of many runs cost a system as much to make room for as to copy.
    ///
    /// # Errors
    /// As for [`Plan::read`]; [`Error::WrongValues`] also for a slice of another length.
    pub fn read_into<T: Element>(&self, name: &str, values: &mut [T]) -> Result<()> {
        let (index, id) = find(&self.recording.outputs, "output", name)?;
        let node = self.recording.node(id);
        check_values::<T>(name, node.dtype, node.shape.elements(), values.len())?;
        self.read_bytes_into(name, index, bytemuck::cast_slice_mut(values))
    }

    /// As [`Plan::read`], whatever type it is.
    pub(crate) fn read_bytes(&self, name: &str) -> Result<Vec<u8>> {
        let (index, id) = find(&self.recording.outputs, "output", name)?;
        let mut bytes = vec![0; self.recording.node(id).bytes()];
        self.read_bytes_into(name, index, &mut bytes)?;
        Ok(bytes)
    }

    fn read_bytes_into(&self, name: &str, index: usize, bytes: &mut [u8]) -> Result<()> {
        let form = self.form.as_ref().filter(|_| self.has_run);
        let form = form.ok_or_else(|| Error::NotRun {
            name: name.to_owned(),
        })?;
        form.read(index, bytes);
        Ok(self.device.check_connection()?)
    }

    /// Shape of an output, outermost first.
    ///
    /// # Errors
    /// [`Error::UnknownName`].
    pub fn output_shape(&self, name: &str) -> Result<crate::Shape> {
        let (_, id) = find(&self.recording.outputs, "output", name)?;
        Ok(self.recording.node(id).shape)
    }

    /// How it runs now; as it could at most be cut while it holds no memory.
    pub fn segmentation(&self) -> Segmentation {
        let whole = self.form.as_ref().is_some_and(|form| form.len() == 1);
        let names = self.partition.segments.iter().map(|s| s.name.clone());
        Segmentation {
            segments: match &self.form {
                Some(form) => form.names().to_vec(),
                None => names.collect(),
            },
            added_cuts: if whole { 0 } else { self.partition.added_cuts },
            recomputed: if whole { 0 } else { self.partition.recomputed },
            is_streamed: self.is_streamed(),
        }
    }

    /// Whether weights come and go while it runs.
    pub(crate) fn is_streamed(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| {
            let stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
            !stream.is_resident()
        })
    }

    /// Bytes of device memory that this plan holds for what it computes.
    pub fn compute_bytes(&self) -> u64 {
        self.form.as_ref().map_or(0, Form::compute_bytes)
    }

    /// Operations in ggml's graphs.
    pub fn nodes(&self) -> usize {
        self.form.as_ref().map_or(0, Form::nodes)
    }
}

impl Estimate {
    /// Measures the graph that `build` records for `backend`, with parameters that need not be loaded. Allocates
    /// nothing on the device.
    ///
    /// # Errors
    /// [`Error::Graph`], [`Error::Unsupported`].
    pub fn of(backend: &Backend, build: impl for<'g> FnOnce(Graph<'g>)) -> Result<Estimate> {
        let device = backend.device();
        let recording = Recording::of(build)?;
        let partition = partition(&recording);
        let whole = Draft::of(&recording, vec![Segment::whole(&recording)], backend)?;
        let is_state = |param: &Param| {
            let mut states = recording.states.iter();
            states.any(|state| state.param().key() == param.key())
        };
        let weights = partition.params(&recording, |param| !is_state(param));
        let weights = sizes(&weights, device)?;
        // Without a budget nothing passes through a ring; with none at all it says what would do.
        let largest = sd_backend::Buffer::largest(device) as u64;
        let streamed = match Ring::lay_out(&weights, Some(0), largest) {
            Ok(_) => 0,
            Err(least) => least,
        };
        let segments = partition.segments.len();
        let segmented_bytes = match segments {
            1 => whole.compute_bytes(),
            _ => Draft::of(&recording, partition.segments, backend)?.compute_bytes(),
        };
        Ok(Estimate {
            nodes: whole.nodes(),
            weight_bytes: recording
                .params
                .iter()
                .map(|param| param.bytes() as u64)
                .sum(),
            compute_bytes: whole.compute_bytes(),
            constant_bytes: whole.constant_bytes(),
            segments,
            segmented_bytes,
            streamed_weight_bytes: streamed,
            cache_bytes: stored_bytes(&recording, device),
        })
    }
}

fn find(named: &[Named], what: &'static str, name: &str) -> Result<(usize, TensorId)> {
    named
        .iter()
        .position(|entry| entry.name == name)
        .map(|index| (index, named[index].tensor))
        .ok_or_else(|| Error::UnknownName {
            what,
            name: name.to_owned(),
            known: named.iter().map(|entry| entry.name.clone()).collect(),
        })
}

fn check_values<T: Element>(
    name: &str,
    dtype: sd_backend::DType,
    wanted: usize,
    found: usize,
) -> Result<()> {
    let reason = if dtype != T::DTYPE {
        format!("holds {dtype}, not {}", T::DTYPE)
    } else if wanted != found {
        format!("holds {wanted} values, not {found}")
    } else {
        return Ok(());
    };
    Err(Error::WrongValues {
        name: name.to_owned(),
        reason,
    })
}
