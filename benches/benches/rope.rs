//! Building rotary embeddings for a picture of 1024x1024 pixels with three references of the same size and 512 tokens of
//! text. `tools/reference/bench_rope.py` measures the same in diffusers.

#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use sd_models::rope::{self, Circular, FluxOptions, Joint, Part, ReferenceMode, Size};

const TEXT: usize = 512;

fn families(criterion: &mut Criterion) {
    // Eight pixels to a latent, two by two latents to a token; in FLUX.2 and Qwen-Image 2.1 sixteen pixels to both.
    let (latents, tokens) = (Size::new(128, 128), Size::new(64, 64));
    let (many_latents, many_tokens) = ([latents; 3], [tokens; 3]);
    let joint = Joint::new(TEXT, latents).references(&many_latents);
    let packed = Joint::new(TEXT, tokens).references(&many_tokens);

    let options = FluxOptions::default();
    criterion.bench_function("rope flux", |bencher| {
        bencher.iter(|| rope::flux(black_box(&joint), &options).unwrap());
    });
    criterion.bench_function("rope flux, circular", |bencher| {
        bencher.iter(|| {
            let plain = rope::flux(black_box(&joint), &options).unwrap();
            plain.circular(Circular::XY)
        });
    });
    criterion.bench_function("rope flux 2", |bencher| {
        bencher.iter(|| rope::flux_2(black_box(&packed)).unwrap());
    });
    criterion.bench_function("rope qwen image", |bencher| {
        bencher.iter(|| rope::qwen_image(black_box(&joint), 1, ReferenceMode::Increase).unwrap());
    });
    let parts = [Part::Text(TEXT), Part::Picture(tokens)].into_iter();
    let parts = parts.chain(many_tokens.map(Part::Picture));
    criterion.bench_function("rope qwen image 2.1", |bencher| {
        bencher.iter(|| rope::qwen_image_2_1(black_box(parts.clone()), [16, 56, 56], 1).unwrap());
    });
}

criterion_group!(benches, families);
criterion_main!(benches);
