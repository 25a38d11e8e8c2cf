//! Rotary embeddings applied in a graph, on every device.

use sd_backend::{Backend, BackendOptions, DeviceKind};
use sd_graph::{Cancel, Graph, Pairing, Plan};
use sd_models::noise;
use sd_models::rope::{self, Circular, Embedding, H3Clip, Part, Precision, Rotation, Size};

use crate::fixtures::{devices, max_error};

/// `x [tokens, heads, channels]` turned by the embedding's own values in double precision.
fn turned(x: &[f32], [heads, channels]: [usize; 2], of: &Embedding, pairing: Pairing) -> Vec<f32> {
    let pairs = of.pairs();
    let mut result = x.to_vec();
    for (row, values) in result.chunks_exact_mut(channels).enumerate() {
        let before: Vec<f64> = values.iter().map(|&value| f64::from(value)).collect();
        for pair in 0..pairs {
            let (a, b) = match pairing {
                Pairing::Neighbours => (2 * pair, 2 * pair + 1),
                Pairing::Halves => (pair, pair + pairs),
            };
            // With an angle for each channel, a channel is turned by its own.
            let angle = |channel: usize| {
                let pair = match of.value_layout() {
                    rope::ValueLayout::Matrix => pair,
                    rope::ValueLayout::Split => channel / 2,
                };
                of.rotation(row / heads, pair).unwrap().map(f64::from)
            };
            let ([cos_a, sin_a], [cos_b, sin_b]) = (angle(a), angle(b));
            values[a] = (before[a] * cos_a - before[b] * sin_a) as f32;
            values[b] = (before[b] * cos_b + before[a] * sin_b) as f32;
        }
    }
    result
}

/// Turns noise on every device, by whatever way is chosen and by tables, and compares.
fn check(name: &str, embedding: &Embedding, channels: usize, pairing: Pairing) {
    let (tokens, heads) = (embedding.batch() * embedding.tokens(), 3);
    let x = noise::normal(17, tokens * heads * channels);
    let should = turned(&x, [heads, channels], embedding, pairing);
    type Build = for<'g> fn(Graph<'g>, &Embedding, Pairing) -> Rotation<'g>;
    let chosen: Build = |g, embedding, pairing| Rotation::new(g, &Ok(embedding.clone()), pairing);
    let tables: Build = |g, embedding, pairing| Rotation::with_tables(g, embedding, pairing);
    for device in devices() {
        for (way, build) in [("chosen", chosen), ("tables", tables)] {
            let mut backend = Backend::new(device, &BackendOptions::default().threads(2)).unwrap();
            let mut plan = Plan::build(&backend, |g| {
                let x = g.input::<f32>("x", [tokens, heads, channels]);
                g.output("y", build(g, embedding, pairing).turn(x));
            })
            .unwrap();
            plan.set("x", &x).unwrap();
            plan.run(&mut backend, &Cancel::new()).unwrap();
            let error = max_error(&plan.read::<f32>("y").unwrap(), &should);
            println!("{name}, {way} on {device}: {error:e}");
            // Values up to 5, angles up to 100 rounded once more when ggml divides: 100 * 6e-8 * 5.
            let tolerance = if device.kind() == DeviceKind::Cpu {
                4e-5
            } else {
                1e-3
            };
            assert!(error < tolerance, "{name}, {way} on {device}: {error:e}");
        }
    }
}

#[test]
fn graphs_turn_as_the_values_say() {
    let picture = |circular| {
        let parts = [Part::Text(70), Part::Picture(Size::new(4, 5))];
        let embedding = rope::qwen_image_2_1(parts, [8, 12, 12], 2).unwrap();
        embedding.circular(circular)
    };
    let text = rope::one_axis(90, 16, 5e6, Precision::Single).unwrap();
    let clip = H3Clip {
        frames: 2,
        latents: Size::new(4, 6),
        sound: 2,
    };
    let (neighbours, halves) = (Pairing::Neighbours, Pairing::Halves);
    check("three axes", &picture(Circular::NONE), 32, neighbours);
    check(
        "three axes, some channels",
        &picture(Circular::NONE),
        40,
        neighbours,
    );
    check("three axes in halves", &picture(Circular::NONE), 32, halves);
    check(
        "a picture that wraps",
        &picture(Circular::XY),
        32,
        neighbours,
    );
    check(
        "a picture that wraps one way",
        &picture(Circular::Y),
        40,
        neighbours,
    );
    let (one, other) = (Size::new(3, 5), Size::new(4, 4));
    let parts = [
        Part::Picture(one),
        Part::Picture(other),
        Part::Text(3),
        Part::Picture(one),
    ];
    let pictures = rope::qwen_image_2_1(parts, [8, 12, 12], 2).unwrap();
    let pictures = pictures.circular(Circular::X).circular(Circular::Y);
    check("pictures that wrap", &pictures, 32, neighbours);
    check("text", &text, 16, halves);
    check("text, some channels", &text, 20, halves);
    check("text of neighbours", &text, 16, neighbours);
    let h3 = rope::minimax_h3(3, &[], clip, rope::H3Axis::PUBLISHED).unwrap();
    check("MiniMax H3", &h3, 128, halves);
    let ernie = rope::ernie_image(&[3, 2], Size::new(2, 3)).unwrap();
    check("ERNIE-Image", &ernie, 128, halves);
    check(
        "ERNIE-Image's values in neighbours",
        &ernie,
        128,
        neighbours,
    );
}
