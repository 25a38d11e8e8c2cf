//! Calls into build helpers that report failure by a panic: no backtrace, a sentence in its place.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};

/// Runs `action`; a panic in it becomes its message.
pub(crate) fn run<T>(action: impl FnOnce() -> T) -> Result<T, String> {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let outcome = panic::catch_unwind(AssertUnwindSafe(action));
    panic::set_hook(hook);
    outcome.map_err(|payload| message(payload.as_ref()))
}

/// The beginning of what was said, on one line.
fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| payload.downcast_ref::<&str>().copied())
        .unwrap_or("no reason given");
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(120).collect()
}
