//! What can go wrong between a checkpoint and a result.

use crate::checkpoint::{CheckpointError, WriteError};
use crate::convert::ConvertError;
use crate::graph::GraphError;
use crate::scope::Mismatch;

/// Short for a [`std::result::Result`] with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of failure an error is. Only memory that ran out may be tried again: after anything else a device is not to
/// be trusted, and less memory would not cure it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// Memory ran out.
    Allocation(Allocation),
    /// Anything else, cancelling included.
    Other,
}

/// What memory was for that ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Allocation {
    /// Descriptions of a graph, which are needed to measure it: the host's memory.
    Measuring,
    /// All that a graph needs, found to be too much before any of it was taken.
    Reserving,
    /// What a graph computes in, what the driver takes while it computes included.
    Workspace,
    /// What a run stores in its cache.
    Capture,
    /// Weights, those that come and go included.
    Weights,
    /// What weights pass through on the host.
    Host,
}

impl std::fmt::Display for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Allocation::Measuring => "measuring a graph",
            Allocation::Reserving => "memory for a graph",
            Allocation::Workspace => "memory to compute in",
            Allocation::Capture => "memory for a cache",
            Allocation::Weights => "memory for weights",
            Allocation::Host => "memory that weights pass through",
        })
    }
}

/// A failure of loading, planning or running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A weight file cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A checkpoint does not fit the model.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    /// A graph has a mistake in it: a fault of the program that built it.
    #[error("the graph is wrong: {0}")]
    Graph(#[from] GraphError),
    /// A device failed, memory ran out, or the run was cancelled.
    #[error(transparent)]
    Backend(#[from] sd_backend::Error),
    /// Memory ran out for something else than what a graph computes in, which is [`Error::Backend`].
    #[error("{what}: {source}")]
    OutOfMemory {
        /// What it was for.
        what: Allocation,
        /// What was refused.
        source: sd_backend::Error,
    },
    /// Memory does not suffice for a graph however it is cut and whatever of its weights comes and goes.
    #[error("{source}; the graph runs in {} at least", sd_backend::Bytes(*smallest))]
    TooLittleMemory {
        /// What was refused.
        source: sd_backend::Error,
        /// Bytes of the device's memory that would do, weights included, beside what others hold.
        smallest: u64,
    },
    /// The device lacks an operation.
    #[error("device {device} cannot run the operation {operation}")]
    Unsupported {
        /// Name of the device.
        device: String,
        /// ggml's name of the operation.
        operation: String,
    },
    /// A parameter is not in the checkpoint it is loaded from, or not as it was declared.
    #[error("`{name}` was not declared against this checkpoint")]
    NotDeclared {
        /// Name of the parameter.
        name: String,
    },
    /// A parameter's values cannot have the type that was asked for.
    #[error("`{name}`: {source}")]
    Unconvertible {
        /// Name of the parameter.
        name: String,
        /// Why.
        source: ConvertError,
    },
    /// A parameter that the graph needs was declared but never loaded.
    #[error("`{name}` has not been loaded")]
    NotLoaded {
        /// Name of the parameter.
        name: String,
    },
    /// A run was asked for without giving it this input (inputs are used up by a run).
    #[error("input `{name}` was not set before the run")]
    InputNotSet {
        /// Name of the input.
        name: String,
    },
    /// A plan has no input or output of this name.
    #[error("the plan has no {what} called `{name}`; it has: {}", known.join(", "))]
    UnknownName {
        /// `input` or `output`.
        what: &'static str,
        /// The name that was asked for.
        name: String,
        /// The names it has.
        known: Vec<String>,
    },
    /// Values do not fit an input or output.
    #[error("`{name}` {reason}")]
    WrongValues {
        /// Name of the input or output.
        name: String,
        /// Why.
        reason: String,
    },
    /// A plan was run on, or given parameters of, another device than it was made for.
    #[error("{what} is on {found}, the plan on {wanted}")]
    WrongDevice {
        /// What is elsewhere.
        what: String,
        /// Where it is.
        found: String,
        /// Where it should be.
        wanted: String,
    },
    /// A cache does not hold what a graph reads, or not in its shape and type.
    #[error("the cache entry `{name}` {reason}")]
    Cache {
        /// Name of the entry.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A plan that reads or stores something in a cache was run without one (a run uses it up).
    #[error("no cache was attached before the run")]
    NotAttached,
    /// An output was read before anything was computed.
    #[error("output `{name}` was read before a run")]
    NotRun {
        /// Name of the output.
        name: String,
    },
}

impl Error {
    /// What kind of failure this is: memory that ran out, and for what, or anything else.
    pub fn failure(&self) -> FailureKind {
        let what = match self {
            Error::OutOfMemory { what, .. } => *what,
            Error::TooLittleMemory { .. } => Allocation::Reserving,
            Error::Backend(sd_backend::Error::OutOfMemory { .. }) => Allocation::Workspace,
            _ => return FailureKind::Other,
        };
        FailureKind::Allocation(what)
    }

    /// Whether this is memory that ran out, the only failure that may be tried again with less.
    pub fn is_out_of_memory(&self) -> bool {
        self.failure() != FailureKind::Other
    }

    /// What was refused, if memory ran out.
    pub fn refusal(&self) -> Option<&sd_backend::Error> {
        match self {
            Error::OutOfMemory { source, .. }
            | Error::TooLittleMemory { source, .. }
            | Error::Backend(source @ sd_backend::Error::OutOfMemory { .. }) => Some(source),
            _ => None,
        }
    }

    /// Says of memory that ran out what it was for, if that is not known yet.
    pub(crate) fn of(self, what: Allocation) -> Error {
        match self {
            Error::Backend(source @ sd_backend::Error::OutOfMemory { .. }) => {
                Error::OutOfMemory { what, source }
            }
            other => other,
        }
    }

    /// Whether the run was cancelled by its caller.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Error::Backend(sd_backend::Error::Cancelled))
    }
}
