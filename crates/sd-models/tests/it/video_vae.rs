//! The video VAE of MiniMax H3 against diffusers on random weights: pictures, clips short and long, tiles.

use sd_backend::{Backend, DeviceKind};
use sd_graph::{Cancel, LoadOptions, Progress};
use sd_models::Error;
use sd_models::minimax_h3::video_vae::{Posterior, Tiling, VideoVae};
use sd_models::wan_vae::Clip;

use crate::fixtures::{Array, Case, cases, folder, relative_l2};
use crate::wan::{backends, case, clip, processor};

/// Relative error allowed on the processor. The reference itself moves by 1e-6 between kernels of single precision; sums
/// here run in another order.
const TOLERANCE: f64 = 2e-5;

/// Elsewhere products may pass through half precision or TF32.
const HALF_PRECISION: f64 = 0.06;

const SHORT: &str = "minimax_h3_vae";
const LONG: &str = "minimax_h3_vae_long";

fn open(name: &str) -> VideoVae {
    VideoVae::open(&folder(name), &LoadOptions::default()).unwrap()
}

#[track_caller]
fn assert_near(backend: &Backend, name: &str, is: &[f32], should: &[f32]) {
    assert_eq!(is.len(), should.len(), "{name}");
    let error = relative_l2(is, should);
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

fn encode(vae: &mut VideoVae, backend: &mut Backend, pixels: &Clip, tiling: Tiling) -> Posterior {
    let (cancel, quiet) = (Cancel::new(), &mut |_: &Progress| {});
    let encoded = vae.encode(backend, pixels, tiling, (&cancel, quiet));
    encoded.unwrap().0
}

/// All frames of `latents`.
fn decode(vae: &mut VideoVae, backend: &mut Backend, latents: &Clip, tiling: Tiling) -> Vec<f32> {
    let mut frames = Vec::new();
    let mut add = |frame: &[f32]| {
        frames.extend_from_slice(frame);
        Ok(())
    };
    let (cancel, quiet) = (Cancel::new(), &mut |_: &Progress| {});
    vae.decode(backend, latents, tiling, (&cancel, quiet), &mut add)
        .unwrap();
    frames
}

fn compare(backend: &mut Backend, vae: &mut VideoVae, (name, case): (&str, &Case), tiling: Tiling) {
    if case.has("in.pixels") {
        let pixels = clip(case.get("in.pixels"));
        let is = encode(vae, backend, &pixels, tiling);
        let should = clip(case.get("out.mean"));
        assert_eq!(vae.config().latent_frames(pixels.frames), should.frames);
        assert_eq!(
            (is.mean.frames, is.mean.channels),
            (should.frames, should.channels)
        );
        assert_near(
            backend,
            &format!("{name} mean"),
            &is.mean.values,
            &should.values,
        );
        let logvar = &case.get("out.logvar").f32;
        assert_near(
            backend,
            &format!("{name} logvar"),
            &is.logvar.values,
            logvar,
        );
        let normalized = &case.get("out.normalized").f32;
        let mode = is.mode(vae.config());
        assert_near(
            backend,
            &format!("{name} normalized"),
            &mode.values,
            normalized,
        );
    }
    if case.has("in.normalized") {
        let latents = clip(case.get("in.normalized"));
        let should: &Array = case.get("out.frames");
        assert_eq!(
            vae.config().frames(latents.frames),
            should.shape[0],
            "{name}"
        );
        let is = decode(vae, backend, &latents, tiling);
        assert_near(backend, &format!("{name} decoded"), &is, &should.f32);
    }
}

#[test]
fn pictures_and_clips_of_all_lengths_are_the_references() {
    for (folder_name, count) in [(SHORT, 3), (LONG, 11)] {
        for mut backend in backends() {
            let mut vae = open(folder_name);
            let mut compared = 0;
            for (name, case) in cases(folder_name) {
                if name.starts_with("encode") || name.starts_with("decode") {
                    let named = (name.as_str(), &case);
                    compare(&mut backend, &mut vae, named, Tiling::Whole);
                    compared += 1;
                }
            }
            assert_eq!(compared, count);
        }
    }
}

#[test]
fn tiles_are_the_references() {
    let mut compared = 0;
    for (name, case) in cases(LONG) {
        if !name.starts_with("tiled") {
            continue;
        }
        let number = |key: &str| case.meta[key].as_u64().unwrap() as usize;
        let (size, overlap) = (number("size"), number("overlap"));
        let tiling = Tiling::Tiles { size, overlap };
        for mut backend in backends() {
            compare(&mut backend, &mut open(LONG), (&name, &case), tiling);
        }
        compared += 1;
    }
    assert_eq!(compared, 2);
}
