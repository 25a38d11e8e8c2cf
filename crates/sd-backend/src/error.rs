//! What can go wrong with devices and memory.

use std::fmt;
use std::path::PathBuf;

use crate::ledger::Usage;

/// Short for a [`std::result::Result`] with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure of a device, a buffer or a run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No device of this process fits the given selector.
    #[error("no device fits `{wanted}`; available: {}", available.join(", "))]
    DeviceNotFound {
        /// The selector that was asked for.
        wanted: String,
        /// Names of all devices.
        available: Vec<String>,
    },
    /// The selector is the beginning of several names.
    #[error("`{wanted}` fits several devices: {}", candidates.join(", "))]
    AmbiguousDevice {
        /// The selector that was asked for.
        wanted: String,
        /// The names that it fits.
        candidates: Vec<String>,
    },
    /// A device exists but could not be started.
    #[error("device {device} could not be started")]
    DeviceStart {
        /// Name of the device.
        device: String,
    },
    /// Memory was refused, by the operating system, the driver or our own look at what is free.
    #[error(
        "out of memory on {device}: {} needed, {}{}{}{used}{}",
        Bytes(*requested),
        free.map_or_else(|| "an unknown amount free".to_owned(), |free| format!("{} free", Bytes(free))),
        total.map_or_else(String::new, |total| format!(" of {}", Bytes(total))),
        budget.map_or_else(
            || " (used here: ".to_owned(),
            |budget| format!("; of the budget of {} {} are used (", Bytes(budget), Bytes(used.total()))
        ),
        ")"
    )]
    OutOfMemory {
        /// Name of the device.
        device: String,
        /// Bytes that were asked for.
        requested: u64,
        /// Bytes that the device reported as free just before, if it says.
        free: Option<u64>,
        /// Bytes that the device has in all, if it says.
        total: Option<u64>,
        /// Bytes that were granted in all, if in numbers.
        budget: Option<u64>,
        /// Bytes that are held already, by kind.
        used: Box<Usage>,
    },
    /// A device cannot use a file's memory where it lies; reading the file works.
    #[error("{device} cannot use a mapped file: {reason}")]
    CannotMap {
        /// Name of the device.
        device: String,
        /// Why.
        reason: &'static str,
    },
    /// A budget that cannot be read.
    #[error("memory budget `{text}`: {reason}")]
    Budget {
        /// What was given.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A placement that cannot be read.
    #[error("placement `{text}`: {reason}")]
    Placement {
        /// What was given.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The device refused or failed to run a graph.
    #[error("device {device} failed while computing ({reason})")]
    Compute {
        /// Name of the device.
        device: String,
        /// ggml's word for the failure.
        reason: &'static str,
    },
    /// A server of devices could not be reached, or does not speak as it should.
    #[error("server {endpoint}: {reason}")]
    Connection {
        /// Host and port.
        endpoint: String,
        /// What happened.
        reason: String,
    },
    /// The connection to a remote device broke; what lay in the device's memory is gone. Once everything on the device is
    /// dropped, the next use connects again.
    #[error(
        "the connection to device {device} at {endpoint} is lost: its server ended, or gave up on a request"
    )]
    DeviceLost {
        /// Name of the device.
        device: String,
        /// Host and port of its server.
        endpoint: String,
    },
    /// This build lacks a backend.
    #[error(
        "this build has no backend `{backend}`: build with the feature `{feature}`, or load it as a library"
    )]
    MissingBackend {
        /// ggml's name of the backend.
        backend: &'static str,
        /// The feature of these crates that has it built.
        feature: &'static str,
    },
    /// Devices could not be served to other machines.
    #[error("cannot serve at {address}: {reason}")]
    Serve {
        /// Address and port.
        address: String,
        /// What happened.
        reason: String,
    },
    /// A folder of backends could not be loaded.
    #[error("backends in {}: {reason}", folder.display())]
    Libraries {
        /// The folder.
        folder: PathBuf,
        /// What was tried, and what happened.
        reason: String,
    },
    /// The run was cancelled by its caller.
    #[error("cancelled")]
    Cancelled,
}

/// A number of bytes, shown in binary units: `1.50 GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 {
            write!(f, "{} B", self.0)
        } else {
            write!(f, "{value:.2} {}", UNITS[unit])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_like_a_person_would_say_them() {
        assert_eq!(Bytes(0).to_string(), "0 B");
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes(1536).to_string(), "1.50 KiB");
        assert_eq!(Bytes(3 << 30).to_string(), "3.00 GiB");
        assert_eq!(Bytes(u64::MAX).to_string(), "16777216.00 TiB");
    }
}
