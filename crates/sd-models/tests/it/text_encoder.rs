//! The text encoder against transformers on random weights.

use sd_models::qwen3_vl::{Config, TextModel};

use crate::fixtures::{assert_close, cases, folder, on_all_devices};

/// Asked of single precision; the reference itself moves by 4.7e-6 between kernels, hidden states reach about 10.
const TOLERANCE: f32 = 1e-4;

#[test]
fn hidden_states_are_the_references() {
    let folder = folder("qwen3vl_text_encoder");
    let config = Config::read(&folder.join("config.json"))
        .unwrap()
        .text_config;
    for mut loaded in on_all_devices(&folder, |root| TextModel::new(root, &config)) {
        for (name, case) in cases("qwen3vl_text_encoder") {
            let ids = case.get("in.input_ids");
            let (batch, tokens) = (ids.shape[0], ids.shape[1]);
            let should = &case.get("out.embeds").f32;
            let width = should.len() / (batch * tokens);
            for item in 0..batch {
                let row = |values: &[i32]| values[item * tokens..(item + 1) * tokens].to_vec();
                // Left padding is invisible and positions are relative: the rest alone gives the same.
                let mask = case
                    .has("in.attention_mask")
                    .then(|| row(&case.get("in.attention_mask").i32));
                let skip = mask.map_or(0, |mask| mask.iter().filter(|&&valid| valid == 0).count());
                let ids = &row(&ids.i32)[skip..];
                let result = loaded.run(&[], &[("ids", ids)], |model, g| {
                    model.forward(g, g.input::<i32>("ids", [ids.len()]))
                });
                let should = &should[(item * tokens + skip) * width..(item + 1) * tokens * width];
                assert_close(
                    &loaded,
                    &format!("{name}, text {item}"),
                    &result,
                    should,
                    TOLERANCE,
                );
            }
        }
    }
}
