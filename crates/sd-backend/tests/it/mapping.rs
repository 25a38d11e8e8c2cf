//! Files as memory of a device.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;

use sd_backend::fake::{FakeDevice, FakeOptions, HostPointers};
use sd_backend::{
    Access, Device, Error, HostMapping, Ledger, MapOptions, MappedFile, MemoryBudget,
    MemoryBudgets, MemoryKind,
};

const BYTES: usize = 100_000;
/// `BYTES` in whole pages of 4096.
const PAGES: u64 = 102_400;

fn file() -> File {
    let mut file = tempfile::tempfile().unwrap();
    let bytes: Vec<u8> = (0..BYTES).map(|n| (n * 31 % 251) as u8).collect();
    file.write_all(&bytes).unwrap();
    file
}

fn mapped() -> Arc<MappedFile> {
    Arc::new(MappedFile::open(&file(), BYTES as u64, MapOptions::default()).unwrap())
}

fn fake(host_pointers: HostPointers) -> FakeDevice {
    FakeDevice::new(FakeOptions {
        host_pointers,
        ..FakeOptions::default()
    })
}

#[test]
fn a_mapping_counts_its_pages_until_nobody_keeps_it() {
    for fake in [None, Some(fake(HostPointers::Work))] {
        let device = fake.map_or_else(|| Device::cpu().unwrap(), |fake| fake.device());
        let (ledger, file) = (Ledger::default(), mapped());
        let mapping = HostMapping::new(&ledger, device, &file, 5_000..BYTES as u64, 1000).unwrap();
        // The first page is not covered.
        assert_eq!(mapping.bytes(), PAGES - 4096);
        assert_eq!(mapping.offset_of(5_000..5_100), Some(5_000 - 4096));
        assert_eq!(mapping.offset_of(4_000..5_100), None);
        assert!(!mapping.buffer().is_writable());
        let used = ledger.report(device).used;
        assert_eq!(used.of(MemoryKind::Mapping), PAGES - 4096);
        assert_eq!(used.total(), PAGES - 4096);
        // Dropped in every order, the last one ends it: clones share one buffer, which keeps the file.
        let (clone, buffer) = (mapping.clone(), Arc::clone(mapping.buffer()));
        drop(file);
        drop(mapping);
        assert_eq!(ledger.report(device).used.total(), PAGES - 4096);
        drop(clone);
        assert_eq!(ledger.report(device).used.total(), PAGES - 4096);
        drop(buffer);
        assert_eq!(ledger.report(device).used.total(), 0);
        if let Some(fake) = fake {
            let counts = fake.counts();
            assert_eq!(
                (counts.bytes, counts.mapped_bytes, counts.buffers),
                (0, 0, 0)
            );
        }
    }
}

#[test]
fn a_device_that_cannot_says_so_and_leaves_nothing_behind() {
    for (host_pointers, why) in [
        (HostPointers::Missing, "memory of its own"),
        (HostPointers::Refuse, "refused"),
        (HostPointers::FailLikeMetal, "failed"),
        (HostPointers::ReadWrong, "other bytes"),
    ] {
        let (fake, ledger, file) = (fake(host_pointers), Ledger::default(), mapped());
        let error = HostMapping::new(&ledger, fake.device(), &file, 0..BYTES as u64, 1000)
            .map(drop)
            .unwrap_err();
        let Error::CannotMap { device, reason } = error else {
            panic!("{error}");
        };
        assert_eq!(device, "Fake0");
        assert!(reason.contains(why), "{reason}");
        assert_eq!(ledger.report(fake.device()).used.total(), 0);
        assert_eq!(fake.counts().buffers, 0);
        assert_eq!(Arc::strong_count(&file), 1);
    }
}

#[test]
fn nobody_maps_what_is_written_or_not_there() {
    let (ledger, cpu) = (Ledger::default(), Device::cpu().unwrap());
    let options = MapOptions::default().access(Access::PrivateWritable);
    let writable = Arc::new(MappedFile::open(&file(), 0, options).unwrap());
    let read_only = mapped();
    for (file, range) in [
        (&writable, 0..10),
        (&read_only, 0..BYTES as u64 + 1),
        (&read_only, 10..10),
    ] {
        let error = HostMapping::new(&ledger, cpu, file, range, 10).unwrap_err();
        assert!(matches!(error, Error::CannotMap { .. }), "{error}");
    }
}

#[test]
fn a_mapping_must_be_granted() {
    let fake = fake(HostPointers::Work);
    let budget = |bytes| Ledger::new(MemoryBudgets::every(MemoryBudget::Bytes(bytes)));
    let (device, file) = (fake.device(), mapped());
    let map = |ledger: &Ledger| HostMapping::new(ledger, device, &file, 0..BYTES as u64, 10);
    // The sample that is read back is 1024 bytes.
    assert!(map(&budget(PAGES + 1024)).is_ok());
    for bytes in [PAGES - 1, PAGES] {
        let ledger = budget(bytes);
        assert!(matches!(map(&ledger), Err(Error::OutOfMemory { .. })));
        assert_eq!(ledger.report(device).used.total(), 0);
        assert_eq!(fake.counts().buffers, 0);
    }
    // The driver refuses the mapping, or the sample.
    for nth in [1, 2] {
        fake.fail_allocation(nth);
        assert!(map(&Ledger::default()).is_err());
        assert_eq!(fake.counts().buffers, 0);
    }
    assert!(map(&Ledger::default()).is_ok());
}
