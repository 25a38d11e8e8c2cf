//! LoRAs against diffusers and peft, in the styles of three programs; what does not fit, and what they take.

use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};
use sd_backend::{Backend, BackendOptions, DType, Device};
use sd_graph::{Cancel, Checkpoint, Declarations, LoadOptions, Progress, Selection, load};
use sd_models::qwen_image_2_1::{Transformer, TransformerConfig, with_loras};
use sd_models::{Error, ModelFiles, Pipeline, Request};

use crate::fixtures::{Case, Loaded, assert_close, devices, folder, psnr, relative_l2, tiny};
use crate::transformer::Item;

fn file(name: &str) -> PathBuf {
    folder("qwenimage21_lora").join(format!("{name}.safetensors"))
}

/// The transformer of the fixture with LoRAs, on one device.
fn loaded(
    checkpoint: &Checkpoint,
    loras: &[(PathBuf, f32)],
    device: Device,
    options: LoadOptions,
) -> (Loaded<Transformer>, usize) {
    let config = folder("qwenimage21_transformer").join("config.json");
    let config = TransformerConfig::read(&config).unwrap();
    let adapted = with_loras(checkpoint, loras).unwrap();
    assert!(
        adapted
            .reports
            .iter()
            .all(sd_models::LoraReport::is_complete),
        "{:?}",
        adapted.reports
    );
    let weights = adapted.reports.iter().map(|report| report.weights).sum();
    let declarations = Declarations::new(&adapted.checkpoint, options).adapt(adapted.adapters);
    let module = Transformer::new(&declarations.root(), &config);
    assert_eq!(declarations.unused_adapters(), Vec::<String>::new());
    let params = declarations.finish().unwrap();
    let backend = Backend::new(device, &BackendOptions::default().threads(2)).unwrap();
    let (cancel, quiet) = (Cancel::new(), &mut |_: &Progress| {});
    load(&adapted.checkpoint, &params, &backend, &cancel, quiet).unwrap();
    (Loaded { module, backend }, weights)
}

/// What the transformer predicts in the case of the fixture.
fn predicted(loaded: &mut Loaded<Transformer>, item: &Item) -> Vec<f32> {
    let config = loaded.module.config().clone();
    let inputs = [
        ("latents", item.latents.as_slice()),
        ("text", &item.text),
        ("timestep", item.timesteps.as_flattened()),
    ];
    loaded.run(&inputs, &[], |model, g| {
        let latents = [item.layout.image_tokens(), config.in_channels];
        let text = [item.layout.text_tokens(), config.context_in_dim];
        model.forward(
            g,
            &item.layout,
            g.input::<f32>("latents", latents),
            g.input::<f32>("text", text),
            g.input::<f32>("timestep", [2, 256]),
        )
    })
}

/// The base model as its file has it, and as ComfyUI has it: gate and up projections in one, behind a prefix.
fn layouts() -> [(&'static str, Checkpoint); 2] {
    let plain = Checkpoint::open(folder("qwenimage21_transformer")).unwrap();
    let fused = Checkpoint::open(crate::layouts::fused_fixture()).unwrap();
    [("diffusers", plain), ("fused", fused)]
}

/// Single precision: factors of rank 4 and less change nothing about how products of 96 to 576 elements are rounded. The same as for
/// the transformer without them.
const TOLERANCE: f32 = 1e-4;

#[test]
fn loras_of_three_styles_change_what_diffusers_says_they_change() {
    let outputs = Case::read(&file("outputs"));
    let strengths = &outputs.meta["strengths"];
    let strength = |name: &str| strengths[name].as_f64().unwrap() as f32;
    let base = Case::read(&folder("qwenimage21_transformer").join("case_t2i.safetensors"));
    let item = &Item::all(&base, 64)[0];
    let one = |name: &'static str| vec![(file(name), strength(name))];
    let all = ["diffusers", "kohya", "comfyui"].map(|name| (file(name), strength(name)));
    // Nine targets of each of three blocks but the four outside of them; four modules; two of two halves.
    let cases = [
        ("none", vec![], 0),
        ("diffusers", one("diffusers"), 3 * 5 + 4),
        ("kohya", one("kohya"), 4),
        ("comfyui", one("comfyui"), 4),
        ("all", all.to_vec(), 27),
    ];
    let single = || LoadOptions::default().weight_type(DType::F32);
    let (_, plain) = &layouts()[0];
    for device in devices() {
        for (name, loras, weights) in &cases {
            let (mut loaded, added) = loaded(plain, loras, device, single());
            assert_eq!(added, *weights, "{name}");
            let result = predicted(&mut loaded, item);
            let sample = &outputs.get(name).f32;
            let target = &sample[sample.len() - result.len()..];
            assert_close(&loaded, name, &result, target, TOLERANCE);
        }
    }
    // Quantised weights: the same additions to weights that are a 270th off, which the transformer without them makes 0.05 of.
    let cpu = Device::cpu().unwrap();
    let options = LoadOptions::default().weight_type(DType::Q8_0);
    let result = predicted(&mut loaded(plain, &cases[4].1, cpu, options).0, item);
    let sample = &outputs.get("all").f32;
    let error = relative_l2(&result, &sample[sample.len() - result.len()..]);
    println!("q8_0 with all: {error:e}");
    assert!(error < 0.15, "{error:e}");
}

#[test]
fn loras_fit_weights_that_are_kept_in_one() {
    let base = Case::read(&folder("qwenimage21_transformer").join("case_t2i.safetensors"));
    let item = &Item::all(&base, 64)[0];
    let loras = ["diffusers", "kohya", "comfyui"].map(|name| (file(name), 1.0));
    let cpu = Device::cpu().unwrap();
    let results = layouts().map(|(name, checkpoint)| {
        let (checkpoint, _) = crate::layouts::named(&checkpoint);
        let (mut loaded, weights) = loaded(&checkpoint, &loras, cpu, LoadOptions::default());
        assert_eq!(weights, 27, "{name}");
        predicted(&mut loaded, item)
    });
    assert_eq!(results[0], results[1]);
}

/// Tensors to be written: names and shapes.
type Given<'a> = &'a [(&'a str, &'a [usize])];

/// A safetensors file of F32 zeros.
fn zeros(path: &Path, tensors: Given<'_>) {
    let data: Vec<Vec<u8>> = (tensors.iter())
        .map(|(_, shape)| vec![0; shape.iter().product::<usize>() * 4])
        .collect();
    let views = tensors.iter().zip(&data).map(|((name, shape), data)| {
        (
            *name,
            TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap(),
        )
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn what_does_not_fit_is_listed_and_a_lora_without_effect_is_an_error() {
    let checkpoint = Checkpoint::open(folder("qwenimage21_transformer")).unwrap();
    let at = tempfile::tempdir().unwrap();
    let path = at.path().join("lora.safetensors");
    let mixed: Given<'_> = &[
        // Fits, with the sides of 1 that factors of convolutions have.
        ("transformer.img_in.lora_A.weight", &[2, 16, 1, 1]),
        ("transformer.img_in.lora_B.weight", &[96, 2, 1, 1]),
        // Of another model, of another width, without its other half, of two ranks.
        ("transformer.single_blocks.0.proj.lora_A.weight", &[2, 96]),
        ("transformer.single_blocks.0.proj.lora_B.weight", &[96, 2]),
        ("lora_unet_proj_out.lora_down.weight", &[2, 64]),
        ("lora_unet_proj_out.lora_up.weight", &[20, 2]),
        ("diffusion_model.modulation.1.lora_A.weight", &[2, 96]),
        ("transformer.norm_out.linear.lora_A.weight", &[2, 96]),
        ("transformer.norm_out.linear.lora_B.weight", &[96, 3]),
        // A vector has no rows to multiply.
        ("transformer.txt_in.text_norm.lora_A.weight", &[1, 64]),
        ("transformer.txt_in.text_norm.lora_B.weight", &[64, 1]),
        ("transformer.img_in.dora_scale", &[96]),
        ("transformer.txt_in.in_layer.hada_w1_a", &[2, 2]),
    ];
    zeros(&path, mixed);
    let report = &with_loras(&checkpoint, &[(path.clone(), 0.5)])
        .unwrap()
        .reports[0];
    assert_eq!((report.weights, report.strength), (1, 0.5));
    assert_eq!(report.unmatched, ["transformer.single_blocks.0.proj"]);
    let misshapen: Vec<&str> = report
        .misshapen
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(
        misshapen,
        [
            "diffusion_model.modulation.1",
            "lora_unet_proj_out",
            "transformer.norm_out.linear",
            "transformer.txt_in.text_norm"
        ]
    );
    assert_eq!(report.misshapen[1].1, "[20, 64] for a matrix of [20, 96]");
    assert_eq!(
        report.unsupported,
        [
            "transformer.img_in.dora_scale",
            "transformer.txt_in.in_layer.hada_w1_a"
        ]
    );
    let text = report.to_string();
    assert!(text.contains("adds to 1 weights; 1 modules that the model does not have: transformer.single_blocks.0.proj"), "{text}");

    let refused: &[(Given<'_>, f32, &str)] = &[
        (&mixed[2..4], 1.0, "nothing of this LoRA fits"),
        (
            &[("img_in.weight", &[96, 16])],
            1.0,
            "nothing of this LoRA fits",
        ),
        (&[], 1.0, "this is no LoRA"),
        (&mixed[..2], f32::NAN, "a strength of NaN"),
        (
            &[
                ("img_in.lora_A.weight", &[2, 16]),
                ("img_in.lora_down.weight", &[2, 16]),
            ],
            1.0,
            "the same factor",
        ),
    ];
    for (tensors, strength, part) in refused {
        zeros(&path, tensors);
        let error = with_loras(&checkpoint, &[(path.clone(), *strength)]).unwrap_err();
        assert!(matches!(error, Error::Lora { .. }), "{error}");
        assert!(error.to_string().contains(part), "`{part}` in {error}");
    }
    // An alpha that is no number makes its module one that does not fit, not a picture of nothing.
    let alpha: Given<'_> = &[
        ("img_in.lora_A.weight", &[2, 16]),
        ("img_in.lora_B.weight", &[96, 2]),
        ("img_in.alpha", &[3]),
    ];
    zeros(&path, alpha);
    let error = with_loras(&checkpoint, &[(path.clone(), 1.0)]).unwrap_err();
    assert!(error.to_string().contains("no single number"), "{error}");
    // A selection's names are its own: a LoRA of the same file twice is added twice.
    zeros(&path, &alpha[..2]);
    let twice = with_loras(&checkpoint, &[(path.clone(), 1.0), (path, 1.0)]).unwrap();
    assert_eq!(twice.checkpoint.len(), checkpoint.len() + 4);
    let mut again = Selection::new(&checkpoint);
    again.add_all(&checkpoint).unwrap();
    assert!(again.add_all(&checkpoint).is_err());
}

/// A LoRA for the tiny checkpoint whose factors are `value` everywhere.
fn constant_lora(path: &Path, value: f32) {
    let (down, up): (Vec<u8>, Vec<u8>) = (
        std::iter::repeat_n(value.to_le_bytes(), 4 * 192)
            .flatten()
            .collect(),
        std::iter::repeat_n(value.to_le_bytes(), 192 * 4)
            .flatten()
            .collect(),
    );
    let names: Vec<(String, String)> = (0..7)
        .map(|block| {
            let module = format!("transformer.transformer_blocks.{block}.attn.to_v");
            (
                format!("{module}.lora_A.weight"),
                format!("{module}.lora_B.weight"),
            )
        })
        .collect();
    let views = names.iter().flat_map(|(a, b)| {
        [
            (a, TensorView::new(Dtype::F32, vec![4, 192], &down).unwrap()),
            (b, TensorView::new(Dtype::F32, vec![192, 4], &up).unwrap()),
        ]
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

#[test]
fn pictures_change_with_a_lora_however_weights_come() {
    let at = tempfile::tempdir().unwrap();
    let (path, none) = (
        at.path().join("lora.safetensors"),
        at.path().join("none.safetensors"),
    );
    constant_lora(&path, 0.2);
    constant_lora(&none, 0.0);
    let draw = |files: ModelFiles, placement: &str| {
        let builder = Pipeline::open(files).unwrap().device("cpu").threads(2);
        let builder = builder.placement(placement.parse().unwrap());
        let planned = builder.plan(Some((96, 96)), 16).unwrap();
        let mut pipeline = builder.load().unwrap();
        let condition = pipeline
            .encode("a large red circle on a blue background")
            .unwrap();
        let request = Request::new(&condition).size(96, 96).steps(3).seed(7);
        let (image, _) = pipeline.generate(&request, &mut |_: &Progress| {}).unwrap();
        let weights: u64 = planned.seats.iter().map(|seat| seat.weights).sum();
        let levels: Vec<f32> = (image.pixels().as_raw().iter())
            .map(|&byte| f32::from(byte) / 127.5 - 1.0)
            .collect();
        (levels, weights, pipeline.loras().len())
    };
    let base = || ModelFiles::from(&tiny());
    let (plain, bytes, _) = draw(base(), "cpu");
    let (changed, with, reports) = draw(base().lora(&path, 1.0), "cpu");
    assert_eq!(reports, 1);
    let quality = psnr(&changed, &plain);
    println!("with a LoRA: {quality:.1} dB from without");
    assert!(quality < 30.0, "{quality:.1} dB");
    // Two matrices of 4 x 192 in single precision for each of seven blocks, and the file's header where it is mapped.
    let added = with - bytes;
    assert!(
        (7 * 2 * 4 * 192 * 4..7 * 2 * 4 * 192 * 4 + 8192).contains(&added),
        "{added} bytes"
    );
    // Half of it twice is all of it, but for rounding; nothing of it is none.
    let twice = draw(base().lora(&path, 0.5).lora(&path, 0.5), "cpu").0;
    assert!(psnr(&twice, &changed) > 60.0);
    assert_eq!(draw(base().lora(&none, 1.0), "cpu").0, plain);
    // Weights that come and go bring the factors with them.
    assert_eq!(
        draw(base().lora(&path, 1.0), "diffusion=cpu@disk").0,
        changed
    );
}
