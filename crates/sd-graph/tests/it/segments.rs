//! Graphs in segments, with weights that come and go: never another number, never a byte left behind.

use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use sd_backend::fake::{FakeDevice, FakeOptions, GraphFailure};
use sd_backend::{
    Backend, BackendOptions, Device, Ledger, Mapping, MemoryBudget, MemoryBudgets, MemoryKind,
    Residence,
};
use sd_graph::{
    Cancel, Checkpoint, Declarations, Error, Estimate, Graph, LoadOptions, Param, Plan, PlanCache,
    Progress, Reporter, Result, Role, Tensor, Weights,
};

const BLOCKS: usize = 6;
const DIM: usize = 32;
const INNER: usize = 128;
const TOKENS: usize = 16;

/// A small transformer without attention: a prelude, blocks, and a head that shares a parameter with the prelude.
struct Model {
    first: Param,
    shared: Param,
    up: Vec<Param>,
    down: Vec<Param>,
    head: Param,
}

fn file(folder: &Path) -> Checkpoint {
    let mut tensors = vec![
        ("first".to_owned(), vec![DIM, DIM]),
        ("shared".to_owned(), vec![DIM]),
        ("head".to_owned(), vec![3 * DIM, DIM]),
    ];
    for block in 0..BLOCKS {
        tensors.push((format!("{block}.up"), vec![INNER, DIM]));
        tensors.push((format!("{block}.down"), vec![DIM, INNER]));
    }
    let values: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .enumerate()
        .map(|(seed, (name, shape))| {
            let count: usize = shape.iter().product();
            // Half precision, so that it is converted on loading.
            let number = |n: usize| ((n * 37 + seed * 101) % 257) as f32 / 1024.0 - 0.125;
            let bytes = (0..count).flat_map(|n| half::f16::from_f32(number(n)).to_le_bytes());
            (name, shape, bytes.collect())
        })
        .collect();
    let views = values.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F16, shape.clone(), bytes).unwrap();
        (name.clone(), view)
    });
    let path = folder.join("model.safetensors");
    safetensors::serialize_to_file(views, None, &path).unwrap();
    Checkpoint::open(&path).unwrap()
}

impl Model {
    fn new(checkpoint: &Checkpoint) -> (Model, Weights) {
        let options = LoadOptions::default().weight_type(sd_backend::DType::F32);
        let declarations = Declarations::new(checkpoint, options);
        let root = declarations.root();
        let block = |block: usize, name, shape| root.sub(block).param(name, shape, Role::Matrix);
        let model = Model {
            first: root.param("first", [DIM, DIM], Role::Matrix),
            shared: root.param("shared", [DIM], Role::Vector),
            up: (0..BLOCKS).map(|n| block(n, "up", [INNER, DIM])).collect(),
            down: (0..BLOCKS)
                .map(|n| block(n, "down", [DIM, INNER]))
                .collect(),
            head: root.param("head", [3 * DIM, DIM], Role::Matrix),
        };
        let params = declarations.finish().unwrap();
        (model, Weights::new(checkpoint.clone(), params))
    }

    fn forward<'g>(&self, g: Graph<'g>, is_cut: bool, tokens: usize) -> Tensor<'g> {
        let cut = |x: Tensor<'g>, group: &str| if is_cut { x.cut(group) } else { x };
        let x = g.input::<f32>("x", [tokens, DIM]);
        let condition = g.input::<f32>("condition", [2, DIM]);
        let shared = g.param(&self.shared);
        let x = x.matmul_transposed(g.param(&self.first)) * shared;
        let x = cut(x, "prelude");
        // Large rows made from small ones, that every block uses and nobody marks.
        let rows: Vec<i32> = (0..tokens).map(|n| (n % 2) as i32).collect();
        let rows = g.constant(&rows, [tokens]);
        let scale = (condition.silu() + 1.0).rows(rows);
        let x = (0..BLOCKS).fold(x, |x, n| {
            let fed = (x.rms_norm(1e-6) * scale).matmul_transposed(g.param(&self.up[n]));
            let x = x + fed.silu().matmul_transposed(g.param(&self.down[n]));
            cut(x, &format!("block.{n}"))
        });
        (x * shared).matmul_transposed(g.param(&self.head))
    }

    fn graph(&self, g: Graph<'_>, is_cut: bool, tokens: usize) {
        g.output("y", self.forward(g, is_cut, tokens));
    }
}

fn backend(device: Device, ledger: &Ledger) -> Backend {
    Backend::new(device, &BackendOptions::default().threads(1).ledger(ledger)).unwrap()
}

/// Budgets hold on the device alone; staging is the host's.
fn granted_on(device: Device, bytes: u64) -> Ledger {
    let budgets = MemoryBudgets::default().with(&device.name(), MemoryBudget::Bytes(bytes));
    Ledger::with_headroom(budgets, 0)
}

fn values(count: usize, seed: usize) -> Vec<f32> {
    (0..count)
        .map(|n| ((n * 31 + seed * 17) % 101) as f32 / 50.0 - 1.0)
        .collect()
}

fn set(plan: &mut Plan, tokens: usize, seed: usize) {
    plan.set("x", &values(tokens * DIM, seed)).unwrap();
    plan.set("condition", &values(2 * DIM, seed + 1)).unwrap();
}

fn run(plan: &mut Plan, backend: &mut Backend, seed: usize) -> Result<Vec<f32>> {
    set(plan, TOKENS, seed);
    plan.run(backend, &Cancel::new())?;
    plan.read("y")
}

fn load(weights: &mut Weights, residence: Residence, backend: &Backend) {
    weights.live(residence, Mapping::Never);
    weights.stream(true);
    weights
        .load(backend, &Cancel::new(), &mut |_: &Progress| {})
        .unwrap();
}

/// Bytes that weights pass through on their way to a device, if that is the host.
fn passage(device: Device, residence: Residence, weights: &Weights) -> u64 {
    let cost = weights.cost(device, residence, Mapping::Never).unwrap();
    match (residence, device == Device::cpu().unwrap()) {
        (Residence::Disk, true) => cost.staging,
        _ => 0,
    }
}

/// What the whole graph gives on the processor for a seed.
fn expected(checkpoint: &Checkpoint, seed: usize) -> Vec<f32> {
    let mut backend = backend(Device::cpu().unwrap(), &Ledger::default());
    let (model, mut weights) = Model::new(checkpoint);
    load(&mut weights, Residence::Device, &backend);
    let mut plan = Plan::build(&backend, |g| model.graph(g, false, TOKENS)).unwrap();
    assert_eq!(plan.segmentation().segments, ["final"]);
    run(&mut plan, &mut backend, seed).unwrap()
}

/// The processor and a device that is not host memory: weights are brought beside computing, and between.
fn devices() -> Vec<Device> {
    vec![
        Device::cpu().unwrap(),
        FakeDevice::new(FakeOptions::default()).device(),
        FakeDevice::new(FakeOptions {
            largest_buffer: 40 << 10,
            padding: 256,
            ..FakeOptions::default()
        })
        .device(),
    ]
}

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
            let mut plans = cache.get_or_build_all(&tokens, &backend, graph).unwrap();
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
        assert_eq!(ledger.report(device).used.total(), 0);
    }
}

/// The bytes of `y` of a graph in one piece and in as many as it has, on the processor; and its segments.
fn both_ways(build: impl for<'g> Fn(Graph<'g>) + Copy) -> (Vec<f32>, Vec<f32>, Vec<String>) {
    let cpu = Device::cpu().unwrap();
    let mut outcome = Vec::new();
    let mut segments = Vec::new();
    let mut backend = backend(cpu, &Ledger::default());
    let estimate = Estimate::of(&backend, build).unwrap();
    for is_cut in [false, true] {
        let mut plan = match is_cut {
            false => Plan::build(&backend, build),
            true => Plan::build_in_segments(&backend, build),
        }
        .unwrap();
        let compute_bytes = match is_cut {
            false => estimate.compute_bytes,
            true => estimate.segmented_bytes,
        };
        assert_eq!(plan.compute_bytes(), compute_bytes);
        segments = plan.segmentation().segments;
        plan.set("x", &values(1024, 3)).unwrap();
        plan.run(&mut backend, &Cancel::new()).unwrap();
        outcome.push(plan.read::<f32>("y").unwrap());
    }
    let cut = outcome.pop().unwrap();
    (outcome.pop().unwrap(), cut, segments)
}

/// Some operations that give what they are given, more or less.
fn wide<'g>(x: Tensor<'g>) -> Tensor<'g> {
    let g = x.graph();
    let parts: Vec<Tensor<'g>> = (0..8).map(|n| (x + n as f32).silu()).collect();
    let sum = parts.iter().fold(x, |sum, part| sum + *part);
    sum * g.constant(&[0.25_f32], [1])
}

#[test]
fn views_of_what_is_kept_and_one_node_segments() {
    // Three views of one boundary, one of them the mark itself, and a marked view of an input.
    let (whole, cut, segments) = both_ways(|g| {
        let x = g.input::<f32>("x", [4, 16, 16]);
        let turned = x.transpose(0, 1).cut("leaf");
        let y = wide(x).transpose(0, 1).cut("views");
        let one = y.slice(0, 0, 8);
        let other = y.slice(0, 8, 8);
        let flat = y.reshape([64, 16]);
        let z = one.matmul_transposed(other).cut("single");
        let w = wide(z.reshape([16, 8])).cut("again");
        let sum = flat.matmul_transposed(w.reshape([8, 16]));
        g.output(
            "y",
            wide(sum)
                + turned
                    .slice(0, 0, 1)
                    .slice(1, 0, 1)
                    .reshape([16])
                    .slice(0, 0, 1),
        );
    });
    assert!(whole == cut);
    assert_eq!(segments, ["views", "single", "again", "final"]);

    // A segment of one operation between two views.
    let (whole, cut, segments) = both_ways(|g| {
        let x = wide(g.input::<f32>("x", [32, 32])).cut("a");
        let y = (x.transpose(0, 1) + 1.0).cut("b");
        let z = wide(y.transpose(0, 1)).cut("c");
        g.output("y", z.transpose(0, 1));
    });
    assert!(whole == cut);
    assert_eq!(segments, ["a", "b", "c", "final"]);
}

#[test]
fn whatever_order_groups_are_marked_in() {
    // "late" is marked first and needs "early"; "dead" is for nobody; two marks in one group; an output in the middle.
    let (whole, cut, segments) = both_ways(|g| {
        let x = g.input::<f32>("x", [32, 32]);
        let a = wide(x);
        let b = wide(a.matmul_transposed(x));
        let b = b.cut("late");
        let a = a.cut("early");
        let _ = wide(b).cut("dead");
        let c = wide(b).cut("pair");
        let d = wide(c + a).cut("pair");
        let _ = d.cut("moved");
        g.output("middle", a.transpose(0, 1));
        g.output("y", wide(c) + d);
        g.output("input", x);
    });
    assert!(whole == cut);
    assert_eq!(segments, ["late", "pair", "moved", "final"]);
}

#[test]
fn what_several_segments_use_is_kept_if_that_is_cheaper() {
    let cpu = Device::cpu().unwrap();
    fn graph(g: Graph<'_>) {
        let x = g.input::<f32>("x", [32, 32]);
        // A product, which nobody marks.
        let p = x.matmul_transposed(x);
        let a = wide(x + p).cut("a");
        let b = wide(a + p).cut("b");
        g.output("y", wide(b) + p);
    }
    let (whole, cut, _) = both_ways(graph);
    assert!(whole == cut);
    let plan = Plan::build_in_segments(&backend(cpu, &Ledger::default()), graph).unwrap();
    let how = plan.segmentation();
    assert_eq!((how.added_cuts, how.recomputed), (1, 0), "{how:?}");
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
