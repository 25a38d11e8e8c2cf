//! Weight files as memory of devices.

use std::ops::Range;
use std::sync::Arc;

use sd_backend::{Device, Error as BackendError, HostMapping, Ledger, MapOptions, MappedFile};

use super::Checkpoint;
use super::file::WeightFile;

/// What is kept of a mapped file, so that everything loaded from it shares that.
#[derive(Debug, Default)]
pub(super) struct FileMappings {
    file: Option<Arc<MappedFile>>,
    /// One for each device and account, or several where a device cannot take a whole file at once.
    on_devices: Vec<(Ledger, HostMapping)>,
    /// Whether it was said that this file is read although it was to be mapped.
    warned: bool,
}

/// Bytes that the largest windows into a file have: Vulkan imports host memory in pieces of less than 4 GiB.
const WINDOW: u64 = (1 << 32) - (1 << 20);

impl Checkpoint {
    /// Which file holds the bytes of tensor `name`, and where.
    pub(crate) fn range_of(&self, name: &str) -> Option<(usize, Range<u64>)> {
        let info = self.get(name)?;
        let at = info.location?;
        Some((at.file, at.offset..at.offset + info.bytes))
    }

    /// Bytes of file `index`.
    pub(crate) fn file_length(&self, index: usize) -> u64 {
        self.0.files.get(index).map_or(0, |file| file.length())
    }

    /// Whether file `index` lies on a disk of this machine.
    pub(crate) fn is_local(&self, index: usize) -> bool {
        self.0.files.get(index).is_some_and(|file| file.is_local())
    }

    /// Mappings of file `index` for `device`, on the account of `ledger`, that together cover every range of `ranges`;
    /// those that exist already are shared. `None`, with one warning for each file, if it cannot be mapped: then it is
    /// read.
    pub(crate) fn map(
        &self,
        index: usize,
        device: Device,
        ledger: &Ledger,
        ranges: &[Range<u64>],
    ) -> Option<Vec<HostMapping>> {
        let file = self.0.files.get(index)?;
        let mut state = file.mappings();
        let failure = match state.cover(file, device, ledger, ranges) {
            Ok(mappings) => return Some(mappings),
            Err(failure) => failure,
        };
        if !state.warned {
            state.warned = true;
            tracing::warn!(file = %file.path().display(), "read instead of mapped: {failure}");
        }
        None
    }

    /// Forgets the mappings that are kept for the next load; those in use stay until nothing uses them.
    pub fn release_mappings(&self) {
        for file in &self.0.files {
            *file.mappings() = FileMappings::default();
        }
    }
}

impl FileMappings {
    fn cover(
        &mut self,
        file: &WeightFile,
        device: Device,
        ledger: &Ledger,
        ranges: &[Range<u64>],
    ) -> Result<Vec<HostMapping>, String> {
        let kept: Vec<HostMapping> = self
            .on_devices
            .iter()
            .filter(|(account, mapping)| {
                mapping.buffer().device() == device && account.is_same(ledger)
            })
            .map(|(_, mapping)| mapping.clone())
            .collect();
        let is_covered = |range: &Range<u64>| {
            kept.iter()
                .any(|mapping| mapping.offset_of(range.clone()).is_some())
        };
        if ranges.iter().all(is_covered) {
            return Ok(kept);
        }

        let mapped = match &self.file {
            Some(mapped) => Arc::clone(mapped),
            None => {
                let mapped = file
                    .map(MapOptions::default())
                    .map_err(|error| error.to_string())?;
                Arc::clone(self.file.insert(Arc::new(mapped)))
            }
        };
        let largest = ranges
            .iter()
            .map(|range| (range.end - range.start) as usize)
            .max()
            .unwrap_or(0);
        let map = |range| HostMapping::new(ledger, device, &mapped, range, largest);
        let mappings = match map(0..mapped.len()) {
            Ok(whole) => vec![whole],
            Err(BackendError::CannotMap { .. }) if mapped.len() > WINDOW => windows(ranges)
                .into_iter()
                .map(map)
                .collect::<Result<_, _>>()
                .map_err(|error| error.to_string())?,
            Err(error) => return Err(error.to_string()),
        };
        let kept = mappings
            .iter()
            .map(|mapping| (ledger.clone(), mapping.clone()));
        self.on_devices.extend(kept);
        Ok(mappings)
    }
}

/// Stretches of a file of at most [`WINDOW`] bytes, each beginning and ending with a tensor of `ranges`. A larger tensor
/// has one of its own, which the device will refuse.
fn windows(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut sorted: Vec<&Range<u64>> = ranges.iter().collect();
    sorted.sort_by_key(|range| range.start);
    let mut windows: Vec<Range<u64>> = Vec::new();
    for range in sorted {
        match windows.last_mut() {
            Some(last) if range.end - last.start <= WINDOW => last.end = last.end.max(range.end),
            _ => windows.push(range.clone()),
        }
    }
    windows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_file_is_cut_between_tensors() {
        const GIB: u64 = 1 << 30;
        assert_eq!(windows(&[]), []);
        assert_eq!(windows(&[5..10, 0..5, 10..20]), vec![0..20]);
        let tensors: Vec<_> = (0..5)
            .map(|n| n * GIB * 3 / 2..(n + 1) * GIB * 3 / 2)
            .collect();
        assert_eq!(
            windows(&tensors),
            [0..3 * GIB, 3 * GIB..6 * GIB, 6 * GIB..GIB * 15 / 2]
        );
    }
}
