//! Running the command in a folder of its own.

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// What the command printed and how it ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// Runs `sd` with `arguments` in `folder`.
pub(crate) fn sd<S: AsRef<std::ffi::OsStr>>(folder: &Path, arguments: &[S]) -> Ended {
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(env!("CARGO_BIN_EXE_sd"))
        .args(arguments)
        .current_dir(folder)
        .env_remove("SD_LOG")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    Ended {
        code: status.code(),
        out: String::from_utf8(stdout).unwrap(),
        err: String::from_utf8(stderr).unwrap(),
    }
}

/// Asserts that a run was refused: exit code 2, a text with all of `parts`, nothing on standard output, and no file
/// left in `folder` but those that were there.
#[track_caller]
pub(crate) fn assert_refused(folder: &Path, arguments: &[&str], parts: &[&str]) {
    let before = files(folder);
    let ended = sd(folder, arguments);
    assert_eq!(ended.code, Some(2), "{arguments:?}: {ended:?}");
    for part in parts {
        assert!(
            ended.err.contains(part),
            "{arguments:?}: `{part}` in {}",
            ended.err
        );
    }
    assert!(
        !ended.err.contains("panicked"),
        "{arguments:?}: {}",
        ended.err
    );
    assert_eq!(ended.out, "", "{arguments:?}");
    assert_eq!(files(folder), before, "{arguments:?}");
}

fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
