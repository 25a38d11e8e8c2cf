//! Caches that runs keep for one another: keys and values of a prefix in a small model, whole, in segments and streamed.

use sd_backend::fake::{FakeDevice, FakeOptions, GraphFailure};
use sd_backend::{Backend, DType, Device, DeviceKind, Ledger, MemoryKind, Residence};
use sd_graph::{
    Allocation, CacheEntry, Cancel, Error, Estimate, FailureKind, Graph, Plan, Progress, Reporter,
    Result, RunnerCache, Tensor,
};

use crate::blocks::{
    BLOCKS, DIM, INNER, Model, TOKENS, backend, devices, file, granted_on, load, passage, values,
};

/// Tokens whose keys are the same in every run.
const PREFIX: usize = 10;

/// What a graph does with the keys of the prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Ignore,
    Store(DType),
    Read(DType),
}

/// Blocks of attention in which the prefix sees only itself and the others see all. Reads `y`, the rows of the others.
fn graph(model: &Model, mode: Mode, g: Graph<'_>) {
    let rest = TOKENS - PREFIX;
    fn heads(x: Tensor<'_>, tokens: usize) -> Tensor<'_> {
        x.reshape([1, tokens, INNER])
    }
    fn flat(x: Tensor<'_>, tokens: usize) -> Tensor<'_> {
        x.reshape([tokens, INNER])
    }
    let mut x = g.input::<f32>("rest", [rest, DIM]);
    if !matches!(mode, Mode::Read(_)) {
        x = g.input::<f32>("prefix", [PREFIX, DIM]).concat(x, 0);
    }
    x = (x.matmul_transposed(g.param(&model.first)) * g.param(&model.shared)).cut("prelude");
    for n in 0..BLOCKS {
        let keys = x.rms_norm(1e-6).matmul_transposed(g.param(&model.up[n]));
        let name = format!("{n}.keys");
        let mixed = match mode {
            Mode::Read(dtype) => {
                let before = g.cached(&name, [PREFIX, INNER], dtype);
                let before = match dtype {
                    DType::F32 => before,
                    _ => before.cast(DType::F32),
                };
                let all = heads(before.concat(keys, 0), TOKENS);
                flat(heads(keys, rest).attention(all, all, None, 0.1), rest)
            }
            _ => {
                let before = keys.slice(0, 0, PREFIX);
                if let Mode::Store(dtype) = mode {
                    g.store(&name, before, dtype);
                }
                let (own, all) = (heads(before, PREFIX), heads(keys, TOKENS));
                let behind = all.slice(1, PREFIX, rest);
                let before = flat(own.attention(own, own, None, 0.1), PREFIX);
                let behind = flat(behind.attention(all, all, None, 0.1), rest);
                before.concat(behind, 0)
            }
        };
        let fed = mixed.matmul_transposed(g.param(&model.down[n]));
        x = (x + fed * 16.0).cut(&format!("block.{n}"));
    }
    g.output("y", x.slice(0, x.dim(0) - rest, rest));
}

/// Runs a plan for a prefix and a step with a cache.
fn run(
    plan: &mut Plan,
    backend: &mut Backend,
    (prefix, step): (usize, usize),
    cache: &RunnerCache,
) -> Result<Vec<f32>> {
    run_with(
        plan,
        backend,
        (prefix, step),
        cache,
        &Cancel::new(),
        &mut |_: &Progress| {},
    )
}

fn run_with(
    plan: &mut Plan,
    backend: &mut Backend,
    (prefix, step): (usize, usize),
    cache: &RunnerCache,
    cancel: &Cancel,
    progress: &mut dyn Reporter,
) -> Result<Vec<f32>> {
    plan.set("rest", &values((TOKENS - PREFIX) * DIM, 50 + step))?;
    match plan.set("prefix", &values(PREFIX * DIM, prefix)) {
        Ok(()) | Err(Error::UnknownName { .. }) => {}
        Err(error) => return Err(error),
    }
    plan.attach(cache)?;
    plan.run_with(backend, cancel, progress)?;
    plan.read("y")
}

/// What a graph without a cache gives on the processor.
fn expected(model: &Model, of: (usize, usize)) -> Vec<f32> {
    let mut backend = backend(Device::cpu().unwrap(), &Ledger::default());
    let mut plan = Plan::build(&backend, |g| graph(model, Mode::Ignore, g)).unwrap();
    run(&mut plan, &mut backend, of, &RunnerCache::new()).unwrap()
}

fn error_of(found: &[f32], wanted: &[f32]) -> f32 {
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
    let difference = square(&mut found.iter().zip(wanted).map(|(a, b)| a - b));
    (difference / square(&mut wanted.iter().copied())).sqrt()
}

fn loaded(
    checkpoint: &sd_graph::Checkpoint,
    residence: Residence,
    device: Device,
) -> (Model, sd_graph::Weights) {
    let (model, mut weights) = Model::new(checkpoint);
    load(
        &mut weights,
        residence,
        &backend(device, &Ledger::default()),
    );
    (model, weights)
}

#[test]
fn what_one_run_stores_another_reads_however_graphs_are_cut() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let cpu = Device::cpu().unwrap();
    let should = expected(&loaded(&checkpoint, Residence::Device, cpu).0, (1, 2));
    // Rounding: of single precision in other products; half a unit in the last place of 11 and 8 bits; of a block of 32.
    let types = [
        (DType::F32, 1e-6, 4.0),
        (DType::F16, 1e-3, 2.0),
        (DType::BF16, 8e-3, 2.0),
        (DType::Q8_0, 1e-2, 34.0 / 32.0),
    ];
    for device in devices() {
        for (dtype, tolerance, bytes) in types {
            let mut results: Vec<Vec<f32>> = Vec::new();
            let stored = (BLOCKS * PREFIX * INNER) as f64 * bytes;
            for residence in [Residence::Device, Residence::Disk] {
                let (model, weights) = loaded(&checkpoint, residence, device);
                let [store, read] = [Mode::Store(dtype), Mode::Read(dtype)];
                let of = |mode| {
                    let backend = backend(device, &Ledger::default());
                    Estimate::of(&backend, |g| graph(&model, mode, g)).unwrap()
                };
                let (estimate, plain) = (of(store), of(Mode::Ignore));
                assert!((estimate.cache_bytes as f64) < stored * 1.1 + 4096.0);
                assert!(estimate.cache_bytes as f64 >= stored);
                // The copies lie in the segments of their blocks, behind what they copy: nothing is kept for them.
                assert_eq!(estimate.segments, plain.segments);
                if dtype == DType::F32 {
                    assert_eq!(estimate.segmented_bytes, plain.segmented_bytes);
                    assert_eq!(estimate.compute_bytes, plain.compute_bytes);
                }
                let reading = of(read);
                assert_eq!(reading.cache_bytes, 0);
                let computed = |e: &Estimate| e.segmented_bytes + e.constant_bytes;
                let least = computed(&estimate).max(computed(&reading))
                    + estimate.cache_bytes
                    + estimate.streamed_weight_bytes * u64::from(residence == Residence::Disk)
                    + passage(device, residence, &weights);
                for (in_segments, budget) in [(false, None), (true, None), (false, Some(least))] {
                    let ledger = match budget {
                        None => Ledger::default(),
                        Some(bytes) => granted_on(device, bytes),
                    };
                    let mut backend = backend(device, &ledger);
                    let build = |mode, backend: &Backend| match in_segments {
                        false => Plan::build(backend, |g| graph(&model, mode, g)),
                        true => Plan::build_in_segments(backend, |g| graph(&model, mode, g)),
                    };
                    let cache = RunnerCache::new();
                    let mut plan = build(store, &backend).unwrap();
                    if budget.is_some() && residence == Residence::Disk {
                        assert!(plan.segmentation().is_streamed);
                    }
                    run(&mut plan, &mut backend, (1, 1), &cache).unwrap();
                    let held = ledger.report(device).used.of(MemoryKind::Cache);
                    assert_eq!(held, estimate.cache_bytes);
                    assert_eq!(cache.resident_bytes(device), held);
                    assert_eq!(cache.entries().len(), BLOCKS);
                    drop(plan);
                    let mut plan = build(read, &backend).unwrap();
                    results.push(run(&mut plan, &mut backend, (9, 2), &cache).unwrap());
                    drop((plan, cache));
                    assert_eq!(ledger.report(device).used.total(), 0);
                }
            }
            for result in &results {
                let error = error_of(result, &should);
                assert!(error <= tolerance, "{device} {dtype}: {error:e}");
                assert!(*result == results[0], "{device} {dtype}");
            }
        }
    }
}

#[test]
fn caches_take_turns_on_one_plan() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    // Other devices may multiply in half precision, and round products of other sizes in another way.
    let tolerance = |device: Device| match device.kind() {
        DeviceKind::Gpu | DeviceKind::IntegratedGpu if !device.name().starts_with("Fake") => 0.02,
        _ => 1e-6,
    };
    for device in devices().into_iter().chain(crate::devices()) {
        let (model, _weights) = loaded(&checkpoint, Residence::Device, device);
        let mut backend = backend(device, &Ledger::default());
        let build = |mode| Plan::build(&backend, |g| graph(&model, mode, g)).unwrap();
        let mut plain = build(Mode::Ignore);
        let (mut store, mut read) = (
            build(Mode::Store(DType::F32)),
            build(Mode::Read(DType::F32)),
        );
        let caches: Vec<RunnerCache> = (0..3).map(|_| RunnerCache::new()).collect();
        for step in 0..3 {
            for (prefix, cache) in caches.iter().enumerate() {
                let plan = if step == 0 { &mut store } else { &mut read };
                let found = run(plan, &mut backend, (prefix, step), cache).unwrap();
                let should = run(&mut plain, &mut backend, (prefix, step), cache).unwrap();
                let error = error_of(&found, &should);
                assert!(
                    error <= tolerance(device),
                    "{device} {prefix} {step}: {error:e}"
                );
            }
        }
        assert!(caches.iter().all(|cache| cache.commits() == 1));
        // Together, both store; into one cache too, where the later plan's stays.
        let mut other =
            Plan::build(&backend, |g| graph(&model, Mode::Store(DType::F32), g)).unwrap();
        let one = RunnerCache::new();
        for (plan, prefix) in [(&mut store, 5), (&mut other, 6)] {
            plan.set("rest", &values((TOKENS - PREFIX) * DIM, 50))
                .unwrap();
            plan.set("prefix", &values(PREFIX * DIM, prefix)).unwrap();
            plan.attach(&one).unwrap();
        }
        let mut plans = [&mut store, &mut other];
        Plan::run_together(
            &mut plans,
            &mut backend,
            &Cancel::new(),
            &mut |_: &Progress| {},
        )
        .unwrap();
        let found = run(&mut read, &mut backend, (0, 7), &one).unwrap();
        let should = run(&mut plain, &mut backend, (6, 7), &one).unwrap();
        assert!(error_of(&found, &should) <= tolerance(device));
    }
}

#[test]
fn a_run_reads_what_was_there_while_it_stores_anew() {
    for device in devices() {
        let mut backend = backend(device, &Ledger::default());
        let cache = RunnerCache::new();
        let mut first = Plan::build(&backend, |g| {
            g.store("sum", g.input::<f32>("x", [4, 32]), DType::F32);
            g.output("y", g.input::<f32>("z", [1]) + 1.0);
        })
        .unwrap();
        first.set("x", &[0.5_f32; 128]).unwrap();
        first.set("z", &[1.0_f32]).unwrap();
        first.attach(&cache).unwrap();
        first.run(&mut backend, &Cancel::new()).unwrap();
        let mut next = Plan::build(&backend, |g| {
            let sum = g.cached("sum", [4, 32], DType::F32);
            g.store(
                "sum",
                sum.transpose(0, 1).reshape([4, 32]) + 1.0,
                DType::F32,
            );
            g.store("half", sum, DType::Q8_0);
            g.output("y", sum.slice(0, 1, 2));
        })
        .unwrap();
        let mut run = |cache: &RunnerCache, cancel: &Cancel| -> Result<f32> {
            next.attach(cache)?;
            next.run(&mut backend, cancel)?;
            Ok(next.read::<f32>("y")?[0])
        };
        for round in 0..3 {
            assert_eq!(run(&cache, &Cancel::new()).unwrap(), 0.5 + round as f32);
            assert_eq!(cache.commits(), 2 + round);
        }
        let cancel = Cancel::new();
        cancel.cancel();
        assert!(run(&cache, &cancel).unwrap_err().is_cancelled());
        assert_eq!(cache.commits(), 4);
        assert_eq!(run(&cache, &Cancel::new()).unwrap(), 3.5);
        // What was attached before it was cleared is read; then it is not there.
        next.attach(&cache).unwrap();
        cache.clear();
        next.run(&mut backend, &Cancel::new()).unwrap();
        assert_eq!(next.read::<f32>("y").unwrap()[0], 4.5);
        assert_eq!(cache.entries().len(), 2);
    }
}

#[test]
fn caches_that_do_not_fit_are_refused() {
    let device = Device::cpu().unwrap();
    let fake = FakeDevice::new(FakeOptions::default()).device();
    let stored_on = |device: Device, shape: [usize; 2], dtype: DType| {
        let mut backend = backend(device, &Ledger::default());
        let cache = RunnerCache::new();
        let mut plan = Plan::build(&backend, |g| {
            let x = g.input::<f32>("x", shape);
            g.store("k", x, dtype);
            g.output("y", x + 1.0);
        })
        .unwrap();
        plan.set("x", &vec![2.0_f32; shape[0] * shape[1]]).unwrap();
        let error = plan.run(&mut backend, &Cancel::new()).unwrap_err();
        assert!(matches!(error, Error::NotAttached), "{error}");
        plan.attach(&cache).unwrap();
        plan.run(&mut backend, &Cancel::new()).unwrap();
        cache
    };
    let mut backend = backend(device, &Ledger::default());
    let mut plan = Plan::build(&backend, |g| {
        g.output(
            "y",
            g.cached("k", [2, 32], DType::F16).cast(DType::F32) + 1.0,
        );
    })
    .unwrap();
    for (cache, reason) in [
        (RunnerCache::new(), "is not there"),
        (stored_on(device, [2, 64], DType::F16), "[2, 64]"),
        (stored_on(device, [2, 32], DType::F32), "f32"),
        (stored_on(fake, [2, 32], DType::F16), "lies on"),
    ] {
        let error = plan.attach(&cache).unwrap_err();
        assert!(matches!(error, Error::Cache { .. }), "{error}");
        assert_eq!(error.failure(), FailureKind::Other);
        assert!(error.to_string().contains(reason), "{error}");
        let error = plan.run(&mut backend, &Cancel::new()).unwrap_err();
        assert!(matches!(error, Error::NotAttached), "{error}");
    }
    let good = stored_on(device, [2, 32], DType::F16);
    let entry = |dtype| CacheEntry {
        name: "k".to_owned(),
        shape: sd_graph::Shape::new(&[2, 32]).unwrap(),
        dtype,
    };
    assert!(good.holds(&entry(DType::F16)) && !good.holds(&entry(DType::F32)));
    plan.attach(&good).unwrap();
    plan.run(&mut backend, &Cancel::new()).unwrap();
    assert_eq!(plan.read::<f32>("y").unwrap(), [3.0; 64]);
    // Used up, like an input.
    let error = plan.run(&mut backend, &Cancel::new()).unwrap_err();
    assert!(matches!(error, Error::NotAttached), "{error}");

    type Build = fn(Graph<'_>);
    let mistakes: [(&str, Build); 5] = [
        ("whole blocks", |g| {
            g.store("k", g.input::<f32>("x", [2, 33]), DType::Q8_0)
        }),
        ("q4_0", |g| {
            g.cached("k", [2, 32], DType::Q4_0);
        }),
        ("not i32", |g| {
            g.store("k", g.input::<i32>("x", [2]), DType::F32)
        }),
        ("stored twice", |g| {
            let x = g.input::<f32>("x", [2]);
            g.store("k", x, DType::F32);
            g.store("k", x, DType::F32);
        }),
        ("is read as", |g| {
            g.cached("k", [2], DType::F32);
            g.cached("k", [3], DType::F32);
        }),
    ];
    for (reason, build) in mistakes {
        let error = Plan::build(&backend, build).unwrap_err();
        assert!(matches!(error, Error::Graph(_)), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
}

/// Cancels at the `at`th event.
struct CancelAt(Cancel, usize);

impl Reporter for CancelAt {
    fn report(&mut self, _: &Progress) {
        self.1 = self.1.wrapping_sub(1);
        if self.1 == 0 {
            self.0.cancel();
        }
    }
}

#[test]
fn whatever_fails_the_cache_stays_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let fake = FakeDevice::new(FakeOptions {
        // Few tensors to a buffer, so that a cache is several allocations.
        largest_buffer: 24 << 10,
        ..FakeOptions::default()
    });
    let device = fake.device();
    let (model, _weights) = loaded(&checkpoint, Residence::Host, device);
    let [store, read] = [Mode::Store(DType::F32), Mode::Read(DType::F32)];
    let ledger = Ledger::default();
    let mut backend = backend(device, &ledger);
    let build =
        |mode, backend: &Backend| Plan::build_in_segments(backend, |g| graph(&model, mode, g));
    let cache = RunnerCache::new();
    let first = {
        let mut plan = build(store, &backend).unwrap();
        run(&mut plan, &mut backend, (1, 1), &cache).unwrap();
        let mut plan = build(read, &backend).unwrap();
        run(&mut plan, &mut backend, (1, 2), &cache).unwrap()
    };
    let (used, counts) = (ledger.report(device).used, fake.counts());
    let unchanged = |commits: u64, what: &str| {
        assert_eq!(cache.commits(), commits, "{what}");
        assert_eq!(ledger.report(device).used, used, "{what}");
        let now = fake.counts();
        assert_eq!(
            (now.buffers, now.bytes),
            (counts.buffers, counts.bytes),
            "{what}"
        );
    };
    let mut commits = 1;
    // From building the plan on, with another prefix: what is read afterwards tells whose it is.
    let mut captures = 0;
    for mode in [store, read] {
        for nth in 1.. {
            fake.fail_allocation(nth);
            let before = fake.counts().allocations;
            let outcome = build(mode, &backend)
                .and_then(|mut plan| run(&mut plan, &mut backend, (1, 2), &cache));
            fake.fail_allocation(0);
            let is_last = fake.counts().allocations - before < nth;
            match outcome {
                Ok(found) => {
                    assert!(mode == store || found == first);
                    commits += u64::from(mode == store);
                }
                Err(error) => {
                    assert!(error.is_out_of_memory(), "{error}");
                    captures += usize::from(
                        error.failure() == FailureKind::Allocation(Allocation::Capture),
                    );
                }
            }
            unchanged(commits, &format!("allocation {nth}, {mode:?}"));
            let mut plan = build(read, &backend).unwrap();
            assert!(run(&mut plan, &mut backend, (0, 2), &cache).unwrap() == first);
            if is_last {
                break;
            }
        }
    }
    assert!(captures > 1, "{captures}");

    // With plans that are there, every graph that fails, and every event that cancels.
    for mode in [store, read] {
        let mut plan = build(mode, &backend).unwrap();
        let segments = plan.segmentation().segments.len();
        let held = ledger.report(device).used;
        for nth in 1..=segments {
            for how in [
                Some(GraphFailure::Allocation),
                Some(GraphFailure::Other),
                None,
            ] {
                let cancel = Cancel::new();
                let mut reporter = CancelAt(cancel.clone(), 0);
                match how {
                    Some(how) => fake.fail_graph(nth as u64, how),
                    None => reporter.1 = nth,
                }
                // Another prefix, so that storing by mistake shows.
                let outcome = run_with(
                    &mut plan,
                    &mut backend,
                    (3, 3),
                    &cache,
                    &cancel,
                    &mut reporter,
                );
                fake.fail_graph(0, GraphFailure::Other);
                match outcome {
                    // Nothing was left to cancel.
                    Ok(_) => {
                        assert!(how.is_none() && nth == segments);
                        commits += u64::from(mode == store);
                        run(&mut plan, &mut backend, (1, 2), &cache).unwrap();
                        commits += u64::from(mode == store);
                    }
                    Err(error) => {
                        assert_eq!(
                            error.is_out_of_memory(),
                            how == Some(GraphFailure::Allocation)
                        );
                        assert_eq!(error.is_cancelled(), how.is_none());
                    }
                }
                assert_eq!(cache.commits(), commits);
                assert_eq!(ledger.report(device).used, held);
                let mut reading = build(read, &backend).unwrap();
                assert!(run(&mut reading, &mut backend, (0, 2), &cache).unwrap() == first);
            }
        }
    }
    unchanged(commits, "at the end");
}

#[test]
fn runs_on_two_threads_store_into_one_cache_one_after_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(folder.path());
    let device = Device::cpu().unwrap();
    let (model, _weights) = loaded(&checkpoint, Residence::Device, device);
    let cache = RunnerCache::new();
    let prefixes = [1, 2];
    let should = prefixes.map(|prefix| expected(&model, (prefix, 3)));
    std::thread::scope(|scope| {
        for prefix in prefixes {
            let (model, cache, should) = (&model, &cache, &should);
            scope.spawn(move || {
                let mut backend = backend(device, &Ledger::default());
                let build = |mode| Plan::build(&backend, |g| graph(model, mode, g)).unwrap();
                let (mut store, mut read) = (
                    build(Mode::Store(DType::F32)),
                    build(Mode::Read(DType::F32)),
                );
                for _ in 0..20 {
                    run(&mut store, &mut backend, (prefix, 3), cache).unwrap();
                    // Whosever it is, all of it is.
                    let found = run(&mut read, &mut backend, (prefix, 3), cache).unwrap();
                    let right = should.iter().any(|should| error_of(&found, should) <= 1e-6);
                    assert!(right);
                }
            });
        }
    });
    assert_eq!(cache.commits(), 40);
}
