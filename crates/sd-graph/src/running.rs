//! Running plans: segment by segment, with the weights of each there in time.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sd_backend::{Backend, Buffer, Device, Event};

use crate::error::{Error, Result};
use crate::form::Form;
use crate::lower::Slot;
use crate::param::Place;
use crate::plan::Plan;
use crate::run::{Cancel, Progress, Reporter, RunReport};
use crate::runner_cache::{self, Pending, RunnerCache};
use crate::state::{self, State};
use crate::stream::{IN_FLIGHT, Stream};

/// Runs plans together if they have the same segments and weights, else one after the other.
pub(crate) fn run(
    plans: &mut [&mut Plan],
    backend: &mut Backend,
    cancel: &Cancel,
    progress: &mut dyn Reporter,
) -> Result<RunReport> {
    let watch = backend.ledger().watch(backend.device());
    for plan in &mut *plans {
        plan.check(backend, |_| false)?;
        cancel.check()?;
        plan.acquire(backend, cancel, progress)?;
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
    let (pending, mut report) = outcome?;
    report.most = watch.most();
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
    let mut stream = stream.as_deref_mut().filter(|stream| !stream.is_resident());
    let marks = match &stream {
        _ if passes.total < 2 || !passes.backend.has_events() => Vec::new(),
        Some(stream) => stream.marks().to_vec(),
        None => (0..IN_FLIGHT).map_while(|_| Event::new(device)).collect(),
    };
    if marks.len() == IN_FLIGHT {
        return passes.run_queued(stream, marks);
    }
    match stream.take() {
        None => passes.run(|_| Ok(0)),
        Some(stream) if stream.has_queue() || !copies_beside_computing(device) => {
            passes.run(|segment| {
                let bytes = stream.bring(segment, &[], cancel)?;
                stream.settle().map(|()| bytes)
            })
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
            self.tell(segment);
        }
        Ok(())
    }

    fn tell(&mut self, segment: usize) {
        if self.total > 1 {
            self.progress.report(&Progress::Segment {
                done: segment + 1,
                total: self.total,
                bytes: self.report.weight_bytes,
            });
        }
    }

    /// Computes everything by queues that work by themselves: a few segments are queued before the host waits for the
    /// first of them, and weights are brought as far ahead as there is room, those of the next run in the end.
    fn run_queued(&mut self, stream: Option<&mut Stream>, marks: Vec<Event>) -> Result<()> {
        let mut flight = Flight {
            queued: VecDeque::new(),
            free: marks,
            since: Instant::now(),
        };
        let outcome = self.fly(stream, &mut flight);
        let finished = self.backend.finish();
        outcome?;
        Ok(finished?)
    }

    fn fly(&mut self, mut stream: Option<&mut Stream>, flight: &mut Flight) -> Result<()> {
        // The first segment that is not queued, and whether something was brought that took long since one was done.
        let (mut first, mut was_busy) = (0, false);
        loop {
            self.cancel.check()?;
            let is_there = stream.as_ref().is_none_or(|stream| stream.is_loaded(first));
            if first < self.total
                && is_there
                && let Some(computed) = flight.free.pop()
            {
                let ready = stream.as_ref().and_then(|stream| stream.ready(first));
                self.queue(first, ready, &computed)?;
                flight.queued.push_back((first, computed));
                first += 1;
                continue;
            }
            // What the next run needs is brought as long as this one computes.
            let is_wanted = |stream: &Stream, segment: usize| {
                let may_be_long = !flight.queued.is_empty() && !was_busy;
                first < self.total || may_be_long || !stream.takes_long(segment)
            };
            let next = stream.as_deref_mut().and_then(|stream| {
                let segment = stream.next(first)?;
                is_wanted(stream, segment).then_some((stream, segment))
            });
            if let Some((stream, segment)) = next {
                let began = Instant::now();
                let in_flight = flight.queued.make_contiguous();
                self.report.weight_bytes += stream.bring(segment, in_flight, self.cancel)?;
                was_busy = stream.takes_long(segment);
                if was_busy && segment == first {
                    // Nothing else could be queued meanwhile.
                    self.report.waiting += began.elapsed();
                    flight.since += began.elapsed();
                }
            } else if let Some((segment, computed)) = flight.queued.pop_front() {
                if let Some(ready) = stream.as_ref().and_then(|stream| stream.ready(segment)) {
                    ready.wait();
                    self.report.waiting += flight.lap();
                }
                computed.wait();
                self.report.computing += flight.lap();
                flight.free.push(computed);
                was_busy = false;
                self.tell(segment);
            } else {
                return Ok(());
            }
        }
    }

    /// Queues the passes over a segment for when its weights are `ready`; `computed` happens behind them.
    fn queue(&mut self, segment: usize, ready: Option<&Event>, computed: &Event) -> Result<()> {
        if let Some(ready) = ready {
            self.backend.wait_for(ready)?;
        }
        for form in &self.forms {
            form.queue(segment, self.backend, self.cancel.flag())?;
            self.report.segments += 1;
        }
        Ok(self.backend.mark(computed)?)
    }
}

impl Drop for Passes<'_> {
    /// Nothing is read or given up before the device is done with it, whatever happened, a panic of the caller's reporter
    /// included.
    fn drop(&mut self) {
        if self.backend.is_busy() {
            // Whoever computes there next is told if the device is lost.
            let _ = self.backend.finish();
        }
    }
}

/// Segments that were queued.
struct Flight {
    /// Those that the host has not seen done, and what happens when they are.
    queued: VecDeque<(usize, Event)>,
    free: Vec<Event>,
    /// Until when time was accounted for.
    since: Instant,
}

impl Flight {
    /// Time since the last lap.
    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let lap = now.saturating_duration_since(self.since);
        self.since = now;
        lap
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
            let brought = stream.bring(segment, &[], cancel);
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
