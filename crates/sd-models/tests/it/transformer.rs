//! The transformer against diffusers on random weights, in every layout.

use sd_models::qwen_image_2_1::{
    Layout, Segment, Transformer, TransformerConfig, timestep_embedding,
};

use crate::fixtures::{Case, assert_close, cases, folder, on_all_devices};

/// Asked of single precision; the reference itself moves by 3.1e-5 between kernels on these sharpened weights.
const TOLERANCE: f32 = 1e-4;

/// The joint sequence of a case: runs of its image mask, cut by the pictures' own sizes.
fn layout(case: &Case, item: usize) -> (Layout, Vec<usize>) {
    let shapes: Vec<(usize, usize)> = case.meta["img_shapes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|shape| {
            let sides: Vec<usize> = shape
                .as_array()
                .unwrap()
                .iter()
                .map(|n| n.as_u64().unwrap() as usize)
                .collect();
            (sides[sides.len() - 2], sides[sides.len() - 1])
        })
        .collect();
    let (&target, references) = shapes.split_last().unwrap();
    let mask = case.get("in.img_mask");
    let slots = mask.i32.len() / mask.shape[0];
    let is_image = |slot: usize| mask.i32[slot] != 0;

    let mut prefix = Vec::new();
    let mut text_rows = Vec::new();
    let mut references = references.iter();
    let mut slot = 0;
    while slot < slots - target.0 * target.1 / 4 {
        if is_image(slot) {
            let &(height, width) = references.next().unwrap();
            prefix.push(Segment::Image { height, width });
            slot += height * width / 4;
        } else {
            text_rows.push(slot);
            slot += 1;
            match prefix.last_mut() {
                Some(Segment::Text(count)) => *count += 1,
                _ => prefix.push(Segment::Text(1)),
            }
        }
    }
    let mut layout = Layout::new(prefix, target.0, target.1);
    if case.has("in.encoder_hidden_states_mask") {
        let valid = case.get("in.encoder_hidden_states_mask");
        let length = valid.i32.len() / valid.shape[0];
        let valid: Vec<bool> = text_rows
            .iter()
            .map(|&row| valid.i32[item * length + row] != 0)
            .collect();
        layout = layout.with_valid_text(&valid);
    }
    (layout, text_rows)
}

#[test]
fn every_layout_gives_the_references_velocity() {
    let folder = folder("qwenimage21_transformer");
    let base = TransformerConfig::read(&folder.join("config.json")).unwrap();
    for mut loaded in on_all_devices(&folder, |root| Transformer::new(root, &base)) {
        let cases = cases("qwenimage21_transformer");
        assert!(cases.len() >= 11);
        for (name, case) in cases {
            let causal = case.meta["causal_condition"].as_bool().unwrap_or(true);
            loaded.module.set_causal_condition(causal);
            let batch = case.get("in.timestep").f32.len();
            for item in 0..batch {
                let (layout, text_rows) = layout(&case, item);
                let part = |name: &str| {
                    let values = &case.get(name).f32;
                    let len = values.len() / batch;
                    &values[item * len..(item + 1) * len]
                };
                let width = base.context_in_dim;
                let text: Vec<f32> = text_rows
                    .iter()
                    .flat_map(|&row| {
                        part("in.encoder_hidden_states")[row * width..(row + 1) * width].to_vec()
                    })
                    .collect();
                let timestep = case.get("in.timestep").f32[item];
                let timesteps = [timestep_embedding(timestep), timestep_embedding(0.0)];
                let inputs = [
                    ("latents", part("in.hidden_states")),
                    ("text", text.as_slice()),
                    ("timestep", timesteps.as_flattened()),
                ];
                let result = loaded.run(&inputs, &[], |model, g| {
                    let latents =
                        g.input::<f32>("latents", [layout.image_tokens(), base.in_channels]);
                    let text = g.input::<f32>("text", [layout.text_tokens(), width]);
                    model.forward(
                        g,
                        &layout,
                        latents,
                        text,
                        g.input::<f32>("timestep", [2, 256]),
                    )
                });
                let sample = part("out.sample");
                let target = &sample[sample.len() - result.len()..];
                assert_close(
                    &loaded,
                    &format!("{name}, item {item}"),
                    &result,
                    target,
                    TOLERANCE,
                );
            }
        }
    }
}
