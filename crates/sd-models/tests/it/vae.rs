//! The VAE's decoder against diffusers on random weights.

use sd_models::Circular;
use sd_models::qwen_image_2_1::{VaeConfig, VaeDecoder};

use crate::fixtures::{assert_close, cases, folder, on_all_devices, relative_l2};

/// Asked of single precision; the reference itself moves by 6.5e-6 between kernels.
const TOLERANCE: f32 = 1e-4;

#[test]
fn pictures_are_the_references() {
    for variant in ["qwenimage21_vae", "qwenimage21_vae_variant"] {
        let folder = folder(variant);
        let config = VaeConfig::read(&folder.join("config.json")).unwrap();
        for mut loaded in on_all_devices(&folder, |root| VaeDecoder::new(root, &config)) {
            let mut compared = 0;
            for (name, case) in cases(variant) {
                if !name.starts_with("decode") {
                    continue;
                }
                let z = case.get("in.z");
                let decoded = case.get("out.decoded");
                let (batch, shape) = (z.shape[0], [1, z.shape[1], z.shape[2], z.shape[3]]);
                let (z_len, decoded_len) = (z.f32.len() / batch, decoded.f32.len() / batch);
                for item in 0..batch {
                    let values = &z.f32[item * z_len..(item + 1) * z_len];
                    let mut result = loaded.run(&[("z", values)], &[], |decoder, g| {
                        decoder.forward(g.input::<f32>("z", shape), Circular::NONE)
                    });
                    for value in &mut result {
                        *value = value.clamp(-1.0, 1.0);
                    }
                    let should = &decoded.f32[item * decoded_len..(item + 1) * decoded_len];
                    assert_close(
                        &loaded,
                        &format!("{variant} {name}, item {item}"),
                        &result,
                        should,
                        TOLERANCE,
                    );
                    compared += 1;
                }
            }
            assert!(compared >= 2, "{compared}");
        }
    }
}

/// Values `[channels, height, width]` moved on by `(down, right)`, what leaves at one side entering at the other.
fn rolled(values: &[f32], [height, width]: [usize; 2], [down, right]: [usize; 2]) -> Vec<f32> {
    (0..values.len())
        .map(|at| {
            let (channel, y, x) = (at / (height * width), at / width % height, at % width);
            let y = (y + height - down) % height;
            values[(channel * height + y) * width + (x + width - right) % width]
        })
        .collect()
}

/// A picture whose sides join has no place where it begins: latents moved on give the picture moved on, along the axes
/// that join and no others.
#[test]
fn joined_sides_are_like_all_other_places() {
    let variant = "qwenimage21_vae_variant";
    let folder = folder(variant);
    let config = VaeConfig::read(&folder.join("config.json")).unwrap();
    let (height, width, scale) = (3, 4, config.scale_factor());
    let z: Vec<f32> = sd_models::noise::normal(7, config.z_dim * height * width);
    for mut loaded in on_all_devices(&folder, |root| VaeDecoder::new(root, &config)) {
        for circular in [Circular::NONE, Circular::X, Circular::Y, Circular::XY] {
            let mut decode = |z: &[f32]| {
                loaded.run(&[("z", z)], &[], |decoder, g| {
                    let z = g.input::<f32>("z", [1, config.z_dim, height, width]);
                    decoder.forward(z, circular)
                })
            };
            let picture = decode(&z);
            for (by, joined) in [
                ([0, 1], circular.x),
                ([2, 0], circular.y),
                ([1, 3], circular == Circular::XY),
            ] {
                let moved = decode(&rolled(&z, [height, width], by));
                let pixels = [height * scale, width * scale];
                let should = rolled(&picture, pixels, by.map(|latents| latents * scale));
                let error = relative_l2(&moved, &should);
                println!("{circular} moved by {by:?}: {error:e}");
                // Sums in another order, in half precision on some devices; without the join as much as the signal itself.
                assert_eq!(
                    error < 0.01,
                    joined,
                    "{circular} moved by {by:?}: {error:e}"
                );
            }
        }
    }
}
