//! Running the parts of split plans: a thread for each device, and what is handed over from one to the next.

use std::sync::mpsc::{Receiver, Sender, channel};

use sd_backend::Backend;

use crate::error::Result;
use crate::plan::Plan;
use crate::run::{Cancel, Progress, Reporter, RunReport};
use crate::running;

/// One device's part of a plan.
#[derive(Debug)]
pub(crate) struct Link {
    /// Number of the device among those of the split.
    pub device: usize,
    pub plan: Plan,
    pub takes: Vec<Take>,
}

/// What a part takes from an earlier one.
#[derive(Debug)]
pub(crate) struct Take {
    /// Number of the earlier part.
    pub link: usize,
    pub output: String,
    pub input: String,
}

/// One device and its part of all plans that run.
pub(crate) struct Stage<'s> {
    pub backend: &'s mut Backend,
    pub passes: Vec<&'s mut Link>,
}

/// A tensor on its way to another device.
struct Handed {
    pass: usize,
    input: String,
    bytes: Vec<u8>,
}

/// What a part gives: to which later one, from which output, as which input.
struct Give {
    stage: usize,
    output: String,
    input: String,
}

/// Runs all passes through all stages, and says what each stage took.
///
/// # Errors
/// The failure of the first stage that failed.
pub(crate) fn run(
    stages: Vec<Stage<'_>>,
    cancel: &Cancel,
    progress: &mut dyn Reporter,
) -> Result<Vec<RunReport>> {
    let gives: Vec<Vec<Give>> = (0..stages.len())
        .map(|giver| gives(&stages, giver))
        .collect();
    let (senders, inboxes): (Vec<Sender<Handed>>, Vec<Receiver<Handed>>) =
        stages.iter().map(|_| channel()).unzip();
    let (tell, told) = channel();
    let mut tally = Tally::new(&stages);
    let reports: Result<Vec<_>> = std::thread::scope(|scope| {
        let stages = stages.into_iter().zip(gives).zip(inboxes).enumerate();
        let threads: Vec<_> = stages
            .map(|(number, ((stage, gives), inbox))| {
                // Only those behind: a stage that waits for one that failed hears that nobody is left to send.
                let behind = senders.iter().enumerate();
                let behind = behind.map(|(n, sender)| (n > number).then(|| sender.clone()));
                let post = Post {
                    gives,
                    inbox,
                    behind: behind.collect(),
                    early: Vec::new(),
                };
                let tell = tell.clone();
                let tell = move |segments, bytes| {
                    // Nobody listens any more if the caller's reporter panicked.
                    tell.send((number, segments, bytes)).ok();
                };
                scope.spawn(move || stage.run(post, cancel, &tell))
            })
            .collect();
        drop((senders, tell));
        while let Ok((stage, segments, bytes)) = told.recv() {
            progress.report(&tally.add(stage, segments, bytes));
        }
        let reports = threads.into_iter().map(|thread| {
            let outcome = thread.join();
            outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        reports.collect()
    });
    // A stage without a report was stopped by one that failed, whose failure has been returned.
    Ok(reports?.into_iter().flatten().collect())
}

/// What stage `giver` gives to others. All passes have the same parts.
fn gives(stages: &[Stage<'_>], giver: usize) -> Vec<Give> {
    let mut gives = Vec::new();
    for (stage, taker) in stages.iter().enumerate() {
        let takes = taker
            .passes
            .first()
            .into_iter()
            .flat_map(|link| &link.takes);
        gives.extend(takes.filter(|take| take.link == giver).map(|take| Give {
            stage,
            output: take.output.clone(),
            input: take.input.clone(),
        }));
    }
    gives
}

/// How a stage hears from those before it and tells those behind.
struct Post {
    gives: Vec<Give>,
    inbox: Receiver<Handed>,
    behind: Vec<Option<Sender<Handed>>>,
    /// What came for later passes.
    early: Vec<Handed>,
}

impl Post {
    /// Gives a pass all that it takes; `false` if that will never come.
    fn receive(&mut self, pass: usize, link: &mut Link) -> Result<bool> {
        let mut missing = link.takes.len();
        let (now, later) = self.early.drain(..).partition(|handed| handed.pass == pass);
        self.early = later;
        let mut now: Vec<Handed> = now;
        loop {
            for handed in now.drain(..) {
                link.plan.give(&handed.input, handed.bytes)?;
                missing -= 1;
            }
            if missing == 0 {
                return Ok(true);
            }
            match self.inbox.recv() {
                Ok(handed) if handed.pass == pass => now.push(handed),
                Ok(handed) => self.early.push(handed),
                Err(_) => return Ok(false),
            }
        }
    }

    /// Hands over what a pass gives; `false` if somebody no longer takes it.
    fn send(&self, pass: usize, link: &Link) -> Result<bool> {
        for give in &self.gives {
            let handed = Handed {
                pass,
                input: give.input.clone(),
                bytes: link.plan.read_bytes(&give.output)?,
            };
            let sender = self.behind.get(give.stage).and_then(Option::as_ref);
            if sender.is_none_or(|sender| sender.send(handed).is_err()) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Stage<'_> {
    /// Computes all passes, each as soon as what it takes is there; those with weights that come and go together.
    /// `None` if another stage failed.
    fn run(
        mut self,
        mut post: Post,
        cancel: &Cancel,
        tell: &dyn Fn(usize, u64),
    ) -> Result<Option<RunReport>> {
        let is_streamed = self.passes.iter().any(|link| link.plan.is_streamed());
        let together = if is_streamed { self.passes.len() } else { 1 };
        let mut report = RunReport::default();
        for (turn, passes) in self.passes.chunks_mut(together.max(1)).enumerate() {
            let first = turn * together;
            for (offset, link) in passes.iter_mut().enumerate() {
                if !post.receive(first + offset, link)? {
                    return Ok(None);
                }
            }
            let mut told = 0;
            let mut hear = |event: &Progress| {
                if let Progress::Segment { done, bytes, .. } = event {
                    told = *done;
                    tell(*done, *bytes);
                }
            };
            let mut plans: Vec<&mut Plan> = passes.iter_mut().map(|link| &mut link.plan).collect();
            let ran = running::run(&mut plans, self.backend, cancel, &mut hear)?;
            // A graph in one piece tells nothing by itself.
            if told == 0 {
                tell(1, ran.weight_bytes);
            }
            report.add(ran);
            for (offset, link) in passes.iter().enumerate() {
                if !post.send(first + offset, link)? {
                    return Ok(None);
                }
            }
        }
        Ok(Some(report))
    }
}

/// What all stages have told so far.
struct Tally {
    total: usize,
    done: usize,
    /// For each stage: segments and bytes of the turn that it told of last.
    last: Vec<(usize, u64)>,
    bytes: u64,
}

impl Tally {
    fn new(stages: &[Stage<'_>]) -> Tally {
        let segments = stages.iter().map(|stage| {
            let passes = stage.passes.iter();
            let segments = passes.map(|link| link.plan.segmentation().segments.len());
            let is_streamed = stage.passes.iter().any(|link| link.plan.is_streamed());
            if is_streamed {
                segments.max().unwrap_or(0)
            } else {
                segments.sum()
            }
        });
        Tally {
            total: segments.sum(),
            done: 0,
            last: vec![(0, 0); stages.len()],
            bytes: 0,
        }
    }

    fn add(&mut self, stage: usize, segments: usize, bytes: u64) -> Progress {
        let last = &mut self.last[stage];
        // A new turn begins to count again.
        let before = if segments <= last.0 { (0, 0) } else { *last };
        self.done += segments - before.0;
        self.bytes += bytes.saturating_sub(before.1);
        *last = (segments, bytes);
        Progress::Segment {
            done: self.done,
            total: self.total.max(self.done),
            bytes: self.bytes,
        }
    }
}
