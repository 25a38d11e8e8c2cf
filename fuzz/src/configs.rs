//! The configurations of a model folder: whatever is in one of them, opening the model succeeds or says why not.

use std::fs;
use std::path::Path;

use sd_graph::LoadOptions;
use sd_models::qwen_image_2_1::QwenImage21;
use sd_models::{ModelIndex, Pipeline};

/// The files of a model folder that are not weights or the tokenizer.
const FILES: [&str; 7] = [
    "model_index.json",
    "sd-defaults.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "transformer/config.json",
    "vae/config.json",
    "processor/preprocessor_config.json",
];

/// Puts the bytes after the first into the configuration that the first one chooses, in a copy of the model `tiny` in
/// `folder`, and opens that; from 128 on it plans for a picture too.
pub fn config(folder: &Path, tiny: &Path, bytes: &[u8]) {
    let [chosen, bytes @ ..] = bytes else {
        return;
    };
    let model = folder.join("model");
    if !model.exists() {
        copy(tiny, &model);
    }
    let name = FILES[usize::from(*chosen) % FILES.len()];
    let path = model.join(name);
    fs::write(&path, bytes).expect("the folder can be written to");
    if let Ok(index) = ModelIndex::read(&model) {
        assert!(index.components().count() <= bytes.len() + 100);
    }
    // A plan opens the model too and then builds its graphs, which takes longer than all else.
    let outcome = if *chosen < 128 {
        QwenImage21::open(&model, &LoadOptions::default()).map(drop)
    } else {
        Pipeline::open(&model)
            .and_then(|builder| builder.device("cpu").plan(Some((64, 64)), 4))
            .map(drop)
    };
    if let Err(error) = outcome {
        let text = error.to_string();
        assert!(
            text.len() < bytes.len() + 4096,
            "an error that nobody reads: {text}"
        );
    }
    fs::copy(tiny.join(name), path).expect("the folder can be written to");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("the folder can be written to");
    for entry in fs::read_dir(from).expect("the tiny model is there") {
        let from = entry.expect("the tiny model is there").path();
        let to = to.join(from.file_name().unwrap_or_default());
        if from.is_dir() {
            copy(&from, &to);
        } else {
            fs::copy(&from, &to).expect("the folder can be written to");
        }
    }
}
