//! The transformer with heads of the published width, in half precision: what the tiny models are too small for. Devices have
//! kernels for such heads alone, and do chains of steps at once.

use std::path::Path;

use sd_backend::{Backend, BackendOptions, DType, Device};
use sd_graph::{
    Cancel, Checkpoint, Declarations, Graph, LoadOptions, Plan, Progress, RunnerCache, load,
};
use sd_models::qwen_image_2_1::{
    Layout, Prefix, Transformer, TransformerConfig, timestep_embedding,
};

use crate::fixtures::{devices, relative_l2};

/// Channels of a text token: what blocks of 256 weights divide.
const CONTEXT: usize = 256;
const CHANNELS: usize = 16;

/// The published shape, but for so many heads and blocks.
fn config(heads: usize, blocks: usize) -> TransformerConfig {
    serde_json::from_value(serde_json::json!({
        "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56], "causal_condition": true,
        "context_in_dim": CONTEXT, "eps": 1e-6, "in_channels": CHANNELS, "mlp_ratio": 3,
        "num_attention_heads": heads, "num_layers": blocks, "out_channels": CHANNELS, "patch_size": 1
    }))
    .unwrap()
}

/// Numbers from -1 to 1.
fn numbers(count: usize, seed: u32) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    (0..count).map(move |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    })
}

/// Numbers of mean 0 and variance 1 that are spread as those of trained weights are: most of them small.
fn bell(count: usize, seed: u32) -> impl Iterator<Item = f32> {
    let mut even = numbers(4 * count, seed);
    let next = move || even.by_ref().take(4).sum::<f32>() * 0.75_f32.sqrt();
    std::iter::repeat_with(next).take(count)
}

/// A checkpoint in BF16 whose products neither grow nor vanish.
fn file(path: &Path, config: &TransformerConfig) -> Checkpoint {
    let dim = config.inner_dim();
    let mut tensors: Vec<(String, Vec<usize>)> = [
        ("time_text_embed.timestep_embedder.linear_1", vec![dim, 256]),
        ("time_text_embed.timestep_embedder.linear_2", vec![dim, dim]),
        ("txt_in.text_norm", vec![CONTEXT]),
        ("txt_in.in_layer", vec![dim, CONTEXT]),
        ("txt_in.out_layer", vec![dim, dim]),
        ("img_in", vec![dim, CHANNELS]),
        ("modulation.1", vec![4 * dim, dim]),
        ("norm_out.linear", vec![dim, dim]),
        ("proj_out", vec![CHANNELS, dim]),
    ]
    .map(|(name, shape)| (name.to_owned(), shape))
    .into();
    for block in 0..config.num_layers {
        let name = |part: &str| format!("transformer_blocks.{block}.{part}");
        for part in ["to_q", "to_k", "to_v", "to_out.0"] {
            tensors.push((name(&format!("attn.{part}")), vec![dim, dim]));
        }
        tensors.push((name("attn.norm_q"), vec![128]));
        tensors.push((name("attn.norm_k"), vec![128]));
        tensors.push((name("img_mlp.proj"), vec![3 * dim, dim]));
        tensors.push((name("img_mlp.gate_layer"), vec![3 * dim, dim]));
        tensors.push((name("img_mlp.out"), vec![dim, 3 * dim]));
    }
    let tensors = tensors.into_iter().enumerate();
    let values: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .map(|(seed, (name, shape))| {
            let scale = match shape[..] {
                [_, input] => (1.0 / input as f32).sqrt(),
                _ => 1.0,
            };
            let numbers = bell(shape.iter().product(), seed as u32);
            let bytes = numbers.flat_map(|x| half::bf16::from_f32(x * scale).to_le_bytes());
            (format!("{name}.weight"), shape, bytes.collect())
        })
        .collect();
    let views = values.iter().map(|(name, shape, bytes)| {
        let dtype = safetensors::Dtype::BF16;
        let view = safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes).unwrap();
        (name.clone(), view)
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
    Checkpoint::open(path).unwrap()
}

/// What the transformer makes of a picture of 18 by 17 latent pixels and 40 tokens of text, on `device`: once computed, and
/// once more for each type that keys and values of the text are kept in.
fn velocities(
    checkpoint: &Checkpoint,
    config: &TransformerConfig,
    device: Device,
    options: LoadOptions,
    kept: &[DType],
) -> Vec<Vec<f32>> {
    let declarations = Declarations::new(checkpoint, options);
    let transformer = Transformer::new(&declarations.root(), config);
    let params = declarations.finish().unwrap();
    let mut backend = Backend::new(device, &BackendOptions::default().threads(2)).unwrap();
    let (cancel, quiet) = (Cancel::new(), &mut |_: &Progress| {});
    load(checkpoint, &params, &backend, &cancel, quiet).unwrap();
    let layout = Layout::text_to_image(40, 18, 17);
    let mut call = |prefix: Prefix, cache: &RunnerCache| {
        let is_read = matches!(prefix, Prefix::Read(_));
        let mut plan = Plan::build(&backend, |g: Graph<'_>| {
            let latents = g.input::<f32>("latents", [layout.image_tokens(), CHANNELS]);
            let text = (!is_read).then(|| g.input::<f32>("text", [layout.text_tokens(), CONTEXT]));
            let timestep = g.input::<f32>("timestep", [2, timestep_embedding(0.0).len()]);
            let velocity = transformer.forward_with(g, &layout, latents, text, timestep, prefix);
            g.output("velocity", velocity);
        })
        .unwrap();
        let inputs = |count: usize, seed| numbers(count, seed).collect::<Vec<f32>>();
        plan.set("latents", &inputs(layout.image_tokens() * CHANNELS, 100))
            .unwrap();
        if !is_read {
            plan.set("text", &inputs(layout.text_tokens() * CONTEXT, 101))
                .unwrap();
        }
        let timestep = [timestep_embedding(0.7), timestep_embedding(0.0)];
        plan.set("timestep", timestep.as_flattened()).unwrap();
        if prefix != Prefix::Compute {
            plan.attach(cache).unwrap();
        }
        plan.run(&mut backend, &cancel).unwrap();
        plan.read("velocity").unwrap()
    };
    let mut all = vec![call(Prefix::Compute, &RunnerCache::new())];
    for &dtype in kept {
        let cache = RunnerCache::new();
        call(Prefix::Store(dtype), &cache);
        all.push(call(Prefix::Read(dtype), &cache));
    }
    all
}

#[test]
fn heads_of_the_published_width_are_right_on_every_device() {
    let config = config(3, 2);
    // Before the processor is asked for, which may come from a library too.
    let devices = devices();
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(&folder.path().join("wide.safetensors"), &config);
    let single = LoadOptions::default().weight_type(DType::F32);
    let cpu = Device::cpu().unwrap();
    let expected = velocities(&checkpoint, &config, cpu, single.clone(), &[]).remove(0);
    // Not a result of zeros or of one huge number.
    let size = (expected.iter().map(|x| x * x).sum::<f32>() / expected.len() as f32).sqrt();
    assert!((0.1..10.0).contains(&size), "{size}");
    for device in devices {
        for (name, options) in [("F32", single.clone()), ("BF16", LoadOptions::default())] {
            let found = velocities(&checkpoint, &config, device, options, &[]).remove(0);
            let error = relative_l2(&found, &expected);
            println!("{name} on {device}: relative {error:e}");
            // BF16 keeps 8 bits of what goes into each product: 2^-9 each, some ten of them one behind the other.
            assert!(error < 0.02, "{name} on {device}: {error}");
        }
    }
}

/// How far weights of each type, and keys and values of the text of each type, move the velocity from that of single precision.
#[test]
fn each_type_of_weights_moves_the_velocity_by_so_much() {
    let config = config(4, 4);
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(&folder.path().join("wide.safetensors"), &config);
    let cpu = Device::cpu().unwrap();
    let with = |dtype: DType, kept: &[DType]| {
        let options = LoadOptions::default().weight_type(dtype);
        velocities(&checkpoint, &config, cpu, options, kept)
    };
    // The file is in BF16, so that F32 has the same weights. The bounds are half as much again as what was found: a type that is
    // made or multiplied wrongly is further off by a factor, not by a few per cent.
    let kept = [
        (DType::F32, 1e-6),
        (DType::F16, 1.1e-5),
        (DType::Q8_0, 3.2e-4),
    ];
    let plain = with(DType::F32, &kept.map(|(dtype, _)| dtype));
    for ((dtype, most), found) in kept.iter().zip(&plain[1..]) {
        let error = relative_l2(found, &plain[0]);
        println!("kept keys and values, {dtype}: {error:.1e}");
        assert!(error <= *most, "{dtype}: {error:e}");
    }
    let weights = [
        (DType::BF16, 3.5e-3),
        (DType::F16, 4.2e-4),
        (DType::Q8_0, 0.019),
        (DType::Q6K, 0.048),
        (DType::Q5K, 0.092),
        (DType::Q5_0, 0.104),
        (DType::Q4K, 0.165),
        (DType::Q4_0, 0.21),
        (DType::Q3K, 0.38),
        (DType::Q2K, 0.72),
    ];
    let errors = weights.map(|(dtype, most)| {
        let error = relative_l2(&with(dtype, &[])[0], &plain[0]);
        println!("weights, {dtype}: {error:.1e}");
        (dtype, error, most)
    });
    for (dtype, error, most) in errors {
        assert!(error <= most, "{dtype}: {error:e}");
    }
}
