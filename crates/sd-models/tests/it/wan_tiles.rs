//! Pictures and clips in tiles: near the whole, without a step, in less memory.

use sd_backend::fake::{FakeDevice, FakeOptions, MemoryStory};
use sd_backend::{Backend, BackendOptions, Device, Ledger, MemoryBudget, MemoryBudgets};
use sd_graph::Cancel;
use sd_models::Error;
use sd_models::wan_vae::{Clip, Tiling, WanVae};

use crate::fixtures::{Case, folder, psnr, relative_l2};
use crate::wan::{TOLERANCE, case, clip, open, processor};

/// A picture beside and above its mirror images, in tiles: near the whole, and without a step where tiles end, along both
/// sides of a picture that is wider than high, and of one that is higher.
#[test]
fn tiles_of_a_picture_show_no_step() {
    let path = folder("tiny-qwen-image-2.1-reference").join("vae_128.safetensors");
    let quarter = Case::read(&path).get("pixels").f32.clone();
    let mirrored = |at: usize| if at < 128 { at } else { 255 - at };
    let mut backend = processor();
    let mut vae = open(&crate::fixtures::tiny().join("vae"));
    let cancel = Cancel::new();
    for (height, width) in [(192, 256), (256, 192)] {
        let values = quarter.chunks_exact(128 * 128).flat_map(|plane| {
            let places = (0..height).flat_map(|y| (0..width).map(move |x| (y, x)));
            places.map(|(y, x)| plane[mirrored(y) * 128 + mirrored(x)])
        });
        let pixels = Clip {
            frames: 1,
            channels: 4,
            height,
            width,
            values: values.collect(),
        };
        let mut decode = |latents: &Clip, tiling: Tiling| {
            let outcome = vae.decode(&mut backend, latents, tiling, &cancel);
            outcome.unwrap().0
        };
        let latents = {
            let mut vae = open(&crate::fixtures::tiny().join("vae"));
            let outcome = vae.encode(&mut processor(), &pixels, Tiling::Whole, &cancel);
            outcome.unwrap().0
        };
        let whole = decode(&latents, Tiling::Whole);
        let as_large = decode(&latents, Tiling::Squares(16));
        assert!(as_large.values == whole.values);

        // Tiles of 128 pixels, half of what one would use at the least.
        let tiled = decode(&latents, Tiling::Squares(8));
        let near = psnr(&tiled.values, &whole.values);
        println!("{width}x{height} in tiles: {near:.1} dB");
        assert!(near > 35.0, "{near}");
        for columns in [true, false] {
            let (is, should) = (steps(&tiled, columns), steps(&whole, columns));
            // Borders of tiles are where one ends; elsewhere the picture has its own steps.
            let lines = if columns { width } else { height };
            let ends = if lines == 256 {
                [64, 128, 192]
            } else {
                [64, 64, 128]
            };
            let most = should.iter().copied().fold(0.0, f64::max);
            for end in ends {
                let (is, should) = (is[end - 1], should[end - 1]);
                println!("columns {columns}, at {end}: {is:.5}, whole {should:.5}, most {most:.5}");
                // A shade of 8 bits is 1/127 here: no border is half of one more than the picture itself has there.
                assert!(is < should + 0.5 / 127.0, "{is} {should}");
                assert!(is < most, "{is} {most}");
            }
        }

        let encoded = vae
            .encode(&mut backend, &pixels, Tiling::Squares(8), &cancel)
            .unwrap()
            .0;
        let decoded = vae
            .decode(&mut backend, &encoded, Tiling::Whole, &cancel)
            .unwrap()
            .0;
        let (tiled, whole) = (
            psnr(&decoded.values, &pixels.values),
            psnr(&whole.values, &pixels.values),
        );
        println!("round trip: {whole:.1} dB, encoded in tiles {tiled:.1} dB");
        // Latents at the border of a tile saw nothing beyond.
        assert!(tiled > whole - 1.0, "{tiled}");
    }
}

/// How far each column, or row, is from the one before, on average.
fn steps(clip: &Clip, columns: bool) -> Vec<f64> {
    let (height, width) = (clip.height, clip.width);
    let (lines, places) = if columns {
        (width, height)
    } else {
        (height, width)
    };
    (1..lines)
        .map(|line| {
            let pixel = |plane: &[f32], line: usize, place: usize| {
                let (y, x) = if columns {
                    (place, line)
                } else {
                    (line, place)
                };
                f64::from(plane[y * width + x])
            };
            let planes = clip.values.chunks_exact(height * width);
            let sum: f64 = planes
                .flat_map(|plane| (0..places).map(move |place| (plane, place)))
                .map(|(plane, place)| {
                    (pixel(plane, line, place) - pixel(plane, line - 1, place)).abs()
                })
                .sum();
            sum / (clip.channels * places) as f64
        })
        .collect()
}

/// Tiles of a clip: where each sees all that there is, they are the clip.
#[test]
fn clips_are_cut_into_tiles_frame_by_frame() {
    let mut backend = processor();
    let mut vae = open(&folder("wan21_vae"));
    let cancel = Cancel::new();
    let case = case("wan21_vae", "9_24x16");
    let (pixels, z) = (clip(case.get("in.pixels")), clip(case.get("in.z")));
    for tile in [3, 2] {
        let decoded = vae
            .decode(&mut backend, &z, Tiling::Squares(tile), &cancel)
            .unwrap()
            .0;
        let encoded = vae
            .encode(&mut backend, &pixels, Tiling::Squares(tile), &cancel)
            .unwrap()
            .0;
        let sizes = |clip: &Clip| (clip.frames, clip.channels, clip.height, clip.width);
        assert_eq!(sizes(&decoded), (9, 3, 24, 16));
        assert_eq!(sizes(&encoded), (3, 4, 3, 2));
        let error = relative_l2(&decoded.values, &case.get("out.decoded").f32);
        println!("tiles of {tile}: {error:e}");
        // The larger tile is all of it; the smaller ones cannot know what random weights make of their neighbours.
        assert!(error < if tile == 3 { TOLERANCE } else { 1.5 });
        assert!(decoded.values.iter().all(|value| value.is_finite()));
    }
}

/// With less memory than the whole takes, squares are taken; with too little for any, it is an error, and nothing stays.
#[test]
fn what_does_not_fit_is_cut() {
    let path = folder("wan21_vae");
    let cancel = Cancel::new();
    let z = Clip {
        frames: 1,
        channels: 4,
        height: 16,
        width: 12,
        values: sd_models::noise::normal(9, 4 * 16 * 12),
    };
    let with = |bytes: u64| {
        let budget: MemoryBudgets = format!("{bytes}").parse().unwrap();
        let options = BackendOptions::default()
            .threads(2)
            .ledger(&Ledger::new(budget));
        Backend::new(Device::cpu().unwrap(), &options).unwrap()
    };
    let mut vae = open(&path);
    let decode = |vae: &mut WanVae, backend: &mut Backend, tiling: Tiling| {
        vae.unload();
        Ok::<_, Error>(vae.decode(backend, &z, tiling, &cancel)?.0)
    };
    let mut ample = with(1 << 30);
    let whole = decode(&mut vae, &mut ample, Tiling::Whole).unwrap();
    let fits = decode(&mut vae, &mut ample, Tiling::Fit).unwrap();
    assert!(fits.values == whole.values);
    let cut = decode(&mut vae, &mut ample, Tiling::Squares(8)).unwrap();

    let mut seen = Vec::new();
    for bytes in (8..17).map(|step| 1 << (step + 10)) {
        let mut backend = with(bytes);
        let fit = vae
            .fit_decoding(&backend, 1, (16, 12), Tiling::Fit)
            .unwrap();
        vae.unload();
        let part = match vae.decode(&mut backend, &z, Tiling::Fit, &cancel) {
            Ok((clip, report)) => {
                assert!(fit.fits() && report.tile == fit.tile, "{fit:?} {report:?}");
                assert!(report.peak <= fit.bytes, "{fit:?} {report:?}");
                match report.tile {
                    None => assert!(clip.values == whole.values),
                    Some(8) => assert!(clip.values == cut.values),
                    Some(_) => {}
                }
                report.tile.map_or("whole", |_| "squares")
            }
            Err(error) => {
                assert!(
                    matches!(error, Error::TooLittleMemory { smallest, .. } if smallest == fit.smallest),
                    "{error}"
                );
                assert!(bytes < fit.smallest);
                "nothing"
            }
        };
        if seen.last() != Some(&part) {
            seen.push(part);
        }
        vae.unload();
        let used = backend.ledger().report(backend.device()).used;
        assert_eq!(used.total(), 0, "{bytes}");
    }
    assert_eq!(seen, ["nothing", "squares", "whole"]);
}

/// The bytes that are foreseen are the bytes that are needed: with them it works, with one less smaller squares are taken,
/// and with less than the smallest need it is refused before anything is computed.
#[test]
fn the_budget_that_is_foreseen_is_the_one_that_does() {
    let cancel = Cancel::new();
    let device = Device::cpu().unwrap();
    let clip = |frames: usize, channels: usize, height: usize, width: usize| Clip {
        frames,
        channels,
        height,
        width,
        values: sd_models::noise::normal(2, frames * channels * height * width),
    };
    let mut vae = open(&folder("wan21_vae"));
    for frames in [1, 9] {
        let z = clip(vae.config().latent_frames(frames), 4, 12, 28);
        let pixels = clip(frames, 3, 12 * 8, 28 * 8);
        for encodes in [false, true] {
            let mut tiles = Vec::new();
            let mut budget = u64::MAX / 2;
            loop {
                let budgets = MemoryBudgets::every(MemoryBudget::Bytes(budget));
                let ledger = Ledger::new(budgets);
                let options = BackendOptions::default().threads(2).ledger(&ledger);
                let mut backend = Backend::new(device, &options).unwrap();
                vae.unload();
                let (fit, outcome) = if encodes {
                    let fit = vae.fit_encoding(&backend, frames, (12 * 8, 28 * 8), Tiling::Fit);
                    let outcome = vae.encode(&mut backend, &pixels, Tiling::Fit, &cancel);
                    (fit.unwrap(), outcome)
                } else {
                    let fit = vae.fit_decoding(&backend, z.frames, (12, 28), Tiling::Fit);
                    let outcome = vae.decode(&mut backend, &z, Tiling::Fit, &cancel);
                    (fit.unwrap(), outcome)
                };
                let what = format!("{frames} {encodes} {budget}: {fit:?}");
                match outcome {
                    Ok((_, report)) => {
                        assert_eq!(report.tile, fit.tile, "{what}");
                        assert!(report.peak <= fit.bytes, "{what} {report:?}");
                        // Reading weights passes through memory too, which may be more than is computed in.
                        if report.peak == fit.bytes {
                            tiles.push(fit.tile);
                        }
                        assert!(fit.bytes <= budget, "{what}");
                        budget = fit.bytes - 1;
                    }
                    Err(Error::TooLittleMemory { smallest, .. }) => {
                        assert_eq!(smallest, budget + 1, "{what}");
                        break;
                    }
                    Err(error) => panic!("{what}: {error}"),
                }
            }
            println!("{frames} frames, encoding {encodes}: tiles {tiles:?}");
            assert!(tiles.starts_with(&[None, Some(16)]), "{tiles:?}");
            assert!(tiles.contains(&Some(Tiling::SMALLEST)), "{tiles:?}");
        }
    }
}

/// A device that has less than it says refuses what was granted: squares half as large are taken then, and the weights of
/// the other half give way.
#[test]
fn a_device_that_lies_gets_smaller_squares() {
    let cancel = Cancel::new();
    let z = Clip {
        frames: 2,
        channels: 4,
        height: 24,
        width: 8,
        values: sd_models::noise::normal(9, 2 * 4 * 24 * 8),
    };
    let mut vae = open(&folder("wan21_vae"));
    let on = |fake: &FakeDevice| {
        let ledger = Ledger::with_headroom(MemoryBudgets::default(), 0);
        Backend::new(
            fake.device(),
            &BackendOptions::default().threads(2).ledger(&ledger),
        )
        .unwrap()
    };
    let honest = FakeDevice::new(FakeOptions::default());
    let mut backend = on(&honest);
    let whole = vae
        .fit_decoding(&backend, 2, (24, 8), Tiling::Whole)
        .unwrap();
    let squares = |side| {
        let outcome = vae.decode(&mut backend, &z, Tiling::Squares(side), &cancel);
        outcome.unwrap().0
    };
    let [of_12, of_8] = [12, 8].map(squares);
    vae.unload();
    let mut seen = Vec::new();
    for percent in [60, 45] {
        let liar = FakeDevice::new(FakeOptions {
            name: format!("Liar{percent}"),
            memory: whole.bytes as usize * percent / 100,
            ..FakeOptions::default()
        });
        liar.tell(MemoryStory::Of(1 << 30, 1 << 30));
        let mut backend = on(&liar);
        let outcome = vae.decode(&mut backend, &z, Tiling::Fit, &cancel);
        let (clip, report) = outcome.unwrap();
        let same = match report.tile {
            Some(12) => &of_12,
            Some(8) => &of_8,
            other => panic!("{other:?}"),
        };
        assert!(clip.values == same.values);
        seen.push(report.tile);
        vae.unload();
        assert_eq!((liar.counts().buffers, liar.counts().bytes), (0, 0));
    }
    assert_eq!(seen, [Some(12), Some(8)]);
}
