//! Weights that come and go while graphs run: never another number, never a byte left behind.

use sd_backend::fake::{FakeDevice, FakeOptions, GraphFailure};
use sd_backend::{Ledger, MemoryKind, Residence};
use sd_graph::{Cancel, Error, Estimate, Graph, Plan, PlanCache, Progress, Reporter};

use crate::blocks::{
    BLOCKS, DIM, Model, TOKENS, assert_unharmed, backend, devices, expected, file, granted_on,
    load, passage, run, set,
};

#[test]
fn budgets_of_every_size_give_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = [0, 1].map(|seed| expected(&checkpoint, seed));
    for device in devices() {
        let (model, mut weights) = Model::new(&checkpoint);
        let graph = |g: Graph<'_>| model.graph(g, true, TOKENS);
        let estimate = {
            let backend = backend(device, &Ledger::default());
            Estimate::of(&backend, graph).unwrap()
        };
        assert_eq!(estimate.segments, BLOCKS + 2);
        assert!(estimate.streamed_weight_bytes < estimate.weight_bytes / 3);
        for residence in [Residence::Device, Residence::Host, Residence::Disk] {
            let mut least = None;
            let mut kinds = std::collections::BTreeSet::new();
            let most = estimate.weight_bytes * 5 / 4 + estimate.compute_bytes * 2;
            for budget in (0..=most).rev().step_by(14 << 10) {
                // What the host keeps is not to count here, and neither is what loading passes through.
                let host = backend(device, &Ledger::default());
                load(&mut weights, residence, &host);
                let ledger = granted_on(device, budget);
                let mut backend = backend(device, &ledger);
                match Plan::build(&backend, graph) {
                    Ok(mut plan) => {
                        assert!(least.is_none(), "{budget} does, more does not");
                        let how = plan.segmentation();
                        kinds.insert((how.segments.len(), how.is_streamed));
                        for (seed, expected) in expected.iter().enumerate() {
                            let values = run(&mut plan, &mut backend, seed).unwrap();
                            assert!(values == *expected, "{device} {residence} {budget}");
                        }
                    }
                    Err(Error::TooLittleMemory { smallest, .. }) => {
                        assert!(smallest > budget, "{smallest} <= {budget}");
                        least.get_or_insert(smallest);
                    }
                    Err(error) => panic!("{error}"),
                }
                assert_eq!(ledger.report(device).used.total(), 0);
            }
            // What it says would do does, and a byte less does not.
            let least = least.unwrap();
            let host = backend(device, &Ledger::default());
            load(&mut weights, residence, &host);
            let enough = backend(device, &granted_on(device, least));
            Plan::build(&enough, graph).unwrap();
            let short = backend(device, &granted_on(device, least - 1));
            assert!(Plan::build(&short, graph).unwrap_err().is_out_of_memory());
            assert_unharmed(device);
            let cut = BLOCKS + 2;
            assert!(kinds.contains(&(1, false)), "{device} {kinds:?}");
            let streamed = residence != Residence::Device;
            assert_eq!(kinds.contains(&(cut, true)), streamed, "{device} {kinds:?}");
            if streamed {
                let known = estimate.segmented_bytes + estimate.constant_bytes;
                assert_eq!(
                    least,
                    known + estimate.streamed_weight_bytes + passage(device, residence, &weights)
                );
            }
        }
    }
}

#[test]
fn a_settled_run_allocates_nothing_and_reports_what_it_moved() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let fake = FakeDevice::new(FakeOptions::default());
    let device = fake.device();
    let (model, mut weights) = Model::new(&checkpoint);
    let graph = |g: Graph<'_>| model.graph(g, true, TOKENS);
    let least = {
        let backend = backend(device, &Ledger::default());
        let estimate = Estimate::of(&backend, graph).unwrap();
        estimate.segmented_bytes + estimate.constant_bytes + estimate.streamed_weight_bytes
    };
    load(
        &mut weights,
        Residence::Host,
        &backend(device, &Ledger::default()),
    );
    let ledger = granted_on(device, least);
    let mut backend = backend(device, &ledger);
    let mut plan = Plan::build(&backend, graph).unwrap();
    let how = plan.segmentation();
    assert!(how.is_streamed);
    // The large rows are made again by every later block, from small ones that are kept.
    assert_eq!((how.added_cuts, how.recomputed), (1, BLOCKS - 1));
    assert_eq!(how.segments[0], "prelude");
    assert_eq!(how.segments[1], "block.0");
    assert_eq!(how.segments[BLOCKS + 1], "final");
    let before = fake.counts();
    let used = ledger.report(device).used;
    for _ in 0..3 {
        let mut told = Vec::new();
        set(&mut plan, TOKENS, 0);
        let report = plan
            .run_with(&mut backend, &Cancel::new(), &mut |p: &Progress| {
                told.push(p.clone());
            })
            .unwrap();
        assert_eq!(report.segments, BLOCKS + 2);
        assert_eq!(report.used, used);
        assert_eq!(report.input_bytes, ((TOKENS + 2) * DIM * 4) as u64);
        assert!(report.weight_bytes > weights.bytes() / 2);
        assert_eq!(told.len(), BLOCKS + 2);
        let Some(Progress::Segment { done, total, bytes }) = told.last() else {
            panic!("{told:?}")
        };
        assert_eq!(
            (*done, *total, *bytes),
            (BLOCKS + 2, BLOCKS + 2, report.weight_bytes)
        );
    }
    let after = fake.counts();
    assert_eq!(after.allocations, before.allocations);
    assert_eq!(after.peak_bytes, after.bytes);
    assert!(after.bytes as u64 <= least);
}

#[test]
fn plans_that_run_together_move_their_weights_once() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = expected(&checkpoint, 0);
    for device in devices() {
        let (model, mut weights) = Model::new(&checkpoint);
        let tokens = [TOKENS, TOKENS / 2];
        let graph = |&tokens: &usize, g: Graph<'_>| model.graph(g, true, tokens);
        let need: u64 = tokens
            .iter()
            .map(|tokens| {
                let backend = backend(device, &Ledger::default());
                let estimate = Estimate::of(&backend, |g| graph(tokens, g)).unwrap();
                estimate.segmented_bytes + estimate.constant_bytes
            })
            .max()
            .unwrap();
        load(
            &mut weights,
            Residence::Disk,
            &backend(device, &Ledger::default()),
        );
        let passage = passage(device, Residence::Disk, &weights);
        let ledger = granted_on(device, 2 * need + weights.bytes() / 2 + passage);
        let mut backend = backend(device, &ledger);
        let mut cache = PlanCache::new(2);
        let mut quiet = |_: &Progress| {};
        let mut alone = Vec::new();
        for (n, tokens) in tokens.iter().enumerate() {
            let plan = cache
                .get_or_build(*tokens, &backend, |g| graph(tokens, g))
                .unwrap();
            set(plan, *tokens, n);
            let mut moved = 0;
            for _ in 0..2 {
                set(plan, *tokens, n);
                moved = plan.run(&mut backend, &Cancel::new()).unwrap().weight_bytes;
            }
            alone.push((moved, plan.read::<f32>("y").unwrap()));
        }
        assert!(alone[0].1 == expected);
        assert_eq!(cache.len(), 2);
        for _ in 0..2 {
            let mut plans = cache
                .get_or_build_all(&tokens, &backend, &Cancel::new(), &mut quiet, graph)
                .unwrap();
            for (n, plan) in plans.iter_mut().enumerate() {
                set(plan, tokens[n], n);
                let how = plan.segmentation();
                assert!(how.is_streamed, "{device} {how:?}");
            }
            let cancel = Cancel::new();
            let report =
                Plan::run_together(&mut plans, &mut backend, &cancel, &mut |_: &Progress| {});
            let report = report.unwrap();
            assert_eq!(report.segments, 2 * (BLOCKS + 2));
            assert_eq!(report.weight_bytes, alone[0].0);
            for (plan, (_, expected)) in plans.iter().zip(&alone) {
                assert!(plan.read::<f32>("y").unwrap() == *expected);
            }
        }
        cache.clear();
        assert_unharmed(device);
        assert_eq!(ledger.report(device).used.total(), 0);
    }
}

#[test]
fn a_graph_without_cuts_streams_nothing_and_says_what_it_needs() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = expected(&checkpoint, 0);
    let fake = FakeDevice::new(FakeOptions::default());
    let device = fake.device();
    let (model, mut weights) = Model::new(&checkpoint);
    load(
        &mut weights,
        Residence::Host,
        &backend(device, &Ledger::default()),
    );
    let graph = |g: Graph<'_>| model.graph(g, false, TOKENS);
    let Err(Error::TooLittleMemory { smallest, .. }) =
        Plan::build(&backend(device, &granted_on(device, 1000)), graph)
    else {
        panic!()
    };
    let mut backend = backend(device, &granted_on(device, smallest));
    let mut plan = Plan::build(&backend, graph).unwrap();
    assert!(run(&mut plan, &mut backend, 0).unwrap() == expected);
}

#[test]
fn whatever_fails_nothing_is_left_and_the_next_run_is_right() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = expected(&checkpoint, 0);
    let fake = FakeDevice::new(FakeOptions {
        largest_buffer: 40 << 10,
        ..FakeOptions::default()
    });
    let device = fake.device();
    let (model, mut weights) = Model::new(&checkpoint);
    let graph = |g: Graph<'_>| model.graph(g, true, TOKENS);
    let estimate = Estimate::of(&backend(device, &Ledger::default()), graph).unwrap();
    let least = estimate.segmented_bytes + estimate.constant_bytes + estimate.streamed_weight_bytes;
    for residence in [Residence::Host, Residence::Disk] {
        load(
            &mut weights,
            residence,
            &backend(device, &Ledger::default()),
        );
        for budget in [least, least + weights.bytes() / 3, least * 20] {
            let ledger = granted_on(device, budget);
            let mut backend = backend(device, &ledger);
            let mut refused = 0;
            for nth in 1.. {
                fake.fail_allocation(nth);
                let before = fake.counts().allocations;
                let outcome =
                    Plan::build(&backend, graph).and_then(|mut p| run(&mut p, &mut backend, 0));
                fake.fail_allocation(0);
                match outcome {
                    // What does not get memory whole may go on in segments.
                    Ok(values) => assert!(values == expected),
                    Err(error) => {
                        assert!(error.is_out_of_memory(), "{error}");
                        refused += 1;
                    }
                }
                assert_eq!(ledger.report(device).used.total(), 0);
                assert_eq!((fake.counts().buffers, fake.counts().bytes), (0, 0));
                if fake.counts().allocations - before < nth {
                    break;
                }
            }
            assert!(refused > 0);
            // Graphs that fail: the plan stays, and works the next time.
            let mut plan = Plan::build(&backend, graph).unwrap();
            let segments = plan.segmentation().segments.len() as u64;
            let held = ledger.report(device).used;
            for nth in 1..=segments {
                for how in [GraphFailure::Allocation, GraphFailure::Other] {
                    fake.fail_graph(nth, how);
                    let error = run(&mut plan, &mut backend, 0).unwrap_err();
                    assert_eq!(error.is_out_of_memory(), how == GraphFailure::Allocation);
                    assert!(matches!(plan.read::<f32>("y"), Err(Error::NotRun { .. })));
                    assert!(run(&mut plan, &mut backend, 0).unwrap() == expected);
                    assert_eq!(ledger.report(device).used, held);
                }
            }
        }
    }
}

/// Cancels at the `at`th event.
struct CancelAt {
    cancel: Cancel,
    at: usize,
    heard: usize,
}

impl Reporter for CancelAt {
    fn report(&mut self, _: &Progress) {
        self.heard += 1;
        if self.heard == self.at {
            self.cancel.cancel();
        }
    }
}

#[test]
fn a_run_that_is_cancelled_anywhere_can_be_run_again() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = expected(&checkpoint, 0);
    for device in devices() {
        let (model, mut weights) = Model::new(&checkpoint);
        let graph = |g: Graph<'_>| model.graph(g, true, TOKENS);
        let estimate = Estimate::of(&backend(device, &Ledger::default()), graph).unwrap();
        let least =
            estimate.segmented_bytes + estimate.constant_bytes + estimate.streamed_weight_bytes;
        load(
            &mut weights,
            Residence::Disk,
            &backend(device, &Ledger::default()),
        );
        let passage = passage(device, Residence::Disk, &weights);
        let ledger = granted_on(device, least + weights.bytes() / 4 + passage);
        let mut backend = backend(device, &ledger);
        let mut plan = Plan::build(&backend, graph).unwrap();
        let total = plan.segmentation().segments.len();
        for at in 1..=total {
            let cancel = Cancel::new();
            let mut reporter = CancelAt {
                cancel: cancel.clone(),
                at,
                heard: 0,
            };
            set(&mut plan, TOKENS, 0);
            let outcome = plan.run_with(&mut backend, &cancel, &mut reporter);
            match outcome {
                Err(error) => assert!(error.is_cancelled(), "{error}"),
                // Nothing was left to do.
                Ok(_) => assert_eq!(at, total),
            }
            assert_eq!(reporter.heard, at);
            assert!(
                run(&mut plan, &mut backend, 0).unwrap() == expected,
                "{device} {at}"
            );
        }
        drop(plan);
        assert_eq!(ledger.report(device).used.total(), 0);
        assert_unharmed(device);
    }
}

#[test]
fn memory_taken_elsewhere_makes_the_next_plan_smaller() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = expected(&checkpoint, 0);
    let fake = FakeDevice::new(FakeOptions::default());
    let device = fake.device();
    let (model, mut weights) = Model::new(&checkpoint);
    let graph = |g: Graph<'_>| model.graph(g, true, TOKENS);
    load(
        &mut weights,
        Residence::Host,
        &backend(device, &Ledger::default()),
    );
    let budget = weights.bytes() * 2;
    let ledger = granted_on(device, budget);
    let mut backend = backend(device, &ledger);
    let mut plan = Plan::build(&backend, graph).unwrap();
    assert_eq!(plan.segmentation().segments.len(), 1);
    assert!(run(&mut plan, &mut backend, 0).unwrap() == expected);
    plan.release();
    assert_eq!(
        (ledger.report(device).used.total(), fake.counts().buffers),
        (0, 0)
    );
    let taken = ledger
        .reserve(device, budget - weights.bytes() / 2, MemoryKind::Cache)
        .unwrap();
    assert!(run(&mut plan, &mut backend, 0).unwrap() == expected);
    assert!(plan.segmentation().is_streamed);
    // It holds what it has, so that a run allocates nothing, until it is told to give it back.
    drop(taken);
    assert!(run(&mut plan, &mut backend, 0).unwrap() == expected);
    assert!(plan.segmentation().is_streamed);
    plan.release();
    assert!(run(&mut plan, &mut backend, 0).unwrap() == expected);
    assert_eq!(plan.segmentation().segments.len(), 1);
    // With too little it says so, and runs when there is more again.
    plan.release();
    let taken = ledger
        .reserve(device, budget - 100, MemoryKind::Cache)
        .unwrap();
    let error = run(&mut plan, &mut backend, 0).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    drop(taken);
    assert!(run(&mut plan, &mut backend, 0).unwrap() == expected);
}

#[test]
fn two_models_in_two_threads_share_one_account() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let expected = expected(&checkpoint, 0);
    let fake = FakeDevice::new(FakeOptions::default());
    let device = fake.device();
    let (probe, weights) = Model::new(&checkpoint);
    let graph = |g: Graph<'_>| probe.graph(g, true, TOKENS);
    let estimate = Estimate::of(&backend(device, &Ledger::default()), graph).unwrap();
    let least = estimate.segmented_bytes + estimate.constant_bytes + estimate.streamed_weight_bytes;
    // One fits whole; the second has what is left.
    let ledger = granted_on(
        device,
        weights.bytes() + estimate.compute_bytes + estimate.constant_bytes + least + (4 << 10),
    );
    let barrier = std::sync::Barrier::new(2);
    let how_many_streamed: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (ledger, barrier) = (ledger.clone(), &barrier);
                let (checkpoint, expected) = (&checkpoint, &expected);
                scope.spawn(move || {
                    let (model, mut weights) = Model::new(checkpoint);
                    load(
                        &mut weights,
                        Residence::Host,
                        &backend(device, &Ledger::default()),
                    );
                    let mut backend = backend(device, &ledger);
                    let mut streamed = 0;
                    for round in 0..8 {
                        // What is measured may be gone when it is taken: that is an error, and the next try plans anew.
                        let mut plan = loop {
                            match Plan::build(&backend, |g| model.graph(g, true, TOKENS)) {
                                Ok(plan) => break plan,
                                Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                            }
                        };
                        assert!(run(&mut plan, &mut backend, 0).unwrap() == *expected);
                        if round == 0 {
                            barrier.wait();
                            streamed += usize::from(plan.segmentation().is_streamed);
                        }
                    }
                    streamed
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum()
    });
    assert!(how_many_streamed >= 1);
    assert_eq!(ledger.report(device).used.total(), 0);
    assert_eq!(fake.counts().buffers, 0);
}
