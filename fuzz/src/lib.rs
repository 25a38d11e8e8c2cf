//! What the fuzz targets check. The integration tests of the crates run the same checks over the committed corpus, so
//! they stand here in files that know nothing of fuzzing.

#[cfg(feature = "models")]
pub mod configs;
pub mod convert;
#[cfg(feature = "models")]
pub mod pictures;
pub mod readers;
#[cfg(feature = "models")]
pub mod sounds;
pub mod texts;

use std::path::Path;

/// Calls `check` with a folder that stays the same as long as the process lives, in memory where the system has such a
/// place: the readers take paths.
pub fn in_folder(check: impl FnOnce(&Path)) {
    std::thread_local! {
        static FOLDER: tempfile::TempDir = tempfile::tempdir_in("/dev/shm")
            .or_else(|_| tempfile::tempdir())
            .expect("a temporary folder can be made");
    }
    FOLDER.with(|folder| check(folder.path()));
}
