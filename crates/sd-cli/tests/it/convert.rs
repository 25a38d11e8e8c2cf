//! `sd convert`, and pictures from what it wrote.

use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};

use crate::run::{assert_refused, sd};

fn tiny(part: &str) -> PathBuf {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    models.join("tiny-qwen-image-2.1").join(part)
}

/// Runs `sd` and gives its JSON.
#[track_caller]
fn json(folder: &Path, arguments: &[&str]) -> serde_json::Value {
    let ended = sd(folder, arguments);
    assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
    serde_json::from_str(&ended.out).unwrap()
}

#[test]
fn parts_are_converted_and_draw_a_picture() {
    let at = tempfile::tempdir().unwrap();
    let folder = at.path();
    let path = |part: &str| tiny(part).to_str().unwrap().to_owned();
    let (transformer, text, vae) = (path("transformer"), path("text_encoder"), path("vae"));
    let rules = [
        "--weight-type",
        "q8_0",
        "--tensor-type",
        r"blocks\.0\..*to_q=f16",
    ];
    let convert = |arguments: &[&str]| json(folder, &[&["convert", "--json"], arguments].concat());
    let report = convert(&[&[&*transformer, "t.gguf"], &rules[..]].concat());
    assert_eq!(report["types"]["q8_0"], 48);
    assert_eq!(report["tensors"], 72);
    assert_eq!(
        report["bytes"],
        std::fs::metadata(folder.join("t.gguf")).unwrap().len()
    );
    convert(&[&text, "e.safetensors", "--weight-type", "bf16"]);
    convert(&[&vae, "v.gguf"]);

    // What it is, says the file.
    let info = json(folder, &["info", "t.gguf", "--json"]);
    let part = &info["parts"][0];
    assert_eq!(
        (part["family"].as_str(), part["component"].as_str()),
        (Some("Qwen-Image 2.1"), Some("diffusion"))
    );
    assert_eq!(part["config"]["num_layers"], 7);
    let told = sd(folder, &["info", "v.gguf"]).out;
    assert!(
        told.contains("vae of WAN and Qwen-Image, names as in diffusers"),
        "{told}"
    );

    let picture = [
        "generate",
        "-p",
        "a red circle",
        "--steps",
        "2",
        "-W",
        "64",
        "-H",
        "64",
        "--device",
        "cpu",
        "--json",
    ];
    let tokenizer = path("processor");
    let parts = [
        "--transformer",
        "t.gguf",
        "--text-encoder",
        "e.safetensors",
        "--vae",
        "v.gguf",
    ];
    let parts = [&parts[..], &["--tokenizer", &tokenizer]].concat();
    let report = json(folder, &[&picture[..], &parts].concat());
    assert_eq!(report["model"], "t.gguf");
    // The plan says the same without a folder, with the LoRA counted.
    let plan = json(
        folder,
        &[&["plan", "--json", "--device", "cpu"], &parts[..]].concat(),
    );
    let weights = |plan: &serde_json::Value| plan["parts"][1]["weights"].as_u64().unwrap();
    lora(&folder.join("red:1.safetensors"));
    let lora = [&parts[..], &["--lora", "red:1.safetensors:0.5"]].concat();
    let more = json(
        folder,
        &[&["plan", "--json", "--device", "cpu"], &lora[..]].concat(),
    );
    assert!(weights(&more) > weights(&plan));
    std::fs::rename(folder.join("output.png"), folder.join("without.png")).unwrap();
    json(folder, &[&picture[..], &lora].concat());
    let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
    assert_ne!(bytes("output.png"), bytes("without.png"));
}

/// A LoRA for one layer of the tiny checkpoint; another module of it is of no model.
fn lora(path: &Path) {
    let data = 0.5_f32.to_le_bytes().repeat(4 * 192);
    let names = ["transformer_blocks_3_attn_to_v", "another_module"];
    let names = names.map(|name| {
        [("down", [4, 192]), ("up", [192, 4])]
            .map(|(factor, shape)| (format!("lora_unet_{name}.lora_{factor}.weight"), shape))
    });
    let views = (names.iter().flatten()).map(|(name, shape)| {
        (
            name,
            TensorView::new(Dtype::F32, shape.to_vec(), &data).unwrap(),
        )
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn what_does_not_fit_of_a_lora_is_said() {
    let at = tempfile::tempdir().unwrap();
    lora(&at.path().join("lora.safetensors"));
    let model = tiny("");
    let model = model.to_str().unwrap();
    let ended = sd(at.path(), &["plan", model, "--lora", "lora.safetensors"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(
        ended.err.contains("lora_unet_another_module"),
        "{}",
        ended.err
    );

    let refused = |arguments: &[&str], parts: &[&str]| {
        assert_refused(at.path(), &[&["plan", model], arguments].concat(), parts)
    };
    refused(
        &["--lora", "none.safetensors"],
        &["none.safetensors", "no such file"],
    );
    let vae = tiny("vae/diffusion_pytorch_model.safetensors");
    refused(
        &["--lora", vae.to_str().unwrap()],
        &["nothing of this LoRA fits the model"],
    );
    refused(&["--lora", "lora.safetensors:inf"], &["inf is no strength"]);
}

#[test]
fn what_cannot_be_converted_is_refused_and_nothing_written() {
    let at = tempfile::tempdir().unwrap();
    let folder = at.path();
    let (model, transformer) = (tiny(""), tiny("transformer"));
    let (model, transformer) = (model.to_str().unwrap(), transformer.to_str().unwrap());
    std::fs::write(folder.join("there.gguf"), "old").unwrap();
    std::fs::write(folder.join("broken.gguf"), b"GGUF\x03\0\0\0").unwrap();
    let cases: &[(&[&str], &[&str])] = &[
        (&[model, "out.gguf"], &["several parts", "transformer"]),
        (
            &[transformer, "out.bin"],
            &["must end in .gguf or .safetensors"],
        ),
        (&[transformer, "there.gguf"], &["exists already"]),
        (&[transformer, "no/out.gguf"], &["there is no such folder"]),
        (
            &[transformer, "out.safetensors", "--weight-type", "q8_0"],
            &["holds no q8_0"],
        ),
        (
            &[transformer, "out.gguf", "--tensor-type", "attn=q9"],
            &["q9"],
        ),
        (&["none.gguf", "out.gguf"], &["none.gguf", "no such file"]),
        (&["broken.gguf", "out.gguf"], &["broken.gguf"]),
    ];
    for (arguments, parts) in cases {
        assert_refused(folder, &[&["convert"], *arguments].concat(), parts);
    }
    assert_eq!(std::fs::read(folder.join("there.gguf")).unwrap(), b"old");
    let ended = sd(
        folder,
        &["convert", transformer, "there.gguf", "--overwrite"],
    );
    assert_eq!(ended.code, Some(0), "{ended:?}");
    // And what was written is not written over by itself.
    let again = ["convert", "there.gguf", "there.gguf", "--overwrite"];
    assert_refused(folder, &again, &["the file that is read"]);
}
