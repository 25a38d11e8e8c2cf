//! `sd info`: what a checkpoint is, or why it is none.

use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};

use crate::run::{assert_refused, sd};

#[test]
fn a_model_folder_is_described() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-qwen-image-2.1");
    let tiny = tiny.to_str().unwrap();
    let ended = sd(folder.path(), &["info", tiny]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for part in [
        "QwenImage21Pipeline",
        "6.98 M parameters",
        "transformer (QwenImage21Transformer2DModel): 3.69 M",
        "F16",
    ] {
        assert!(ended.out.contains(part), "`{part}` in {}", ended.out);
    }
    let report: serde_json::Value =
        serde_json::from_str(&sd(folder.path(), &["info", tiny, "--json"]).out).unwrap();
    assert_eq!(report["class"], "QwenImage21Pipeline");
    assert_eq!(report["components"].as_array().unwrap().len(), 3);
}

#[test]
fn a_single_file_of_any_family_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    let data = [0_u8; 8];
    let tensors = [
        (
            "a.strange\nname",
            TensorView::new(Dtype::F8_E4M3, vec![2, 4], &data).unwrap(),
        ),
        (
            "empty",
            TensorView::new(Dtype::F32, vec![0, 7], &[]).unwrap(),
        ),
    ];
    safetensors::serialize_to_file(tensors, None, &folder.path().join("any.safetensors")).unwrap();
    let ended = sd(folder.path(), &["info", "any.safetensors"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(
        ended.out.contains("a.strange\\nname F8_E4M3 [2, 4]"),
        "{}",
        ended.out
    );
    assert!(ended.out.contains("empty F32 [0, 7]"), "{}", ended.out);
    let report: serde_json::Value =
        serde_json::from_str(&sd(folder.path(), &["info", "any.safetensors", "--json"]).out)
            .unwrap();
    assert_eq!(
        report["components"][0]["tensors"][1]["shape"],
        serde_json::json!([0, 7])
    );
}

/// A GGUF file with a name, a matrix in blocks of a type that no device computes with, and a vector.
fn gguf() -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let tensor = |name: &str, sides: &[u64], number: u32, offset: u64| {
        let sides: Vec<u8> = (sides.iter().flat_map(|side| side.to_le_bytes())).collect();
        let rank = (sides.len() as u32 / 8).to_le_bytes();
        let end = [&number.to_le_bytes(), offset.to_le_bytes().as_slice()].concat();
        [text(name), rank.to_vec(), sides, end].concat()
    };
    let mut bytes = [
        b"GGUF\x03\0\0\0".as_slice(),
        &2_u64.to_le_bytes(),
        &1_u64.to_le_bytes(),
    ]
    .concat();
    bytes.extend(
        [
            text("general.name"),
            8_u32.to_le_bytes().to_vec(),
            text("a\tmodel"),
        ]
        .concat(),
    );
    // The file has the innermost side first; 20 is iq4_nl, 18 bytes for 32 elements.
    bytes.extend(tensor("matrix", &[64, 3], 20, 0));
    bytes.extend(tensor("vector", &[3], 0, 128));
    bytes.resize(bytes.len().next_multiple_of(32) + 128 + 12, 0);
    bytes
}

#[test]
fn a_gguf_file_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = gguf();
    fs::write(folder.path().join("any.gguf"), &bytes).unwrap();
    fs::write(folder.path().join("cut.gguf"), &bytes[..bytes.len() - 1]).unwrap();
    let ended = sd(folder.path(), &["info", "any.gguf"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for part in [
        "195 parameters",
        "tensors: 1 F32, 1 iq4_nl",
        "general.name = a\\tmodel",
        "matrix iq4_nl [3, 64]",
        "vector F32 [3]",
    ] {
        assert!(ended.out.contains(part), "`{part}` in {}", ended.out);
    }
    let report: serde_json::Value =
        serde_json::from_str(&sd(folder.path(), &["info", "any.gguf", "--json"]).out).unwrap();
    assert_eq!(report["bytes"], 108 + 12);
    assert_eq!(report["components"][0]["types"]["iq4_nl"], 1);
    let parts = ["cut.gguf", "the download may have been cut off", "vector"];
    assert_refused(folder.path(), &["info", "cut.gguf"], &parts);
}

#[test]
fn components_of_a_folder_may_be_gguf_files() {
    let folder = tempfile::tempdir().unwrap();
    let index = r#"{"_class_name": "SomePipeline", "transformer": ["diffusers", "A"], "vae": ["diffusers", "B"]}"#;
    fs::write(folder.path().join("model_index.json"), index).unwrap();
    for part in ["transformer", "vae"] {
        fs::create_dir(folder.path().join(part)).unwrap();
    }
    fs::write(folder.path().join("transformer/some-Q4.gguf"), gguf()).unwrap();
    // Left behind by a file manager: no weights.
    fs::write(folder.path().join("vae/._model.safetensors"), [0; 9]).unwrap();
    let ended = sd(folder.path(), &["info", "."]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for part in [
        "SomePipeline (not supported",
        "transformer (A): 195 parameters",
        "1 iq4_nl",
    ] {
        assert!(ended.out.contains(part), "`{part}` in {}", ended.out);
    }
    fs::write(folder.path().join("vae/broken.gguf"), b"GGUF\x03\0\0\0").unwrap();
    assert_refused(folder.path(), &["info", "."], &["broken.gguf"]);
}

#[test]
fn every_file_ends_with_a_list_or_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let (mut listed, mut refused) = (0, 0);
    for (target, name) in [
        ("gguf", "any.gguf"),
        ("safetensors", "any.safetensors"),
        ("index", "any.safetensors.index.json"),
    ] {
        for entry in fs::read_dir(corpus.join(target)).unwrap() {
            let path = entry.unwrap().path();
            // Fuzzing's own finds are many, and the readers' tests go through them.
            if !path.to_string_lossy().contains("seed-") {
                continue;
            }
            fs::copy(&path, folder.path().join(name)).unwrap();
            let ended = sd(folder.path(), &["info", name, "--json"]);
            match ended.code {
                Some(0) => listed += 1,
                Some(2) => refused += 1,
                _ => panic!("{}: {ended:?}", path.display()),
            }
        }
    }
    assert!(listed > 5 && refused > 5, "{listed} and {refused}");
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("noise.safetensors"), [0xA5; 400]).unwrap();
    fs::write(folder.path().join("empty.safetensors"), []).unwrap();
    fs::write(
        folder.path().join("page.safetensors"),
        "<!DOCTYPE html><html></html>",
    )
    .unwrap();
    fs::create_dir(folder.path().join("nothing")).unwrap();
    for (model, parts) in [
        ("noise.safetensors", ["noise.safetensors"]),
        ("empty.safetensors", ["empty.safetensors"]),
        ("page.safetensors", ["page.safetensors"]),
        ("absent.safetensors", ["absent.safetensors"]),
        ("nothing", ["nothing"]),
    ] {
        assert_refused(folder.path(), &["info", model], &parts);
        assert_refused(folder.path(), &["info", model, "--json"], &parts);
    }
    assert_refused(folder.path(), &["info"], &["MODEL"]);
}

/// A modular pipeline's folder, whose index may name no parts; and the VAE that only such models have.
#[test]
fn models_of_clips_are_known() {
    let folder = tempfile::tempdir().unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sd-models/tests/fixtures");
    let info = |path: &str| -> serde_json::Value {
        let path = fixtures.join(path);
        let ended = sd(folder.path(), &["info", path.to_str().unwrap(), "--json"]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        serde_json::from_str(&ended.out).unwrap()
    };
    let model = info("minimax_h3_pipeline");
    assert_eq!(
        (&model["class"], &model["supported"]),
        (&"MiniMaxH3ModularPipeline".into(), &true.into())
    );
    let components = model["components"].as_array().unwrap().iter();
    let names: Vec<&str> = components
        .map(|part| part["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        ["audio_vae", "transformer", "transformer_ref", "vae"]
    );
    let sound = info("minimax_h3_sound_vae/model.safetensors");
    let part = &sound["parts"][0];
    assert_eq!(
        (&part["family"], &part["component"]),
        (&"MiniMax H3, sound".into(), &"vae".into())
    );
    assert_eq!(part["config"]["encoder_rates"], serde_json::json!([2, 5]));
    assert_eq!(part["config"]["decoder_rates"], serde_json::json!([5, 2]));
    assert_eq!(part["config_is_told"], false);
    // Shapes do not tell its heads, and what they are is not made up: 8 of 32 channels, not 4 of 64.
    let vae = "../../../../models/tiny-minimax-h3/vae";
    let weights = format!("{vae}/diffusion_pytorch_model.safetensors");
    let part = info(&weights)["parts"][0].take();
    let error = part["error"].as_str().unwrap();
    assert!(error.contains("how many heads"), "{error}");
    assert_eq!(part.get("config"), None);
    // A converted file says them.
    let from = fixtures.join(vae);
    let to = folder.path().join("vae.safetensors");
    let ended = sd(
        folder.path(),
        &["convert", from.to_str().unwrap(), to.to_str().unwrap()],
    );
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let part = info(to.to_str().unwrap())["parts"][0].take();
    assert_eq!(part["config"]["decoder_num_attention_heads"], 8);
    assert_eq!(part["config_is_told"], true);
}
