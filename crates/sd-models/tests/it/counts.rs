//! What a step costs that no clock is needed for: operations, launches, allocations, bytes copied. Exact numbers on a device that counts, so
//! that one copy more for each step is seen.
//!
//! A number that changed: each test prints what it found (`cargo test -p sd-models --test it counts -- --nocapture`). Where the
//! change is meant, put the new number here and say in the commit what it buys; fewer need no reason.

use sd_backend::fake::{FakeCounts, FakeDevice, FakeOptions, Pinned, Queues};
use sd_backend::{
    Backend, BackendOptions, DType, Device, Ledger, Mapping, MemoryBudget, MemoryBudgets, Residence,
};
use sd_graph::{
    Cancel, Checkpoint, Declarations, Estimate, Graph, LoadOptions, Plan, Progress, RunnerCache,
    Weights,
};
use sd_models::minimax_h3::{self, Conditions, Denoiser, Noisy, QkvOrder, Stage, Tag};
use sd_models::qwen_image_2_1::{
    Layout, Prefix, Segment, Transformer, TransformerConfig, timestep_embedding,
};
use sd_models::rope::{H3Clip, Size};
use sd_models::{Pipeline, PrefixCache, Request};

use crate::fixtures::{folder, tiny};

/// What one step added to the device's counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    /// Graphs that were launched.
    graphs: u64,
    /// Allocations that were asked for.
    allocations: u64,
    /// Bytes copied to the device.
    uploaded: u64,
    /// Bytes copied from it.
    downloaded: u64,
}

impl Step {
    /// A `steps`-th of what was counted since `before`.
    fn since(before: FakeCounts, after: FakeCounts, steps: u64) -> Step {
        let each = |count: fn(&FakeCounts) -> u64| {
            let more = count(&after) - count(&before);
            assert_eq!(more % steps, 0, "steps differ: {before:?} {after:?}");
            more / steps
        };
        Step {
            graphs: each(|counts| counts.graphs),
            allocations: each(|counts| counts.allocations),
            uploaded: each(|counts| counts.uploaded),
            downloaded: each(|counts| counts.downloaded),
        }
    }
}

/// The tiny checkpoint's transformer.
struct Tiny {
    config: TransformerConfig,
    module: Transformer,
    weights: Weights,
}

/// 12 tokens of text around a reference picture of 4x4 latent pixels, and a picture of 4x4.
fn layout() -> Layout {
    let picture = Segment::Image {
        height: 4,
        width: 4,
    };
    Layout::new(vec![Segment::Text(6), picture, Segment::Text(6)], 4, 4)
}

impl Tiny {
    fn open() -> Tiny {
        let folder = tiny().join("transformer");
        let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let config: TransformerConfig = serde_json::from_str(&config).unwrap();
        let file = folder.join("diffusion_pytorch_model.safetensors");
        let checkpoint = Checkpoint::open(&file).unwrap();
        let options = LoadOptions::default().weight_type(DType::F32);
        let declarations = Declarations::new(&checkpoint, options);
        let module = Transformer::new(&declarations.root(), &config);
        let params = declarations.finish().unwrap();
        Tiny {
            config,
            module,
            weights: Weights::new(checkpoint, params),
        }
    }

    fn load(&mut self, backend: &Backend, residence: Residence) {
        self.weights.live(residence, Mapping::Never);
        self.weights.stream(residence != Residence::Device);
        let quiet = &mut |_: &Progress| {};
        self.weights.load(backend, &Cancel::new(), quiet).unwrap();
    }

    fn graph(&self, g: Graph<'_>, prefix: Prefix) {
        let layout = layout();
        let is_read = matches!(prefix, Prefix::Read(_));
        let pixels = match is_read {
            true => layout.target_tokens(),
            false => layout.image_tokens(),
        };
        let latents = g.input::<f32>("latents", [pixels, self.config.in_channels]);
        let text = (!is_read)
            .then(|| g.input::<f32>("text", [layout.text_tokens(), self.config.context_in_dim]));
        let timestep = g.input::<f32>("timestep", [2, timestep_embedding(0.0).len()]);
        let module = &self.module;
        let velocity = module.forward_with(g, &layout, latents, text, timestep, prefix);
        g.output("velocity", velocity);
    }

    /// What a sampler does at each step.
    fn call(&self, plan: &mut Plan, backend: &mut Backend, prefix: Prefix, cache: &RunnerCache) {
        let layout = layout();
        let is_read = matches!(prefix, Prefix::Read(_));
        let pixels = match is_read {
            true => layout.target_tokens(),
            false => layout.image_tokens(),
        };
        let latents = vec![0.5; pixels * self.config.in_channels];
        plan.set("latents", &latents).unwrap();
        if !is_read {
            let text = vec![0.5; layout.text_tokens() * self.config.context_in_dim];
            plan.set("text", &text).unwrap();
        }
        let timestep = [timestep_embedding(0.5), timestep_embedding(0.0)];
        plan.set("timestep", timestep.as_flattened()).unwrap();
        if prefix != Prefix::Compute {
            plan.attach(cache).unwrap();
        }
        plan.run(backend, &Cancel::new()).unwrap();
        let velocity = plan.read::<f32>("velocity").unwrap();
        assert!(velocity.iter().all(|value| value.is_finite()));
    }
}

fn backend(device: Device, ledger: &Ledger) -> Backend {
    Backend::new(device, &BackendOptions::default().threads(1).ledger(ledger)).unwrap()
}

#[test]
fn of_a_call_of_the_transformer() {
    let fake = FakeDevice::new(FakeOptions::default());
    let mut backend = backend(fake.device(), &Ledger::default());
    let mut tiny = Tiny::open();
    tiny.load(&backend, Residence::Device);
    let cache = RunnerCache::new();
    // Inputs are 32 latents of 16 numbers, 12 tokens of 128 and 2 timesteps of 256, of 4 bytes; with a kept prefix 16 latents and the
    // timesteps. The velocity is 16 times 16 numbers. A call that stores, of which a picture has one, takes memory for what replaces
    // the cache when all has succeeded.
    for (prefix, nodes, allocations, uploaded) in [
        (Prefix::Compute, 413, 0, 10_240),
        (Prefix::Store(DType::F32), 441, 1, 10_240),
        (Prefix::Read(DType::F32), 309, 0, 3072),
    ] {
        let mut plan = Plan::build(&backend, |g| tiny.graph(g, prefix)).unwrap();
        tiny.call(&mut plan, &mut backend, prefix, &cache);
        let before = fake.counts();
        for _ in 0..3 {
            tiny.call(&mut plan, &mut backend, prefix, &cache);
        }
        let step = Step::since(before, fake.counts(), 3);
        println!("{prefix:?}: {} nodes, {step:?}", plan.nodes());
        let expected = Step {
            graphs: 1,
            allocations,
            uploaded,
            downloaded: 1024,
        };
        assert_eq!((plan.nodes(), step), (nodes, expected), "{prefix:?}");
    }
}

/// Half of the weights have room, and 10,779,648 bytes of them come and go. A segment is a graph; what passes is copied once, and nothing is allocated.
#[test]
fn of_a_call_whose_weights_come_and_go() {
    for residence in [Residence::Host, Residence::Disk] {
        let fake = FakeDevice::new(FakeOptions {
            queues: Queues::EarlyCopies,
            pinned: Pinned::Work,
            ..FakeOptions::default()
        });
        let device = fake.device();
        let mut tiny = Tiny::open();
        let free = backend(device, &Ledger::default());
        tiny.load(&free, residence);
        let prefix = Prefix::Compute;
        let estimate = Estimate::of(&free, |g| tiny.graph(g, prefix)).unwrap();
        let budget = estimate.segmented_bytes
            + estimate.constant_bytes
            + estimate.streamed_weight_bytes
            + tiny.weights.bytes() / 2;
        let budgets = MemoryBudgets::default().with(&device.name(), MemoryBudget::Bytes(budget));
        let mut backend = backend(device, &Ledger::with_headroom(budgets, 0));
        let mut plan = Plan::build(&backend, |g| tiny.graph(g, prefix)).unwrap();
        assert!(plan.segmentation().is_streamed);
        let cache = RunnerCache::new();
        tiny.call(&mut plan, &mut backend, prefix, &cache);
        let before = fake.counts();
        for _ in 0..3 {
            tiny.call(&mut plan, &mut backend, prefix, &cache);
        }
        let step = Step::since(before, fake.counts(), 3);
        println!("{residence}: {} nodes, {step:?}", plan.nodes());
        let expected = Step {
            graphs: 9,
            allocations: 0,
            uploaded: 10_240 + 10_779_648,
            downloaded: 1024,
        };
        assert_eq!((plan.nodes(), step), (437, expected), "{residence}");
    }
}

/// A guided step of a picture of 32x64 by the pipeline, the first ones left out: 2 calls, each with 8 latents of 16 numbers and two timesteps
/// in and a velocity out; where nothing is kept, also with the prompt's tokens, 21 of both together with 128 numbers each.
#[test]
fn of_a_step_of_the_pipeline() {
    for (prefix, expected) in [
        (
            PrefixCache::Off,
            Step {
                graphs: 2,
                allocations: 0,
                uploaded: 15_872,
                downloaded: 1024,
            },
        ),
        (
            PrefixCache::F32,
            Step {
                graphs: 2,
                allocations: 0,
                uploaded: 5120,
                downloaded: 1024,
            },
        ),
    ] {
        let fake = FakeDevice::new(FakeOptions::default());
        let builder = Pipeline::open(tiny()).unwrap().threads(2);
        let builder = builder.device(fake.device()).mapping(Mapping::Never);
        let mut pipeline = builder.prefix_cache(prefix).load().unwrap();
        let condition = pipeline.encode("a small green star").unwrap();
        let negative = pipeline.encode("").unwrap();
        let mut draw = |steps| {
            let request = Request::new(&condition).size(32, 64).guidance(2.0);
            let request = request.negative(&negative).steps(steps);
            let before = fake.counts();
            pipeline.generate(&request, &mut |_: &Progress| {}).unwrap();
            (before, fake.counts())
        };
        // Plans are there from the first picture on; pictures of 3 and of 6 steps then differ by 3 steps.
        draw(3);
        let (short, long) = (draw(3), draw(6));
        let mut before = short.1;
        let more = |count: fn(&FakeCounts) -> u64| count(&short.1) - count(&short.0);
        before.graphs += more(|counts| counts.graphs);
        before.allocations += more(|counts| counts.allocations);
        before.uploaded += more(|counts| counts.uploaded);
        before.downloaded += more(|counts| counts.downloaded);
        let step = Step::since(before, long.1, 3);
        println!("{prefix:?}: {step:?}");
        assert_eq!(step, expected, "{prefix:?}");
    }
}

/// A step of the MiniMax H3 fixture, three blocks: 42 rows of video of 32 numbers and 18 of sound of 16 go in and come out, and which
/// times they have goes in. Text and modulations are there from before.
#[test]
fn of_a_step_of_minimax_h3() {
    let fake = FakeDevice::new(FakeOptions::default());
    let mut backend = backend(fake.device(), &Ledger::default());
    let (cancel, quiet) = (Cancel::new(), &mut |_: &Progress| {});
    let at = folder("minimax_h3_transformer");
    let options = LoadOptions::default();
    let mut model = Denoiser::open(&at, QkvOrder::Stacked, &[], &options).unwrap();
    model.load(&backend, &cancel, quiet).unwrap();
    let clip = H3Clip {
        frames: 7,
        latents: Size::new(4, 6),
        sound: 9,
    };
    let conditions = Conditions::Keyframes(Vec::new());
    let layout = minimax_h3::Layout::new(vec![Tag::Text; 6], conditions, clip).unwrap();
    let times = minimax_h3::Layout::times(0.35, 0.6);
    let text = vec![0.5; 6 * model.config().text_dim];
    let prepared = model.prepare(&mut backend, &text, &times, &cancel, quiet);
    let (prepared, _) = prepared.unwrap();
    let noisy = Noisy {
        video: &[0.5; 42 * 32],
        sound: &[0.5; 18 * 16],
        times: [0.35, 0.6],
    };
    let mut step = |backend: &mut Backend| {
        let made = model.velocity(backend, &layout, &prepared, noisy, &cancel, quiet);
        assert!(made.unwrap().video.iter().all(|value| value.is_finite()));
    };
    step(&mut backend);
    let before = fake.counts();
    (0..3).for_each(|_| step(&mut backend));
    let found = Step::since(before, fake.counts(), 3);
    let estimate = model.estimate(Stage::Steps, &backend, &layout, times.len());
    let nodes = estimate.unwrap().nodes;
    println!("{nodes} nodes, {found:?}");
    let expected = Step {
        graphs: 1,
        allocations: 0,
        uploaded: 6544,
        downloaded: 6528,
    };
    assert_eq!((nodes, found), (264, expected));
}
