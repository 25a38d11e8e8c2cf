//! The bindings against the C compiler's view of the headers, and against the library they are linked to.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[cfg(feature = "dynamic-backends")]
mod dynamic;
mod fake_device;
mod layout;
mod product;
#[cfg(all(feature = "rpc", not(feature = "dynamic-backends")))]
mod rpc;

use std::sync::Once;

/// Completes ggml's registry of devices before a test reads it: ggml guards it against nothing, so nobody may add to it
/// while another thread looks.
fn fill_registry() {
    static FILLED: Once = Once::new();
    FILLED.call_once(|| {
        #[cfg(feature = "dynamic-backends")]
        dynamic::load();
        fake_device::register();
        #[cfg(all(feature = "rpc", not(feature = "dynamic-backends")))]
        rpc::register();
    });
}
