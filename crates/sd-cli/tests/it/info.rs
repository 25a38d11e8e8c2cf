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
