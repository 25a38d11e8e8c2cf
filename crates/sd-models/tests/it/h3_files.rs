//! The trained tiny MiniMax H3 from files of every kind, with a LoRA and in little memory: the clip of its folder, or one like it.

use std::path::{Path, PathBuf};

use half::f16;
use safetensors::tensor::{Dtype, TensorView};
use sd_backend::fake::{FakeDevice, FakeOptions};
use sd_backend::{DType, Ledger, MemoryBudget, MemoryBudgets};
use sd_graph::{Cancel, Checkpoint, Existing, FileFormat, LoadOptions, Progress};
use sd_models::minimax_h3::QkvOrder;
use sd_models::{
    Error, ModelFiles, PipelineBuilder, Video, VideoPipeline, VideoRequest, VideoShape, conversion,
};

use crate::fixtures::psnr;

/// A tensor to be written: its name, shape and numbers.
type Given = (String, Vec<usize>, Vec<f32>);

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-minimax-h3")
}

fn request() -> VideoRequest {
    VideoRequest::new("a red circle moves right on a black background with a tone of 440 hertz")
        .size(64, 64)
        .frames(22)
        .steps(5)
        .seed(1)
}

fn quiet() -> impl FnMut(&Progress) {
    |_: &Progress| {}
}

fn builder(files: ModelFiles) -> PipelineBuilder<VideoPipeline> {
    let builder = VideoPipeline::open(files).unwrap();
    builder.device("cpu").threads(2)
}

fn made(builder: PipelineBuilder<VideoPipeline>) -> Video {
    let mut pipeline = builder.load().unwrap();
    pipeline.generate(&request(), &mut quiet()).unwrap().0
}

fn clip(files: ModelFiles) -> Video {
    made(builder(files))
}

fn folder() -> ModelFiles {
    ModelFiles::from(&model())
}

/// How alike the frames of two clips are, in decibels.
fn likeness(one: &Video, other: &Video) -> f64 {
    let levels = |video: &Video| -> Vec<f32> {
        let bytes = video.frames.iter().flat_map(|frame| frame.pixels().iter());
        bytes.map(|&byte| f32::from(byte) / 127.5 - 1.0).collect()
    };
    psnr(&levels(one), &levels(other))
}

fn tensors(part: &str) -> Vec<Given> {
    let checkpoint = Checkpoint::open(model().join(part)).unwrap();
    let tensors = checkpoint.tensors().map(|(name, info)| {
        let mut bytes = vec![0; info.bytes as usize];
        checkpoint.read(name, &mut bytes).unwrap();
        let halves = bytes.as_chunks::<2>().0.iter();
        let numbers = halves.map(|&half| f16::from_le_bytes(half).to_f32());
        (name.to_owned(), info.shape.clone(), numbers.collect())
    });
    tensors.collect()
}

/// Writes tensors in half precision, which those of the folder are in, or in single precision.
fn write(path: &Path, given: &[Given], dtype: Dtype) {
    let bytes: Vec<Vec<u8>> = (given.iter())
        .map(|(.., numbers)| match dtype {
            Dtype::F16 => (numbers.iter())
                .flat_map(|&number| f16::from_f32(number).to_le_bytes())
                .collect(),
            _ => numbers.iter().flat_map(|n| n.to_le_bytes()).collect(),
        })
        .collect();
    let views = given.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (name, TensorView::new(dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

fn convert(part: &str, to: &Path, dtype: Option<DType>) {
    let from = model().join(part);
    let checkpoint = Checkpoint::open(&from).unwrap();
    let mut options = LoadOptions::default();
    if let Some(dtype) = dtype {
        options = options.weight_type(dtype);
    }
    let format = FileFormat::of(to).unwrap();
    let planned = conversion(&checkpoint, &from, format, &options).unwrap();
    let (cancel, quiet) = (Cancel::new(), &mut quiet());
    planned
        .write(to, Existing::Keep, &Ledger::default(), &cancel, quiet)
        .unwrap();
}

#[test]
fn converted_parts_make_the_same_clip_or_one_like_it() {
    let at = tempfile::tempdir().unwrap();
    let expected = clip(folder());
    // What a file of half precision has is kept as it is. Of Q8_0, numbers are a 250th off, which turns a shade here and there by one or
    // two: 66 and 80 dB were seen. Another prompt's clip is at 10.
    for (part, dtype, least) in [
        ("transformer", DType::F16, f64::INFINITY),
        ("transformer", DType::Q8_0, 50.0),
        ("text_encoder", DType::Q8_0, 60.0),
    ] {
        let path = at.path().join(format!("{part}_{dtype}.gguf"));
        convert(part, &path, Some(dtype));
        let files = match part {
            "transformer" => folder().transformer(&path),
            _ => folder().text_encoder(&path),
        };
        let video = clip(files);
        let found = likeness(&video, &expected);
        println!("{part} {dtype}: {found:.1} dB");
        assert!(found >= least, "{part} {dtype}: {found:.1} dB");
        assert_eq!(video == expected, dtype == DType::F16, "{part} {dtype}");
    }
    // Quantised on loading: the same numbers as from the file.
    let path = at.path().join(format!("transformer_{}.gguf", DType::Q8_0));
    let loaded = builder(folder()).tensor_types("^transformer[.]=q8_0".parse().unwrap());
    let found = likeness(&made(loaded), &clip(folder().transformer(&path)));
    println!("quantised on loading: {found:.1} dB from the file");
    assert!(found > 50.0, "{found:.1} dB");
}

/// The transformer of the folder as its authors name and keep it, or as ComfyUI does.
fn published(order: QkvOrder) -> Vec<Given> {
    const OUTSIDE: [(&str, &str); 10] = [
        ("proj_in.", "video_patch_proj."),
        ("audio_proj_in.", "audio_patch_proj."),
        ("context_embedder.", "condition_proj."),
        ("time_embedder.linear_1.", "time_embedder.proj_in."),
        ("time_embedder.linear_2.", "time_embedder.proj_out."),
        ("norm_out.norm.", "final_layer.norm."),
        ("norm_out.linear.", "final_layer.adaln_proj.linear."),
        ("proj_out.", "final_layer.video_out."),
        ("audio_proj_out.", "final_layer.audio_out."),
        ("token_refiner.refiner_blocks.", "token_refiner.blocks."),
    ];
    const INSIDE: [(&str, &str); 6] = [
        ("transformer_blocks.", "blocks."),
        ("attn.norm_q.", "attn.q_norm."),
        ("attn.norm_k.", "attn.k_norm."),
        ("attn.to_out.0.", "attn.out_proj."),
        ("ff.net.0.proj.", "mlp.fc1."),
        ("ff.net.2.", "mlp.fc2."),
    ];
    const HEAD: usize = 64;
    let all = tensors("transformer");
    let numbers = |name: &str| {
        let mut all = all.iter();
        &all.find(|given| given.0 == name).unwrap().2
    };
    let mut given = Vec::new();
    for (stored, shape, own) in &all {
        let mut name = stored.clone();
        for (from, to) in OUTSIDE {
            if let Some(rest) = stored.strip_prefix(from) {
                name = format!("{to}{rest}");
            }
        }
        for (from, to) in INSIDE {
            name = name.replace(from, to);
        }
        let (mut shape, mut own) = (shape.clone(), own.clone());
        if name.contains(".mlp.fc1.") {
            // The value's rows are first in the folder, the gate's in all others.
            let half = own.len() / 2;
            own.rotate_left(half);
        }
        if name.contains(".attn.to_k.") || name.contains(".attn.to_v.") {
            continue;
        }
        if name.contains(".attn.to_q.") {
            let parts = ["to_q", "to_k", "to_v"].map(|part| numbers(&stored.replace("to_q", part)));
            own = match order {
                QkvOrder::Stacked => parts.into_iter().flatten().copied().collect(),
                QkvOrder::ByHead => {
                    let of_head = HEAD * shape[1];
                    let heads = (0..shape[0] / HEAD).map(|head| head * of_head);
                    let rows = heads.flat_map(|from| {
                        let parts = parts.into_iter();
                        parts.flat_map(move |part| &part[from..from + of_head])
                    });
                    rows.copied().collect()
                }
            };
            shape[0] *= 3;
            name = name.replace("to_q", "qkv_proj");
        }
        given.push((name, shape, own));
    }
    given
}

/// Transformers of the authors and of ComfyUI, and single files for all parts.
#[test]
fn single_files_of_other_programs_make_the_same_clip() {
    let at = tempfile::tempdir().unwrap();
    let path = |name: &str| at.path().join(name);
    let expected = clip(folder());

    let by_head = path("by_head.safetensors");
    write(&by_head, &published(QkvOrder::ByHead), Dtype::F16);
    let order = |order| builder(folder().transformer(&by_head)).qkv_order(order);
    assert!(made(order(QkvOrder::ByHead)) == expected);
    // Nothing in the file tells.
    let wrong = likeness(&made(order(QkvOrder::Stacked)), &expected);
    println!("heads taken for parts: {wrong:.1} dB");
    assert!(wrong < 20.0, "{wrong:.1} dB");

    let behind = |prefix: &str, mut given: Vec<Given>| {
        for (name, ..) in &mut given {
            *name = format!("{prefix}{name}");
        }
        given
    };
    let (transformer, text) = (path("t.safetensors"), path("e.safetensors"));
    let stacked = published(QkvOrder::Stacked);
    let prefixed = behind("model.diffusion_model.", stacked);
    write(&transformer, &prefixed, Dtype::F16);
    let mut older = tensors("text_encoder");
    for (name, ..) in &mut older {
        *name = name
            .replace("model.language_model.", "model.")
            .replace("model.visual.", "visual.");
    }
    write(&text, &older, Dtype::F16);
    let (vae, sound_vae) = (path("v.safetensors"), path("s.safetensors"));
    convert("vae", &vae, None);
    convert("audio_vae", &sound_vae, None);
    // What lies beside them is about another.
    std::fs::copy(model().join("transformer/config.json"), path("config.json")).unwrap();
    let single = ModelFiles::default()
        .transformer(&transformer)
        .text_encoder(&text)
        .vae(&vae)
        .sound_vae(&sound_vae)
        .tokenizer(model().join("tokenizer"));
    // The shifts of the schedule stand in the folder alone.
    let mut pipeline = builder(single).load().unwrap();
    let request = request().shift(4.0).sound_shift(2.0);
    let (video, _) = pipeline.generate(&request, &mut quiet()).unwrap();
    let found = likeness(&video, &expected);
    assert!(video == expected, "{found:.1} dB");
}

/// Factors of rank 2 for what attention gives, in the names of diffusers; and the weights with them added.
#[test]
fn a_lora_does_what_merged_weights_do() {
    let at = tempfile::tempdir().unwrap();
    let (lora, merged) = (
        at.path().join("lora.safetensors"),
        at.path().join("merged.safetensors"),
    );
    const RANK: usize = 2;
    const STRENGTH: f32 = 0.5;
    let number = |at: usize, step: usize| ((at * step % 101) as f32 - 50.0) / 100.0;
    let (mut factors, mut added) = (Vec::new(), tensors("transformer"));
    for (name, shape, numbers) in &mut added {
        let Some(target) = name.strip_suffix(".attn.to_out.0.weight") else {
            continue;
        };
        if !target.starts_with("transformer_blocks.") {
            continue;
        }
        let (rows, columns) = (shape[0], shape[1]);
        let down: Vec<f32> = (0..RANK * columns).map(|at| number(at, 37)).collect();
        let up: Vec<f32> = (0..rows * RANK).map(|at| number(at, 53)).collect();
        for (at, value) in numbers.iter_mut().enumerate() {
            let (row, column) = (at / columns, at % columns);
            let products =
                (0..RANK).map(|rank| up[row * RANK + rank] * down[rank * columns + column]);
            *value += STRENGTH * products.sum::<f32>();
        }
        let key = |factor: &str| format!("transformer.{target}.attn.to_out.0.{factor}.weight");
        factors.push((key("lora_A"), vec![RANK, columns], down));
        factors.push((key("lora_B"), vec![rows, RANK], up));
    }
    assert_eq!(factors.len(), 2 * 6);
    write(&lora, &factors, Dtype::F32);
    write(&merged, &added, Dtype::F32);

    let single = |files| made(builder(files).weight_type(DType::F32));
    let plain = single(folder());
    let with = single(folder().lora(&lora, STRENGTH));
    let changed = likeness(&with, &plain);
    let off = likeness(&with, &single(folder().transformer(&merged)));
    println!("a LoRA: {changed:.1} dB from without, {off:.1} dB from merged");
    assert!(changed < 30.0, "{changed:.1} dB");
    // Sums in another order turn a shade here and there by one.
    assert!(off > 60.0, "{off:.1} dB");
}

#[test]
fn every_budget_from_the_smallest_on_does_and_one_byte_less_does_not() {
    let fake = FakeDevice::new(FakeOptions {
        name: "Fake0".to_owned(),
        memory: 512 << 20,
        ..FakeOptions::default()
    });
    let open = |budget| {
        // No head-room, which a small fake device does not have.
        let ledger = Ledger::with_headroom(MemoryBudgets::every(budget), 0);
        let builder = VideoPipeline::open(folder()).unwrap();
        builder.device(fake.device()).threads(2).ledger(&ledger)
    };
    let (expected, report) = {
        let mut pipeline = open(MemoryBudget::Automatic).load().unwrap();
        pipeline.generate(&request(), &mut quiet()).unwrap()
    };
    let shape = VideoShape {
        size: Some((64, 64)),
        frames: Some(22),
        steps: Some(5),
        tokens: report.text_rows,
        keyframes: 0,
    };
    let plan = open(MemoryBudget::Automatic).plan(&shape).unwrap();
    let (smallest, peak) = (plan.devices[0].smallest, plan.devices[0].peak);
    println!("from {smallest} to {peak} bytes");
    assert!(smallest < peak);
    // More steps have more times, whose modulations are kept.
    let longer = VideoShape {
        steps: Some(1000),
        ..shape
    };
    let longer = open(MemoryBudget::Automatic).plan(&longer).unwrap();
    assert!(longer.devices[0].smallest > smallest);

    for budget in [smallest, smallest.midpoint(peak)] {
        let mut pipeline = open(MemoryBudget::Bytes(budget)).load().unwrap();
        let (video, _) = pipeline.generate(&request(), &mut quiet()).unwrap();
        assert!(video == expected, "{budget} bytes");
    }
    let less = MemoryBudget::Bytes(smallest - 1);
    let error = match open(less).load() {
        Ok(mut pipeline) => pipeline.generate(&request(), &mut quiet()).map(drop),
        Err(error) => Err(error),
    };
    let error = error.unwrap_err();
    let told = matches!(error, Error::TooLittleMemory { smallest: told, .. } if told == smallest);
    assert!(told, "{error}");
}
