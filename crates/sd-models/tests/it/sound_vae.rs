//! The VAE of MiniMax H3 for sound, against the reference.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use sd_backend::{Backend, BackendOptions, Device, DeviceKind, Ledger, MemoryBudgets};
use sd_graph::{Cancel, Progress};
use sd_models::minimax_h3::sound_vae::{Latents, SoundVae};
use sd_models::{Error, Sound};

use crate::fixtures::{Array, Case, cases, folder, max_error, relative_l2};

/// Largest error on a processor: sums of a few hundred products in single precision through some thirty layers: measured 2e-5 for latents
/// of up to 7, 5e-6 for samples of up to 1, both 2e-6 of their size. The reference moves as much between its own kernels.
const TOLERANCE: f32 = 5e-5;

/// Relative error elsewhere: products may pass through half precision.
const HALF_PRECISION: f64 = 0.02;

fn quiet() -> impl FnMut(&Progress) {
    |_: &Progress| {}
}

fn backend(device: Device) -> Backend {
    Backend::new(device, &BackendOptions::default().threads(2)).unwrap()
}

/// The processor with so many bytes.
fn granted(bytes: u64) -> Backend {
    let budgets: MemoryBudgets = bytes.to_string().parse().unwrap();
    let options = BackendOptions::default().ledger(&Ledger::new(budgets));
    Backend::new(Device::cpu().unwrap(), &options.threads(2)).unwrap()
}

fn backends() -> impl Iterator<Item = Backend> {
    let devices = crate::fixtures::devices().into_iter();
    devices.map(backend)
}

fn processor() -> Backend {
    backend(Device::cpu().unwrap())
}

fn open() -> SoundVae {
    SoundVae::open(&folder("minimax_h3_sound_vae")).unwrap()
}

fn sound(array: &Array) -> Sound {
    let channels = array.f32.chunks_exact(array.shape[1]);
    Sound::new(32_000, channels.map(<[f32]>::to_vec).collect()).unwrap()
}

fn latents(array: &Array) -> Latents {
    Latents {
        count: array.shape[1],
        values: array.f32.clone(),
    }
}

#[track_caller]
fn assert_near(backend: &Backend, what: &str, is: &[f32], should: &[f32]) {
    let (error, relative) = (max_error(is, should), relative_l2(is, should));
    let device = backend.device();
    println!("{what} on {device}: {error:e}, relative {relative:e}");
    match device.kind() {
        DeviceKind::Cpu => assert!(error <= TOLERANCE, "{what}: off by {error:e}"),
        _ => assert!(
            relative <= HALF_PRECISION,
            "{what} on {device}: {relative:e}"
        ),
    }
}

fn assert_decodes(vae: &mut SoundVae, backend: &mut Backend, what: &str, case: &Case) {
    let decoded = vae
        .decode(
            backend,
            &latents(case.get("in.z")),
            &Cancel::new(),
            &mut quiet(),
        )
        .unwrap();
    let expected = case.get("out.decoded");
    assert_eq!(decoded.rate(), 32_000);
    assert_near(backend, what, &decoded.channels().concat(), &expected.f32);
}

fn assert_encodes(vae: &mut SoundVae, backend: &mut Backend, what: &str, case: &Case) {
    let encoded = vae
        .encode(
            backend,
            &sound(case.get("in.samples")),
            &Cancel::new(),
            &mut quiet(),
        )
        .unwrap();
    let expected = case.get("out.latents");
    assert_eq!(encoded.count, expected.shape[1], "{what}");
    assert_near(backend, what, &encoded.values, &expected.f32);
}

/// The longest goes through both ways in pieces, which leave no seam.
#[test]
fn sound_comes_and_goes_as_through_the_reference() {
    let cases = cases("minimax_h3_sound_vae");
    assert_eq!(cases.len(), 4);
    for mut backend in backends() {
        let mut vae = open();
        for (name, case) in &cases {
            assert_encodes(&mut vae, &mut backend, &format!("{name} encoded"), case);
            assert_decodes(&mut vae, &mut backend, &format!("{name} decoded"), case);
        }
    }
}

/// A budget under which a long sound has to be cut shorter changes nothing but time; what is said to be needed is enough.
#[test]
fn little_memory_makes_shorter_pieces_of_the_same_sound() {
    let path = folder("minimax_h3_sound_vae/case_3000.safetensors");
    let case = Case::read(&path);
    let mut vae = open();
    let (weights, beside) = vae.decoding_need(&processor(), 300).unwrap();
    let mut little = granted(weights + beside / 2);
    assert_decodes(&mut vae, &mut little, "decoded in little memory", &case);
    vae.unload();
    let (weights, beside) = vae.encoding_need(&processor(), 3000).unwrap();
    let mut just = granted(weights + beside);
    assert_encodes(&mut vae, &mut just, "encoded in what is said", &case);
    vae.unload();
    let mut none = granted(4096);
    let outcome = vae.decode(
        &mut none,
        &latents(case.get("in.z")),
        &Cancel::new(),
        &mut quiet(),
    );
    assert!(outcome.unwrap_err().is_out_of_memory());
}

/// Kernels folded, everything behind a prefix, statistics as tensors and a stranger beside: as single files are.
fn single_file(path: &Path) {
    let stored = Case::read(&folder("minimax_h3_sound_vae/model.safetensors"));
    let config = std::fs::read_to_string(folder("minimax_h3_sound_vae/config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    for name in stored.names() {
        let array = stored.get(name);
        if name.ends_with(".weight_g") {
            continue;
        }
        let Some(place) = name.strip_suffix(".weight_v") else {
            tensors.insert(name.to_owned(), (array.shape.clone(), array.f32.clone()));
            continue;
        };
        let lengths = &stored.get(&format!("{place}.weight_g")).f32;
        let rows = array.f32.chunks_exact(array.f32.len() / array.shape[0]);
        let folded = rows.zip(lengths).flat_map(|(row, length)| {
            let norm = row
                .iter()
                .map(|v| f64::from(*v).powi(2))
                .sum::<f64>()
                .sqrt();
            row.iter()
                .map(move |v| (f64::from(*v) * f64::from(*length) / norm) as f32)
        });
        let folded = folded.collect();
        tensors.insert(format!("{place}.weight"), (array.shape.clone(), folded));
    }
    for name in ["latents_mean", "latents_std"] {
        let values = config[name].as_array().unwrap();
        let values = values.iter().map(|v| v.as_f64().unwrap() as f32).collect();
        tensors.insert(name.to_owned(), (vec![8], values));
    }
    let bytes: BTreeMap<String, (Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .map(|(name, (shape, values))| {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes());
            (format!("audio_vae.{name}"), (shape, bytes.collect()))
        })
        .collect();
    let mut views: Vec<(&str, TensorView<'_>)> = bytes
        .iter()
        .map(|(name, (shape, bytes))| {
            let view = TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap();
            (name.as_str(), view)
        })
        .collect();
    views.push((
        "other.weight",
        TensorView::new(Dtype::F32, vec![1], &[0; 4]).unwrap(),
    ));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn single_files_with_folded_kernels_are_the_same() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("sound.safetensors");
    single_file(&path);
    let mut backend = processor();
    let case = Case::read(&folder("minimax_h3_sound_vae/case_133.safetensors"));
    // What names and shapes say; how many heads there are they do not say, and the published model has more than this.
    let mut vae = SoundVae::open(&path).unwrap();
    assert_eq!(vae.config().hop(), 10);
    assert_decodes(&mut vae, &mut backend, "by shapes", &case);
    let config = folder("minimax_h3_sound_vae/config.json");
    std::fs::copy(config, place.path().join("config.json")).unwrap();
    let mut vae = SoundVae::open(&path).unwrap();
    assert_decodes(&mut vae, &mut backend, "folded", &case);
    assert_encodes(&mut vae, &mut backend, "folded", &case);
    let found = sd_models::identify(&sd_graph::Checkpoint::open(&path).unwrap());
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].family(), "MiniMax H3, sound");
    assert_eq!(found[0].prefix(), "audio_vae.");
}

#[test]
fn what_is_no_sound_is_named() {
    let mut backend = processor();
    let cancel = Cancel::new();
    let mut vae = open();
    let mut text = |latents: Latents| {
        vae.decode(&mut backend, &latents, &cancel, &mut quiet())
            .unwrap_err()
            .to_string()
    };
    let of = |count: usize, values: usize| Latents {
        count,
        values: vec![0.0; values],
    };
    assert_eq!(text(of(0, 0)), "0 latents instead of 1");
    assert_eq!(text(of(2, 31)), "31 latent values instead of 32");
    let empty = Sound::new(32_000, vec![vec![]]).unwrap();
    let error = vae
        .encode(&mut backend, &empty, &cancel, &mut quiet())
        .unwrap_err();
    assert_eq!(error.to_string(), "0 samples instead of 1");
    let long = Sound::new(32_000, vec![vec![0.0; 40_961]]).unwrap();
    let error = vae
        .encode(&mut backend, &long, &cancel, &mut quiet())
        .unwrap_err();
    assert_eq!(error.to_string(), "40961 samples instead of 40960");
    cancel.cancel();
    let error = vae
        .decode(&mut backend, &of(1, 16), &cancel, &mut quiet())
        .unwrap_err();
    assert!(error.is_cancelled());
    // Another model's folder.
    let error = SoundVae::open(&folder("wan21_vae")).unwrap_err();
    assert!(matches!(error, Error::UnknownFile { .. }), "{error}");
}

/// One channel at another rate is two channels at this one.
#[test]
fn any_sound_is_brought_to_what_the_model_hears() {
    let mut backend = processor();
    let mut vae = open();
    let tone = |rate: u32| -> Vec<f32> {
        let place = |at: u32| at as f32 / rate as f32 * 440.0 * std::f32::consts::TAU;
        (0..rate / 100).map(|at| place(at).sin()).collect()
    };
    let mono = Sound::new(48_000, vec![tone(48_000)]).unwrap();
    let stereo = mono.stereo().resampled(32_000).unwrap();
    let cancel = Cancel::new();
    let is = vae
        .encode(&mut backend, &mono, &cancel, &mut quiet())
        .unwrap();
    assert_eq!(
        is,
        vae.encode(&mut backend, &stereo, &cancel, &mut quiet())
            .unwrap()
    );
    assert_eq!(is.count, 32);
}
