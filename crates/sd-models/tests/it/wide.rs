//! The transformer with heads of the published width, in half precision: what the tiny models are too small for. Devices have
//! kernels for such heads alone, and do chains of steps at once.

use std::path::Path;

use sd_backend::{Backend, BackendOptions, DType, Device};
use sd_graph::{Cancel, Checkpoint, Declarations, Graph, LoadOptions, Plan, Progress, load};
use sd_models::qwen_image_2_1::{Layout, Transformer, TransformerConfig, timestep_embedding};

use crate::fixtures::{devices, relative_l2};

const BLOCKS: usize = 2;
const HEADS: usize = 3;
const CONTEXT: usize = 64;
const CHANNELS: usize = 16;

/// Numbers from -1 to 1.
fn numbers(count: usize, seed: u32) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    (0..count).map(move |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    })
}

/// A checkpoint in BF16 whose products neither grow nor vanish.
fn file(path: &Path, dim: usize) -> Checkpoint {
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
    for block in 0..BLOCKS {
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
                [_, input] => (3.0 / input as f32).sqrt(),
                _ => 1.5,
            };
            let numbers = numbers(shape.iter().product(), seed as u32);
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

/// What the transformer makes of a picture of 18 by 17 latent pixels and 40 tokens of text, on `device`.
fn velocity(
    checkpoint: &Checkpoint,
    config: &TransformerConfig,
    device: Device,
    options: LoadOptions,
) -> Vec<f32> {
    let declarations = Declarations::new(checkpoint, options);
    let transformer = Transformer::new(&declarations.root(), config);
    let params = declarations.finish().unwrap();
    let mut backend = Backend::new(device, &BackendOptions::default().threads(2)).unwrap();
    let (cancel, quiet) = (Cancel::new(), &mut |_: &Progress| {});
    load(checkpoint, &params, &backend, &cancel, quiet).unwrap();
    let layout = Layout::text_to_image(40, 18, 17);
    let mut plan = Plan::build(&backend, |g: Graph<'_>| {
        let latents = g.input::<f32>("latents", [layout.image_tokens(), CHANNELS]);
        let text = g.input::<f32>("text", [layout.text_tokens(), CONTEXT]);
        let timestep = g.input::<f32>("timestep", [2, timestep_embedding(0.0).len()]);
        let velocity = transformer.forward(g, &layout, latents, text, timestep);
        g.output("velocity", velocity);
    })
    .unwrap();
    let inputs = |count: usize, seed| numbers(count, seed).collect::<Vec<f32>>();
    plan.set("latents", &inputs(layout.image_tokens() * CHANNELS, 100))
        .unwrap();
    plan.set("text", &inputs(layout.text_tokens() * CONTEXT, 101))
        .unwrap();
    let timestep = [timestep_embedding(0.7), timestep_embedding(0.0)];
    plan.set("timestep", timestep.as_flattened()).unwrap();
    plan.run(&mut backend, &cancel).unwrap();
    plan.read("velocity").unwrap()
}

#[test]
fn heads_of_the_published_width_are_right_on_every_device() {
    let config: TransformerConfig = serde_json::from_value(serde_json::json!({
        "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56], "causal_condition": true,
        "context_in_dim": CONTEXT, "eps": 1e-6, "in_channels": CHANNELS, "mlp_ratio": 3,
        "num_attention_heads": HEADS, "num_layers": BLOCKS, "out_channels": CHANNELS, "patch_size": 1
    }))
    .unwrap();
    // Before the processor is asked for, which may come from a library too.
    let devices = devices();
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = file(&folder.path().join("wide.safetensors"), config.inner_dim());
    let single = LoadOptions::default().weight_type(DType::F32);
    let expected = velocity(&checkpoint, &config, Device::cpu().unwrap(), single.clone());
    // Not a result of zeros or of one huge number.
    let size = (expected.iter().map(|x| x * x).sum::<f32>() / expected.len() as f32).sqrt();
    assert!((0.1..10.0).contains(&size), "{size}");
    for device in devices {
        for (name, options) in [("F32", single.clone()), ("BF16", LoadOptions::default())] {
            let found = velocity(&checkpoint, &config, device, options);
            let error = relative_l2(&found, &expected);
            println!("{name} on {device}: relative {error:e}");
            // BF16 keeps 8 bits of what goes into each product: 2^-9 each, some ten of them one behind the other.
            assert!(error < 0.02, "{name} on {device}: {error}");
        }
    }
}
