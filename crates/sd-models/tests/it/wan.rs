//! The VAEs of the WAN family against diffusers on random weights: pictures and clips, both ways, whole and in a stream.

use std::path::Path;

use sd_backend::{Backend, BackendOptions, DType, DeviceKind, MemoryKind};
use sd_graph::{Cancel, LoadOptions};
use sd_models::wan_vae::{Clip, Tiling, WanVae, Work};
use sd_models::{Circular, Error};

use crate::fixtures::{Array, Case, cases, devices, folder, psnr, relative_l2};
use crate::wan_files::changed;

/// Relative error allowed on the processor. The reference itself moves by 1e-6 between kernels of single precision; sums
/// here run in another order, three layers of time taps at a time.
pub(crate) const TOLERANCE: f64 = 1e-4;

/// Elsewhere products may pass through half precision or TF32, which costs 0.002 to 0.042 by measurement: most where a frame
/// has one pixel, whose norms have nothing to average.
const HALF_PRECISION: f64 = 0.06;

pub(crate) fn open(folder: &Path) -> WanVae {
    WanVae::open(folder, &LoadOptions::default()).unwrap()
}

pub(crate) fn backends() -> impl Iterator<Item = Backend> {
    devices()
        .into_iter()
        .map(|device| Backend::new(device, &BackendOptions::default().threads(2)).unwrap())
}

pub(crate) fn processor() -> Backend {
    backends()
        .find(|backend| backend.device().kind() == DeviceKind::Cpu)
        .unwrap()
}

pub(crate) fn clip(array: &Array) -> Clip {
    let &[frames, channels, height, width] = &array.shape[..] else {
        panic!("{:?}", array.shape)
    };
    Clip {
        frames,
        channels,
        height,
        width,
        values: array.f32.clone(),
    }
}

pub(crate) fn case(folder: &str, name: &str) -> Case {
    let mut cases = cases(folder);
    let at = cases.iter().position(|(is, _)| is == name).unwrap();
    cases.swap_remove(at).1
}

#[track_caller]
pub(crate) fn assert_near(backend: &Backend, name: &str, is: &Clip, should: &Clip) {
    let shape = |clip: &Clip| [clip.frames, clip.channels, clip.height, clip.width];
    assert_eq!(shape(is), shape(should), "{name}");
    let error = relative_l2(&is.values, &should.values);
    println!("{name} on {}: relative {error:e}", backend.device());
    let allowed = match backend.device().kind() {
        DeviceKind::Cpu => TOLERANCE,
        _ => HALF_PRECISION,
    };
    assert!(
        error <= allowed,
        "{name} on {}: {error:e}",
        backend.device()
    );
}

#[test]
fn clips_and_pictures_are_the_references() {
    for (name, count) in [("wan21_vae", 9), ("wan22_vae", 5), ("qwenimage_vae", 2)] {
        for mut backend in backends() {
            let mut vae = open(&folder(name));
            let cases = cases(name);
            assert_eq!(cases.len(), count);
            for (case_name, case) in cases {
                let cancel = Cancel::new();
                let encoded = vae
                    .encode(
                        &mut backend,
                        &clip(case.get("in.pixels")),
                        Tiling::Whole,
                        &cancel,
                    )
                    .unwrap()
                    .0;
                let name = format!("{name} {case_name}");
                let mean = clip(case.get("out.mean"));
                assert_near(&backend, &format!("{name} encoded"), &encoded, &mean);
                let decoded = vae
                    .decode(
                        &mut backend,
                        &clip(case.get("in.z")),
                        Tiling::Whole,
                        &cancel,
                    )
                    .unwrap()
                    .0;
                let should = clip(case.get("out.decoded"));
                assert_near(&backend, &format!("{name} decoded"), &decoded, &should);
            }
        }
    }
}

#[test]
fn pictures_of_qwen_image_2_1_are_the_references() {
    for name in ["qwenimage21_vae", "qwenimage21_vae_variant"] {
        for mut backend in backends() {
            let mut vae = open(&folder(name));
            let mut compared = 0;
            for (case_name, case) in cases(name) {
                let name = format!("{name} {case_name}");
                if case.has("in.pixels") {
                    let pixels = clip(case.get("in.pixels"));
                    let mut encoded = vae
                        .encode(&mut backend, &pixels, Tiling::Whole, &Cancel::new())
                        .unwrap()
                        .0;
                    assert_near(&backend, &name, &encoded, &clip(case.get("out.mean")));
                    vae.config().normalize(&mut encoded);
                    let normalized = clip(case.get("out.normalized"));
                    assert_near(&backend, &name, &encoded, &normalized);
                    compared += 1;
                } else if case.get("in.z").shape[0] == 1 {
                    let mut z = clip(case.get("in.normalized"));
                    vae.config().denormalize(&mut z);
                    let decoded = vae
                        .decode(&mut backend, &z, Tiling::Whole, &Cancel::new())
                        .unwrap()
                        .0;
                    assert_near(&backend, &name, &decoded, &clip(case.get("out.decoded")));
                    compared += 1;
                }
            }
            assert!(compared >= 4, "{compared}");
        }
    }
}

/// Kernels in half precision round what they see, so that what is kept for the next chunk may be rounded before.
#[test]
fn clips_in_half_precision_are_near_the_references() {
    for mut backend in backends() {
        let options = LoadOptions::default().weight_type(DType::F16);
        let mut vae = WanVae::open(&folder("wan21_vae"), &options).unwrap();
        let case = case("wan21_vae", "17_8x16");
        let z = clip(case.get("in.z"));
        let decoded = vae
            .decode(&mut backend, &z, Tiling::Whole, &Cancel::new())
            .unwrap()
            .0;
        let error = relative_l2(&decoded.values, &clip(case.get("out.decoded")).values);
        println!("F16 on {}: relative {error:e}", backend.device());
        assert!(error < HALF_PRECISION, "{}: {error:e}", backend.device());
    }
}

#[test]
fn a_stream_gives_what_the_whole_clip_gives() {
    let cancel = Cancel::new();
    for (name, case_name) in [("wan21_vae", "17_8x16"), ("wan22_vae", "17_16x16")] {
        let case = case(name, case_name);
        for mut backend in backends() {
            let mut vae = open(&folder(name));
            let z = clip(case.get("in.z"));
            let whole = vae
                .decode(&mut backend, &z, Tiling::Whole, &cancel)
                .unwrap()
                .0;
            let mut decoding = vae
                .decoding(&backend, (z.height, z.width), &cancel)
                .unwrap();
            let parts: Vec<Clip> = decoding
                .frames(&mut backend, z.each_frame(), &cancel)
                .map(Result::unwrap)
                .collect();
            let counts: Vec<usize> = parts.iter().map(|part| part.frames).collect();
            assert_eq!(counts, [1, 4, 4, 4, 4]);
            let values: Vec<f32> = parts
                .iter()
                .flat_map(|part| &part.values)
                .copied()
                .collect();
            assert!(values == whole.values, "{name} decoded");

            let pixels = clip(case.get("in.pixels"));
            let whole = vae
                .encode(&mut backend, &pixels, Tiling::Whole, &cancel)
                .unwrap()
                .0;
            let sides = (pixels.height, pixels.width);
            let mut encoding = vae.encoding(&backend, sides, &cancel).unwrap();
            let mut values = Vec::new();
            for (index, frame) in pixels.each_frame().enumerate() {
                let latent = encoding.push(&mut backend, frame, &cancel).unwrap();
                assert_eq!(latent.is_some(), index % 4 == 0);
                assert_eq!(encoding.waiting(), index % 4);
                values.extend(latent.into_iter().flat_map(|latent| latent.values));
            }
            assert!(values == whole.values, "{name} encoded");
        }
    }
}

#[test]
fn a_long_clip_takes_the_memory_of_a_short_one() {
    let mut backend = processor();
    let mut vae = open(&folder("wan21_vae"));
    let cancel = Cancel::new();
    let mut decoding = vae.decoding(&backend, (2, 3), &cancel).unwrap();
    let latent = sd_models::noise::normal(3, 4 * 2 * 3);
    let mut used = Vec::new();
    // 81 frames.
    for _ in 0..21 {
        decoding.push(&mut backend, &latent, &cancel).unwrap();
        let report = backend.ledger().report(backend.device());
        used.push((
            report.used.of(MemoryKind::Compute),
            report.used.of(MemoryKind::Cache),
        ));
    }
    // The third chunk is the first whose graph serves all that follow.
    assert!(used[2].0 > 0 && used[2].1 > 0, "{used:?}");
    assert!(
        used[2..].iter().all(|&used_now| used_now == used[2]),
        "{used:?}"
    );
    let peak = decoding.peak();
    let weights = backend.ledger().report(backend.device()).used.total() - used[2].0 - used[2].1;
    let fit = vae
        .fit_decoding(&backend, 81, (2, 3), Tiling::Whole)
        .unwrap();
    // What was foreseen is what it takes, weights included.
    let most = used.iter().map(|(compute, cache)| compute + cache).max();
    assert_eq!(peak, weights + most.unwrap());
    assert_eq!(fit.bytes, peak);
    let longer = vae.fit_decoding(&backend, 1001, (2, 3), Tiling::Whole);
    assert_eq!(longer.unwrap().bytes, peak);
}

/// The first two taps of every kernel lie over what was before the beginning: with numbers there that spoil whatever they
/// touch, a picture is the same.
#[test]
fn nothing_is_computed_with_what_was_before_the_beginning() {
    let spoilt = changed("wan21_vae", safetensors::Dtype::F32, |_, shape, values| {
        if let &[_, _, 3, height, width] = shape {
            let area = height * width;
            for kernel in values.chunks_exact_mut(3 * area) {
                kernel[..2 * area].fill(f32::NAN);
            }
        }
    });
    let case = case("wan21_vae", "1_16x24");
    let (pixels, z) = (clip(case.get("in.pixels")), clip(case.get("in.z")));
    let cancel = Cancel::new();
    for mut backend in backends() {
        let mut vae = open(spoilt.path());
        let encoded = vae
            .encode(&mut backend, &pixels, Tiling::Whole, &cancel)
            .unwrap()
            .0;
        assert_near(&backend, "encoded", &encoded, &clip(case.get("out.mean")));
        let decoded = vae
            .decode(&mut backend, &z, Tiling::Whole, &cancel)
            .unwrap()
            .0;
        assert_near(
            &backend,
            "decoded",
            &decoded,
            &clip(case.get("out.decoded")),
        );
        // The first frame of a clip is such a picture too, both ways.
        let mut decoding = vae
            .decoding(&backend, (z.height, z.width), &cancel)
            .unwrap();
        let first = decoding.push(&mut backend, &z.values, &cancel).unwrap();
        let should = clip(case.get("out.decoded"));
        assert_near(&backend, "first of a clip", &first, &should);
        let sides = (pixels.height, pixels.width);
        let mut encoding = vae.encoding(&backend, sides, &cancel).unwrap();
        let first = encoding.push(&mut backend, &pixels.values, &cancel);
        let (first, should) = (first.unwrap().unwrap(), clip(case.get("out.mean")));
        assert_near(&backend, "first of a clip", &first, &should);
        let mut clip = clip(case.get("in.z"));
        clip.values.extend(z.values.clone());
        clip.frames = 2;
        let decoded = vae
            .decode(&mut backend, &clip, Tiling::Whole, &cancel)
            .unwrap()
            .0;
        assert!(decoded.values.iter().any(|value| value.is_nan()));
    }
}

/// A fourth channel, alpha: what is encoded does not depend on it where its weights are zeros, and it is decoded as the one
/// whose weights it has.
#[test]
fn clips_may_have_alpha() {
    let from = folder("wan21_vae");
    let to = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(from.join("config.json")).unwrap();
    let config = config
        .replace("\"in_channels\": 3", "\"in_channels\": 4")
        .replace("\"out_channels\": 3", "\"out_channels\": 4");
    std::fs::write(to.path().join("config.json"), config).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = file
        .iter()
        .map(|(name, view)| {
            let (mut shape, mut data) = (view.shape().to_vec(), view.data().to_vec());
            let kernel = 27 * 4;
            match name {
                "encoder.conv_in.weight" => {
                    shape[1] = 4;
                    let outputs = data.chunks_exact(3 * kernel);
                    data = outputs
                        .flat_map(|channels| [channels, &vec![0; kernel]].concat())
                        .collect();
                }
                "decoder.conv_out.weight" | "decoder.conv_out.bias" => {
                    shape[0] = 4;
                    data.extend_from_within(..data.len() / 3);
                }
                _ => {}
            }
            (name.to_owned(), shape, data)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, data)| {
        let dtype = safetensors::Dtype::F32;
        let view = safetensors::tensor::TensorView::new(dtype, shape.clone(), data).unwrap();
        (name.as_str(), view)
    });
    safetensors::serialize_to_file(views, None, &to.path().join("model.safetensors")).unwrap();

    let (mut backend, cancel) = (processor(), Cancel::new());
    let case = case("wan21_vae", "5_16x24");
    let mut vae = open(to.path());
    assert_eq!(vae.config().channels(), 4);
    let area = 16 * 24;
    let with_alpha = |rgb: &Clip, alpha: &dyn Fn(&[f32]) -> Vec<f32>| Clip {
        channels: 4,
        values: rgb
            .each_frame()
            .flat_map(|frame| [frame, &alpha(frame)].concat())
            .collect(),
        ..rgb.clone()
    };
    let alpha = sd_models::noise::normal(4, area);
    let pixels = with_alpha(&clip(case.get("in.pixels")), &|_| alpha.clone());
    let (encoded, _) = vae
        .encode(&mut backend, &pixels, Tiling::Whole, &cancel)
        .unwrap();
    assert_near(&backend, "encoded", &encoded, &clip(case.get("out.mean")));
    let z = clip(case.get("in.z"));
    let (decoded, _) = vae
        .decode(&mut backend, &z, Tiling::Whole, &cancel)
        .unwrap();
    let should = with_alpha(&clip(case.get("out.decoded")), &|frame| {
        frame[..area].to_vec()
    });
    assert_near(&backend, "decoded", &decoded, &should);
}

/// Where sides join, what is moved on along them is encoded and decoded as the same, moved on; without, it is not.
#[test]
fn joined_sides_have_no_beginning() {
    for name in ["wan21_vae", "wan22_vae", "qwenimage21_vae_variant"] {
        for mut backend in backends() {
            let cancel = Cancel::new();
            let mut vae = open(&folder(name));
            let config = vae.config().clone();
            let scale = config.scale_factor();
            let frames = if config.is_for_pictures() { 1 } else { 5 };
            let latents = config.latent_frames(frames);
            let noise = |seed, frames, channels, height: usize, width: usize| Clip {
                frames,
                channels,
                height,
                width,
                values: sd_models::noise::normal(seed, frames * channels * height * width),
            };
            let pixels = noise(5, frames, config.channels(), 2 * scale, 3 * scale);
            let z = noise(6, latents, config.z_dim, 2, 3);
            for circular in [Circular::NONE, Circular::X, Circular::Y, Circular::XY] {
                let work = Work::from(Tiling::Whole).circular(circular);
                let mut encode = |clip: &Clip| {
                    let outcome = vae.encode(&mut backend, clip, work, &cancel);
                    outcome.unwrap().0
                };
                let encoded = [encode(&pixels), encode(&moved(&pixels, scale))];
                let mut decode = |clip: &Clip| {
                    let outcome = vae.decode(&mut backend, clip, work, &cancel);
                    outcome.unwrap().0
                };
                let decoded = [decode(&z), decode(&moved(&z, 1))];
                let same = circular == Circular::XY;
                for (what, [is, other], by) in
                    [("encoded", encoded, 1), ("decoded", decoded, scale)]
                {
                    let error = relative_l2(&other.values, &moved(&is, by).values);
                    println!("{name} {what}, joined {circular}: {error:e}");
                    // Sums run in the same order wherever a pixel lies, but for attention's.
                    let limit = match backend.device().kind() {
                        DeviceKind::Cpu => TOLERANCE,
                        _ => HALF_PRECISION,
                    };
                    assert_eq!(error < limit, same, "{name} {what} {circular}: {error:e}");
                }
            }
        }
    }
}

/// The clip moved on by so many rows down and columns to the right, what leaves it coming in on the other side.
fn moved(clip: &Clip, by: usize) -> Clip {
    let area = clip.height * clip.width;
    let values = clip.values.chunks_exact(area).flat_map(|plane| {
        (0..area).map(|at| {
            let y = (at / clip.width + clip.height - by) % clip.height;
            let x = (at % clip.width + clip.width - by) % clip.width;
            plane[y * clip.width + x]
        })
    });
    Clip {
        values: values.collect(),
        ..clip.clone()
    }
}

#[test]
fn wrong_sizes_are_named() {
    let mut backend = processor();
    let cancel = Cancel::new();
    let mut vae = open(&folder("wan22_vae"));
    let blank = |frames: usize, channels: usize, height: usize, width: usize| Clip {
        frames,
        channels,
        height,
        width,
        values: vec![0.0; frames * channels * height * width],
    };
    let mut text = |clip: Clip| {
        vae.encode(&mut backend, &clip, Tiling::Whole, &cancel)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        text(blank(1, 3, 16, 24)),
        "frames of 24x16 cannot be encoded: both sides must be multiples of 16 pixels"
    );
    assert_eq!(
        text(blank(1, 3, 0, 16)),
        "frames of 16x0 cannot be encoded: both sides must be multiples of 16 pixels"
    );
    assert_eq!(text(blank(1, 4, 16, 16)), "4 channels instead of 3");
    assert_eq!(text(blank(0, 3, 16, 16)), "0 frames instead of 1");
    let mut short = blank(2, 3, 16, 16);
    short.values.pop();
    assert_eq!(text(short), "1535 values instead of 1536");

    assert!(matches!(
        vae.encoding(&backend, (16, 17), &cancel),
        Err(Error::FrameSize { .. })
    ));
    let mut decoding = vae.decoding(&backend, (1, 1), &cancel).unwrap();
    let error = decoding.push(&mut backend, &[0.0; 5], &cancel).unwrap_err();
    assert_eq!(error.to_string(), "5 latent values instead of 6");
    assert!(decoding.push(&mut backend, &[0.0; 6], &cancel).is_ok());

    // What was interrupted does not go on as if it had not been.
    let cancelled = Cancel::new();
    cancelled.cancel();
    let error = decoding.push(&mut backend, &[0.0; 6], &cancelled);
    assert!(error.unwrap_err().is_cancelled());
    let error = decoding.push(&mut backend, &[0.0; 6], &cancel);
    assert!(matches!(error, Err(Error::Interrupted)));

    // One frame is all that a VAE for pictures takes.
    let mut vae = open(&folder("qwenimage21_vae_variant"));
    let two = blank(2, 6, 1, 1);
    let outcome = vae.decode(&mut backend, &two, Tiling::Whole, &cancel);
    assert_eq!(outcome.unwrap_err().to_string(), "2 frames instead of 1");
    let mut decoding = vae.decoding(&backend, (1, 1), &cancel).unwrap();
    assert!(decoding.push(&mut backend, &[0.0; 6], &cancel).is_ok());
    let error = decoding.push(&mut backend, &[0.0; 6], &cancel).unwrap_err();
    assert_eq!(
        error.to_string(),
        "2 frames for a VAE of pictures instead of 1"
    );
}

/// Trained weights and a picture that the reference has encoded and decoded: it comes back as well from here.
#[test]
fn a_picture_comes_back_as_from_the_reference() {
    let path = folder("tiny-qwen-image-2.1-reference").join("vae_128.safetensors");
    let recorded = Case::read(&path);
    let cancel = Cancel::new();
    // The checkpoint is in half precision; the reference widened it to single precision.
    let options = LoadOptions::default().weight_type(DType::F32);
    for mut backend in backends() {
        let mut vae = WanVae::open(&crate::fixtures::tiny().join("vae"), &options).unwrap();
        let pixels = clip(recorded.get("pixels"));
        let mut latents = vae
            .encode(&mut backend, &pixels, Tiling::Whole, &cancel)
            .unwrap()
            .0;
        assert_near(&backend, "mean", &latents, &clip(recorded.get("mean")));
        let decoded = vae
            .decode(&mut backend, &latents, Tiling::Whole, &cancel)
            .unwrap()
            .0;
        let reconstruction = clip(recorded.get("reconstruction"));
        assert_near(&backend, "reconstruction", &decoded, &reconstruction);
        vae.config().normalize(&mut latents);
        let normalized = clip(recorded.get("normalized_mean"));
        assert_near(&backend, "normalized", &latents, &normalized);
        let (ours, theirs) = (
            psnr(&decoded.values, &pixels.values),
            psnr(&reconstruction.values, &pixels.values),
        );
        println!("{ours:.3} dB, by the reference {theirs:.3} dB");
        // Rounding moves it in the fourth digit.
        assert!(ours > theirs - 0.05, "{ours}, not {theirs}");
    }
}
