//! The path from a folder to a picture with the tiny checkpoint, stage by stage, on the processor.

#![allow(
    clippy::unwrap_used,
    reason = "what criterion calls returns nothing, and a measurement that fails must end the program"
)]

use std::hint::black_box;
use std::path::Path;

use criterion::Criterion;
use sd_backend::{Backend, BackendOptions, Device};
use sd_graph::{Cancel, LoadOptions, Progress};
use sd_models::Pipeline;
use sd_models::qwen_image_2_1::QwenImage21;

use crate::groups::Group;

/// Latent pixels of a picture of 128x128.
const SIZE: (usize, usize) = (8, 8);

/// Measures the stages that belong to `group` with the checkpoint in `folder`.
pub fn measure(criterion: &mut Criterion, folder: &Path, group: Group) {
    let device = Device::cpu().unwrap();
    let cancel = Cancel::new();
    let mut backend = Backend::new(device, &BackendOptions::default()).unwrap();
    let mut quiet = |_: &Progress| {};
    if group == Group::Plan {
        criterion.bench_function("tiny, plan of a picture", |bencher| {
            bencher.iter(|| {
                let pipeline = Pipeline::open(folder).unwrap().device(device);
                black_box(pipeline.plan(Some((128, 128)), 16).unwrap());
            });
        });
        return;
    }
    if group == Group::Load {
        criterion.bench_function("tiny, load", |bencher| {
            bencher.iter(|| {
                let mut model = QwenImage21::open(folder, &LoadOptions::default()).unwrap();
                black_box(model.load(&backend, &cancel, &mut quiet).unwrap());
            });
        });
        return;
    }
    let mut model = QwenImage21::open(folder, &LoadOptions::default()).unwrap();
    model.load(&backend, &cancel, &mut quiet).unwrap();
    let latents = vec![0.5; SIZE.0 * SIZE.1 * model.latent_channels()];
    if group == Group::Decode {
        criterion.bench_function("tiny, decode", |bencher| {
            bencher
                .iter(|| black_box(model.decode(&mut backend, &latents, SIZE, &cancel).unwrap()));
        });
        return;
    }
    let prompt = "a large red circle on a blue background";
    criterion.bench_function("tiny, encode", |bencher| {
        bencher.iter(|| black_box(model.encode(&mut backend, prompt, &cancel).unwrap()));
    });
    let condition = model.encode(&mut backend, prompt, &cancel).unwrap();
    criterion.bench_function("tiny, transformer call", |bencher| {
        bencher.iter(|| {
            black_box(
                model
                    .velocity(&mut backend, &condition, &latents, SIZE, 0.5, &cancel)
                    .unwrap(),
            );
        });
    });
}
