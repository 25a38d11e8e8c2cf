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
const TOLERANCE: f64 = 1e-5;

/// Elsewhere products may pass through half precision or TF32.
const HALF_PRECISION: f64 = 0.06;

const SHORT: &str = "minimax_h3_vae";
pub(crate) const LONG: &str = "minimax_h3_vae_long";

pub(crate) fn open(name: &str) -> VideoVae {
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

pub(crate) fn encode(
    vae: &mut VideoVae,
    backend: &mut Backend,
    pixels: &Clip,
    tiling: Tiling,
) -> Posterior {
    let (cancel, quiet) = (Cancel::new(), &mut |_: &Progress| {});
    let encoded = vae.encode(backend, pixels, tiling, (&cancel, quiet));
    encoded.unwrap().0
}

/// All frames of `latents`.
pub(crate) fn decode(
    vae: &mut VideoVae,
    backend: &mut Backend,
    latents: &Clip,
    tiling: Tiling,
) -> Vec<f32> {
    let mut frames = Vec::new();
    let mut add = |frame: &[f32]| {
        frames.extend_from_slice(frame);
        Ok::<_, Error>(())
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

#[test]
fn a_stream_gives_what_the_whole_clip_gives() {
    let pixels = clip(case(LONG, "encode_39_3x2").get("in.pixels"));
    let size = (pixels.height, pixels.width);
    let (cancel, mut quiet) = (Cancel::new(), |_: &Progress| {});
    for mut backend in backends() {
        let mut vae = open(LONG);
        let whole = encode(&mut vae, &mut backend, &pixels, Tiling::Whole);
        let mut encoding = vae
            .encoding(&backend, size, Tiling::Whole, &cancel)
            .unwrap();
        let mut parts = Vec::new();
        for (index, frame) in pixels.each_frame().enumerate() {
            let part = encoding.push(&mut backend, frame, &cancel, &mut quiet);
            let part = part.unwrap();
            // With the first frame of another clip it is known that those before were not the last.
            assert_eq!(part.is_some(), index == 17 || index == 34);
            parts.extend(part);
        }
        parts.push(encoding.finish(&mut backend, &cancel, &mut quiet).unwrap());
        let counts: Vec<usize> = parts.iter().map(|part| part.mean.frames).collect();
        assert_eq!(counts, [5, 5, 2]);
        let mut joined = parts.remove(0);
        parts.iter().for_each(|part| joined.append(part));
        assert!(joined == whole);
    }
}

/// A picture is what a clip of it alone would begin with: fewer latent frames than the reference can decode are decoded as if
/// the last went on.
#[test]
fn a_picture_comes_back_as_one() {
    let mut backend = processor();
    let mut vae = open(LONG);
    let case = case(LONG, "encode_1_2x3");
    let pixels = clip(case.get("in.pixels"));
    let (cancel, mut quiet) = (Cancel::new(), |_: &Progress| {});
    let size = (pixels.height, pixels.width);
    let with = (&cancel, &mut quiet as &mut dyn sd_graph::Reporter);
    let posterior = vae
        .encode_picture(&mut backend, &pixels.values, size, Tiling::default(), with)
        .unwrap();
    let mode = posterior.mode(vae.config());
    assert_near(
        &backend,
        "picture",
        &mode.values,
        &case.get("out.normalized").f32,
    );
    let one = decode(&mut vae, &mut backend, &mode, Tiling::Whole);
    let seven = Clip {
        frames: 7,
        values: mode.values.repeat(7),
        ..mode.clone()
    };
    let many = decode(&mut vae, &mut backend, &seven, Tiling::Whole);
    assert_eq!((one.len(), many.len()), (288, 22 * 288));
    assert!(one == many[..288]);
    let two = Clip {
        frames: 2,
        values: mode.values.repeat(2),
        ..mode
    };
    let five = decode(&mut vae, &mut backend, &two, Tiling::Whole);
    assert!(five == many[..5 * 288]);
}

#[test]
fn latents_are_drawn_in_the_references_order() {
    let config = open(LONG).config().clone();
    let case = case(LONG, "encode_22_2x3");
    let posterior = Posterior {
        mean: clip(case.get("out.mean")),
        logvar: clip(case.get("out.logvar")),
    };
    let sides = [posterior.mean.frames, 6, 2, 3];
    let noise = sd_models::noise::normal(5, sides.iter().product());
    let drawn = posterior.sample(&config, &noise).unwrap();
    for (at, is) in drawn.values.iter().enumerate() {
        let (pixel, channel, frame) = (at % 6, at / 6 % 6, at / 36);
        let noise = noise[(channel * 7 + frame) * 6 + pixel];
        let std = (0.5 * posterior.logvar.values[at]).exp();
        let value = posterior.mean.values[at] + std * noise;
        let should = (value - config.latents_mean[channel]) / config.latents_std[channel];
        assert!((is - should).abs() < 1e-5, "{at}: {is}, not {should}");
    }
    assert_eq!(
        Clip::from_channels_first([6, 7, 2, 3], &drawn.channels_first()),
        drawn
    );
    let error = posterior.sample(&config, &noise[1..]).unwrap_err();
    assert!(matches!(error, Error::Clip { .. }), "{error}");
}

/// However long a clip is: the same memory, as was foreseen; frames come as they are made.
#[test]
fn a_long_clip_takes_the_memory_of_a_short_one() {
    let tiling = Tiling::Tiles {
        size: 12,
        overlap: 4,
    };
    let (cancel, mut quiet) = (Cancel::new(), |_: &Progress| {});
    let mut backend = processor();
    let mut vae = open(LONG);
    let (height, width) = (3, 5);
    let mut peaks = Vec::new();
    for frames in [7, 57] {
        let latents = Clip {
            frames,
            channels: 6,
            height,
            width,
            values: sd_models::noise::normal(3, frames * 6 * height * width),
        };
        let mut made = 0;
        let mut count = |_: &[f32]| {
            made += 1;
            Ok::<_, Error>(())
        };
        let with = (&cancel, &mut quiet as &mut dyn sd_graph::Reporter);
        let report = vae
            .decode(&mut backend, &latents, tiling, with, &mut count)
            .unwrap();
        assert_eq!(made, vae.config().frames(frames));
        peaks.push(report.peak);
    }
    let fit = vae.fit_decoding(&backend, (height, width), tiling).unwrap();
    assert_eq!(peaks, [fit.bytes; 2]);
    assert!(
        fit.bytes
            < vae
                .fit_decoding(&backend, (height, width), Tiling::Whole)
                .unwrap()
                .bytes
    );
    vae.unload();

    let mut peaks = Vec::new();
    for frames in [22, 90] {
        let size = (4 * height, 4 * width);
        let mut encoding = vae.encoding(&backend, size, tiling, &cancel).unwrap();
        let picture = vec![0.5; 3 * size.0 * size.1];
        let mut latents = 0;
        for _ in 0..frames {
            let part = encoding.push(&mut backend, &picture, &cancel, &mut quiet);
            latents += part.unwrap().map_or(0, |part| part.mean.frames);
        }
        let last = encoding.finish(&mut backend, &cancel, &mut quiet).unwrap();
        peaks.push(encoding.peak());
        latents += last.mean.frames;
        assert_eq!(latents, vae.config().latent_frames(frames));
    }
    let fit = vae
        .fit_encoding(&backend, 90, (4 * height, 4 * width), tiling)
        .unwrap();
    assert_eq!(peaks, [fit.bytes; 2]);
}

/// Every tile of every clip is told of; a cancelled run ends, and so does one whose caller fails.
#[test]
fn progress_is_told_and_runs_can_be_ended() {
    let latents = clip(case(LONG, "decode_28_2x2").get("in.normalized"));
    let tiling = Tiling::Whole;
    let mut backend = processor();
    let mut vae = open(LONG);
    let cancel = Cancel::new();
    let mut told = Vec::new();
    let mut frames = 0;
    let mut listen = |progress: &Progress| {
        if let Progress::Chunk { done, total } = progress {
            told.push((*done, *total));
            if *done == 3 {
                cancel.cancel();
            }
        }
    };
    let mut count = |_: &[f32]| {
        frames += 1;
        Ok::<_, Error>(())
    };
    let with = (&cancel, &mut listen as &mut dyn sd_graph::Reporter);
    let outcome = vae.decode(&mut backend, &latents, tiling, with, &mut count);
    assert!(outcome.unwrap_err().is_cancelled());
    assert_eq!(told, [(1, 6), (2, 6), (3, 6)]);
    // Those of three clips came out before.
    assert_eq!(frames, 3 * 17);

    let (cancel, mut quiet) = (Cancel::new(), |_: &Progress| {});
    let mut fail = |_: &[f32]| Err(Error::Steps(0));
    let with = (&cancel, &mut quiet as &mut dyn sd_graph::Reporter);
    let outcome = vae.decode(&mut backend, &latents, tiling, with, &mut fail);
    assert!(matches!(outcome, Err(Error::Steps(0))));
    let should = &case(LONG, "decode_28_2x2").get("out.frames").f32.clone();
    let is = decode(&mut vae, &mut backend, &latents, tiling);
    assert_near(&backend, "after all that", &is, should);

    let pixels = clip(case(LONG, "encode_22_2x3").get("in.pixels"));
    let mut told = Vec::new();
    let mut listen = |progress: &Progress| {
        if let Progress::Chunk { done, total } = progress {
            told.push((*done, *total));
        }
    };
    let with = (&cancel, &mut listen as &mut dyn sd_graph::Reporter);
    vae.encode(&mut backend, &pixels, tiling, with).unwrap();
    assert_eq!(told, [(1, 2), (2, 2)]);
}

#[test]
fn frames_and_latents_are_counted_as_by_the_reference() {
    let vae = open(LONG);
    let config = vae.config();
    // `17 n + 5` frames are `5 n + 2` latent frames and come back as many.
    for clips in 0..20 {
        let (frames, latents) = (17 * clips + 5, 5 * clips + 2);
        assert_eq!(config.latent_frames(frames), latents);
        assert_eq!(config.frames(latents), frames);
    }
    let encoded = [0, 1, 2, 17, 18, 34, 35].map(|frames| config.latent_frames(frames));
    assert_eq!(encoded, [0, 1, 2, 2, 7, 7, 12]);
    let decoded = [0, 1, 2, 3, 4, 5, 6, 10].map(|latents| config.frames(latents));
    assert_eq!(decoded, [0, 1, 5, 9, 13, 17, 18, 34]);
}

/// Discs that move to the right on a plain ground, `[frames, 3, side, side]`: what the tiny checkpoint was trained to draw.
fn moving_discs(frames: usize, side: usize, discs: &[(usize, usize, [f32; 3])]) -> Clip {
    let mut values = Vec::new();
    for frame in 0..frames {
        for channel in 0..3 {
            for (y, x) in (0..side).flat_map(|y| (0..side).map(move |x| (y, x))) {
                let inside = |&&(row, column, _): &&(usize, usize, [f32; 3])| {
                    let (dy, dx) = (y.abs_diff(row), x.abs_diff(column + 2 * frame));
                    dy * dy + dx * dx < 26 * 26
                };
                let disc = discs.iter().find(inside);
                values.push(disc.map_or(0.5, |(.., colour)| colour[channel]));
            }
        }
    }
    Clip {
        frames,
        channels: 3,
        height: side,
        width: side,
        values,
    }
}

/// With weights that were trained clips come back, whole and in tiles, and where tiles begin and end frames have no step of
/// their own.
#[test]
fn a_trained_checkpoint_brings_clips_back_without_a_grid() {
    let path = crate::fixtures::folder("../../../../models/tiny-minimax-h3/vae");
    let mut vae = VideoVae::open(&path, &LoadOptions::default()).unwrap();
    let mut backend = processor();
    let red = [1.0, 0.0, 0.0];
    let small = moving_discs(22, 128, &[(64, 40, red)]);
    let large = moving_discs(5, 224, &[(48, 40, red)]);
    let tiling = Tiling::Tiles {
        size: 128,
        overlap: 32,
    };
    // Of the small one diffusers brings back 25.87 dB.
    for (clip, least) in [(&small, 25.85), (&large, 24.0)] {
        let latents = encode(&mut vae, &mut backend, clip, tiling).mode(vae.config());
        let back = decode(&mut vae, &mut backend, &latents, tiling);
        let near = crate::fixtures::psnr(&back, &clip.values);
        // Of numbers from 0 to 1, where `psnr` takes them to be from -1 to 1.
        let near = near - 20.0 * 2_f64.log10();
        println!("{} frames of {}: {near:.1} dB", clip.frames, clip.width);
        assert!(near > least, "{near}");
        if clip.width == 128 {
            continue;
        }
        // Tiles cover 0..128 and 96..224. Blocks of pixels, which latents become, end at every 16th line; of those, tiles end at
        // two, and the others show what a plain ground has there anyway.
        for (apart, along) in [(1, 224), (224, 1)] {
            let ends = [96, 128].map(|at| step(&back, at, apart, along));
            let others = [112, 144, 160, 176, 192, 208].map(|at| step(&back, at, apart, along));
            let most = others.iter().copied().fold(0.0, f64::max);
            println!("lines {apart} apart: {ends:.5?}, elsewhere {others:.5?}");
            assert!(ends.iter().all(|&is| is < 1.2 * most), "{ends:?} {most}");
        }
    }
}

/// How far the line `at` of frames of 224 by 224 is from the one before, on average: lines `apart` values from each other, of
/// values that are `along` from each other.
fn step(values: &[f32], at: usize, apart: usize, along: usize) -> f64 {
    let planes = values.chunks_exact(224 * 224);
    let of_plane = |plane: &[f32]| {
        let places = (0..224).map(|place| place * along + at * apart);
        let steps = places.map(|place| f64::from((plane[place] - plane[place - apart]).abs()));
        steps.sum::<f64>() / 224.0
    };
    let count = planes.len() as f64;
    planes.map(of_plane).sum::<f64>() / count
}
