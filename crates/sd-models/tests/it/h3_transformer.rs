//! MiniMax H3's transformer against diffusers on random weights: every kind of sequence, its table variant, every layout of files.

use std::path::{Path, PathBuf};

use sd_backend::{Backend, BackendOptions, DType, Device, Ledger};
use sd_graph::{
    Cancel, Checkpoint, Existing, FileFormat, LoadOptions, Plan, Progress, Scope, StoredType,
};
use sd_models::minimax_h3::{
    Conditions, Denoiser, Layout, Noisy, Preparation, QkvOrder, Rows, Stage, Tag, Transformer,
    TransformerConfig, patchify, transformer_in, unpatchify,
};
use sd_models::rope::{H3Clip, H3Keyframe, H3Reference, Size};
use sd_models::{LoraReport, conversion, identify};
use serde_json::Value;

use crate::fixtures::{
    Case, Loaded, assert_close, cases, folder, max_error, on_all_devices_as, on_all_devices_of,
    relative_l2,
};

/// Single precision: sums of up to 113 rows and 96 channels in another order than the reference's cost 8e-6 on a processor.
const TOLERANCE: f32 = 2e-5;

type Parts = (Preparation, Transformer);

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn clip(sizes: &[usize]) -> H3Clip {
    H3Clip {
        frames: sizes[0],
        latents: Size::new(sizes[1], sizes[2]),
        sound: sizes[3],
    }
}

/// The sequence of a case.
pub(crate) fn layout(case: &Case) -> Layout {
    let meta = &case.meta;
    let tags = meta["tags"].as_array().unwrap().iter();
    let tags = tags.map(|tag| [Tag::Video, Tag::Text][number(tag)]);
    let target: Vec<usize> = meta["target"]
        .as_array()
        .unwrap()
        .iter()
        .map(number)
        .collect();
    let conditions = match meta["references"].as_array() {
        Some(references) => Conditions::References(references.iter().map(reference).collect()),
        None => {
            let keyframes = meta["keyframes"].as_array().cloned().unwrap_or_default();
            let keyframe = |name: &Value| match name.as_str().unwrap() {
                "first" => H3Keyframe::First,
                _ => H3Keyframe::Last,
            };
            Conditions::Keyframes(keyframes.iter().map(keyframe).collect())
        }
    };
    Layout::new(tags.collect(), conditions, clip(&target)).unwrap()
}

fn reference(value: &Value) -> H3Reference {
    let parts = value.as_array().unwrap();
    let sizes: Vec<usize> = parts[1..].iter().map(number).collect();
    match parts[0].as_str().unwrap() {
        "image" => H3Reference::Picture(Size::new(sizes[1], sizes[2])),
        "audio" => H3Reference::Sound(sizes[3]),
        _ => H3Reference::Clip(clip(&sizes)),
    }
}

/// One call: the velocities of video and of sound, and what was asked for beside them.
fn predicted(loaded: &mut Loaded<Parts>, case: &Case, layout: &Layout) -> [Vec<f32>; 2] {
    let (preparation, module) = &loaded.module;
    let config = module.config();
    let has_sound = layout.target_sound_rows() > 0;
    let mut plan = Plan::build(&loaded.backend, |g| {
        let text = g.input::<f32>("text", [layout.text_rows(), config.text_dim]);
        let sound = || g.input::<f32>("sound", [layout.sound_rows(), config.audio_in_channels]);
        let rows = Rows {
            text: preparation.text(text),
            sound: (layout.sound_rows() > 0).then(sound),
            video: g.input::<f32>("video", [layout.video_rows(), config.video_channels()]),
        };
        let modulations = preparation.modulations(g, 4);
        let velocities = module.forward(g, layout, rows, &modulations);
        g.output("video", velocities.video);
        if let Some(sound) = velocities.sound {
            g.output("sound", sound);
        }
    })
    .unwrap();
    plan.set("text", &case.get("in.encoder_hidden_states").f32)
        .unwrap();
    plan.set("video", &case.get("in.hidden_states").f32)
        .unwrap();
    if layout.sound_rows() > 0 {
        plan.set("sound", &case.get("in.audio_hidden_states").f32)
            .unwrap();
    }
    let time = |name: &str| case.meta["times"][name].as_f64().unwrap() as f32;
    let times = Layout::times(time("video"), time("sound"));
    preparation.set_times(&mut plan, &times).unwrap();
    plan.run(&mut loaded.backend, &Cancel::new()).unwrap();
    let sound = has_sound.then(|| plan.read("sound").unwrap());
    [plan.read("video").unwrap(), sound.unwrap_or_default()]
}

/// Compares both velocities with the record, which has those of conditions before.
fn check(loaded: &mut Loaded<Parts>, name: &str, case: &Case) {
    let layout = layout(case);
    let [video, sound] = predicted(loaded, case, &layout);
    for (what, is) in [("sample", video), ("audio_sample", sound)] {
        let should = &case.get(&format!("out.{what}")).f32;
        let made = &should[should.len() - is.len()..];
        if !is.is_empty() {
            assert_close(loaded, &format!("{name} {what}"), &is, made, TOLERANCE);
        }
    }
}

fn transformer(path: &Path, order: QkvOrder) -> Vec<Loaded<Parts>> {
    let (part, config) = transformer_in(&Checkpoint::open(path).unwrap(), order).unwrap();
    on_all_devices_of(&part, |root| {
        (
            Preparation::new(root, &config),
            Transformer::new(root, &config),
        )
    })
}

#[test]
fn every_sequence_gives_the_references_velocities() {
    let at = folder("minimax_h3_transformer");
    for mut loaded in transformer(&at, QkvOrder::Stacked) {
        let written = TransformerConfig::read(&at.join("config.json")).unwrap();
        assert_eq!(loaded.module.1.config(), &written);
        let mut checked = 0;
        for (name, case) in cases("minimax_h3_transformer") {
            if name != "patchify" {
                check(&mut loaded, &name, &case);
                checked += 1;
            }
        }
        assert_eq!(checked, 6);
    }
}

#[test]
fn rows_are_tagged_and_timed_as_the_reference_does() {
    for (name, case) in cases("minimax_h3_transformer") {
        if name == "patchify" {
            continue;
        }
        let layout = layout(&case);
        let distinct = &case.get("in.timestep").f32;
        let times = &case.get("in.timestep_indices").i32;
        let ours = Layout::times(0.35, 0.6);
        let tags = &case.get("in.token_tags").i32;
        assert_eq!(layout.rows(), tags.len(), "{name}");
        for (row, modulation) in layout.modulation_rows().into_iter().enumerate() {
            assert_eq!(modulation % 3, tags[row], "{name}, row {row}");
            let time = distinct[times[row] as usize];
            assert_eq!(ours[modulation as usize / 3], time, "{name}, row {row}");
        }
    }
}

#[test]
fn latents_become_rows_and_come_back() {
    let case = Case::read(&folder("minimax_h3_transformer").join("case_patchify.safetensors"));
    let latents = &case.get("in.latents");
    let [_, frames, height, width] = latents.shape[..] else {
        panic!("{:?}", latents.shape)
    };
    let rows = patchify(&latents.f32, frames, Size::new(height, width));
    assert_eq!(rows, case.get("out.rows").f32);
    let back = unpatchify(&rows, frames, Size::new(height, width));
    assert_eq!(max_error(&back, &latents.f32), 0.0);
}

/// A table in the place of the time embedder, as smaller variants have it.
#[test]
fn a_table_of_times_gives_what_its_rows_say() {
    let at = folder("minimax_h3_table");
    for mut loaded in transformer(&at, QkvOrder::Stacked) {
        assert_eq!(loaded.module.1.config().time_table, Some(9));
        for (name, case) in cases("minimax_h3_table") {
            check(&mut loaded, &name, &case);
        }
    }
}

/// The same weights as diffusers, ComfyUI and the authors keep them.
#[test]
fn every_layout_of_files_is_the_same_transformer() {
    let at = folder("minimax_h3_single");
    let case = Case::read(&at.join("case_fl2va.safetensors"));
    let mut found = Vec::new();
    for (file, order) in [
        ("model", QkvOrder::Stacked),
        ("stacked", QkvOrder::Stacked),
        ("interleaved", QkvOrder::ByHead),
    ] {
        let file = at.join(format!("{file}.safetensors"));
        let mut loaded = transformer(&file, order).remove(0);
        check(&mut loaded, &file.display().to_string(), &case);
        found.push(predicted(&mut loaded, &case, &layout(&case)));
    }
    assert!(found.iter().all(|other| *other == found[0]));
    // Nothing but the caller tells: the other order is another transformer.
    let stacked = at.join("stacked.safetensors");
    let mut wrong = transformer(&stacked, QkvOrder::ByHead).remove(0);
    let [video, _] = predicted(&mut wrong, &case, &layout(&case));
    assert!(max_error(&video, &found[0][0]) > 0.1);
}

/// Numbers between the products of the feed-forward that half precision cannot hold: value rows sixteen thousand times as large, and the
/// columns that they meet as much smaller, so that the result is the same.
#[test]
fn weights_in_half_precision_do_not_overflow() {
    let at = folder("minimax_h3_single");
    let bytes = std::fs::read(at.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let case = Case::read(&at.join("case_fl2va.safetensors"));
    const GROWN: f32 = 16384.0;
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = (file.iter())
        .map(|(name, view)| {
            let values = view.data().as_chunks().0.iter();
            let mut values: Vec<f32> = values.map(|&bytes| f32::from_le_bytes(bytes)).collect();
            if name.starts_with("transformer_blocks") && name.ends_with("ff.net.0.proj.weight") {
                let half = values.len() / 2;
                values[..half].iter_mut().for_each(|value| *value *= GROWN);
            }
            if name.starts_with("transformer_blocks") && name.ends_with("ff.net.2.weight") {
                values.iter_mut().for_each(|value| *value /= GROWN);
            }
            let bytes = values.iter().flat_map(|value| value.to_le_bytes());
            (name.to_owned(), view.shape().to_vec(), bytes.collect())
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, data)| {
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), data);
        (name.clone(), view.unwrap())
    });
    let to = tempfile::tempdir().unwrap();
    let path = to.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &path).unwrap();
    let (part, config) =
        transformer_in(&Checkpoint::open(&path).unwrap(), QkvOrder::Stacked).unwrap();
    let new = |root: &Scope<'_>| {
        (
            Preparation::new(root, &config),
            Transformer::new(root, &config),
        )
    };
    for mut loaded in on_all_devices_as(&part, DType::F16, new) {
        let [video, _] = predicted(&mut loaded, &case, &layout(&case));
        let should = &case.get("out.sample").f32;
        let error = relative_l2(&video, &should[should.len() - video.len()..]);
        println!("{error:e} on {}", loaded.backend.device());
        // What rounding all matrices to 11 bits costs.
        assert!(error <= 2e-2, "{error:e}");
    }
}

/// Files that `sd convert` writes are recognised, keep what must stay precise, and predict the same.
#[test]
fn converted_files_are_the_same_transformer() {
    let to = tempfile::tempdir().unwrap();
    // In a model of one block all matrices stand alone, and keep their types.
    for (at, file, case, naming, rounding) in [
        (
            "minimax_h3_transformer",
            "model",
            "t2va",
            "as in diffusers",
            0.05,
        ),
        ("minimax_h3_single", "stacked", "fl2va", "as published", 0.0),
    ] {
        let case = Case::read(&folder(at).join(format!("case_{case}.safetensors")));
        let from = folder(at).join(format!("{file}.safetensors"));
        let layout = layout(&case);
        let mut plain = transformer(&from, QkvOrder::Stacked).remove(0);
        let expected = predicted(&mut plain, &case, &layout);
        let checkpoint = Checkpoint::open(&from).unwrap();
        let found = identify(&checkpoint);
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].family(), found[0].naming()),
            ("MiniMax H3", naming)
        );
        for (dtype, tolerance) in [(DType::F32, 0.0), (DType::Q8_0, rounding)] {
            let path = to.path().join(format!("{file}-{dtype}.gguf"));
            let options = LoadOptions::default().weight_type(dtype);
            let planned = conversion(&checkpoint, &from, FileFormat::Gguf, &options).unwrap();
            let (cancel, quiet) = (Cancel::new(), &mut |_: &Progress| {});
            planned
                .write(&path, Existing::Keep, &Ledger::default(), &cancel, quiet)
                .unwrap();
            let converted = Checkpoint::open(&path).unwrap();
            let (part, _) = transformer_in(&converted, QkvOrder::Stacked).unwrap();
            for name in [
                "proj_in",
                "audio_proj_in",
                "proj_out",
                "audio_proj_out",
                "time_embedder.linear_1",
            ] {
                let stored = part.get(&format!("{name}.weight")).unwrap().stored;
                assert_eq!(stored, StoredType::F32, "{name}");
            }
            let mut loaded = transformer(&path, QkvOrder::Stacked).remove(0);
            let made = predicted(&mut loaded, &case, &layout);
            for (is, should) in made.iter().zip(&expected) {
                let error = relative_l2(is, should);
                println!("{file} {dtype}: {error:e}");
                assert!(error <= tolerance, "{file} {dtype}: {error:e}");
                assert!(error > 0.0 || tolerance == 0.0);
            }
        }
    }
}

/// A type that is asked for all weights leaves those alone that all else passes through, but a rule does not; a file in half precision
/// has them widened.
#[test]
fn what_goes_in_and_out_is_in_single_precision() {
    let at = folder("minimax_h3_transformer");
    let options = LoadOptions::default().weight_type(DType::BF16);
    let types = |options: &LoadOptions, name: &str| {
        let model = Denoiser::open(&at, QkvOrder::Stacked, &[], options).unwrap();
        let stages = [Stage::Preparation, Stage::Steps];
        let mut params = stages
            .into_iter()
            .flat_map(|stage| model.weights(stage).params().to_vec());
        params.find(|param| param.name() == name).unwrap().dtype()
    };
    for (name, dtype) in [
        ("proj_in.weight", DType::F32),
        ("audio_proj_out.weight", DType::F32),
        ("time_embedder.linear_2.weight", DType::F32),
        ("context_embedder.weight", DType::BF16),
        ("transformer_blocks.1.adaln_proj.linear.weight", DType::BF16),
        ("transformer_blocks.0.ff.gate.weight", DType::BF16),
        ("transformer_blocks.0.attn.norm_q.weight", DType::F32),
    ] {
        assert_eq!(types(&options, name), dtype, "{name}");
    }
    let ruled = options.tensor_types(r"transformer\.proj_in=f16".parse().unwrap());
    assert_eq!(types(&ruled, "proj_in.weight"), DType::F16);

    let checkpoint = Checkpoint::open(&at).unwrap();
    let tensors = checkpoint.tensors().map(|(name, info)| {
        let stored = match (info.shape.len(), name) {
            (2, "proj_out.weight") => StoredType::Q8_0,
            (2, _) => StoredType::F16,
            _ => StoredType::F32,
        };
        (name.to_owned(), stored, info.shape.clone())
    });
    let half = Checkpoint::from_table("half", tensors).unwrap();
    let options = LoadOptions::default();
    let model = Denoiser::in_checkpoint(&half, QkvOrder::Stacked, &[], &options).unwrap();
    let params = model.weights(Stage::Steps).params();
    for (name, dtype) in [
        ("proj_in.weight", DType::F32),
        ("proj_out.weight", DType::Q8_0),
        ("transformer_blocks.0.ff.gate.weight", DType::F16),
    ] {
        let param = params.iter().find(|param| param.name() == name).unwrap();
        assert_eq!(param.dtype(), dtype, "{name}");
    }
}

/// LoRAs of diffusers, musubi-tuner and DiffSynth-Studio, each alone and all together.
#[test]
fn loras_of_three_styles_change_what_they_should() {
    let at = folder("minimax_h3_lora");
    let outputs = Case::read(&at.join("outputs.safetensors"));
    let strengths = outputs.meta["strengths"].as_object().unwrap();
    let lora = |(style, strength): (&String, &Value)| {
        let path = at.join(format!("{style}.safetensors"));
        (path, strength.as_f64().unwrap() as f32)
    };
    let mut cases: Vec<(&str, Vec<(PathBuf, f32)>)> = vec![("none", Vec::new())];
    cases.extend(
        strengths
            .iter()
            .map(|one| (one.0.as_str(), vec![lora(one)])),
    );
    cases.push(("all", strengths.iter().map(lora).collect()));
    let case = Case::read(&folder("minimax_h3_transformer").join("case_t2va.safetensors"));
    let layout = layout(&case);
    let options = LoadOptions::default().weight_type(DType::F32);
    let mut moved = Vec::new();
    for (name, loras) in cases {
        let path = folder("minimax_h3_transformer");
        let model = Denoiser::open(&path, QkvOrder::Stacked, &loras, &options).unwrap();
        assert_eq!(model.loras().len(), loras.len());
        assert!(
            model.loras().iter().all(LoraReport::is_complete),
            "{:?}",
            model.loras()
        );
        let mut model = model;
        let mut backend = Backend::new(
            Device::cpu().unwrap(),
            &BackendOptions::default().threads(2),
        )
        .unwrap();
        let (cancel, quiet) = (Cancel::new(), &mut |_: &Progress| {});
        model.load(&backend, &cancel, quiet).unwrap();
        let text = &case.get("in.encoder_hidden_states").f32;
        let times = Layout::times(0.35, 0.6);
        let (prepared, _) = model
            .prepare(&mut backend, text, &times, &cancel, quiet)
            .unwrap();
        let noisy = Noisy {
            video: &case.get("in.hidden_states").f32,
            sound: &case.get("in.audio_hidden_states").f32,
            times: [0.35, 0.6],
        };
        let made = model
            .velocity(&mut backend, &layout, &prepared, noisy, &cancel, quiet)
            .unwrap();
        let should = &outputs.get(name).f32;
        let error = max_error(&made.video, should);
        println!("{name}: {error:e}");
        // Factors of rank 4 and less change nothing about how sums are rounded.
        assert!(error <= TOLERANCE, "{name}: {error:e}");
        moved.push(relative_l2(should, &outputs.get("none").f32));
    }
    // Each is large enough to be seen.
    assert!(moved[1..].iter().all(|&moved| moved > 0.05), "{moved:?}");
}

/// Where graphs may be cut: behind the projection of text, each block of the refiner, each block.
#[test]
fn graphs_are_cut_by_the_groups_that_users_know() {
    let case = Case::read(&folder("minimax_h3_transformer").join("case_t2va.safetensors"));
    let layout = layout(&case);
    let loaded = transformer(&folder("minimax_h3_transformer"), QkvOrder::Stacked).remove(0);
    let (preparation, module) = &loaded.module;
    let config = module.config();
    let plan = Plan::build_in_segments(&loaded.backend, |g| {
        let rows = Rows {
            text: preparation.text(g.input::<f32>("text", [layout.text_rows(), config.text_dim])),
            sound: Some(g.input::<f32>("sound", [layout.sound_rows(), config.audio_in_channels])),
            video: g.input::<f32>("video", [layout.video_rows(), config.video_channels()]),
        };
        let modulations = preparation.modulations(g, 4);
        g.output(
            "video",
            module.forward(g, &layout, rows, &modulations).video,
        );
    })
    .unwrap();
    let segments = plan.segmentation().segments;
    let groups: Vec<&str> = segments.iter().map(String::as_str).collect();
    assert_eq!(
        groups[..groups.len() - 1],
        [
            "minimax_h3.condition_proj",
            "minimax_h3.token_refiner.blocks.0",
            "minimax_h3.token_refiner.blocks.1",
            "minimax_h3.time_embedder",
            "minimax_h3.prelude",
            "minimax_h3.blocks.0",
            "minimax_h3.blocks.1",
            "minimax_h3.blocks.2",
        ]
    );
}
