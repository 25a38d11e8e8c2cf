//! The path from a folder to a picture with the tiny checkpoint, stage by stage, on the processor.

#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::path::Path;

use criterion::{Criterion, criterion_group, criterion_main};
use sd_backend::{Backend, BackendOptions, Device};
use sd_graph::{Cancel, LoadOptions, Progress};
use sd_models::qwen_image_2_1::QwenImage21;

/// Latent pixels of a picture of 128x128.
const SIZE: (usize, usize) = (8, 8);

fn stages(criterion: &mut Criterion) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny-qwen-image-2.1");
    let device = Device::cpu().unwrap();
    let cancel = Cancel::new();
    let mut backend = Backend::new(device, &BackendOptions::default()).unwrap();
    let mut quiet = |_: &Progress| {};

    criterion.bench_function("load", |bencher| {
        bencher.iter(|| {
            let mut model = QwenImage21::open(&folder, &LoadOptions::default()).unwrap();
            black_box(model.load(&backend, &cancel, &mut quiet).unwrap());
        });
    });

    let mut model = QwenImage21::open(&folder, &LoadOptions::default()).unwrap();
    model.load(&backend, &cancel, &mut quiet).unwrap();
    let prompt = "a large red circle on a blue background";
    criterion.bench_function("encode", |bencher| {
        bencher.iter(|| black_box(model.encode(&mut backend, prompt, &cancel).unwrap()));
    });

    let condition = model.encode(&mut backend, prompt, &cancel).unwrap();
    let latents = vec![0.5; SIZE.0 * SIZE.1 * model.latent_channels()];
    criterion.bench_function("transformer call", |bencher| {
        bencher.iter(|| {
            black_box(
                model
                    .velocity(&mut backend, &condition, &latents, SIZE, 0.5, &cancel)
                    .unwrap(),
            );
        });
    });
    criterion.bench_function("decode", |bencher| {
        bencher.iter(|| black_box(model.decode(&mut backend, &latents, SIZE, &cancel).unwrap()));
    });
}

criterion_group!(benches, stages);
criterion_main!(benches);
