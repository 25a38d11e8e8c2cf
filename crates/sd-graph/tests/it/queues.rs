//! Weights that a device's second queue brings: never before what they lie on is done with, never used before they are
//! there, and nothing given up while it is needed. The devices do what is queued as late or as early as events allow.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

use sd_backend::fake::{FakeDevice, FakeOptions, GraphFailure, Pinned, Queues};
use sd_backend::{Backend, Device, Ledger, MemoryKind, Residence};
use sd_graph::{Cancel, Error, Estimate, Graph, Plan, PlanCache, Progress, RunReport};

use crate::blocks::{
    BLOCKS, Model, TOKENS, assert_unharmed, backend, expected, file, granted_on, load, queued, run,
    set,
};

/// What a small budget is: the least that does and that part of the weights.
fn small(device: Device, model: &Model, weights: u64, parts: u64) -> u64 {
    let free = backend(device, &Ledger::default());
    let estimate = Estimate::of(&free, |g| model.graph(g, true, TOKENS)).unwrap();
    estimate.segmented_bytes
        + estimate.constant_bytes
        + estimate.streamed_weight_bytes
        + weights / parts
}

fn run_quietly(plan: &mut Plan, backend: &mut Backend) -> RunReport {
    set(plan, TOKENS, 0);
    plan.run(backend, &Cancel::new()).unwrap()
}

#[test]
fn the_end_of_a_run_brings_what_the_next_one_begins_with() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = [0, 1].map(|seed| expected(&checkpoint, seed));
    for fake in queued() {
        let device = fake.device();
        for residence in [Residence::Host, Residence::Disk] {
            let (model, mut weights) = Model::new(&checkpoint);
            let host = backend(device, &Ledger::default());
            load(&mut weights, residence, &host);
            let pinned = fake.counts().pinned_bytes as u64;
            let is_pinned = residence == Residence::Host && pinned > 0;
            if is_pinned {
                // What lives on the host is on its account, wherever it will be used.
                let cpu = Device::cpu().unwrap();
                let used = host.ledger().report(cpu).used;
                assert!(pinned >= weights.bytes());
                assert_eq!(used.of(MemoryKind::Weights), pinned);
            }
            let ledger = granted_on(device, small(device, &model, weights.bytes(), 3));
            let mut backend = backend(device, &ledger);
            let mut plan = Plan::build(&backend, |g| model.graph(g, true, TOKENS)).unwrap();
            assert!(plan.segmentation().is_streamed);
            assert_eq!(fake.counts().queues, 3);
            let before = fake.counts();
            let first = run_quietly(&mut plan, &mut backend);
            let settled = [0, 1, 0].map(|seed| {
                set(&mut plan, TOKENS, seed);
                let report = plan.run(&mut backend, &Cancel::new()).unwrap();
                assert!(plan.read::<f32>("y").unwrap() == expected[seed]);
                assert_eq!(report.used, ledger.report(device).used);
                assert_eq!(report.most, report.used);
                report.weight_bytes
            });
            // The first run brought all that passes, and what the second one needs first.
            assert_eq!(settled, [settled[0]; 3]);
            assert!(first.weight_bytes > settled[0], "{residence}");
            let after = fake.counts();
            assert_eq!(after.allocations, before.allocations);
            drop((plan, backend, host));
            assert_eq!(ledger.report(device).used.total(), 0);
            weights.live(Residence::Disk, sd_backend::Mapping::Never);
            assert_eq!((fake.counts().buffers, fake.counts().queues), (0, 0));
            assert_unharmed(device);
        }
    }
}

#[test]
fn whatever_fails_or_panics_the_queues_are_done_before_anything_goes() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = expected(&checkpoint, 0);
    for fake in queued() {
        let device = fake.device();
        for residence in [Residence::Host, Residence::Disk] {
            let (model, mut weights) = Model::new(&checkpoint);
            let graph = |g: Graph<'_>| model.graph(g, true, TOKENS);
            load(
                &mut weights,
                residence,
                &backend(device, &Ledger::default()),
            );
            let at_home = fake.counts().buffers;
            let ledger = granted_on(device, small(device, &model, weights.bytes(), 4));
            let mut backend = backend(device, &ledger);
            for nth in 1.. {
                fake.fail_allocation(nth);
                let before = fake.counts().allocations;
                let outcome =
                    Plan::build(&backend, graph).and_then(|mut p| run(&mut p, &mut backend, 0));
                fake.fail_allocation(0);
                match outcome {
                    Ok(values) => assert!(values == expected),
                    Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                }
                assert_eq!(ledger.report(device).used.total(), 0);
                assert_eq!((fake.counts().buffers, fake.counts().bytes), (at_home, 0));
                if fake.counts().allocations - before < nth {
                    assert!(nth > 3);
                    break;
                }
            }
            let mut plan = Plan::build(&backend, graph).unwrap();
            let segments = plan.segmentation().segments.len();
            for nth in 1..=segments {
                for how in [GraphFailure::Allocation, GraphFailure::Other] {
                    fake.fail_graph(nth as u64, how);
                    let error = run(&mut plan, &mut backend, 0).unwrap_err();
                    assert_eq!(error.is_out_of_memory(), how == GraphFailure::Allocation);
                    assert!(run(&mut plan, &mut backend, 0).unwrap() == expected);
                }
                // The caller's own reporter panics, and everything is dropped at once.
                let mut short = Plan::build(&backend, graph);
                if short.is_err() {
                    plan.release();
                    short = Plan::build(&backend, graph);
                }
                let mut short = short.unwrap();
                set(&mut short, TOKENS, 0);
                let mut heard = 0;
                let panic = catch_unwind(AssertUnwindSafe(|| {
                    short.run_with(&mut backend, &Cancel::new(), &mut |_: &Progress| {
                        heard += 1;
                        assert!(heard < nth, "a panic of the caller's");
                    })
                }));
                assert!(panic.is_err());
                drop(short);
                assert!(run(&mut plan, &mut backend, 0).unwrap() == expected);
                assert_unharmed(device);
            }
        }
    }
}

#[test]
fn a_file_that_breaks_while_it_is_read_is_an_error_and_may_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = expected(&checkpoint, 0);
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    for fake in queued() {
        let device = fake.device();
        let (model, mut weights) = Model::new(&checkpoint);
        load(
            &mut weights,
            Residence::Disk,
            &backend(device, &Ledger::default()),
        );
        let ledger = granted_on(device, small(device, &model, weights.bytes(), 4));
        let mut backend = backend(device, &ledger);
        let mut plan = Plan::build(&backend, |g| model.graph(g, true, TOKENS)).unwrap();
        for part in 1..8 {
            let mut file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(bytes.len() as u64 * part / 8).unwrap();
            match run(&mut plan, &mut backend, 0) {
                Err(error) => assert!(matches!(error, Error::Checkpoint(_)), "{error}"),
                // What is there already may be all it needs.
                Ok(values) => assert!(values == expected),
            }
            file.write_all(&bytes).unwrap();
            assert!(run(&mut plan, &mut backend, 0).unwrap() == expected);
        }
        drop(plan);
        assert_unharmed(device);
    }
}

#[test]
fn without_a_second_queue_or_events_the_numbers_are_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = expected(&checkpoint, 0);
    for options in [
        FakeOptions {
            most_queues: 2,
            ..FakeOptions::default()
        },
        FakeOptions {
            makes_events: false,
            ..FakeOptions::default()
        },
    ] {
        let fake = FakeDevice::new(FakeOptions {
            queues: Queues::Late,
            pinned: Pinned::Work,
            ..options
        });
        let device = fake.device();
        for residence in [Residence::Host, Residence::Disk] {
            let (model, mut weights) = Model::new(&checkpoint);
            let loading = backend(device, &Ledger::default());
            load(&mut weights, residence, &loading);
            let ledger = granted_on(device, small(device, &model, weights.bytes(), 4));
            let mut backend = backend(device, &ledger);
            let mut plan = Plan::build(&backend, |g| model.graph(g, true, TOKENS)).unwrap();
            assert!(plan.segmentation().is_streamed);
            assert_eq!(fake.counts().queues, 2);
            for _ in 0..2 {
                assert!(run(&mut plan, &mut backend, 0).unwrap() == expected);
            }
            drop(plan);
            assert_unharmed(device);
        }
    }
}

#[test]
fn building_tells_what_it_loads_and_can_be_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    for device in crate::blocks::devices() {
        let fake = FakeDevice::of(device);
        for residence in [Residence::Host, Residence::Disk] {
            let (model, mut weights) = Model::new(&checkpoint);
            load(
                &mut weights,
                residence,
                &backend(device, &Ledger::default()),
            );
            let budget = small(device, &model, weights.bytes() * 2, 3)
                + crate::blocks::passage(device, residence, &weights);
            let ledger = granted_on(device, budget);
            let backend = backend(device, &ledger);
            let build = |cancel: &Cancel, progress: &mut dyn FnMut(usize, usize, u64)| {
                let mut hear = |event: &Progress| match event {
                    Progress::Loading { done, total, bytes } => progress(*done, *total, *bytes),
                    other => panic!("{other:?}"),
                };
                Plan::build_with(&backend, cancel, &mut hear, |g| {
                    model.graph(g, true, TOKENS)
                })
            };
            let mut told = Vec::new();
            let plan = build(&Cancel::new(), &mut |done, total, bytes| {
                told.push((done, total, bytes));
            });
            drop(plan.unwrap());
            let &(done, total, bytes) = told.last().unwrap();
            assert_eq!((done, told.len()), (total, total));
            assert!(total > BLOCKS / 2 && bytes > weights.bytes() / 3);
            let cancel = Cancel::new();
            let mut heard = 0;
            let error = build(&cancel, &mut |_, _, _| {
                heard += 1;
                cancel.cancel();
            });
            assert!(error.unwrap_err().is_cancelled());
            // What threads bring comes in batches, and so few bytes are one.
            let is_copied_here = fake.is_some_and(|fake| fake.counts().pinned_bytes == 0);
            assert!(heard < total || residence == Residence::Disk || is_copied_here);
            assert_eq!(ledger.report(device).used.total(), 0);
            assert_unharmed(device);
        }
    }
}

#[test]
fn a_plan_that_is_built_later_spoils_no_weights_that_are_there() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = expected(&checkpoint, 0);
    for device in crate::blocks::devices() {
        let (model, mut weights) = Model::new(&checkpoint);
        let host = backend(device, &Ledger::default());
        load(&mut weights, Residence::Host, &host);
        let graph = |g: Graph<'_>| model.graph(g, true, TOKENS);
        let estimate = Estimate::of(&host, graph).unwrap();
        let need = 2 * (estimate.segmented_bytes + estimate.constant_bytes);
        // Rings of every length, so that what one segment pads lies where another one's weights are.
        for passing in (estimate.streamed_weight_bytes..weights.bytes()).step_by(3000) {
            let ledger = granted_on(device, need + passing);
            let mut backend = backend(device, &ledger);
            let mut cache = PlanCache::new(2);
            for key in [0, 1, 0] {
                let plan = cache.get_or_build(key, &backend, graph).unwrap();
                let found = run(plan, &mut backend, 0).unwrap();
                assert!(found == expected, "{device} {passing} {key}");
            }
            assert_eq!(cache.len(), 2);
        }
        assert_unharmed(device);
    }
}

#[test]
fn streamed_is_resident_on_every_device_there_is() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    for device in Device::all() {
        let (model, mut weights) = Model::new(&checkpoint);
        let graph = |g: Graph<'_>| model.graph(g, true, TOKENS);
        let mut free = backend(device, &Ledger::default());
        load(&mut weights, Residence::Device, &free);
        // In segments like the others: drivers fuse what lies side by side.
        let mut plan = Plan::build_in_segments(&free, graph).unwrap();
        let resident = [0, 1].map(|seed| run(&mut plan, &mut free, seed).unwrap());
        drop(plan);
        for residence in [Residence::Host, Residence::Disk] {
            load(&mut weights, residence, &free);
            for parts in [2, 4, 1000] {
                let budget = small(device, &model, weights.bytes(), parts)
                    + crate::blocks::passage(device, residence, &weights);
                let mut backend = backend(device, &granted_on(device, budget));
                let mut plan = Plan::build(&backend, graph).unwrap();
                assert!(plan.segmentation().is_streamed);
                for seed in [0, 1, 1, 0, 0] {
                    let found = run(&mut plan, &mut backend, seed).unwrap();
                    assert!(found == resident[seed], "{device} {residence} {parts}");
                }
            }
        }
    }
}
