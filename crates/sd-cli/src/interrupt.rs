//! Ctrl-C: what is under way ends with an error of its own, so that nothing half written stays.

use std::process;

use sd_graph::Cancel;

/// What ends because somebody asked for it ends with this code, as shells have it: 128 and the number of the signal.
pub(crate) const INTERRUPTED: u8 = 130;

/// A handle that is cancelled by Ctrl-C. A second one ends the process where it is.
pub(crate) fn cancel() -> Cancel {
    let cancel = Cancel::new();
    let asked = cancel.clone();
    let handler = move || {
        if asked.is_cancelled() {
            process::exit(INTERRUPTED.into());
        }
        asked.cancel();
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        tracing::debug!("Ctrl-C ends the process at once: {error}");
    }
    cancel
}
