//! Running plans: segment by segment, with the weights of each there in time.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use sd_backend::{Backend, Buffer, Device};

use crate::error::{Error, Result};
use crate::form::Form;
use crate::lower::Slot;
use crate::param::Place;
use crate::plan::Plan;
use crate::run::{Cancel, Progress, Reporter, RunReport};
use crate::runner_cache::{self, Pending, RunnerCache};
use crate::state::{self, State};
use crate::stream::Stream;

/// Runs plans together if they have the same segments and weights, else one after the other.
pub(crate) fn run(
    plans: &mut [&mut Plan],
    backend: &mut Backend,
    cancel: &Cancel,
    progress: &mut dyn Reporter,
) -> Result<RunReport> {
    for plan in &mut *plans {
        plan.check(backend, |_| false)?;
        cancel.check()?;
        plan.acquire(backend, cancel)?;
    }
    let stored_into = stored_into(plans);
    let _alone = runner_cache::lock(&stored_into);
    let outcome = attach(plans, backend).and_then(|pending| {
        let report = run_attached(plans, backend, cancel, progress)?;
        Ok((pending, report))
    });
    for plan in &mut *plans {
        if let Some(form) = &mut plan.form {
            form.detach();
        }
    }
    let (pending, report) = outcome?;
    for (cache, pending) in pending {
        cache.commit(pending);
    }
    Ok(report)
}

/// The caches that a run of `plans` stores into, each once.
fn stored_into(plans: &[&mut Plan]) -> Vec<RunnerCache> {
    let mut caches: Vec<RunnerCache> = Vec::new();
    let storing = plans
        .iter()
        .filter(|plan| !plan.recording.stores.is_empty());
    for attached in storing.filter_map(|plan| plan.attached.as_ref()) {
        if !caches.contains(&attached.cache) {
            caches.push(attached.cache.clone());
        }
    }
    caches
}

/// Takes memory for all that `plans` store, and lets their graphs point there and to what they read.
fn attach(plans: &mut [&mut Plan], backend: &Backend) -> Result<Vec<(RunnerCache, Pending)>> {
    let mut all = Vec::new();
    for plan in plans {
        let (Some(form), Some(attached)) = (&mut plan.form, &plan.attached) else {
            continue;
        };
        let pending = Pending::allocate(&plan.recording, backend)?;
        let stored: Vec<&Place> = pending.places().collect();
        form.attach(backend, |slot| match slot {
            Slot::Cached(index) => attached.read.get(index).cloned(),
            Slot::Stored(index) => stored.get(index).copied().cloned(),
        })?;
        all.push((attached.cache.clone(), pending));
    }
    Ok(all)
}

/// Runs plans whose graphs have all their memory.
fn run_attached(
    plans: &mut [&mut Plan],
    backend: &mut Backend,
    cancel: &Cancel,
    progress: &mut dyn Reporter,
) -> Result<RunReport> {
    let mut report = RunReport::default();
    for plan in &mut *plans {
        if let Some(form) = &plan.form {
            let inputs = plan.recording.inputs.iter().zip(&plan.values);
            report.input_bytes += inputs
                .map(|(input, values)| form.set(input.tensor, values))
                .sum::<u64>();
        }
        plan.is_set.fill(false);
        plan.attached = None;
        plan.has_run = false;
    }
    let are_alike = plans.windows(2).all(|pair| {
        let same_weights = match (&pair[0].stream, &pair[1].stream) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (None, None) => true,
            _ => false,
        };
        let length = |plan: &Plan| plan.form.as_ref().map(Form::len);
        // What one writes into a state the next may read.
        let keeps = |plan: &Plan| !plan.recording.kept.is_empty();
        !keeps(pair[0]) && !keeps(pair[1]) && same_weights && length(pair[0]) == length(pair[1])
    });
    if are_alike {
        run_passes(plans, backend, cancel, progress, &mut report)?;
    } else {
        for plan in &mut *plans {
            run_passes(&mut [plan], backend, cancel, progress, &mut report)?;
        }
    }
    for plan in &mut *plans {
        plan.has_run = true;
    }
    report.used = backend.ledger().report(backend.device()).used;
    Ok(report)
}

/// Runs plans of the same segments and weights.
fn run_passes(
    plans: &mut [&mut Plan],
    backend: &mut Backend,
    cancel: &Cancel,
    progress: &mut dyn Reporter,
    report: &mut RunReport,
) -> Result<()> {
    // Nobody else may read or write the states of a plan meanwhile.
    let mut states: Vec<State> = Vec::new();
    for state in plans.iter().flat_map(|plan| &plan.recording.states) {
        if !states.contains(state) {
            states.push(state.clone());
        }
    }
    let _alone = state::lock(&states);
    let stream = plans.first().and_then(|plan| plan.stream.clone());
    let mut stream = stream
        .as_ref()
        .map(|stream| stream.lock().unwrap_or_else(PoisonError::into_inner));
    let forms: Vec<&Form> = plans.iter().filter_map(|plan| plan.form.as_ref()).collect();
    let device = backend.device();
    let mut passes = Passes {
        total: forms.first().map_or(0, |form| form.len()),
        forms,
        backend,
        cancel,
        progress,
        report,
    };
    match stream.as_deref_mut().filter(|stream| !stream.is_resident()) {
        None => passes.run(|_| Ok(0)),
        Some(stream) if !copies_beside_computing(device) => {
            passes.run(|segment| stream.bring(segment, cancel))
        }
        Some(stream) => {
            let total = passes.total;
            let handover = Handover::default();
            std::thread::scope(|scope| {
                scope.spawn(|| handover.bring(stream, total, cancel));
                // Stops the thread whatever ends the run, a panic of the caller's reporter included.
                let _stop = Stop(&handover);
                passes.run(|segment| handover.wait(segment))
            })
        }
    }
}

/// Whether weights may be copied to a device by one thread while another computes on it: the processor's memory is the
/// host's, and CUDA copies on a stream of the thread that asks. Of other drivers it is not known.
fn copies_beside_computing(device: Device) -> bool {
    Buffer::is_host(device) || device.backend_name() == "CUDA"
}

/// Passes of one or more plans over each segment in turn.
struct Passes<'p> {
    forms: Vec<&'p Form>,
    total: usize,
    backend: &'p mut Backend,
    cancel: &'p Cancel,
    progress: &'p mut dyn Reporter,
    report: &'p mut RunReport,
}

impl Passes<'_> {
    /// Computes everything. `ready` returns when a segment's weights are there, with the bytes that this took.
    fn run(&mut self, mut ready: impl FnMut(usize) -> Result<u64>) -> Result<()> {
        for segment in 0..self.total {
            self.cancel.check()?;
            let started = Instant::now();
            self.report.weight_bytes += ready(segment)?;
            let computing = Instant::now();
            self.report.waiting += computing - started;
            for form in &self.forms {
                form.compute(segment, self.backend, self.cancel.flag())?;
                self.report.segments += 1;
            }
            self.report.computing += computing.elapsed();
            if self.total > 1 {
                self.progress.report(&Progress::Segment {
                    done: segment + 1,
                    total: self.total,
                    bytes: self.report.weight_bytes,
                });
            }
        }
        Ok(())
    }
}

/// Between the thread that brings weights and the one that computes.
#[derive(Debug, Default)]
struct Handover {
    state: Mutex<Handed>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Handed {
    /// Segments whose weights are there, or were.
    ready: usize,
    /// The segment that is computed now: all before it are done. `None` before the first.
    computing: Option<usize>,
    /// Bytes brought and not yet told of.
    bytes: u64,
    failure: Option<Error>,
    is_over: bool,
}

impl Handover {
    fn lock(&self) -> MutexGuard<'_, Handed> {
        // The state is right after every statement that changes it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until<'s>(
        &'s self,
        state: MutexGuard<'s, Handed>,
        is_so: impl Fn(&Handed) -> bool,
    ) -> MutexGuard<'s, Handed> {
        self.changed
            .wait_while(state, |state| !is_so(state))
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings the weights of all segments, each as soon as nobody computes with what lies in its place.
    fn bring(&self, stream: &mut Stream, total: usize, cancel: &Cancel) {
        for segment in 0..total {
            let behind = stream.waits_for(segment);
            let is_free = |state: &Handed| state.computing >= behind.map(|before| before + 1);
            let state = self.wait_until(self.lock(), |state| state.is_over || is_free(state));
            if state.is_over {
                return;
            }
            drop(state);
            let brought = stream.bring(segment, cancel);
            let mut state = self.lock();
            match brought {
                Ok(bytes) => {
                    state.bytes += bytes;
                    state.ready = segment + 1;
                }
                Err(error) => state.failure = Some(error),
            }
            let is_over = state.failure.is_some();
            drop(state);
            self.changed.notify_all();
            if is_over {
                return;
            }
        }
    }

    /// Says that everything before `segment` is computed, and waits for its weights.
    fn wait(&self, segment: usize) -> Result<u64> {
        let mut state = self.lock();
        state.computing = Some(segment);
        self.changed.notify_all();
        let mut state = self.wait_until(state, |state| {
            state.ready > segment || state.failure.is_some()
        });
        match state.failure.take() {
            // What is there already may be used, but the run cannot be finished.
            Some(failure) => Err(failure),
            None => Ok(std::mem::take(&mut state.bytes)),
        }
    }
}

/// Ends the thread that brings weights.
struct Stop<'h>(&'h Handover);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.changed.notify_all();
    }
}
