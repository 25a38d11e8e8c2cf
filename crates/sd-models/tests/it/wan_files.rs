//! Files of the VAEs: types of weights, names, sizes that do not fit.

use sd_backend::DType;
use sd_graph::{Cancel, Checkpoint, Declarations, LoadOptions, StoredType};
use sd_models::wan_vae::{Config, Decoder, Encoder, Tiling, WanVae};

use crate::fixtures::{folder, relative_l2};
use crate::wan::{assert_near, case, clip, open, processor};

/// A copy of a fixture folder whose weights `change` has seen: name, shape and values of each.
pub(crate) fn changed(
    name: &str,
    dtype: safetensors::Dtype,
    change: impl Fn(&str, &[usize], &mut [f32]),
) -> tempfile::TempDir {
    let (from, to) = (folder(name), tempfile::tempdir().unwrap());
    std::fs::copy(from.join("config.json"), to.path().join("config.json")).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = file
        .iter()
        .map(|(name, view)| {
            let words = view.data().as_chunks::<4>().0;
            let mut values: Vec<f32> = words.iter().map(|&b| f32::from_le_bytes(b)).collect();
            change(name, view.shape(), &mut values);
            let bytes = values
                .iter()
                .flat_map(|&value| match dtype {
                    safetensors::Dtype::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
                    safetensors::Dtype::BF16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
                    _ => value.to_le_bytes().to_vec(),
                })
                .collect();
            (name.to_owned(), view.shape().to_vec(), bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes).unwrap();
        (name.as_str(), view)
    });
    let out = to.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &out).unwrap();
    to
}

#[test]
fn files_in_half_precision_are_near() {
    let case = case("wan22_vae", "5_16x32");
    let mut backend = processor();
    // Weights keep 11 and 8 bits; of these random weights' deep sums that leaves three and two digits.
    for (dtype, allowed) in [
        (safetensors::Dtype::F16, 0.01),
        (safetensors::Dtype::BF16, 0.05),
    ] {
        let copy = changed("wan22_vae", dtype, |_, _, _| {});
        for asked in [None, Some(DType::F32)] {
            let options = match asked {
                Some(asked) => LoadOptions::default().weight_type(asked),
                None => LoadOptions::default(),
            };
            let mut vae = WanVae::open(copy.path(), &options).unwrap();
            let z = clip(case.get("in.z"));
            let decoded = vae
                .decode(&mut backend, &z, Tiling::Whole, &Cancel::new())
                .unwrap()
                .0;
            let error = relative_l2(&decoded.values, &case.get("out.decoded").f32);
            println!("{dtype:?} as {asked:?}: {error:e}");
            assert!(error > 1e-5 && error < allowed, "{dtype:?}: {error:e}");
        }
    }
}

#[test]
fn weights_of_another_size_are_refused_together() {
    let copy = changed("wan21_vae", safetensors::Dtype::F32, |_, _, _| {});
    let path = copy.path().join("config.json");
    let config = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, config.replace("\"base_dim\": 2", "\"base_dim\": 4")).unwrap();
    let error = WanVae::open(copy.path(), &LoadOptions::default()).unwrap_err();
    let text = error.to_string();
    let wanted = "encoder.conv_in.weight ([2, 3, 3, 3, 3] instead of [4, 3, 3, 3, 3])";
    assert!(text.contains(wanted), "{text}");
}

/// Names of diffusers' file for each file of the authors' names: as written down in their programs, not by our translation.
fn original(name: &str, is_residual: bool) -> String {
    let ends = [
        ("norm1.gamma", "residual.0.gamma"),
        ("conv1.weight", "residual.2.weight"),
        ("conv1.bias", "residual.2.bias"),
        ("norm2.gamma", "residual.3.gamma"),
        ("conv2.weight", "residual.6.weight"),
        ("conv2.bias", "residual.6.bias"),
        ("conv_shortcut", "shortcut"),
    ];
    let starts = [
        ("post_quant_conv", "conv2"),
        ("quant_conv", "conv1"),
        ("coder.conv_in", "coder.conv1"),
        ("coder.norm_out", "coder.head.0"),
        ("coder.conv_out", "coder.head.2"),
        ("mid_block.resnets.0", "middle.0"),
        ("mid_block.attentions.0", "middle.1"),
        ("mid_block.resnets.1", "middle.2"),
    ];
    let mut name = name.to_owned();
    if name.contains("_block") {
        for (from, to) in ends {
            name = name.replace(from, to);
        }
    }
    for (from, to) in starts {
        if let Some(rest) = name.strip_prefix(from) {
            name = format!("{to}{rest}");
        } else if from.starts_with("co") || from.starts_with("mid") {
            name = name.replace(from, to);
        }
    }
    for level in (0..5).rev() {
        for resnet in 0..4 {
            // Three blocks and a resampler to a level of the decoder, two and one to the encoder's.
            let (flat, nested) = (4 * level + resnet, format!("{level}.upsamples.{resnet}"));
            let to = if is_residual {
                nested
            } else {
                flat.to_string()
            };
            let from = if resnet < 3 {
                vec![format!("up_blocks.{level}.resnets.{resnet}.")]
            } else {
                vec![
                    format!("up_blocks.{level}.upsamplers.0."),
                    format!("up_blocks.{level}.upsampler."),
                ]
            };
            for from in from {
                name = name.replace(&from, &format!("upsamples.{to}."));
            }
            let from = if resnet < 2 {
                format!("down_blocks.{level}.resnets.{resnet}.")
            } else {
                format!("down_blocks.{level}.downsampler.")
            };
            name = name.replace(
                &from,
                &format!("downsamples.{level}.downsamples.{}.", resnet.min(2)),
            );
        }
    }
    name.replace("down_blocks.", "downsamples.")
}

#[test]
fn files_with_the_authors_names_are_read() {
    // Some of what the authors' programs save, to know that the names above are theirs.
    for (diffusers, is_residual, authors) in [
        (
            "encoder.down_blocks.3.conv_shortcut.weight",
            false,
            "encoder.downsamples.3.shortcut.weight",
        ),
        (
            "encoder.down_blocks.5.time_conv.bias",
            false,
            "encoder.downsamples.5.time_conv.bias",
        ),
        (
            "decoder.up_blocks.1.resnets.0.conv2.bias",
            false,
            "decoder.upsamples.4.residual.6.bias",
        ),
        (
            "decoder.up_blocks.2.upsamplers.0.resample.1.weight",
            false,
            "decoder.upsamples.11.resample.1.weight",
        ),
        (
            "decoder.up_blocks.1.upsampler.time_conv.weight",
            true,
            "decoder.upsamples.1.upsamples.3.time_conv.weight",
        ),
        (
            "encoder.down_blocks.2.downsampler.resample.1.bias",
            true,
            "encoder.downsamples.2.downsamples.2.resample.1.bias",
        ),
        ("encoder.conv_in.weight", true, "encoder.conv1.weight"),
        ("quant_conv.weight", false, "conv1.weight"),
    ] {
        assert_eq!(original(diffusers, is_residual), authors);
    }
    let mut backend = processor();
    for (name, case_name, prefix) in [
        ("wan21_vae", "5_16x24", ""),
        ("wan22_vae", "5_16x32", "first_stage_model."),
        ("qwenimage_vae", "5_8x16", "vae."),
    ] {
        let from = folder(name);
        let to = tempfile::tempdir().unwrap();
        std::fs::copy(from.join("config.json"), to.path().join("config.json")).unwrap();
        let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let renamed = file.iter().map(|(tensor, view)| {
            (
                format!("{prefix}{}", original(tensor, name == "wan22_vae")),
                view,
            )
        });
        let path = to.path().join("some_vae.safetensors");
        safetensors::serialize_to_file(renamed, None, &path).unwrap();
        // Without a configuration beside it, and with the names of diffusers too.
        let alone = tempfile::tempdir().unwrap();
        let file = alone.path().join("authors.safetensors");
        std::fs::copy(&path, &file).unwrap();
        let other = alone.path().join("diffusers.safetensors");
        std::fs::copy(from.join("model.safetensors"), &other).unwrap();
        let case = case(name, case_name);
        for path in [path.as_path(), to.path(), file.as_path(), other.as_path()] {
            let mut vae = open(path);
            let (pixels, z) = (clip(case.get("in.pixels")), clip(case.get("in.z")));
            let encoded = vae
                .encode(&mut backend, &pixels, Tiling::Whole, &Cancel::new())
                .unwrap()
                .0;
            assert_near(&backend, name, &encoded, &clip(case.get("out.mean")));
            let decoded = vae
                .decode(&mut backend, &z, Tiling::Whole, &Cancel::new())
                .unwrap()
                .0;
            assert_near(&backend, name, &decoded, &clip(case.get("out.decoded")));
        }
    }
}

/// What is known of a published VAE: its configuration as diffusers has it, and its tensors.
fn published(name: &str) -> (Config, Vec<(String, Vec<usize>)>) {
    let path = folder("published").join(name);
    let table: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let config = serde_json::from_value(table["config"].clone()).unwrap();
    let tensors = table["tensors"].as_object().unwrap().iter();
    let tensors = tensors.map(|(name, shape)| {
        let shape = serde_json::from_value(shape.clone()).unwrap();
        (name.clone(), shape)
    });
    (config, tensors.collect())
}

fn declares(checkpoint: &Checkpoint, config: &Config) -> Result<(), sd_graph::Mismatch> {
    let declarations = Declarations::new(checkpoint, LoadOptions::default());
    Decoder::new(&declarations.root(), config);
    Encoder::new(&declarations.root(), config);
    declarations.finish().map(drop)
}

/// A file of weights alone says by its names and shapes what it is: all published VAEs, by both ways of naming.
#[test]
fn files_say_what_they_are() {
    for (name, is_residual) in [
        ("wan21_vae.json", false),
        ("qwenimage_vae.json", false),
        ("wan22_vae.json", true),
        ("qwenimage21_vae.json", true),
    ] {
        let (known, tensors) = published(name);
        for (prefix, is_original) in [("", false), ("", true), ("vae.", true)] {
            let renamed = tensors.iter().map(|(tensor, shape)| {
                let tensor = match is_original {
                    true => original(tensor, is_residual),
                    false => tensor.clone(),
                };
                (format!("{prefix}{tensor}"), StoredType::F16, shape.clone())
            });
            let checkpoint = Checkpoint::from_table("some", renamed).unwrap();
            let config = Config::of(&checkpoint).unwrap();
            if !is_original {
                declares(&checkpoint, &config).unwrap();
            }
            let facts = |config: &Config| {
                (
                    (config.z_dim, config.channels(), config.scale_factor()),
                    (config.is_for_pictures(), config.frames_per_latent()),
                )
            };
            assert_eq!(facts(&config), facts(&known), "{name}");
            // The table has no numbers for those of WAN 2.2.
            if config.z_dim != 48 {
                assert_eq!(config.latents_mean, known.latents_mean);
                assert_eq!(config.latents_std, known.latents_std);
            } else {
                // The first and the last, from the authors' program.
                let ends = |values: &[f32]| [values[0], values[47]];
                assert_eq!(ends(&config.latents_mean), [-0.2289, -0.0667]);
                assert_eq!(ends(&config.latents_std), [0.4765, 0.7744]);
            }
        }
    }
    // Frames one deep: as some programs write the kernels of a VAE for pictures.
    let (_, tensors) = published("qwenimage21_vae.json");
    let deep = tensors.iter().map(|(name, shape)| {
        let mut shape = shape.clone();
        if shape.len() == 4 {
            shape.insert(2, 1);
        }
        (name.clone(), StoredType::BF16, shape)
    });
    let checkpoint = Checkpoint::from_table("some", deep).unwrap();
    let config = Config::of(&checkpoint).unwrap();
    assert!(config.is_for_pictures());
    declares(&checkpoint, &config).unwrap();
}

#[test]
fn files_that_are_no_vae_say_what_is_missing() {
    let (_, tensors) = published("wan21_vae.json");
    let without = |left_out: &str| {
        let kept = tensors
            .iter()
            .filter(|(name, _)| !name.starts_with(left_out));
        let kept = kept.map(|(name, shape)| (name.clone(), StoredType::F16, shape.clone()));
        let checkpoint = Checkpoint::from_table("some.safetensors", kept).unwrap();
        Config::of(&checkpoint).unwrap_err().to_string()
    };
    for (left_out, part) in [
        ("encoder.conv_in", "no tensor encoder.conv_in.weight"),
        ("post_quant_conv", "no tensor post_quant_conv.weight"),
        ("encoder.down_blocks", "no levels of an encoder"),
        ("encoder.down_blocks.4.", "levels with different numbers"),
    ] {
        let text = without(left_out);
        assert!(
            text.contains("some.safetensors") && text.contains("no config.json"),
            "{text}"
        );
        assert!(text.contains(part), "{left_out}: {text}");
    }
    let folder = tempfile::tempdir().unwrap();
    let error = WanVae::open(folder.path(), &LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("config.json"), "{error}");
}

/// Types of kernels: floating-point numbers of 8 bits are widened; blocks of quantised numbers lie along rows that kernels
/// do not have, so that what holds them has other shapes, and codes without a key are no numbers.
#[test]
fn quantised_kernels_are_widened_or_refused() {
    let (config, tensors) = published("qwenimage21_vae.json");
    let stored = |kernel: StoredType, flat: bool| {
        let entries = tensors.iter().map(move |(name, shape)| match shape[..] {
            [output, input, height, width] if input % 32 == 0 => {
                let shape = match flat {
                    true => vec![output, input * height * width],
                    false => shape.clone(),
                };
                (name.clone(), kernel, shape)
            }
            _ => (name.clone(), StoredType::F32, shape.clone()),
        });
        Checkpoint::from_table("some", entries).unwrap()
    };
    for kernel in [StoredType::F8E4M3, StoredType::F8E5M2, StoredType::BF16] {
        declares(&stored(kernel, false), &config).unwrap();
    }
    let q8_0 = StoredType::Q8_0;
    let text = declares(&stored(q8_0, true), &config)
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("of another shape: ") && text.contains(" instead of "),
        "{text}"
    );
    let text = declares(&stored(StoredType::I8, false), &config)
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("of a type that cannot be used: ") && text.contains("(I8)"),
        "{text}"
    );
}
