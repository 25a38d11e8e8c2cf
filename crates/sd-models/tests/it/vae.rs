//! The VAE's decoder against diffusers on random weights.

use sd_models::qwen_image_2_1::{VaeConfig, VaeDecoder};

use crate::fixtures::{assert_close, cases, folder, on_all_devices};

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
                        decoder.forward(g.input::<f32>("z", shape))
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
