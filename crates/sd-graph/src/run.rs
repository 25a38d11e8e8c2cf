//! What belongs to a run and not to a process: cancelling it, hearing of its progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sd_backend::{Error, Usage};

/// Stops a run from outside. Clones stop the same run.
///
/// Honoured between steps and, where the device can, between the operations of a graph. A run that was stopped returns
/// [`sd_backend::Error::Cancelled`] and leaves nothing behind.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A handle that nobody has used yet.
    pub fn new() -> Cancel {
        Cancel::default()
    }

    /// Asks the run to stop. Cannot be taken back.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the run was asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Ends a run that was asked to stop.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    pub fn check(&self) -> Result<(), Error> {
        if self.is_cancelled() {
            Err(Error::Cancelled)
        } else {
            Ok(())
        }
    }

    pub(crate) fn flag(&self) -> &AtomicBool {
        &self.0
    }
}

/// Something that a run has done.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Parameters were brought into memory.
    Loading {
        /// Tensors so far.
        done: usize,
        /// Tensors in all.
        total: usize,
        /// Bytes so far.
        bytes: u64,
    },
    /// Tensors were written to a file.
    Writing {
        /// Tensors so far.
        done: usize,
        /// Tensors in all.
        total: usize,
        /// Bytes of the file so far.
        bytes: u64,
        /// Bytes that it will have.
        of: u64,
    },
    /// A named stage has begun: `encode`, `denoise`, `decode`.
    Stage(&'static str),
    /// A segment of a graph was computed.
    Segment {
        /// Segments so far.
        done: usize,
        /// Segments in all.
        total: usize,
        /// Bytes of weights that were moved to the device in this run so far.
        bytes: u64,
    },
    /// A chunk of a clip was encoded or decoded, or a tile of one.
    Chunk {
        /// Chunks so far, or tiles of them.
        done: usize,
        /// How many there are in all; as far as is known, where a clip is still being read.
        total: usize,
    },
    /// What is made so far, as a picture.
    Preview {
        /// Steps so far.
        step: usize,
        /// Steps in all.
        steps: usize,
        /// Pixels from left to right.
        width: usize,
        /// Pixels from top to bottom.
        height: usize,
        /// Red, green, blue and alpha of each pixel, row by row.
        rgba: Vec<u8>,
    },
    /// A sampler has moved on: once a step, or as often as it asks the model in one.
    Step {
        /// Calls of the model so far.
        done: usize,
        /// Calls of the model in all.
        total: usize,
    },
}

/// What a run took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunReport {
    /// Segments that were computed, those of all plans that ran together.
    pub segments: usize,
    /// Time in which the device computed, or was about to.
    pub computing: Duration,
    /// Time in which it waited for weights: in which those of the segment whose turn it was were not there. The host's
    /// clock tells, by which a segment is computed when the host has seen so. Where weights are read from files, reading
    /// those of the next segment to be queued counts, though the device may still have computed for a part of that.
    pub waiting: Duration,
    /// Bytes of weights that were moved to the device.
    pub weight_bytes: u64,
    /// Bytes of inputs that were moved to the device.
    pub input_bytes: u64,
    /// What was held on the device through its ledger, by kind, when all was computed.
    pub used: Usage,
    /// The most that was held while it ran, for each kind by itself. More than `used` only if the plan had to take its
    /// memory first, or others hold some of the same account.
    pub most: Usage,
}

impl RunReport {
    /// Adds what a later run on the same device took.
    pub(crate) fn add(&mut self, later: RunReport) {
        self.segments += later.segments;
        self.computing += later.computing;
        self.waiting += later.waiting;
        self.weight_bytes += later.weight_bytes;
        self.input_bytes += later.input_bytes;
        self.used = later.used;
        self.most = self.most.most(&later.most);
    }
}

/// Hears of progress, on the thread that runs. Implemented by every `FnMut(&Progress)`.
pub trait Reporter {
    /// Called after something was done; quick, since the run waits for it.
    fn report(&mut self, progress: &Progress);
}

impl<F: FnMut(&Progress)> Reporter for F {
    fn report(&mut self, progress: &Progress) {
        self(progress);
    }
}
