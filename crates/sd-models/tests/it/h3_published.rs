//! A whole checkpoint of the published sizes, planned within the memory of a common graphics card. Its files have holes where weights
//! would be.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use sd_backend::fake::{FakeDevice, FakeOptions};
use sd_backend::{Ledger, MemoryBudget, MemoryBudgets, Residence};
use sd_models::minimax_h3::VideoMemoryPlan;
use sd_models::{VideoPipeline, VideoShape};
use serde_json::{Value, json};

use crate::fixtures::{folder, tiny};

const GIB: u64 = 1 << 30;

/// Names and shapes, and the configuration.
fn table(name: &str) -> (BTreeMap<String, Vec<u64>>, Value) {
    let text = fs::read_to_string(folder("published").join(name)).unwrap();
    let table: Value = serde_json::from_str(&text).unwrap();
    let tensors = serde_json::from_value(table["tensors"].clone()).unwrap();
    (tensors, table["config"].clone())
}

/// Qwen3-VL 32B, by the shapes of the 8B: more layers, wider, and the same vision tower but for what it gives. Its sizes are those of
/// <https://huggingface.co/quanliang/F1/blob/main/config.json>, which was trained from it.
fn text_encoder() -> (BTreeMap<String, Vec<u64>>, Value) {
    const HIDDEN: u64 = 5120;
    const INNER: u64 = 25_600;
    let (small, mut config) = table("qwen3vl_8b.json");
    let mut tensors = BTreeMap::new();
    for (name, shape) in small {
        let Some(layer) = name.strip_prefix("model.language_model.layers.0.") else {
            if !name.contains(".layers.") && name != "lm_head.weight" {
                let wide = |side: u64| if side == 4096 { HIDDEN } else { side };
                tensors.insert(name, shape.into_iter().map(wide).collect());
            }
            continue;
        };
        let shape = match layer {
            "self_attn.q_proj.weight" => vec![64 * 128, HIDDEN],
            "self_attn.o_proj.weight" => vec![HIDDEN, 64 * 128],
            "self_attn.k_proj.weight" | "self_attn.v_proj.weight" => vec![8 * 128, HIDDEN],
            "mlp.down_proj.weight" => vec![HIDDEN, INNER],
            "mlp.gate_proj.weight" | "mlp.up_proj.weight" => vec![INNER, HIDDEN],
            "self_attn.q_norm.weight" | "self_attn.k_norm.weight" => shape,
            _ => vec![HIDDEN],
        };
        for index in 0..64 {
            let name = format!("model.language_model.layers.{index}.{layer}");
            tensors.insert(name, shape.clone());
        }
    }
    let text = &mut config["text_config"];
    text["hidden_size"] = json!(HIDDEN);
    text["intermediate_size"] = json!(INNER);
    text["num_hidden_layers"] = json!(64);
    text["num_attention_heads"] = json!(64);
    config["vision_config"]["out_hidden_size"] = json!(HIDDEN);
    // Those of the tokenizer that is there.
    config["image_token_id"] = json!(850);
    config["video_token_id"] = json!(851);
    (tensors, config)
}

fn write(folder: &Path, (tensors, config): (BTreeMap<String, Vec<u64>>, Value), dtype: &str) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let bytes = if dtype == "F32" { 4 } else { 2 };
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let begin = end;
        end += bytes * shape.iter().product::<u64>();
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, end] });
        header.insert(name, entry);
    }
    let text = Value::Object(header).to_string();
    let mut file = File::create(folder.join("model.safetensors")).unwrap();
    file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.set_len(8 + text.len() as u64 + end).unwrap();
}

fn plan(model: &Path, budget: u64) -> VideoMemoryPlan {
    let fake = FakeDevice::new(FakeOptions {
        name: "Fake0".to_owned(),
        memory: (budget + GIB) as usize,
        ..FakeOptions::default()
    });
    let budgets = MemoryBudgets::default().with("Fake0", MemoryBudget::Bytes(budget));
    let shape = VideoShape {
        keyframes: 1,
        ..VideoShape::default()
    };
    VideoPipeline::open(model)
        .unwrap()
        .device(fake.device())
        .ledger(&Ledger::with_headroom(budgets, 0))
        .plan(&shape)
        .unwrap()
}

#[test]
fn a_clip_of_five_seconds_fits_a_card_of_24_gigabytes() {
    let root = tempfile::tempdir().unwrap();
    let model = root.path();
    write(&model.join("text_encoder"), text_encoder(), "BF16");
    write(
        &model.join("transformer"),
        table("minimax_h3_transformer.json"),
        "BF16",
    );
    write(&model.join("vae"), table("minimax_h3_vae.json"), "F32");
    let (mut sound, config) = table("minimax_h3_sound_vae.json");
    // Holes are no filters, and files need not have them.
    sound.retain(|name, _| !name.ends_with(".filter"));
    write(&model.join("audio_vae"), (sound, config), "F32");
    fs::create_dir(model.join("tokenizer")).unwrap();
    let tokenizer = tiny().join("processor/tokenizer.json");
    fs::copy(tokenizer, model.join("tokenizer/tokenizer.json")).unwrap();
    let index = json!({ "_class_name": "MiniMaxH3ModularPipeline" });
    fs::write(model.join("modular_model_index.json"), index.to_string()).unwrap();

    let card = plan(model, 24 * GIB);
    assert_eq!((card.width, card.height, card.frames), (1344, 768, 124));
    for seat in card.seats.iter().chain(&card.readers) {
        println!("{seat:?}");
    }
    println!("{:?}", card.devices);
    assert!(card.fits(), "{:?}", card.devices);
    assert!(card.devices[0].smallest <= 12 * GIB, "{:?}", card.devices);
    let [text, transformer, vae] = &card.seats[..] else {
        panic!("{:?}", card.seats);
    };
    // 50 of 64 layers, 49 GB, and a transformer of 39 GB without what only prepares its steps: neither is ever there as a whole.
    assert!(
        text.is_streamed && transformer.is_streamed,
        "{:?}",
        card.seats
    );
    assert!(text.residence != Residence::Device && transformer.residence != Residence::Device);
    assert!(text.weights + text.compute <= 24 * GIB);
    assert!(!vae.is_streamed, "{vae:?}");

    // Where there is room for all of it, all of it stays.
    let server = plan(model, 160 * GIB);
    assert!(server.fits(), "{:?}", server.devices);
    let stays = |residence| residence == Residence::Device;
    assert!(
        server.seats.iter().all(|seat| stays(seat.residence)),
        "{:?}",
        server.seats
    );
}
