//! Graphs over several devices: the same bytes as on one, each device within its memory.

use std::cell::Cell;

use sd_backend::fake::{FakeDevice, FakeOptions, GraphFailure};
use sd_backend::{
    Backend, Device, Ledger, Mapping, MemoryBudget, MemoryBudgets, MemoryKind, Residence,
};
use sd_graph::{
    Cancel, Checkpoint, Error, Estimate, Graph, Plan, Progress, Shape, Share, Split, SplitPlan,
    State, Weights,
};

use crate::blocks::{BLOCKS, DIM, Model, TOKENS, backend, expected, file, load, values};

fn fake(name: &str) -> FakeDevice {
    FakeDevice::new(FakeOptions {
        name: name.to_owned(),
        padding: 256,
        ..FakeOptions::default()
    })
}

/// Accounts with so much for each device.
fn granted(devices: &[(Device, u64)]) -> Ledger {
    let budgets = devices
        .iter()
        .fold(MemoryBudgets::default(), |all, (device, bytes)| {
            all.with(&device.name(), MemoryBudget::Bytes(*bytes))
        });
    Ledger::with_headroom(budgets, 0)
}

/// A model whose weights were loaded as a split over `devices` says, which are granted `bytes`.
struct Loaded {
    ledger: Ledger,
    backends: Vec<Backend>,
    model: Model,
    split: Split,
    _weights: Vec<Weights>,
}

impl Loaded {
    fn new(checkpoint: &Checkpoint, residence: Residence, granted_to: &[(Device, u64)]) -> Loaded {
        let ledger = granted(granted_to);
        let devices = granted_to.iter().map(|(device, _)| *device);
        let backends: Vec<Backend> = devices.map(|device| backend(device, &ledger)).collect();
        let (model, all) = Model::new(checkpoint);
        let split = {
            let backends: Vec<&Backend> = backends.iter().collect();
            Split::of(&backends, 2, |g| model.graph(g, true, TOKENS)).unwrap()
        };
        let mut weights = split.weights(checkpoint, all.params());
        for (weights, (device, _)) in weights.iter_mut().zip(granted_to) {
            // What the host keeps is not to count here.
            let host = backend(*device, &Ledger::default());
            match residence {
                Residence::Device => load(weights, residence, &backend(*device, &ledger)),
                _ => load(weights, residence, &host),
            }
        }
        Loaded {
            ledger,
            backends,
            model,
            split,
            _weights: weights,
        }
    }

    fn plan(&self) -> sd_graph::Result<SplitPlan> {
        let backends: Vec<&Backend> = self.backends.iter().collect();
        SplitPlan::build(&self.split, &backends, |g| {
            self.model.graph(g, true, TOKENS)
        })
    }

    fn run(&mut self, plan: &mut SplitPlan, seed: usize) -> sd_graph::Result<Vec<f32>> {
        set(plan, seed);
        let mut backends: Vec<&mut Backend> = self.backends.iter_mut().collect();
        plan.run(&mut backends, &Cancel::new())?;
        plan.read("y")
    }
}

fn set(plan: &mut SplitPlan, seed: usize) {
    plan.set("x", &values(TOKENS * DIM, seed)).unwrap();
    plan.set("condition", &values(2 * DIM, seed + 1)).unwrap();
}

/// Bytes that the model's weights take, and what one of its plans computes in at most.
fn needs(checkpoint: &Checkpoint) -> (u64, u64) {
    let (model, weights) = Model::new(checkpoint);
    let backend = backend(fake("Any").device(), &Ledger::default());
    let estimate = Estimate::of(&backend, |g| model.graph(g, true, TOKENS)).unwrap();
    let work = estimate.compute_bytes + estimate.constant_bytes;
    (weights.bytes(), work + (8 << 10))
}

#[test]
fn several_devices_give_the_bytes_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = [0, 1].map(|seed| expected(&checkpoint, seed));
    let (all, work) = needs(&checkpoint);
    let fakes = ["One", "Two", "Three"].map(|name| fake(name).device());
    // The processor among them without a bound: what it loads passes through as much memory as it has threads.
    let mixed = [fakes[0], Device::cpu().unwrap(), fakes[2]];
    let none = 0;
    let ample = 1 << 30;
    for (devices, residence, bytes, parts) in [
        (fakes, Residence::Device, [all / 2, all / 2, all / 4], 3),
        (fakes, Residence::Device, [none, all * 3 / 2, none], 1),
        (fakes, Residence::Device, [all * 3 / 4, all / 2, none], 2),
        (mixed, Residence::Device, [ample; 3], 3),
        (fakes, Residence::Host, [all / 4, all / 4, all / 5], 3),
        (fakes, Residence::Disk, [all / 4, none, all / 5], 2),
    ] {
        let granted = bytes.map(|bytes| if bytes == none { 0 } else { bytes + 2 * work });
        let granted: Vec<(Device, u64)> = devices.into_iter().zip(granted).collect();
        let mut loaded = Loaded::new(&checkpoint, residence, &granted);
        let shares = loaded.split.shares();
        assert_eq!(
            shares.iter().map(Share::segments).sum::<usize>(),
            BLOCKS + 2
        );
        let busy = shares.iter().filter(|share| share.segments() > 0);
        assert_eq!(busy.count(), parts, "{shares:?}");
        let mut plans = [(); 2].map(|()| loaded.plan().unwrap());
        let how = plans[0].segmentations();
        let is_streamed = residence != Residence::Device;
        let streamed = how.iter().filter(|part| part.is_streamed);
        assert_eq!(streamed.count() > 0, is_streamed, "{how:?}");
        for (seed, expected) in expected.iter().enumerate() {
            let found = loaded.run(&mut plans[0], seed).unwrap();
            assert!(found == *expected, "{residence} {seed}");
        }
        // Two at once, told of in order.
        let mut told = Vec::new();
        let mut backends: Vec<&mut Backend> = loaded.backends.iter_mut().collect();
        let [first, second] = &mut plans;
        set(first, 0);
        set(second, 1);
        let reports = SplitPlan::run_together(
            &mut [first, second],
            &mut backends,
            &Cancel::new(),
            &mut |event: &Progress| told.push(event.clone()),
        )
        .unwrap();
        for (plan, expected) in plans.iter().zip(&expected) {
            assert!(plan.read::<f32>("y").unwrap() == *expected, "{residence}");
        }
        assert_eq!(reports.len(), parts);
        let moved = reports.iter().any(|report| report.weight_bytes > 0);
        assert_eq!(moved, is_streamed);
        let Some(Progress::Segment { done, total, .. }) = told.last() else {
            panic!("{told:?}")
        };
        assert_eq!((*done, told.len()), (*total, *total), "{told:?}");
        let ledger = loaded.ledger.clone();
        drop((plans, loaded));
        for device in devices {
            assert_eq!(ledger.report(device).used.total(), 0, "{device}");
        }
    }
}

#[test]
fn no_device_of_a_split_could_do_it_alone() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let (all, work) = needs(&checkpoint);
    let devices = [fake("One").device(), fake("Two").device()];
    let bytes = all * 3 / 5 + work;
    let alone = backend(devices[0], &granted(&[(devices[0], bytes)]));
    let (_, mut weights) = Model::new(&checkpoint);
    weights.live(Residence::Device, Mapping::Never);
    let quiet = &mut |_: &Progress| {};
    let refused = weights.load(&alone, &Cancel::new(), quiet).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");

    let mut loaded = Loaded::new(&checkpoint, Residence::Device, &devices.map(|d| (d, bytes)));
    let mut plan = loaded.plan().unwrap();
    assert!(loaded.run(&mut plan, 5).unwrap() == expected(&checkpoint, 5));
    // The parameter that both ends need is on both.
    let held: u64 = loaded.split.shares().iter().map(Share::weight_bytes).sum();
    assert_eq!(held, all + (DIM * 4) as u64);
    for device in devices {
        let used = loaded.ledger.report(device).used;
        assert!(used.of(MemoryKind::Weights) > all / 3, "{used:?}");
    }
}

#[test]
fn whatever_fails_on_one_device_leaves_all_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = expected(&checkpoint, 3);
    let (all, work) = needs(&checkpoint);
    let fakes = [fake("One"), fake("Two"), fake("Three")];
    for residence in [Residence::Device, Residence::Host] {
        let bytes = match residence {
            Residence::Device => all + work,
            _ => all / 4 + work,
        };
        let granted: Vec<(Device, u64)> = fakes.iter().map(|f| (f.device(), bytes)).collect();
        let mut loaded = Loaded::new(&checkpoint, residence, &granted);
        let used = |loaded: &Loaded| -> Vec<u64> {
            let devices = granted.iter();
            devices
                .map(|(device, _)| loaded.ledger.report(*device).used.total())
                .collect()
        };
        let before = used(&loaded);
        for fake in &fakes {
            let allocations = fake.counts().allocations;
            drop(loaded.plan().unwrap());
            let allocations = fake.counts().allocations - allocations;
            let mut refused = 0;
            for nth in 1..=allocations {
                fake.fail_allocation(nth);
                match loaded.plan() {
                    // It was cut where the whole did not fit.
                    Ok(mut plan) => assert!(loaded.run(&mut plan, 3).unwrap() == expected),
                    Err(error) => {
                        refused += 1;
                        assert!(error.is_out_of_memory(), "{error}");
                    }
                }
                fake.fail_allocation(0);
                assert_eq!(used(&loaded), before);
            }
            assert!(residence == Residence::Device || refused > 0);
            let mut plan = loaded.plan().unwrap();
            fake.fail_graph(1, GraphFailure::Other);
            let failure = loaded.run(&mut plan, 3).unwrap_err();
            assert!(
                !failure.is_out_of_memory() && !failure.is_cancelled(),
                "{failure}"
            );
            assert!(loaded.run(&mut plan, 3).unwrap() == expected);
        }
        // Cancelled at every event.
        let mut plan = loaded.plan().unwrap();
        for event in 0.. {
            set(&mut plan, 3);
            let cancel = Cancel::new();
            let heard = Cell::new(0);
            let mut backends: Vec<&mut Backend> = loaded.backends.iter_mut().collect();
            let plans = &mut [&mut plan];
            let outcome =
                SplitPlan::run_together(plans, &mut backends, &cancel, &mut |_: &Progress| {
                    if heard.replace(heard.get() + 1) == event {
                        cancel.cancel();
                    }
                });
            match outcome {
                // The last event comes behind everything.
                Ok(_) => assert!(plan.read::<f32>("y").unwrap() == expected),
                Err(error) => assert!(error.is_cancelled(), "{error}"),
            }
            if heard.get() <= event {
                assert!(event > 2);
                break;
            }
        }
        assert!(loaded.run(&mut plan, 3).unwrap() == expected);
        drop(plan);
        assert_eq!(used(&loaded), before);
    }
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let devices = [fake("One").device(), fake("Two").device()];
    let mut loaded = Loaded::new(
        &checkpoint,
        Residence::Device,
        &devices.map(|d| (d, 1 << 30)),
    );
    let (model, split) = (&loaded.model, &loaded.split);
    let [one, two] = [0, 1].map(|n| &loaded.backends[n]);

    let build = |backends: &[&Backend]| {
        SplitPlan::build(split, backends, |g| model.graph(g, true, TOKENS)).map(drop)
    };
    for backends in [&[two, one][..], &[one], &[]] {
        let error = build(backends).unwrap_err();
        assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
    }
    // Another size of the same model, and a graph of something else.
    SplitPlan::build(split, &[one, two], |g| model.graph(g, true, 3 * TOKENS)).unwrap();
    fn other(g: Graph<'_>) {
        let x = g.input::<f32>("x", [4, 4]).silu().cut("prelude");
        g.output("y", x + 1.0);
    }
    let error = SplitPlan::build(split, &[one, two], other).unwrap_err();
    assert!(matches!(error, Error::Graph(_)), "{error}");
    assert!(
        error.to_string().contains("no segment called `block."),
        "{error}"
    );

    let state = State::new("seen", Shape::new(&[4, 4]).unwrap());
    let keeps = |g: Graph<'_>| {
        let x = g.input::<f32>("x", [4, 4]) + g.state(&state);
        g.keep(&state, x);
    };
    let error = Split::of(&[one, two], 1, keeps).unwrap_err();
    assert!(error.to_string().contains("between runs"), "{error}");
    let stores = |g: Graph<'_>| {
        let x = g.input::<f32>("x", [4, 4]);
        g.store("x", x, sd_backend::DType::F32);
    };
    let error = Split::of(&[one, two], 1, stores).unwrap_err();
    assert!(error.to_string().contains("between runs"), "{error}");

    let mut plan = loaded.plan().unwrap();
    plan.set("x", &values(TOKENS * DIM, 0)).unwrap();
    let mut backends: Vec<&mut Backend> = loaded.backends.iter_mut().collect();
    let error = plan.run(&mut backends, &Cancel::new()).unwrap_err();
    assert!(matches!(error, Error::InputNotSet { name } if name == "condition"));
    let error = plan.set("hand-over 5", &[0.0_f32]).unwrap_err();
    assert!(matches!(error, Error::UnknownName { .. }), "{error}");
}

#[test]
fn a_graph_without_cuts_runs_where_most_room_is() {
    let devices = [fake("One").device(), fake("Two").device()];
    let ledger = granted(&[(devices[0], 1 << 20), (devices[1], 1 << 21)]);
    let [mut one, mut two] = devices.map(|device| backend(device, &ledger));
    fn graph(g: Graph<'_>) {
        let x = g.input::<f32>("x", [4, 4]);
        g.input::<f32>("idle", [2]);
        g.output("y", x.silu());
    }
    let split = Split::of(&[&one, &two], 1, graph).unwrap();
    let mut plan = SplitPlan::build(&split, &[&one, &two], graph).unwrap();
    plan.set("x", &values(16, 1)).unwrap();
    plan.set("idle", &[0.0_f32; 2]).unwrap();
    plan.run(&mut [&mut one, &mut two], &Cancel::new()).unwrap();
    let mut alone = Plan::build(&one, graph).unwrap();
    alone.set("x", &values(16, 1)).unwrap();
    alone.set("idle", &[0.0_f32; 2]).unwrap();
    alone.run(&mut one, &Cancel::new()).unwrap();
    assert!(plan.read::<f32>("y").unwrap() == alone.read::<f32>("y").unwrap());
}
