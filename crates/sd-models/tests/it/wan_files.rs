//! Files of the VAEs: types of weights, names, sizes that do not fit.

use sd_backend::DType;
use sd_graph::{Cancel, LoadOptions};
use sd_models::wan_vae::{Tiling, WanVae};

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
                .unwrap();
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
    for level in (0..4).rev() {
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
        let case = case(name, case_name);
        for path in [path.as_path(), to.path()] {
            let mut vae = open(path);
            let (pixels, z) = (clip(case.get("in.pixels")), clip(case.get("in.z")));
            let encoded = vae
                .encode(&mut backend, &pixels, Tiling::Whole, &Cancel::new())
                .unwrap();
            assert_near(&backend, name, &encoded, &clip(case.get("out.mean")));
            let decoded = vae
                .decode(&mut backend, &z, Tiling::Whole, &Cancel::new())
                .unwrap();
            assert_near(&backend, name, &decoded, &clip(case.get("out.decoded")));
        }
    }
}
