//! Weights that are used where their file lies, on the processor and on a device that fails on demand.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use safetensors::tensor::{Dtype, TensorView};
use sd_backend::fake::{FakeDevice, FakeOptions, HostPointers};
use sd_backend::{Backend, BackendOptions, Device, Ledger, Mapping, MemoryKind};
use sd_graph::{
    Cancel, Checkpoint, Declarations, LoadOptions, LoadPlan, LoadReport, Param, Plan, Progress,
    Result, Role,
};

const ROWS: usize = 64;
const COLUMNS: usize = 128;
/// Of each of the three matrices.
const MATRIX: u64 = (ROWS * COLUMNS * 4) as u64;

/// Three matrices in single precision, and a vector in half precision, which has to be converted.
fn file(folder: &Path) -> PathBuf {
    let numbers = |seed: usize| -> Vec<u8> {
        (0..ROWS * COLUMNS)
            .flat_map(|n| (((n * 37 + seed * 101) % 257) as f32 / 64.0 - 2.0).to_le_bytes())
            .collect()
    };
    let matrices = [numbers(1), numbers(2), numbers(3)];
    let gamma: Vec<u8> = (0..COLUMNS)
        .flat_map(|n| half::f16::from_f32(n as f32 / 8.0).to_le_bytes())
        .collect();
    let mut tensors: Vec<(String, TensorView<'_>)> = matrices
        .iter()
        .enumerate()
        .map(|(n, bytes)| {
            let view = TensorView::new(Dtype::F32, vec![ROWS, COLUMNS], bytes).unwrap();
            (format!("layer.{n}.weight"), view)
        })
        .collect();
    let view = TensorView::new(Dtype::F16, vec![COLUMNS], &gamma).unwrap();
    tensors.push(("norm.weight".to_owned(), view));
    let path = folder.join("model.safetensors");
    safetensors::serialize_to_file(tensors, None, &path).unwrap();
    path
}

struct Model {
    params: Vec<Param>,
}

impl Model {
    fn new(checkpoint: &Checkpoint) -> Model {
        let declarations = Declarations::new(checkpoint, LoadOptions::default());
        let root = declarations.root();
        for n in 0..3 {
            root.sub("layer")
                .sub(n)
                .param("weight", [ROWS, COLUMNS], Role::Matrix);
        }
        root.sub("norm").param("weight", [COLUMNS], Role::Vector);
        Model {
            params: declarations.finish().unwrap(),
        }
    }

    fn load(
        &self,
        checkpoint: &Checkpoint,
        backend: &Backend,
        mapping: Mapping,
    ) -> Result<LoadReport> {
        LoadPlan::new(checkpoint, &self.params, backend.device(), mapping)?.load(
            backend,
            &Cancel::new(),
            &mut |_: &Progress| {},
        )
    }

    fn run(&self, backend: &mut Backend) -> Vec<f32> {
        let mut plan = Plan::build(backend, |g| {
            let x = g.input::<f32>("x", [2, COLUMNS]) * g.param(&self.params[3]);
            let y = x.matmul_transposed(g.param(&self.params[0]))
                + x.matmul_transposed(g.param(&self.params[1]))
                + x.matmul_transposed(g.param(&self.params[2]));
            g.output("y", y);
        })
        .unwrap();
        let x: Vec<f32> = (0..2 * COLUMNS).map(|n| (n % 17) as f32 - 8.0).collect();
        plan.set("x", &x).unwrap();
        plan.run(backend, &Cancel::new()).unwrap();
        plan.read("y").unwrap()
    }
}

fn backend(device: Device, ledger: &Ledger) -> Backend {
    Backend::new(device, &BackendOptions::default().threads(1).ledger(ledger)).unwrap()
}

fn fake(host_pointers: HostPointers, says: bool) -> FakeDevice {
    FakeDevice::new(FakeOptions {
        host_pointers,
        says_host_pointers: says,
        ..FakeOptions::default()
    })
}

/// The three matrices and the vector, read on the processor.
fn expected(checkpoint: &Checkpoint) -> Vec<f32> {
    let mut backend = backend(Device::cpu().unwrap(), &Ledger::default());
    let model = Model::new(checkpoint);
    model.load(checkpoint, &backend, Mapping::Never).unwrap();
    model.run(&mut backend)
}

#[test]
fn weights_in_place_give_the_same_numbers_on_the_processor() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path());
    let pages = sd_backend::pages(path.metadata().unwrap().len());
    let checkpoint = Checkpoint::open(&path).unwrap();
    let expected = expected(&checkpoint);
    let cpu = Device::cpu().unwrap();
    let ledger = Ledger::default();
    for mapping in [Mapping::Auto, Mapping::Always] {
        let mut backend = backend(cpu, &ledger);
        let (one, other) = (Model::new(&checkpoint), Model::new(&checkpoint));
        let report = one.load(&checkpoint, &backend, mapping).unwrap();
        assert_eq!(report.mapped, 3 * MATRIX);
        assert_eq!(report.copied, 0);
        assert_eq!(report.converted, (COLUMNS * 4) as u64);
        assert_eq!(report.bytes, pages + (COLUMNS * 4) as u64);
        // A second model on the same file shares the mapping.
        other.load(&checkpoint, &backend, mapping).unwrap();
        let used = ledger.report(cpu).used;
        assert_eq!(used.of(MemoryKind::Mapping), pages);
        assert_eq!(used.of(MemoryKind::Weights), 2 * (COLUMNS * 4) as u64);
        assert_eq!(used.of(MemoryKind::Staging), 0);
        assert_eq!(one.run(&mut backend), expected);
        drop(one);
        assert_eq!(other.run(&mut backend), expected);
        drop(other);
        // The checkpoint keeps the mapping for the next model, until it is told not to.
        assert_eq!(ledger.report(cpu).used.total(), pages);
        checkpoint.release_mappings();
        assert_eq!(ledger.report(cpu).used.total(), 0);
    }
}

#[test]
fn a_plan_says_what_a_load_takes() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(file(folder.path())).unwrap();
    let model = Model::new(&checkpoint);
    for (device, mapping) in [
        (Device::cpu().unwrap(), Mapping::Auto),
        (Device::cpu().unwrap(), Mapping::Never),
        (fake(HostPointers::Work, true).device(), Mapping::Auto),
        (fake(HostPointers::Work, true).device(), Mapping::Never),
    ] {
        let plan = LoadPlan::new(&checkpoint, &model.params, device, mapping).unwrap();
        let cost = plan.cost();
        let ledger = Ledger::default();
        let report = plan
            .load(
                &backend(device, &ledger),
                &Cancel::new(),
                &mut |_: &Progress| {},
            )
            .unwrap();
        let used = ledger.report(device).used;
        assert_eq!(report.bytes, cost.resident());
        assert_eq!(used.of(MemoryKind::Mapping), cost.mapped);
        assert_eq!(used.of(MemoryKind::Weights), cost.allocated);
        assert_eq!(cost.mapped == 0, mapping == Mapping::Never);
        assert!(cost.staging > 0);
        checkpoint.release_mappings();
    }
}

#[test]
fn a_device_is_asked_as_its_capabilities_say_or_past_them() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(file(folder.path())).unwrap();
    let expected = expected(&checkpoint);
    for (host_pointers, says, mapping, is_mapped) in [
        (HostPointers::Work, true, Mapping::Auto, true),
        (HostPointers::Work, true, Mapping::Never, false),
        (HostPointers::Work, false, Mapping::Auto, false),
        (HostPointers::Work, false, Mapping::Always, true),
        (HostPointers::Missing, true, Mapping::Always, false),
        (HostPointers::Refuse, true, Mapping::Auto, false),
        (HostPointers::FailLikeMetal, true, Mapping::Auto, false),
        (HostPointers::ReadWrong, true, Mapping::Auto, false),
    ] {
        let what = format!("{host_pointers:?} {says} {mapping:?}");
        let (fake, ledger) = (fake(host_pointers, says), Ledger::default());
        let mut backend = backend(fake.device(), &ledger);
        let model = Model::new(&checkpoint);
        let report = model.load(&checkpoint, &backend, mapping).unwrap();
        assert_eq!(report.mapped > 0, is_mapped, "{what}");
        let uploaded = fake.counts().uploaded;
        assert_eq!(uploaded < MATRIX, is_mapped, "{what}: {uploaded}");
        assert_eq!(report.mapped + report.copied, 3 * MATRIX, "{what}");
        assert_eq!(model.run(&mut backend), expected, "{what}");
        drop((model, backend));
        checkpoint.release_mappings();
        let counts = fake.counts();
        assert_eq!((counts.buffers, counts.bytes), (0, 0), "{what}");
        assert_eq!(ledger.report(fake.device()).used.total(), 0, "{what}");
    }
}

#[test]
fn a_file_that_cannot_be_mapped_is_warned_of_once() {
    struct Warnings(AtomicUsize, Mutex<String>);
    impl tracing::Subscriber for Warnings {
        fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
            *metadata.level() == tracing::Level::WARN
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, event: &tracing::Event<'_>) {
            struct Text<'t>(&'t mut String);
            impl tracing::field::Visit for Text<'_> {
                fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                    self.0.push_str(&format!("{value:?} "));
                }
            }
            self.0.fetch_add(1, Ordering::SeqCst);
            event.record(&mut Text(&mut self.1.lock().unwrap()));
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(file(folder.path())).unwrap();
    let fake = fake(HostPointers::Refuse, true);
    let subscriber = std::sync::Arc::new(Warnings(AtomicUsize::new(0), Mutex::default()));
    tracing::subscriber::with_default(std::sync::Arc::clone(&subscriber), || {
        for _ in 0..3 {
            let backend = backend(fake.device(), &Ledger::default());
            let model = Model::new(&checkpoint);
            model.load(&checkpoint, &backend, Mapping::Auto).unwrap();
        }
    });
    let text = subscriber.1.lock().unwrap();
    assert_eq!(subscriber.0.load(Ordering::SeqCst), 1, "{text}");
    assert!(text.contains("model.safetensors"), "{text}");
    assert!(text.contains("read instead of mapped"), "{text}");
}

#[test]
fn small_buffers_and_padded_rows_are_honoured() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(file(folder.path())).unwrap();
    let expected = expected(&checkpoint);
    for (largest_buffer, padding, buffers) in [
        (usize::MAX, 1, 1),
        (2 * MATRIX as usize, 1, 2),
        (MATRIX as usize, 1, 4),
        (usize::MAX, MATRIX as usize * 2, 1),
    ] {
        let fake = FakeDevice::new(FakeOptions {
            largest_buffer,
            padding,
            host_pointers: HostPointers::Work,
            says_host_pointers: true,
            ..FakeOptions::default()
        });
        let mut backend = backend(fake.device(), &Ledger::default());
        let model = Model::new(&checkpoint);
        let mapping = if padding > 1 {
            Mapping::Always
        } else {
            Mapping::Never
        };
        let report = model.load(&checkpoint, &backend, mapping).unwrap();
        assert_eq!(fake.counts().buffers, buffers);
        // What the device wants padded is not used in a file, where the next tensor follows.
        assert_eq!(report.mapped, 0);
        assert_eq!(model.run(&mut backend), expected);
    }
}

#[test]
fn whatever_allocation_fails_nothing_is_left_behind() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(file(folder.path())).unwrap();
    let expected = expected(&checkpoint);
    for mapping in [Mapping::Auto, Mapping::Never] {
        let fake = FakeDevice::new(FakeOptions {
            host_pointers: HostPointers::Work,
            says_host_pointers: true,
            largest_buffer: MATRIX as usize,
            ..FakeOptions::default()
        });
        let ledger = Ledger::default();
        let mut backend = backend(fake.device(), &ledger);
        let model = Model::new(&checkpoint);
        let mut refused = 0;
        for nth in 1..=12 {
            fake.fail_allocation(nth);
            let outcome = model.load(&checkpoint, &backend, mapping);
            fake.fail_allocation(0);
            match outcome {
                Ok(_) => assert_eq!(model.run(&mut backend), expected),
                Err(error) => {
                    refused += 1;
                    assert!(error.is_out_of_memory(), "{error}");
                    assert!(model.params.iter().all(|param| !param.is_loaded()));
                }
            }
            sd_graph::unload(&model.params);
            checkpoint.release_mappings();
            assert_eq!(ledger.report(fake.device()).used.total(), 0);
            assert_eq!(fake.counts().buffers, 0);
        }
        // Four buffers; or, with a mapping (which is read instead if it fails), the one for the vector.
        assert_eq!(refused, if mapping == Mapping::Never { 4 } else { 1 });
    }
}
