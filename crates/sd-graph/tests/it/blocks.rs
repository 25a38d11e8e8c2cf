//! A small model in blocks for tests of segments and of weights that come and go, and what such tests share.

use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use sd_backend::fake::{FakeDevice, FakeOptions, Pinned, Queues};
use sd_backend::{
    Backend, BackendOptions, Device, Ledger, Mapping, MemoryBudget, MemoryBudgets, Residence,
};
use sd_graph::{
    Cancel, Checkpoint, Declarations, Graph, LoadOptions, Param, Plan, Progress, Result, Role,
    Tensor, Weights,
};

pub(crate) const BLOCKS: usize = 6;
pub(crate) const DIM: usize = 32;
pub(crate) const INNER: usize = 128;
pub(crate) const TOKENS: usize = 16;

/// A small transformer without attention: a prelude, blocks, and a head that shares a parameter with the prelude.
pub(crate) struct Model {
    pub(crate) first: Param,
    pub(crate) shared: Param,
    pub(crate) up: Vec<Param>,
    pub(crate) down: Vec<Param>,
    pub(crate) head: Param,
}

pub(crate) fn file(folder: &Path) -> Checkpoint {
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
    pub(crate) fn new(checkpoint: &Checkpoint) -> (Model, Weights) {
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

    pub(crate) fn forward<'g>(&self, g: Graph<'g>, is_cut: bool, tokens: usize) -> Tensor<'g> {
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

    pub(crate) fn graph(&self, g: Graph<'_>, is_cut: bool, tokens: usize) {
        g.output("y", self.forward(g, is_cut, tokens));
    }
}

pub(crate) fn backend(device: Device, ledger: &Ledger) -> Backend {
    Backend::new(device, &BackendOptions::default().threads(1).ledger(ledger)).unwrap()
}

/// Budgets hold on the device alone; staging is the host's.
pub(crate) fn granted_on(device: Device, bytes: u64) -> Ledger {
    let budgets = MemoryBudgets::default().with(&device.name(), MemoryBudget::Bytes(bytes));
    Ledger::with_headroom(budgets, 0)
}

pub(crate) fn values(count: usize, seed: usize) -> Vec<f32> {
    (0..count)
        .map(|n| ((n * 31 + seed * 17) % 101) as f32 / 50.0 - 1.0)
        .collect()
}

pub(crate) fn set(plan: &mut Plan, tokens: usize, seed: usize) {
    plan.set("x", &values(tokens * DIM, seed)).unwrap();
    plan.set("condition", &values(2 * DIM, seed + 1)).unwrap();
}

pub(crate) fn run(plan: &mut Plan, backend: &mut Backend, seed: usize) -> Result<Vec<f32>> {
    set(plan, TOKENS, seed);
    plan.run(backend, &Cancel::new())?;
    plan.read("y")
}

pub(crate) fn load(weights: &mut Weights, residence: Residence, backend: &Backend) {
    weights.live(residence, Mapping::Never);
    weights.stream(true);
    weights
        .load(backend, &Cancel::new(), &mut |_: &Progress| {})
        .unwrap();
}

/// Bytes that weights pass through on their way to a device, if that is the host.
pub(crate) fn passage(device: Device, residence: Residence, weights: &Weights) -> u64 {
    let cost = weights.cost(device, residence, Mapping::Never).unwrap();
    match (residence, device == Device::cpu().unwrap()) {
        (Residence::Disk, true) => cost.staging,
        _ => 0,
    }
}

/// What the whole graph gives on the processor for a seed.
pub(crate) fn expected(checkpoint: &Checkpoint, seed: usize) -> Vec<f32> {
    let mut backend = backend(Device::cpu().unwrap(), &Ledger::default());
    let (model, mut weights) = Model::new(checkpoint);
    load(&mut weights, Residence::Device, &backend);
    let mut plan = Plan::build(&backend, |g| model.graph(g, false, TOKENS)).unwrap();
    assert_eq!(plan.segmentation().segments, ["final"]);
    run(&mut plan, &mut backend, seed).unwrap()
}

/// The processor and devices that are not host memory: weights are brought beside computing, between, and by queues of
/// their own that work late or early, from memory that is pinned or only was to be.
pub(crate) fn devices() -> Vec<Device> {
    let fakes = [
        FakeOptions::default(),
        FakeOptions {
            largest_buffer: 40 << 10,
            padding: 256,
            ..FakeOptions::default()
        },
    ];
    let plain = fakes.map(|options| FakeDevice::new(options).device());
    let queued = queued().map(|fake| fake.device());
    [Device::cpu().unwrap()]
        .into_iter()
        .chain(plain)
        .chain(queued)
        .collect()
}

/// Devices with queues.
pub(crate) fn queued() -> [FakeDevice; 3] {
    [
        FakeOptions {
            queues: Queues::Late,
            pinned: Pinned::FallBack,
            largest_buffer: 40 << 10,
            padding: 256,
            ..FakeOptions::default()
        },
        FakeOptions {
            queues: Queues::EarlyCopies,
            pinned: Pinned::Work,
            padding: 256,
            ..FakeOptions::default()
        },
        FakeOptions {
            queues: Queues::EarlyGraphs,
            pinned: Pinned::Work,
            padding: 256,
            ..FakeOptions::default()
        },
    ]
    .map(FakeDevice::new)
}

/// Nothing was given up, read or written while something that was queued needed it.
pub(crate) fn assert_unharmed(device: Device) {
    if let Some(fake) = FakeDevice::of(device) {
        assert_eq!(fake.counts().misuses, 0, "{device}");
    }
}
