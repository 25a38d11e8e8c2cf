//! Building rotary embeddings for a picture of 1024x1024 pixels with three references of the same size and 512 tokens of
//! text. `tools/reference/bench_rope.py` measures the same in diffusers.

#![allow(
    clippy::unwrap_used,
    reason = "what criterion calls returns nothing, and a measurement that fails must end the program"
)]

use std::hint::black_box;

use criterion::Criterion;
use sd_backend::{Backend, BackendOptions, Device};
use sd_graph::{Cancel, Graph, Pairing, Plan};
use sd_models::rope::{
    self, Circular, Embedding, FluxOptions, Joint, Part, Precision, ReferenceMode, Rotation, Size,
};

const TEXT: usize = 512;

/// Measures all of it.
pub fn measure(criterion: &mut Criterion) {
    families(criterion);
    applied(criterion);
}

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

/// Turning queries `[tokens, heads, 128]` of a picture of 512x512 (neighbours) and of a text of 1024 (halves), by ggml itself
/// and by tables.
fn applied(criterion: &mut Criterion) {
    const HEADS: usize = 32;
    let parts = [Part::Text(64), Part::Picture(Size::new(32, 32))];
    let picture = rope::qwen_image_2_1(parts, [16, 56, 56], 1).unwrap();
    let text = rope::one_axis(1024, 128, 5e6, Precision::Single).unwrap();
    type Build = for<'g> fn(Graph<'g>, &Embedding, Pairing) -> Rotation<'g>;
    let chosen: Build = |g, embedding, pairing| Rotation::new(g, &Ok(embedding.clone()), pairing);
    let tables: Build = |g, embedding, pairing| Rotation::with_tables(g, embedding, pairing);
    for (name, embedding, pairing) in [
        ("neighbours", &picture, Pairing::Neighbours),
        ("halves", &text, Pairing::Halves),
    ] {
        for (way, build) in [("ggml", chosen), ("tables", tables)] {
            let device = Device::cpu().unwrap();
            let mut backend = Backend::new(device, &BackendOptions::default()).unwrap();
            let shape = [embedding.tokens(), HEADS, 128];
            let mut plan = Plan::build(&backend, |g| {
                let x = g.input::<f32>("x", shape);
                let rotation = build(g, embedding, pairing);
                // Eight in a row, so that setting and reading weigh little.
                g.output("y", (0..8).fold(x, |x, _| rotation.turn(x)));
            })
            .unwrap();
            let x = vec![0.5_f32; shape.iter().product()];
            criterion.bench_function(&format!("rope applied 8 times, {name}, {way}"), |bencher| {
                bencher.iter(|| {
                    plan.set("x", &x).unwrap();
                    plan.run(&mut backend, &Cancel::new()).unwrap();
                });
            });
        }
    }
}
