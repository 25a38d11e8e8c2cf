//! Pictures and clips in tiles: near the whole, without a step, in less memory.

use sd_backend::{Backend, BackendOptions, Device, Ledger, MemoryBudgets};
use sd_graph::Cancel;
use sd_models::wan_vae::{Clip, Tiling, WanVae};

use crate::fixtures::{Case, folder, psnr, relative_l2};
use crate::wan::{TOLERANCE, case, clip, open, processor};

/// A picture beside its mirror image, in tiles: near the whole, and without a step where tiles end.
#[test]
fn tiles_of_a_picture_show_no_step() {
    let path = folder("tiny-qwen-image-2.1-reference").join("vae_128.safetensors");
    let half = Case::read(&path).get("pixels").f32.clone();
    let (height, width) = (128, 256);
    let values: Vec<f32> = half
        .chunks_exact(128)
        .flat_map(|row| row.iter().chain(row.iter().rev()).copied())
        .collect();
    let pixels = Clip {
        frames: 1,
        channels: 4,
        height,
        width,
        values,
    };
    let mut backend = processor();
    let mut vae = open(&crate::fixtures::tiny().join("vae"));
    let cancel = Cancel::new();
    let latents = vae
        .encode(&mut backend, &pixels, Tiling::Whole, &cancel)
        .unwrap();
    let whole = vae
        .decode(&mut backend, &latents, Tiling::Whole, &cancel)
        .unwrap();
    let as_large = vae
        .decode(&mut backend, &latents, Tiling::Squares(16), &cancel)
        .unwrap();
    assert!(as_large.values == whole.values);

    // Tiles of 128 pixels, half of what one would use at the least.
    let tiled = vae
        .decode(&mut backend, &latents, Tiling::Squares(8), &cancel)
        .unwrap();
    let near = psnr(&tiled.values, &whole.values);
    // From each column to the next: what the difference to the whole picture changes by, on average.
    let difference: Vec<f64> = (tiled.values.iter().zip(&whole.values))
        .map(|(tiled, whole)| f64::from(tiled - whole))
        .collect();
    let steps: Vec<f64> = (1..width)
        .map(|x| {
            let rows = difference.chunks_exact(width);
            let sum: f64 = rows.map(|row| (row[x] - row[x - 1]).abs()).sum();
            sum / (4 * height) as f64
        })
        .collect();
    let largest = steps.iter().copied().fold(0.0, f64::max);
    println!("tiles: {near:.1} dB, largest step {largest:e}");
    // A shade of 8 bits is 1/127 here: on average no border is a whole one.
    assert!(near > 35.0, "{near}");
    assert!(largest < 1.0 / 127.0, "{largest}");

    let encoded = vae
        .encode(&mut backend, &pixels, Tiling::Squares(8), &cancel)
        .unwrap();
    let decoded = vae
        .decode(&mut backend, &encoded, Tiling::Whole, &cancel)
        .unwrap();
    let (tiled, whole) = (
        psnr(&decoded.values, &pixels.values),
        psnr(&whole.values, &pixels.values),
    );
    println!("round trip: {whole:.1} dB, encoded in tiles {tiled:.1} dB");
    // Latents at the border of a tile saw nothing beyond.
    assert!(tiled > whole - 1.0, "{tiled}");
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
            .unwrap();
        let encoded = vae
            .encode(&mut backend, &pixels, Tiling::Squares(tile), &cancel)
            .unwrap();
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
        vae.decode(backend, &z, tiling, &cancel)
    };
    let mut ample = with(1 << 30);
    let whole = decode(&mut vae, &mut ample, Tiling::Whole).unwrap();
    let fits = decode(&mut vae, &mut ample, Tiling::Fit).unwrap();
    assert!(fits.values == whole.values);
    let cut = decode(&mut vae, &mut ample, Tiling::Squares(8)).unwrap();

    let mut seen = Vec::new();
    for bytes in (8..17).map(|step| 1 << (step + 10)) {
        let mut backend = with(bytes);
        let part = match decode(&mut vae, &mut backend, Tiling::Fit) {
            Ok(clip) if clip.values == whole.values => "whole",
            Ok(clip) if clip.values == cut.values => "squares",
            Ok(_) => "something else",
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
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
