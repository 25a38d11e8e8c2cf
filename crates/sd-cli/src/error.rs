//! What the command ends with when it does not end well.

use std::io::Write;
use std::path::PathBuf;

/// A failure of a subcommand.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A model could not be opened, loaded or run.
    #[error(transparent)]
    Model(#[from] sd_models::Error),
    /// A device could not be found or served.
    #[error(transparent)]
    Backend(#[from] sd_backend::Error),
    /// A weight file could not be read.
    #[error(transparent)]
    Checkpoint(#[from] sd_graph::CheckpointError),
    /// A weight file cannot be written.
    #[error(transparent)]
    Write(#[from] sd_graph::WriteError),
    /// A model folder, where one of its parts is needed.
    #[error("{}: this is a model of several parts, which are converted one by one, such as {}", folder.display(), folder.join("transformer").display())]
    SeveralParts {
        /// The folder.
        folder: PathBuf,
    },
    /// A model that another subcommand is for.
    #[error("{}: this is a model of {makes}; `sd {command}` is for it", path.display())]
    OtherCommand {
        /// The model.
        path: PathBuf,
        /// What it makes.
        makes: &'static str,
        /// The subcommand.
        command: &'static str,
    },
    /// A value of an option that no model could use.
    #[error("--{option} {value}: {reason}")]
    Option {
        /// The option, without its dashes.
        option: &'static str,
        /// What was given.
        value: String,
        /// Why it cannot be.
        reason: String,
    },
    /// There is no ffmpeg, which a video file needs.
    #[error(
        "{}: video files need the program ffmpeg, and {} cannot be started ({source}); --ffmpeg names another, and folders of \
        PNGs and animated PNGs do without", file.display(), program.display()
    )]
    NoFfmpeg {
        /// What was tried.
        program: PathBuf,
        /// The video file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// ffmpeg did not end well.
    #[error("{}: ffmpeg: {reason}", file.display())]
    Ffmpeg {
        /// The video file.
        file: PathBuf,
        /// The last that it said.
        reason: String,
    },
    /// The tiny checkpoint is not near.
    #[error(
        "no --model was given, and the tiny checkpoint ({model}) lies neither in the current folder or those above it nor beside the program"
    )]
    NoModel {
        /// Where it lies in the repository.
        model: &'static str,
    },
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
    /// Standard output is gone.
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// Refuses the `value` of an `option`, given without its dashes.
pub(crate) fn refuse<T>(
    option: &'static str,
    value: impl ToString,
    reason: impl Into<String>,
) -> Result<T, Error> {
    Err(Error::Option {
        option,
        value: value.to_string(),
        reason: reason.into(),
    })
}

/// Prints an error to standard error, and nothing where that is gone too.
pub(crate) fn print(error: &Error) {
    let _ = writeln!(std::io::stderr(), "error: {error}");
}
