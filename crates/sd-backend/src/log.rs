//! ggml's log, routed to `tracing`.

use std::ffi::{CStr, c_char, c_void};
use std::sync::Once;

use sd_ggml_sys as sys;

/// Replaces ggml's log writer, which prints to standard error, by one that emits `tracing` events.
///
/// ggml keeps one writer per process, so this is done once, before the first device is looked at.
pub(crate) fn route_to_tracing() {
    static ONCE: Once = Once::new();
    // SAFETY: `forward` has the type of a log writer, lives for ever, needs no user data and never unwinds.
    ONCE.call_once(|| unsafe { sys::ggml_log_set(Some(forward), std::ptr::null_mut()) });
}

/// Does the same for another copy of ggml in this process, which a loaded library brought along.
pub(crate) fn route_copy(set: LogSet) {
    // SAFETY: as above.
    unsafe { set(Some(forward), std::ptr::null_mut()) };
}

/// The type of `ggml_log_set`.
pub(crate) type LogSet = unsafe extern "C" fn(sys::ggml_log_callback, *mut c_void);

/// Called by ggml with a zero-terminated piece of text; long lines come in several pieces.
unsafe extern "C" fn forward(level: sys::ggml_log_level, text: *const c_char, _user: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: ggml passes a zero-terminated string that lives until this call returns.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let text = text.trim_end();
    if text.is_empty() || text == "." {
        return;
    }
    match level {
        sys::GGML_LOG_LEVEL_ERROR => tracing::error!(target: "ggml", "{text}"),
        sys::GGML_LOG_LEVEL_WARN => tracing::warn!(target: "ggml", "{text}"),
        sys::GGML_LOG_LEVEL_INFO => tracing::info!(target: "ggml", "{text}"),
        _ => tracing::debug!(target: "ggml", "{text}"),
    }
}
