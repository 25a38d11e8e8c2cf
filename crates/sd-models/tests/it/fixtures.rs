//! Reading fixtures, running modules on every device, comparing numbers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use sd_backend::{Backend, BackendOptions, DType, Device};
use sd_graph::{
    Cancel, Checkpoint, Declarations, Graph, LoadOptions, Plan, Progress, Scope, Tensor, load,
};

/// A folder of `tests/fixtures`.
pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// The tiny trained checkpoint.
pub(crate) fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-qwen-image-2.1")
}

/// One array of a case.
#[derive(Debug, Clone)]
pub(crate) struct Array {
    pub(crate) shape: Vec<usize>,
    pub(crate) f32: Vec<f32>,
    pub(crate) i32: Vec<i32>,
}

/// Everything that was recorded in one file.
#[derive(Debug)]
pub(crate) struct Case {
    arrays: BTreeMap<String, Array>,
    pub(crate) meta: serde_json::Value,
}

impl Case {
    pub(crate) fn read(path: &Path) -> Case {
        let bytes =
            std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let meta = metadata
            .metadata()
            .as_ref()
            .and_then(|map| map.get("meta").cloned());
        let arrays = file
            .iter()
            .map(|(name, view)| {
                let data = view.data();
                let mut array = Array {
                    shape: view.shape().to_vec(),
                    f32: Vec::new(),
                    i32: Vec::new(),
                };
                match view.dtype() {
                    safetensors::Dtype::F32 => {
                        array.f32 = data
                            .as_chunks()
                            .0
                            .iter()
                            .map(|&b| f32::from_le_bytes(b))
                            .collect()
                    }
                    safetensors::Dtype::I32 => {
                        array.i32 = data
                            .as_chunks()
                            .0
                            .iter()
                            .map(|&b| i32::from_le_bytes(b))
                            .collect()
                    }
                    safetensors::Dtype::U8 => {
                        array.i32 = data.iter().map(|&b| i32::from(b)).collect()
                    }
                    other => panic!("{name} is {other:?}"),
                }
                (name.to_owned(), array)
            })
            .collect();
        Case {
            arrays,
            meta: meta.map_or(serde_json::Value::Null, |meta| {
                serde_json::from_str(&meta).unwrap()
            }),
        }
    }

    pub(crate) fn get(&self, name: &str) -> &Array {
        self.arrays
            .get(name)
            .unwrap_or_else(|| panic!("no {name}; there are {:?}", self.arrays.keys()))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.arrays.contains_key(name)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.arrays.keys().map(String::as_str)
    }
}

/// All `case_*` files of a fixture folder, by their names.
pub(crate) fn cases(folder_name: &str) -> Vec<(String, Case)> {
    let mut cases: Vec<(String, Case)> = std::fs::read_dir(folder(folder_name))
        .unwrap()
        .filter_map(|entry| {
            let path = entry.unwrap().path();
            let name = path
                .file_stem()?
                .to_str()?
                .strip_prefix("case_")?
                .to_owned();
            Some((name, Case::read(&path)))
        })
        .collect();
    cases.sort_by(|a, b| a.0.cmp(&b.0));
    cases
}

/// A module with the weights of a fixture folder, on one device.
pub(crate) struct Loaded<M> {
    pub(crate) module: M,
    pub(crate) backend: Backend,
}

/// The devices that everything is tested on: those of the build, and those of the libraries in the folder that the
/// environment names.
pub(crate) fn devices() -> Vec<Device> {
    if let Some(folder) = std::env::var_os("SD_TEST_BACKENDS") {
        Device::load_backends(folder).unwrap();
    }
    Device::all()
}

/// Loads a module on every device of the build, in single precision.
pub(crate) fn on_all_devices<M>(weights: &Path, new: impl Fn(&Scope<'_>) -> M) -> Vec<Loaded<M>> {
    on_all_devices_of(&Checkpoint::open(weights).unwrap(), new)
}

/// As [`on_all_devices`], of a checkpoint.
pub(crate) fn on_all_devices_of<M>(
    checkpoint: &Checkpoint,
    new: impl Fn(&Scope<'_>) -> M,
) -> Vec<Loaded<M>> {
    on_all_devices_as(checkpoint, DType::F32, new)
}

/// As [`on_all_devices_of`], with all weights in one type.
pub(crate) fn on_all_devices_as<M>(
    checkpoint: &Checkpoint,
    dtype: DType,
    new: impl Fn(&Scope<'_>) -> M,
) -> Vec<Loaded<M>> {
    devices()
        .into_iter()
        .map(|device| {
            let declarations =
                Declarations::new(checkpoint, LoadOptions::default().weight_type(dtype));
            let module = new(&declarations.root());
            let params = declarations.finish().unwrap();
            let backend = Backend::new(device, &BackendOptions::default().threads(2)).unwrap();
            load(
                checkpoint,
                &params,
                &backend,
                &Cancel::new(),
                &mut |_: &Progress| {},
            )
            .unwrap();
            Loaded { module, backend }
        })
        .collect()
}

impl<M> Loaded<M> {
    /// Runs `build` on named inputs and gives the output `result`.
    pub(crate) fn run(
        &mut self,
        inputs: &[(&str, &[f32])],
        ids: &[(&str, &[i32])],
        build: impl for<'g> FnOnce(&M, Graph<'g>) -> Tensor<'g>,
    ) -> Vec<f32> {
        // A backend for each graph: Mesa's software driver (22.3) crashes when buffers were freed between two graphs.
        self.backend =
            Backend::new(self.backend.device(), &BackendOptions::default().threads(2)).unwrap();
        let mut plan = Plan::build(&self.backend, |g| {
            g.output("result", build(&self.module, g))
        })
        .unwrap();
        for (name, values) in inputs {
            plan.set(name, values).unwrap();
        }
        for (name, values) in ids {
            plan.set(name, values).unwrap();
        }
        plan.run(&mut self.backend, &Cancel::new()).unwrap();
        plan.read("result").unwrap()
    }

    /// Whether products are summed in single precision throughout; other devices may multiply in half precision.
    pub(crate) fn is_processor(&self) -> bool {
        self.backend.device().kind() == sd_backend::DeviceKind::Cpu
    }
}

/// Largest absolute difference; infinite where one is no number.
pub(crate) fn max_error(is: &[f32], should: &[f32]) -> f32 {
    assert_eq!(is.len(), should.len());
    is.iter()
        .zip(should)
        .map(|(is, should)| (is - should).abs())
        .fold(0.0, |worst, error| {
            if error.is_nan() {
                f32::INFINITY
            } else {
                worst.max(error)
            }
        })
}

/// `|is - should| / |should|` in the Euclidean norm.
pub(crate) fn relative_l2(is: &[f32], should: &[f32]) -> f64 {
    assert_eq!(is.len(), should.len());
    let square = |value: f32| f64::from(value) * f64::from(value);
    let error: f64 = is
        .iter()
        .zip(should)
        .map(|(is, should)| square(is - should))
        .sum();
    let norm: f64 = should.iter().map(|&value| square(value)).sum();
    (error / norm).sqrt()
}

/// Compares a result with the reference: on the processor the largest error in single precision, elsewhere, where
/// products may pass through half precision, the relative error that half-precision weights cost by measurement
/// (0.002 to 0.02).
#[track_caller]
pub(crate) fn assert_close<M>(
    on: &Loaded<M>,
    name: &str,
    is: &[f32],
    should: &[f32],
    tolerance: f32,
) {
    if on.is_processor() {
        let error = max_error(is, should);
        println!(
            "{name}: largest error {error:e}, relative {:e}",
            relative_l2(is, should)
        );
        assert!(
            error <= tolerance,
            "{name}: off by {error:e}, more than {tolerance:e}"
        );
    } else {
        let error = relative_l2(is, should);
        println!("{name} on {}: relative {error:e}", on.backend.device());
        assert!(
            error <= 0.02,
            "{name} on {}: relative error {error:e}",
            on.backend.device()
        );
    }
}

/// Peak signal-to-noise ratio in dB of values from -1 to 1.
pub(crate) fn psnr(is: &[f32], should: &[f32]) -> f64 {
    let mean = is
        .iter()
        .zip(should)
        .map(|(a, b)| f64::from(a - b).powi(2))
        .sum::<f64>()
        / is.len() as f64;
    20.0 * 2.0_f64.log10() - 10.0 * mean.log10()
}
