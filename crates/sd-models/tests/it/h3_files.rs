//! The trained tiny MiniMax H3 from files of every kind, with a LoRA and in little memory: the clip of its folder, or one like it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use half::f16;
use safetensors::tensor::{Dtype, TensorView};
use sd_backend::fake::{FakeDevice, FakeOptions};
use sd_backend::{DType, Ledger, MemoryBudget, MemoryBudgets};
use sd_graph::{Cancel, Checkpoint, Existing, FileFormat, LoadOptions, Progress};
use sd_models::minimax_h3::QkvOrder;
use sd_models::minimax_h3::sound_vae::SoundVae;
use sd_models::minimax_h3::video_vae::VideoVae;
use sd_models::{
    Error, ModelFiles, PipelineBuilder, Video, VideoPipeline, VideoRequest, VideoShape, conversion,
};

use crate::fixtures::{psnr, relative_l2};

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
    write_with(path, given, dtype, None);
}

fn write_with(
    path: &Path,
    given: &[Given],
    dtype: Dtype,
    metadata: Option<HashMap<String, String>>,
) {
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
    safetensors::serialize_to_file(views, metadata, path).unwrap();
}

/// Tensors with names that begin with `prefix`.
fn behind(prefix: &str, mut given: Vec<Given>) -> Vec<Given> {
    for (name, ..) in &mut given {
        *name = format!("{prefix}{name}");
    }
    given
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

/// The frames' VAE as ComfyUI has it: its authors' names, queries, keys and values head by head, the gate before the value.
fn published_vae(all: &[Given]) -> Vec<Given> {
    const NAMES: [(&str, &str); 7] = [
        ("down_blocks", "down"),
        ("resnets", "block"),
        ("conv_shortcut", "nin_shortcut"),
        ("downsamplers.0", "downsample"),
        ("to_out.0", "to_out"),
        ("ff.net.2", "ff.w2"),
        ("decoder.proj_in", "decoder.x_embedder"),
    ];
    const HEADS: usize = 8;
    let numbers = |name: &str| &all.iter().find(|given| given.0 == name).unwrap().2;
    let mut given = Vec::new();
    for (stored, shape, own) in all {
        let (mut shape, mut own) = (shape.clone(), own.clone());
        let mut name = NAMES
            .iter()
            .fold(stored.clone(), |name, (from, to)| name.replace(from, to));
        if name.contains("attn.to_k.") || name.contains("attn.to_v.") {
            continue;
        }
        if name.contains("attn.to_q.") {
            let parts = ["to_q", "to_k", "to_v"].map(|part| numbers(&stored.replace("to_q", part)));
            let of_head = own.len() / HEADS;
            let heads = (0..HEADS)
                .flat_map(|head| parts.into_iter().map(move |part| (head * of_head, part)));
            own = heads
                .flat_map(|(from, part)| part[from..from + of_head].to_vec())
                .collect();
            shape[0] *= 3;
            name = name.replace("to_q", "to_qkv");
        }
        if name.contains("ff.net.0.proj.") {
            let half = own.len() / 2;
            own.rotate_left(half);
            name = name.replace("ff.net.0.proj", "ff.w1");
        }
        given.push((name, shape, own));
    }
    let width = numbers("decoder.norm_out.weight").len();
    given.push((
        "decoder.mask_token".to_owned(),
        vec![1, 1, width],
        vec![0.5; width],
    ));
    given
}

/// The sound's VAE as ComfyUI has it: each weight of a convolution folded into one tensor.
fn folded(all: &[Given]) -> Vec<Given> {
    let mut given = Vec::new();
    for (name, shape, own) in all {
        if name.ends_with(".weight_v") {
            continue;
        }
        let Some(place) = name.strip_suffix(".weight_g") else {
            given.push((name.clone(), shape.clone(), own.clone()));
            continue;
        };
        let direction = format!("{place}.weight_v");
        let (_, shape, values) = all.iter().find(|given| given.0 == direction).unwrap();
        let rows = values.chunks(values.len() / own.len()).zip(own);
        let weight = rows.flat_map(|(row, length)| {
            let squares = row.iter().map(|&value| f64::from(value).powi(2));
            let norm = squares.sum::<f64>().sqrt();
            row.iter()
                .map(move |&value| (f64::from(value) * f64::from(*length) / norm) as f32)
        });
        given.push((format!("{place}.weight"), shape.clone(), weight.collect()));
    }
    given
}

/// Transformers of the authors and of ComfyUI, and single files for all parts, of both VAEs too.
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
    // What other programs know of the published VAEs stands in our metadata, but for what latents are like: that is in tensors, and of
    // the frames' VAE with all digits where the published file has it.
    let mut tables = [tensors("vae"), tensors("audio_vae")];
    let metadata = ["vae", "audio_vae"].map(|part| {
        let text = std::fs::read_to_string(model().join(part).join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        let fields = config.as_object_mut().unwrap();
        let table = &mut tables[usize::from(part == "audio_vae")];
        let mut told = serde_json::Map::new();
        for name in ["latents_mean", "latents_std"] {
            let value = fields.remove(name).unwrap();
            let values: Vec<f32> = serde_json::from_value(value.clone()).unwrap();
            table.retain(|given| given.0 != name);
            table.push((name.to_owned(), vec![values.len()], values));
            told.insert(name.to_owned(), value);
        }
        let told = serde_json::Value::from(told).to_string();
        let (key, more) = match part {
            "vae" => (
                "sd.config.video_vae",
                Some(("minimax_h3_video_vae".to_owned(), told)),
            ),
            _ => ("sd.config.sound_vae", None),
        };
        let own = (key.to_owned(), config.to_string());
        Some([own].into_iter().chain(more).collect())
    });
    let [frames_told, sound_told] = metadata;
    let frames = behind("first_stage_model.", published_vae(&tables[0]));
    write_with(&vae, &frames, Dtype::F16, frames_told);
    write_with(&sound_vae, &folded(&tables[1]), Dtype::F32, sound_told);
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
    let samples = |video: &Video| video.sound.as_ref().unwrap().channels().concat();
    let off = relative_l2(&samples(&video), &samples(&expected));
    println!("ComfyUI's files: frames {found:.1} dB, sound {off:e}");
    assert!(video.frames == expected.frames, "{found:.1} dB");
    // Weights are folded there in double precision.
    assert!(off < 1e-6, "{off:e}");
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
        ..VideoShape::default()
    };
    let plan = open(MemoryBudget::Automatic).plan(&shape).unwrap();
    let (smallest, peak) = (plan.devices[0].smallest, plan.devices[0].peak);
    println!("from {smallest} to {peak} bytes");
    assert!(smallest < peak);
    // More steps have more times, whose modulations are kept.
    let longer = VideoShape {
        steps: Some(1000),
        ..shape.clone()
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

/// One file for both VAEs: each has its configuration under a key of its own.
#[test]
fn both_vaes_in_one_file_know_their_configurations() {
    let at = tempfile::tempdir().unwrap();
    let path = |name: &str| at.path().join(name);
    let (mut both, mut metadata) = (Vec::new(), HashMap::new());
    for (part, prefix) in [("vae", "vae."), ("audio_vae", "audio_vae.")] {
        let converted = path(&format!("{part}.safetensors"));
        convert(part, &converted, None);
        let checkpoint = Checkpoint::open(&converted).unwrap();
        metadata.extend(checkpoint.metadata().clone());
        both.extend(behind(prefix, tensors(part)));
    }
    let file = path("both.safetensors");
    write_with(&file, &both, Dtype::F16, Some(metadata));
    let folders = (
        VideoVae::open(&model().join("vae"), &LoadOptions::default()).unwrap(),
        SoundVae::open(&model().join("audio_vae")).unwrap(),
    );
    let of_file = (
        VideoVae::open(&file, &LoadOptions::default()).unwrap(),
        SoundVae::open(&file).unwrap(),
    );
    assert_eq!(of_file.0.config(), folders.0.config());
    assert_eq!(of_file.1.config(), folders.1.config());

    // An older file had one of them under the key of pictures' VAE.
    let config =
        |part: &str| std::fs::read_to_string(model().join(part).join("config.json")).unwrap();
    for part in ["vae", "audio_vae"] {
        let metadata = HashMap::from([("sd.config.vae".to_owned(), config(part))]);
        write_with(&file, &both, Dtype::F16, Some(metadata));
        let video = VideoVae::open(&file, &LoadOptions::default());
        let sound = SoundVae::open(&file);
        // The other is left with its shapes, which say too little of models that are not as published.
        match part {
            "vae" => {
                assert_eq!(video.unwrap().config(), folders.0.config());
                assert!(sound.is_err());
            }
            _ => {
                assert_eq!(sound.unwrap().config(), folders.1.config());
                let error = video.unwrap_err().to_string();
                assert!(error.contains("how many heads"), "{error}");
            }
        }
    }
}
