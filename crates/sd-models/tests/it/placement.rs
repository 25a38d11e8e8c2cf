//! Where parts of a model go, and what they leave behind: on the processor and on devices that fail on demand.

use sd_backend::fake::{FakeDevice, FakeOptions, HostPointers};
use sd_backend::{
    Component, Device, Ledger, Mapping, MemoryBudget, MemoryBudgets, Placement, Residence,
};
use sd_graph::{Cancel, Progress};
use sd_models::{Error, Image, Pipeline, PipelineBuilder, Request};

use crate::fixtures::tiny;

const PROMPT: &str = "a large red circle on a blue background";

fn open() -> PipelineBuilder {
    Pipeline::open(tiny()).unwrap().threads(2)
}

/// A picture of 32x32 in one guided step: small, for there are many.
fn picture(pipeline: &mut Pipeline) -> Result<Image, Error> {
    let condition = pipeline.encode(PROMPT)?;
    let request = Request::new(&condition).size(32, 32).steps(1).guidance(2.0);
    let (image, _) = pipeline.generate(&request, &mut |_: &Progress| {})?;
    Ok(image)
}

/// No head-room, which a small fake device does not have.
fn ledger(budget: MemoryBudget) -> Ledger {
    Ledger::with_headroom(MemoryBudgets::every(budget), 0)
}

fn fake(name: &str) -> FakeDevice {
    FakeDevice::new(FakeOptions {
        name: name.to_owned(),
        memory: 64 << 20,
        host_pointers: HostPointers::Work,
        ..FakeOptions::default()
    })
}

fn all(residence: Residence) -> Placement {
    Component::ALL
        .into_iter()
        .fold(Placement::default(), |placement, component| {
            placement.residence(component, residence)
        })
}

#[test]
fn wherever_parts_live_the_picture_is_the_same() {
    let one = fake("Fake0");
    let other = fake("Fake1");
    let mixed = Placement::default()
        .device(Component::TextEncoder, other.device())
        .residence(Component::TextEncoder, Residence::Disk)
        .residence(Component::Vae, Residence::Host);
    for device in [Device::cpu().unwrap(), one.device()] {
        let mut expected = None;
        for (placement, mapping) in [
            (all(Residence::Device), Mapping::Never),
            (all(Residence::Device), Mapping::Auto),
            (all(Residence::Device), Mapping::Always),
            (all(Residence::Host), Mapping::Auto),
            (all(Residence::Disk), Mapping::Never),
            (all(Residence::Disk), Mapping::Always),
            (mixed.clone(), Mapping::Auto),
        ] {
            let what = format!("{device} {placement:?} {mapping:?}");
            let ledger = ledger(MemoryBudget::Automatic);
            let mut pipeline = open()
                .device(device)
                .placement(placement)
                .mapping(mapping)
                .ledger(&ledger)
                .load()
                .unwrap();
            let loaded = pipeline.loaded();
            let first = picture(&mut pipeline).unwrap();
            let again = picture(&mut pipeline).unwrap();
            assert!(first == again, "{what}: the second run differs");
            let mapped = loaded.mapped > 0;
            let on_cpu = device == Device::cpu().unwrap();
            match mapping {
                Mapping::Never => assert!(!mapped, "{what}"),
                // The fake device does not say that it can.
                Mapping::Auto if !on_cpu => {}
                _ if pipeline.seats()[1].residence == Residence::Device => {
                    assert!(mapped, "{what}");
                }
                _ => {}
            }
            match &expected {
                None => expected = Some(first),
                Some(expected) => assert!(first == *expected, "{what}: another picture"),
            }
            drop(pipeline);
            for device in [device, one.device(), other.device()] {
                assert_eq!(ledger.report(device).used.total(), 0, "{what}");
            }
        }
    }
    for fake in [one, other] {
        let counts = fake.counts();
        assert_eq!(
            (counts.buffers, counts.bytes, counts.mapped_bytes),
            (0, 0, 0)
        );
    }
}

#[test]
fn every_budget_from_the_smallest_on_gives_the_same_picture() {
    let fake = fake("Fake0");
    let plan = open()
        .device(fake.device())
        .ledger(&ledger(MemoryBudget::Automatic))
        .plan(Some((32, 32)), 24)
        .unwrap();
    let need = &plan.devices[0];
    assert!(need.smallest < need.peak);
    let mut expected = None;
    let mut residences = std::collections::BTreeSet::new();
    for part in 0..=4 {
        let budget = need.smallest + (need.peak - need.smallest) * part / 4;
        let ledger = ledger(MemoryBudget::Bytes(budget));
        // The host's memory has a budget too, in this ledger: parts come from the disk.
        let mut pipeline = open().device(fake.device()).ledger(&ledger).load().unwrap();
        let image = picture(&mut pipeline).unwrap();
        match &expected {
            None => expected = Some(image),
            Some(expected) => assert!(image == *expected, "budget {budget}"),
        }
        let seats = pipeline.seats();
        residences.insert(
            seats
                .iter()
                .map(|seat| seat.residence.name())
                .collect::<Vec<_>>(),
        );
        drop(pipeline);
        assert_eq!(fake.counts().bytes, 0);
    }
    assert!(residences.len() > 1, "{residences:?}");
    assert!(fake.counts().peak_bytes as u64 <= need.peak);

    let ledger = ledger(MemoryBudget::Bytes(need.smallest - 1));
    let mut pipeline = open().device(fake.device()).ledger(&ledger).load().unwrap();
    let condition = pipeline.encode(PROMPT).unwrap();
    // As many tokens as were planned for.
    let request = Request::new(&condition).size(96, 96).steps(2);
    let error = pipeline
        .generate(&request, &mut |_: &Progress| {})
        .map(drop)
        .unwrap_err();
    assert!(matches!(error, Error::TooLittleMemory { .. }), "{error}");
    drop(pipeline);
    assert_eq!(fake.counts().buffers, 0);
}

#[test]
fn whatever_allocation_fails_the_next_run_is_right() {
    let fake = fake("Fake0");
    let load = |ledger: &Ledger| {
        open()
            .device(fake.device())
            .placement(all(Residence::Device))
            .ledger(ledger)
            .load()
    };
    let ledger = ledger(MemoryBudget::Automatic);
    let expected = picture(&mut load(&ledger).unwrap()).unwrap();
    let before = fake.counts().allocations;
    picture(&mut load(&ledger).unwrap()).unwrap();
    let allocations = fake.counts().allocations - before;
    assert!(allocations >= 6, "{allocations}");
    let (mut refused, mut survived) = (0, 0);
    for nth in 1..=allocations + 1 {
        fake.fail_allocation(nth);
        match load(&ledger) {
            Err(error) => {
                assert!(error.is_out_of_memory(), "{nth}: {error}");
                refused += 1;
            }
            Ok(mut pipeline) => {
                // One failure is made good by giving up what can be had again.
                let image = picture(&mut pipeline).unwrap();
                assert!(image == expected, "{nth}");
                fake.fail_allocation(0);
                assert!(picture(&mut pipeline).unwrap() == expected, "{nth}");
                survived += 1;
            }
        }
        fake.fail_allocation(0);
        assert_eq!(ledger.report(fake.device()).used.total(), 0, "{nth}");
        assert_eq!(fake.counts().buffers, 0, "{nth}");
    }
    assert!(refused > 0 && survived > 3, "{refused} {survived}");
}

#[test]
fn a_run_on_a_slow_device_is_stopped_from_outside() {
    let fake = fake("Fake0");
    let ledger = ledger(MemoryBudget::Automatic);
    let mut pipeline = open().device(fake.device()).ledger(&ledger).load().unwrap();
    let expected = picture(&mut pipeline).unwrap();
    let held = ledger.report(fake.device()).used;
    fake.delay(std::time::Duration::from_millis(200));
    let cancel = Cancel::new();
    pipeline.set_cancel(cancel.clone());
    let graphs = fake.counts().graphs;
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            while fake.counts().graphs == graphs {
                std::thread::yield_now();
            }
            cancel.cancel();
        });
        picture(&mut pipeline).map(drop).unwrap_err()
    });
    assert!(error.is_cancelled(), "{error}");
    // The graph that was being computed ends, and nothing begins after it.
    assert_eq!(fake.counts().graphs, graphs + 1);
    assert!(ledger.report(fake.device()).used.total() <= held.total());
    fake.delay(std::time::Duration::ZERO);
    pipeline.set_cancel(Cancel::new());
    assert!(picture(&mut pipeline).unwrap() == expected);
    drop(pipeline);
    assert_eq!(ledger.report(fake.device()).used.total(), 0);
    assert_eq!(fake.counts().buffers, 0);
}

/// The tiny checkpoint in single precision, with its tensors at multiples of 64 bytes: what every device can use in place.
fn in_single_precision(folder: &std::path::Path) {
    fn copy(from: &std::path::Path, to: &std::path::Path) {
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let (from, to) = {
                let entry = entry.unwrap();
                (entry.path(), to.join(entry.file_name()))
            };
            if from.is_dir() {
                copy(&from, &to);
            } else if from
                .extension()
                .is_some_and(|ending| ending == "safetensors")
            {
                convert(&from, &to);
            } else {
                std::fs::copy(&from, &to).unwrap();
            }
        }
    }
    fn convert(from: &std::path::Path, to: &std::path::Path) {
        let checkpoint = sd_graph::Checkpoint::open(from).unwrap();
        let mut tensors = Vec::new();
        for (name, info) in checkpoint.tensors() {
            let mut stored = vec![0; info.bytes as usize];
            checkpoint.read(name, &mut stored).unwrap();
            let mut numbers = vec![0; info.elements() as usize * 4];
            sd_graph::convert(&stored, info.stored, sd_backend::DType::F32, &mut numbers).unwrap();
            // Whole multiples of 64 bytes stay at them one behind the other, so the others come last.
            tensors.push((
                !numbers.len().is_multiple_of(64),
                name.to_owned(),
                info.shape.clone(),
                numbers,
            ));
        }
        tensors.sort();
        // The format pads its list of tensors to 8 bytes only: a comment of the right length does the rest.
        let mut offset = 0;
        let entries: serde_json::Map<String, serde_json::Value> = tensors
            .iter()
            .map(|(_, name, shape, numbers)| {
                let range = [offset, offset + numbers.len()];
                offset = range[1];
                let entry =
                    serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": range});
                (name.clone(), entry)
            })
            .collect();
        let mut header = serde_json::to_vec(&entries).unwrap();
        header.resize((header.len() + 8).next_multiple_of(64) - 8, b' ');
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        for (_, _, _, numbers) in tensors {
            bytes.extend(numbers);
        }
        std::fs::write(to, bytes).unwrap();
    }
    copy(&tiny(), folder);
}

#[test]
fn weights_in_place_draw_the_same_picture_on_every_device() {
    let folder = tempfile::tempdir().unwrap();
    in_single_precision(folder.path());
    for device in crate::fixtures::devices() {
        let draw = |mapping| {
            let ledger = Ledger::default();
            let mut pipeline = Pipeline::open(folder.path())
                .unwrap()
                .device(device)
                .threads(2)
                .mapping(mapping)
                .ledger(&ledger)
                .load()
                .unwrap();
            let image = picture(&mut pipeline).unwrap();
            let loaded = pipeline.loaded();
            drop(pipeline);
            assert_eq!(ledger.report(device).used.total(), 0, "{device}");
            (image, loaded)
        };
        let (copied, none) = draw(Mapping::Never);
        let (mapped, some) = draw(Mapping::Always);
        println!("{device}: {some:?}");
        assert_eq!(none.mapped, 0);
        if device.has_host_pointers() {
            assert!(
                some.mapped > some.copied + some.converted,
                "{device}: {some:?}"
            );
        }
        assert!(copied == mapped, "{device}: another picture");
    }
}

/// Loads and drops in a row, in a process of its own: what other tests allocate would hide what is lost here.
#[test]
fn loading_in_a_row_loses_nothing() {
    const CHILD: &str = "SD_TEST_LOADING_IN_A_ROW";
    if std::env::var_os(CHILD).is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "placement::loading_in_a_row_loses_nothing",
                "--nocapture",
            ])
            .env(CHILD, "1")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let fake = fake("Fake0");
    let ledger = ledger(MemoryBudget::Automatic);
    let resident = || {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok());
        pages.map_or(0, |pages: u64| pages * 4096)
    };
    for device in [Device::cpu().unwrap(), fake.device()] {
        let once = |failure: u64, runs: bool| {
            fake.fail_allocation(failure);
            let loaded = open().device(device).ledger(&ledger).load();
            fake.fail_allocation(0);
            if let (Ok(mut pipeline), true) = (loaded, runs) {
                picture(&mut pipeline).unwrap();
            }
            for device in [Device::cpu().unwrap(), fake.device()] {
                assert_eq!(ledger.report(device).used.total(), 0);
            }
            assert_eq!(fake.counts().buffers, 0);
        };
        // What allocators and thread pools keep for themselves is there after a few rounds.
        for round in 0..40 {
            once(0, round % 5 == 0);
        }
        let (before, mut after) = (resident(), u64::MAX);
        for round in 0..50 {
            once(0, round % 5 == 0);
            if round % 10 == 0 {
                for failure in 1..=4 {
                    once(failure, false);
                }
            }
            if round >= 30 {
                // Fragments that allocators keep come and go by some MB; what is lost stays.
                after = after.min(resident());
            }
        }
        let grown = after.saturating_sub(before);
        println!("{device}: {grown} bytes more after 70 loads, 20 of them with failures");
        // One load holds 11 MB of weights: a single lost one would show. Allocators' own fragments came to 7 MB at most, and
        // to no more after 200 loads.
        assert!(grown < 10 << 20, "{device}: {grown} bytes");
    }
}

#[test]
fn budgets_below_the_weights_of_one_part_give_the_same_picture() {
    let other = fake("Other");
    let whole = ledger(MemoryBudget::Automatic);
    let expected = {
        let pipeline = open().device(other.device()).ledger(&whole).load();
        picture(&mut pipeline.unwrap()).unwrap()
    };
    let plan = open()
        .device(fake("Fake0").device())
        .ledger(&whole)
        .plan(Some((32, 32)), 24);
    let plan = plan.unwrap();
    let diffusion = plan.seats[1].weights;
    let need = &plan.devices[0];
    assert!(need.smallest < diffusion, "{need:?} {diffusion}");
    for residence in [Residence::Host, Residence::Disk] {
        let mut streamed = 0;
        // Two passes take a little more than the one that is planned for.
        for part in 0..=3 {
            let fake = fake("Fake0");
            let device = fake.device();
            let budget = need.smallest * 5 / 4 + (need.peak - need.smallest) * part / 4;
            let budgets = MemoryBudgets::default().with("Fake0", MemoryBudget::Bytes(budget));
            let ledger = Ledger::with_headroom(budgets, 0);
            let mut pipeline = open()
                .device(device)
                .placement(Placement::default().residence(Component::Diffusion, residence))
                .mapping(Mapping::Never)
                .ledger(&ledger)
                .load()
                .unwrap();
            for _ in 0..2 {
                let image = picture(&mut pipeline).unwrap();
                assert!(image == expected, "{residence} {budget}");
            }
            let seat = &pipeline.seats()[1];
            assert_eq!(seat.residence, residence);
            assert!(
                !seat.is_streamed || seat.reason.contains("streams"),
                "{seat:?}"
            );
            streamed += usize::from(seat.is_streamed);
            let peak = fake.counts().peak_bytes as u64;
            assert!(peak <= budget, "{peak} of {budget}");
            drop(pipeline);
            assert_eq!(ledger.report(device).used.total(), 0);
            assert_eq!((fake.counts().buffers, fake.counts().bytes), (0, 0));
        }
        assert!(streamed > 0, "{residence}");
    }
}
