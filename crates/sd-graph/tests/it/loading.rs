//! Declaring against a checkpoint and loading from it.

use safetensors::tensor::{Dtype, TensorView};
use sd_backend::{
    Backend, BackendOptions, DType, Device, Ledger, MemoryBudget, MemoryBudgets, MemoryKind,
};
use sd_graph::{
    Cancel, Checkpoint, Declarations, Error, LoadOptions, Plan, Progress, Role, StoredType, load,
};

/// A file with a matrix in half precision, a norm's weight with idle dimensions, and a counter nobody needs.
fn file(folder: &std::path::Path) -> std::path::PathBuf {
    let matrix: Vec<u8> = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]
        .iter()
        .flat_map(|&v| half::f16::from_f32(v).to_le_bytes())
        .collect();
    let gamma: Vec<u8> = [0.5_f32, 1.0, 2.0]
        .iter()
        .flat_map(|v| v.to_le_bytes())
        .collect();
    let counter = 7_i64.to_le_bytes();
    let tensors = [
        (
            "layer.weight",
            TensorView::new(Dtype::F16, vec![2, 3], &matrix).unwrap(),
        ),
        (
            "norm.gamma",
            TensorView::new(Dtype::F32, vec![3, 1, 1], &gamma).unwrap(),
        ),
        (
            "counter",
            TensorView::new(Dtype::I64, vec![], &counter).unwrap(),
        ),
    ];
    let path = folder.join("model.safetensors");
    safetensors::serialize_to_file(tensors, None, &path).unwrap();
    path
}

#[test]
fn what_was_declared_is_loaded_and_computed_with() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(file(folder.path())).unwrap();
    for (convert, bytes_converted) in [
        (None, false),
        (Some(DType::F32), true),
        (Some(DType::F16), false),
    ] {
        for device in crate::devices() {
            let options = convert.map_or(LoadOptions::default(), |dtype| {
                LoadOptions::default().weight_type(dtype)
            });
            let declarations = Declarations::new(&checkpoint, options);
            let root = declarations.root();
            root.ignore("counter");
            let weight = root.sub("layer").param("weight", [2, 3], Role::Matrix);
            let gamma = root.sub("norm").param("gamma", [3], Role::Vector);
            let params = declarations.finish().unwrap();
            assert_eq!(weight.dtype(), convert.unwrap_or(DType::F16));
            assert_eq!(gamma.dtype(), DType::F32);
            assert!(!weight.is_loaded());

            let mut events = 0;
            let mut count = |_: &Progress| events += 1;
            let ledger = Ledger::default();
            let options = BackendOptions::default().threads(1).ledger(&ledger);
            let mut backend = Backend::new(device, &options).unwrap();
            let report = load(&checkpoint, &params, &backend, &Cancel::new(), &mut count).unwrap();
            assert_eq!(
                ledger.report(device).used.of(MemoryKind::Weights),
                report.bytes
            );
            assert_eq!(events, 2);
            assert!(weight.is_loaded() && report.bytes >= (weight.bytes() + gamma.bytes()) as u64);
            assert_eq!(report.converted > 0, bytes_converted);

            let mut plan = Plan::build(&backend, |g| {
                let x = g.input::<f32>("x", [1, 3]) * g.param(&gamma);
                g.output("y", x.matmul_transposed(g.param(&weight)));
            })
            .unwrap();
            plan.set("x", &[2.0_f32, 1.0, 0.5]).unwrap();
            plan.run(&mut backend, &Cancel::new()).unwrap();
            assert_eq!(plan.read::<f32>("y").unwrap(), [6.0, 15.0]);
        }
    }
}

#[test]
fn everything_wrong_is_told_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(file(folder.path())).unwrap();
    let declarations = Declarations::new(&checkpoint, LoadOptions::default());
    let root = declarations.root();
    root.param("layer.weight", [3, 2], Role::Matrix);
    root.param("layer.bias", [2], Role::Vector);
    root.param("counter", [1], Role::Matrix);
    let text = declarations.finish().unwrap_err().to_string();
    for part in [
        "model.safetensors does not fit the model",
        "1 missing: layer.bias",
        "layer.weight ([2, 3] instead of [3, 2])",
        "counter (I64)",
        "1 unknown: norm.gamma",
    ] {
        assert!(
            text.to_lowercase().contains(&part.to_lowercase()),
            "`{part}` in `{text}`"
        );
    }
}

#[test]
fn a_long_list_is_cut_short() {
    let table = (0..100).map(|index| (format!("tensor.{index}"), StoredType::F32, vec![1]));
    let checkpoint = Checkpoint::from_table("a table", table).unwrap();
    let error = Declarations::new(&checkpoint, LoadOptions::default())
        .finish()
        .unwrap_err();
    assert_eq!(error.unused.len(), 100);
    assert!(error.to_string().contains("and 92 more"), "{error}");
}

#[test]
fn a_parameter_that_was_not_loaded_is_named() {
    let checkpoint =
        Checkpoint::from_table("a table", [("w".to_owned(), StoredType::F32, vec![1, 2])]).unwrap();
    let declarations = Declarations::new(&checkpoint, LoadOptions::default());
    let weight = declarations.root().param("w", [1, 2], Role::Matrix);
    let backend = Backend::new(Device::cpu().unwrap(), &BackendOptions::default()).unwrap();
    let error = Plan::build(&backend, |g| {
        g.output(
            "y",
            g.input::<f32>("x", [1, 2])
                .matmul_transposed(g.param(&weight)),
        );
    })
    .unwrap_err();
    assert!(matches!(error, Error::NotLoaded { name } if name == "w"));
}

#[test]
fn a_cancelled_load_leaves_nothing_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(file(folder.path())).unwrap();
    let declarations = Declarations::new(&checkpoint, LoadOptions::default());
    let root = declarations.root();
    let weight = root.param("layer.weight", [2, 3], Role::Matrix);
    root.param("norm.gamma", [3], Role::Vector);
    root.ignore("counter");
    let params = declarations.finish().unwrap();
    let cancel = Cancel::new();
    let mut cancel_after_one = |_: &Progress| cancel.cancel();
    let backend = Backend::new(Device::cpu().unwrap(), &BackendOptions::default()).unwrap();
    let error = load(
        &checkpoint,
        &params,
        &backend,
        &cancel,
        &mut cancel_after_one,
    )
    .unwrap_err();
    assert!(error.is_cancelled());
    assert!(!weight.is_loaded());
    assert_eq!(backend.ledger().report(backend.device()).used.total(), 0);
}

#[test]
fn a_budget_holds_for_weights_and_plans() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(file(folder.path())).unwrap();
    let device = Device::cpu().unwrap();
    for (budget, weights_fit) in [(63, false), (64, true)] {
        let ledger = Ledger::new(MemoryBudgets::every(MemoryBudget::Bytes(budget)));
        let backend = Backend::new(device, &BackendOptions::default().ledger(&ledger)).unwrap();
        let declarations = Declarations::new(&checkpoint, LoadOptions::default());
        let root = declarations.root();
        let weight = root.param("layer.weight", [2, 3], Role::Matrix);
        root.param("norm.gamma", [3], Role::Vector);
        root.ignore("counter");
        let params = declarations.finish().unwrap();
        let outcome = load(
            &checkpoint,
            &params,
            &backend,
            &Cancel::new(),
            &mut |_: &Progress| {},
        );
        assert_eq!(outcome.is_ok(), weights_fit, "{budget}");
        if let Err(error) = outcome {
            assert!(error.is_out_of_memory());
            assert!(
                error.to_string().contains("of the budget of 63 B"),
                "{error}"
            );
        } else {
            let error = Plan::build(&backend, |g| {
                g.output(
                    "y",
                    g.input::<f32>("x", [1, 3])
                        .matmul_transposed(g.param(&weight)),
                );
            })
            .unwrap_err();
            assert!(error.is_out_of_memory(), "{error}");
            assert_eq!(ledger.report(device).used.total(), 64);
        }
        drop((params, weight));
        assert_eq!(ledger.report(device).used.total(), 0);
    }
}
