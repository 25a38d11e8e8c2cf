//! Files as other programs write them: each loads the same numbers, is recognised for what it is, or says why it is not.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use half::f16;
use safetensors::tensor::{Dtype, TensorView};
use sd_backend::{Component, Ledger};
use sd_graph::{Cancel, Checkpoint, Existing, FileFormat, LoadOptions, Progress, StoredType};
use sd_models::{Error, Image, ModelFiles, Pipeline, Request, conversion, identify};

use crate::fixtures::{folder, psnr, tiny};
use crate::gguf_file::{array, entry, kind, text, written};

/// A tensor to be written: its name, type, shape and bytes.
type Given = (String, Dtype, Vec<usize>, Vec<u8>);

/// All tensors of a checkpoint in F32 or F16, behind `prefix`, with gate and up projections in one where `is_fused`.
fn tensors(checkpoint: &Checkpoint, prefix: &str, is_fused: bool) -> Vec<Given> {
    let read = |name: &str| {
        let info = checkpoint.get(name).unwrap();
        let mut bytes = vec![0; info.bytes as usize];
        checkpoint.read(name, &mut bytes).unwrap();
        let dtype = match info.stored {
            StoredType::F32 => Dtype::F32,
            StoredType::F16 => Dtype::F16,
            other => panic!("{other}"),
        };
        (dtype, info.shape.clone(), bytes)
    };
    let mut given = Vec::new();
    for (name, _) in checkpoint.tensors() {
        let (dtype, mut shape, mut bytes) = read(name);
        let mut name = name.to_owned();
        if is_fused && name.ends_with("img_mlp.proj.weight") {
            continue;
        }
        if is_fused && let Some(before) = name.strip_suffix("gate_layer.weight") {
            let (_, other, more) = read(&format!("{before}proj.weight"));
            name = format!("{before}gate_up.weight");
            shape[0] += other[0];
            bytes.extend(more);
        }
        given.push((format!("{prefix}{name}"), dtype, shape, bytes));
    }
    given
}

fn write(path: &Path, given: &[Given], metadata: &[(&str, String)]) {
    let views = given.iter().map(|(name, dtype, shape, bytes)| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let metadata = (metadata.iter()).map(|(key, text)| ((*key).to_owned(), text.clone()));
    safetensors::serialize_to_file(views, Some(metadata.collect()), path).unwrap();
}

/// The transformer of the fixture as ComfyUI would keep it.
pub(crate) fn fused_fixture() -> &'static Path {
    static FILE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let made = FILE.get_or_init(|| {
        let at = tempfile::tempdir().unwrap();
        let path = at.path().join("fused.safetensors");
        let checkpoint = Checkpoint::open(folder("qwenimage21_transformer")).unwrap();
        write(
            &path,
            &tensors(&checkpoint, "model.diffusion_model.", true),
            &[],
        );
        (at, path)
    });
    &made.1
}

/// The only part in a file under the reference's names, and what names it has in the file.
pub(crate) fn named(checkpoint: &Checkpoint) -> (Checkpoint, &'static str) {
    let parts = identify(checkpoint);
    let [part] = &parts[..] else {
        panic!("{parts:?}")
    };
    (part.select(checkpoint).unwrap(), part.naming())
}

/// A part of the tiny checkpoint.
fn part(name: &str) -> Checkpoint {
    Checkpoint::open(tiny().join(name)).unwrap()
}

fn config_text(name: &str) -> String {
    std::fs::read_to_string(tiny().join(name).join("config.json")).unwrap()
}

fn convert(from: &Path, to: &Path, options: &LoadOptions) {
    let checkpoint = Checkpoint::open(from).unwrap();
    let planned = conversion(&checkpoint, from, FileFormat::of(to).unwrap(), options).unwrap();
    let (cancel, quiet) = (Cancel::new(), &mut |_: &Progress| {});
    planned
        .write(to, Existing::Keep, &Ledger::default(), &cancel, quiet)
        .unwrap();
}

/// llama.cpp's name of a tensor of the text encoder; `None` for what its files do not have.
fn llama_name(name: &str) -> Option<String> {
    const LAYER: [(&str, &str); 11] = [
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    let name = name.strip_prefix("model.language_model.")?;
    if let Some(rest) = name.strip_prefix("layers.") {
        let (index, rest) = rest.split_once('.')?;
        let (_, to) = LAYER
            .iter()
            .find(|(from, _)| rest == format!("{from}.weight"))?;
        return Some(format!("blk.{index}.{to}.weight"));
    }
    Some(match name {
        "embed_tokens.weight" => "token_embd.weight".to_owned(),
        "norm.weight" => "output_norm.weight".to_owned(),
        _ => panic!("{name}"),
    })
}

/// The tiny text encoder as llama.cpp would write it: its names, vectors in single precision, its tokenizer in the metadata.
fn llama_file(path: &Path) {
    let checkpoint = part("text_encoder");
    let mut given: Vec<(String, Vec<usize>, u32, Vec<u8>)> = Vec::new();
    for (name, _, shape, bytes) in tensors(&checkpoint, "", false) {
        let Some(name) = llama_name(&name) else {
            continue;
        };
        // 0 is F32, 1 is F16.
        if shape.len() == 1 {
            let halves = bytes.as_chunks::<2>().0.iter();
            let single = halves.flat_map(|&b| f16::from_le_bytes(b).to_f32().to_le_bytes());
            given.push((name, shape, 0, single.collect()));
        } else {
            given.push((name, shape, 1, bytes));
        }
    }
    let json = std::fs::read_to_string(tiny().join("processor/tokenizer.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let mut tokens: Vec<(u64, String, i32)> = json["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(token, id)| (id.as_u64().unwrap(), token.clone(), 1))
        .collect();
    tokens.extend(
        json["added_tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|token| {
                let content = token["content"].as_str().unwrap().to_owned();
                (token["id"].as_u64().unwrap(), content, 3)
            }),
    );
    tokens.sort();
    // llama.cpp fills the vocabulary up to the table's rows.
    for id in tokens.len() as u64..1024 {
        tokens.push((id, format!("[PAD{id}]"), 5));
    }
    let merges: Vec<String> = json["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pair| {
            format!(
                "{} {}",
                pair[0].as_str().unwrap(),
                pair[1].as_str().unwrap()
            )
        })
        .collect();
    let texts = |texts: &[&str]| {
        let bytes: Vec<u8> = texts.iter().flat_map(text).collect();
        array(kind::TEXT, texts.len() as u64, bytes)
    };
    let contents: Vec<&str> = tokens.iter().map(|(_, token, _)| token.as_str()).collect();
    let merges: Vec<&str> = merges.iter().map(String::as_str).collect();
    let types: Vec<u8> = tokens
        .iter()
        .flat_map(|(_, _, kind)| kind.to_le_bytes())
        .collect();
    const INT32: u32 = 5;
    let entries = [
        entry("general.architecture", kind::TEXT, text("qwen3vl")),
        entry("qwen3vl.context_length", kind::U32, 4096_u32.to_le_bytes()),
        entry("qwen3vl.rope.freq_base", kind::F32, 5e6_f32.to_le_bytes()),
        entry("tokenizer.ggml.model", kind::TEXT, text("gpt2")),
        entry("tokenizer.ggml.pre", kind::TEXT, text("qwen2")),
        entry("tokenizer.ggml.tokens", kind::ARRAY, texts(&contents)),
        entry("tokenizer.ggml.merges", kind::ARRAY, texts(&merges)),
        entry(
            "tokenizer.ggml.token_type",
            kind::ARRAY,
            array(INT32, tokens.len() as u64, types),
        ),
    ];
    let given: Vec<_> = (given.iter())
        .map(|(name, shape, number, bytes)| {
            (name.as_str(), shape.as_slice(), *number, bytes.clone())
        })
        .collect();
    std::fs::write(path, written(3, 32, &entries, &given)).unwrap();
}

/// A picture, as levels from -1 to 1, and the bytes of weights that were used where they lie in files.
fn drawn(files: ModelFiles) -> (Vec<f32>, u64) {
    let builder = Pipeline::open(files).unwrap().device("cpu").threads(2);
    let builder = builder.mapping(sd_backend::Mapping::Always);
    let mut pipeline = builder.load().unwrap();
    let mapped = pipeline.loaded().mapped;
    let condition = pipeline
        .encode("a large red circle on a blue background, isn't it?")
        .unwrap();
    let request = Request::new(&condition)
        .size(96, 96)
        .steps(3)
        .seed(7)
        .guidance(1.0);
    let (image, _) = pipeline.generate(&request, &mut |_: &Progress| {}).unwrap();
    let levels = image.pixels().as_raw().iter();
    (
        levels.map(|&byte| f32::from(byte) / 127.5 - 1.0).collect(),
        mapped,
    )
}

#[test]
fn every_layout_draws_the_same_picture() {
    let at = tempfile::tempdir().unwrap();
    let path = |name: &str| at.path().join(name);
    let (plain, mapped) = drawn(ModelFiles::from(&tiny()));
    assert!(mapped > 6 << 20);

    // Single files: a fused transformer behind a prefix, a text encoder with the older names.
    let (transformer, text, vae) = (
        path("t.safetensors"),
        path("e.safetensors"),
        path("v.safetensors"),
    );
    write(
        &transformer,
        &tensors(&part("transformer"), "model.diffusion_model.", true),
        &[],
    );
    let mut older = tensors(&part("text_encoder"), "", false);
    for (name, ..) in &mut older {
        *name = name
            .replace("model.language_model.", "model.")
            .replace("model.visual.", "visual.");
    }
    write(&text, &older, &[]);
    convert(&tiny().join("vae"), &vae, &LoadOptions::default());
    let single = ModelFiles::default()
        .transformer(&transformer)
        .text_encoder(&text)
        .vae(&vae);
    let single = single.tokenizer(tiny().join("processor"));

    // All in one.
    let all = path("all.safetensors");
    let mut given = tensors(&part("transformer"), "model.diffusion_model.", true);
    for (name, dtype, shape, bytes) in older {
        given.push((
            format!("text_encoders.qwen3vl.transformer.{name}"),
            dtype,
            shape,
            bytes,
        ));
    }
    given.extend(tensors(&part("vae"), "first_stage_model.", false));
    write(&all, &given, &[("sd.config.vae", config_text("vae"))]);
    let all = ModelFiles::default()
        .model(&all)
        .tokenizer(tiny().join("processor/tokenizer.json"));

    // GGUF, with the tokenizer in the text encoder's file.
    let (gguf, llama, vae_gguf) = (path("t.gguf"), path("e.gguf"), path("v.gguf"));
    convert(&transformer, &gguf, &LoadOptions::default());
    llama_file(&llama);
    convert(&vae, &vae_gguf, &LoadOptions::default());
    let ggufs = ModelFiles::default()
        .transformer(&gguf)
        .text_encoder(&llama)
        .vae(&vae_gguf);

    let over = ModelFiles::from(&tiny()).transformer(&gguf);
    // Files of a model folder, each with its configuration beside it.
    let weights = "diffusion_pytorch_model.safetensors";
    let apart = ModelFiles::default()
        .transformer(tiny().join("transformer").join(weights))
        .text_encoder(tiny().join("text_encoder/model.safetensors"))
        .vae(tiny().join("vae").join(weights))
        .tokenizer(tiny());
    let cases = [
        ("single", single),
        ("all in one", all),
        ("gguf", ggufs),
        ("over a folder", over),
        ("files of a folder", apart),
    ];
    for (name, files) in cases {
        let (picture, bytes) = drawn(files);
        assert_eq!(picture, plain, "{name}: {:.1} dB", psnr(&picture, &plain));
        // The halves of what is fused are used where they lie, as whole tensors are; GGUF files have vectors in single precision,
        // which need no copy either.
        assert!(
            bytes >= mapped,
            "{name}: {bytes} of {mapped} bytes in place"
        );
    }
}

/// The tiny vision tower as llama.cpp would write it, beside [`llama_file`].
fn mmproj_file(path: &Path) {
    // Features are taken behind block 1.
    const NAMES: [(&str, &str); 12] = [
        ("patch_embed.proj.", "v.patch_embd."),
        ("pos_embed.", "v.position_embd."),
        ("merger.norm.", "v.post_ln."),
        ("merger.linear_fc1.", "mm.0."),
        ("merger.linear_fc2.", "mm.2."),
        ("deepstack_merger_list.0.norm.", "v.deepstack.1.norm."),
        ("deepstack_merger_list.0.linear_fc", "v.deepstack.1.fc"),
        (".norm", ".ln"),
        (".attn.qkv.", ".attn_qkv."),
        (".attn.proj.", ".attn_out."),
        (".mlp.linear_fc1.", ".ffn_up."),
        (".mlp.linear_fc2.", ".ffn_down."),
    ];
    let mut given: Vec<(String, Vec<usize>, u32, Vec<u8>)> = Vec::new();
    for (name, _, shape, bytes) in tensors(&part("text_encoder"), "", false) {
        let Some(name) = name.strip_prefix("model.visual.") else {
            continue;
        };
        let (from, to) = NAMES.iter().find(|(from, _)| name.contains(from)).unwrap();
        let name = name.replace("blocks.", "v.blk.").replace(from, to);
        if let [out, channels, 2, height, width] = shape[..] {
            let frame = height * width * 2;
            for index in 0..2 {
                let frames = bytes.chunks(frame).skip(index).step_by(2);
                let ending = if index == 0 { "" } else { ".1" };
                let shape = vec![out, channels, height, width];
                given.push((
                    format!("{name}{ending}"),
                    shape,
                    1,
                    frames.flatten().copied().collect(),
                ));
            }
        } else {
            given.push((name, shape, 1, bytes));
        }
    }
    let heads = entry(
        "clip.vision.attention.head_count",
        kind::U32,
        3_u32.to_le_bytes(),
    );
    let given: Vec<_> = (given.iter())
        .map(|(name, shape, number, bytes)| {
            (name.as_str(), shape.as_slice(), *number, bytes.clone())
        })
        .collect();
    std::fs::write(path, written(3, 32, &[heads], &given)).unwrap();
}

#[test]
fn a_vision_tower_in_a_file_of_its_own_is_the_text_encoders() {
    let at = tempfile::tempdir().unwrap();
    let (llama, mmproj) = (at.path().join("e.gguf"), at.path().join("mmproj.gguf"));
    llama_file(&llama);
    mmproj_file(&mmproj);
    let text = Checkpoint::open(&llama).unwrap();
    let (text, _) = named(&text);
    let tower = Checkpoint::open(&mmproj).unwrap();
    let (joined, config) = sd_models::qwen3_vl::with_vision(&text, &tower).unwrap();
    let whole = part("text_encoder");
    let mut compared = 0;
    for (name, info) in whole.tensors().filter(|(name, _)| name.contains("visual")) {
        let found = joined.get(name).unwrap_or_else(|| panic!("no {name}"));
        assert_eq!(found.shape, info.shape, "{name}");
        let read = |checkpoint: &Checkpoint| {
            let mut bytes = vec![0; info.bytes as usize];
            checkpoint.read(name, &mut bytes).unwrap();
            bytes
        };
        assert!(read(&joined) == read(&whole), "{name}");
        compared += 1;
    }
    assert_eq!(joined.len(), text.len() + compared);
    let told: serde_json::Value = serde_json::from_str(&config_text("text_encoder")).unwrap();
    for (field, value) in config.as_object().unwrap() {
        assert_eq!(value, &told["vision_config"][field], "{field}");
    }
    // Prompts of text alone are read as without.
    let files = ModelFiles::from(&tiny()).text_encoder(&llama);
    let (with, without) = (
        drawn(files.clone().vision(&mmproj)).0,
        drawn(files.clone()).0,
    );
    assert_eq!(with, without);
    // And prompts about a picture as with the tower in the text encoder's file.
    let edited = |files: ModelFiles| {
        let builder = Pipeline::open(files).unwrap().device("cpu").threads(2);
        let mut pipeline = builder.load().unwrap();
        let picture = Image::from_planes(&vec![0.5; 4 * 64 * 96], 96, 64).unwrap();
        let quiet = &mut |_: &Progress| {};
        let references = pipeline
            .read_references(&[picture], Some(64), quiet)
            .unwrap();
        let condition = pipeline.encode_with("make it red", &references).unwrap();
        let request = Request::new(&condition).size(64, 64).steps(2).seed(7);
        pipeline.generate(&request, quiet).unwrap().0
    };
    let with = edited(files.clone().vision(&mmproj));
    assert!(with.pixels() == edited(ModelFiles::from(&tiny())).pixels());
    let error = Pipeline::open(files.vision(&llama))
        .unwrap()
        .plan(None, 16)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("looked for the vision tower (Qwen3-VL)"),
        "{error}"
    );
    let again = sd_models::qwen3_vl::with_vision(&joined, &tower).unwrap_err();
    assert!(again.to_string().contains("already"), "{again}");
}

#[test]
fn quantised_rows_of_a_fused_tensor_are_those_of_its_halves() {
    let at = tempfile::tempdir().unwrap();
    let path = |name: &str| at.path().join(name);
    let fused = path("fused.safetensors");
    write(
        &fused,
        &tensors(&part("transformer"), "model.diffusion_model.", true),
        &[],
    );
    let q8_0 = LoadOptions::default().weight_type(sd_graph::weight_type("q8_0").unwrap());
    let (one, two) = (path("fused.gguf"), path("apart.gguf"));
    convert(&fused, &one, &q8_0);
    convert(&tiny().join("transformer"), &two, &q8_0);
    let checkpoint = Checkpoint::open(&one).unwrap();
    let (halves, naming) = named(&checkpoint);
    assert_eq!(naming, "gate and up projections in one");
    let half = halves
        .get("transformer_blocks.3.img_mlp.proj.weight")
        .unwrap();
    assert_eq!(
        (half.stored, &half.shape[..]),
        (StoredType::Q8_0, &[576, 192][..])
    );

    let over = |path: &Path| drawn(ModelFiles::from(&tiny()).transformer(path)).0;
    let (plain, _) = drawn(ModelFiles::from(&tiny()));
    let (one, two) = (over(&one), over(&two));
    assert_eq!(one, two);
    // A 270th of each weight is lost: 53 dB were measured, and the bound leaves twice the error for other processors.
    let quality = psnr(&one, &plain);
    println!("transformer in q8_0: {quality:.1} dB");
    assert!(quality >= 47.0, "{quality:.1} dB");
}

#[test]
fn configurations_follow_from_shapes() {
    // Published sizes. The VAE's statistics are in no shape; they are the published ones.
    for (table, component, fields) in [
        (
            "qwenimage21_transformer.json",
            Component::Diffusion,
            "in_channels num_layers attention_head_dim num_attention_heads context_in_dim mlp_ratio axes_dims_rope eps causal_condition",
        ),
        (
            "qwen3vl_8b.json",
            Component::TextEncoder,
            "text_config/hidden_size text_config/intermediate_size text_config/num_hidden_layers text_config/num_attention_heads \
             text_config/num_key_value_heads text_config/head_dim text_config/vocab_size vision_config/depth vision_config/hidden_size \
             vision_config/num_heads vision_config/patch_size vision_config/deepstack_visual_indexes \
             vision_config/num_position_embeddings vision_config/out_hidden_size image_token_id video_token_id",
        ),
        (
            "qwenimage21_vae.json",
            Component::Vae,
            "_class_name base_dim decoder_base_dim z_dim dim_mult num_res_blocks temperal_downsample is_residual in_channels",
        ),
    ] {
        let text = std::fs::read_to_string(folder("published").join(table)).unwrap();
        let told: serde_json::Value = serde_json::from_str(&text).unwrap();
        let shapes = told["tensors"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, shape)| {
                let sides = shape.as_array().unwrap().iter();
                let sides = sides.map(|side| side.as_u64().unwrap() as usize).collect();
                (name.clone(), StoredType::BF16, sides)
            });
        let checkpoint = Checkpoint::from_table(table, shapes).unwrap();
        let parts = identify(&checkpoint);
        assert_eq!(parts.len(), 1, "{table}: {parts:?}");
        assert_eq!(parts[0].component(), component);
        let found = parts[0].config(&checkpoint).unwrap();
        for field in fields.split_whitespace() {
            let pointer = format!("/{field}");
            let (found, told) = (found.pointer(&pointer), told["config"].pointer(&pointer));
            assert!(told.is_some(), "{table}: no {field}");
            assert_eq!(found, told, "{table}: {field}");
        }
    }
    // The tiny model's, whose heads are smaller.
    let found = identify(&part("transformer"))[0]
        .config(&part("transformer"))
        .unwrap();
    let told: serde_json::Value = serde_json::from_str(&config_text("transformer")).unwrap();
    for (field, value) in found.as_object().unwrap() {
        assert_eq!(value, &told[field], "{field}");
    }
}

#[test]
fn files_that_are_not_what_they_were_given_for_are_refused() {
    let at = tempfile::tempdir().unwrap();
    let path = |name: &str| at.path().join(name);
    let open = |files: ModelFiles| -> Error {
        let builder = Pipeline::open(files).unwrap();
        builder.plan(None, 16).unwrap_err()
    };
    let tiny_vae = tiny().join("vae/diffusion_pytorch_model.safetensors");
    let transformer = path("t.safetensors");
    write(&transformer, &tensors(&part("transformer"), "", true), &[]);
    let strange = path("strange.safetensors");
    write(
        &strange,
        &[("a\nb".to_owned(), Dtype::F32, vec![1], vec![0; 4])],
        &[],
    );
    let scaled = path("scaled.safetensors");
    let mut given = tensors(&part("transformer"), "", true);
    given.push((
        "img_in.scale_weight".to_owned(),
        Dtype::F32,
        vec![1],
        vec![0; 4],
    ));
    write(&scaled, &given, &[]);
    let damaged = path("damaged.safetensors");
    let mut given = tensors(&part("transformer"), "", true);
    given.retain(|(name, ..)| name != "transformer_blocks.2.attn.to_q.weight");
    given.push(("more".to_owned(), Dtype::F32, vec![1], vec![0; 4]));
    write(&damaged, &given, &[]);
    let odd = path("odd.safetensors");
    let mut given = tensors(&part("transformer"), "", true);
    for (name, _, shape, bytes) in &mut given {
        if name == "transformer_blocks.0.img_mlp.gate_up.weight" {
            shape[0] -= 1;
            bytes.truncate(bytes.len() - 2 * shape[1]);
        }
    }
    write(&odd, &given, &[]);

    let over = |path: &Path| ModelFiles::from(&tiny()).transformer(path);
    let cases = [
        (
            over(&tiny_vae),
            "looked for the diffusion (Qwen-Image 2.1): txt_in.text_norm.weight; found a vae (WAN and Qwen-Image)",
        ),
        (over(&strange), "found a\\nb"),
        (
            over(&scaled),
            "scaled by tensors of their own (img_in.scale_weight)",
        ),
        (
            over(&damaged),
            "1 missing: transformer_blocks.2.attn.to_q.weight; 1 unknown: more",
        ),
        (over(&odd), "its 1151 rows are not 2 equal parts"),
        (
            ModelFiles::default().model(&transformer),
            "no text-encoder here; it can be given with --text-encoder",
        ),
        (
            ModelFiles::default().transformer(&transformer),
            "--text-encoder",
        ),
        (
            ModelFiles::default()
                .transformer(&transformer)
                .text_encoder(tiny().join("text_encoder/model.safetensors"))
                .vae(&tiny_vae),
            "no tokenizer here; it can be given with --tokenizer",
        ),
        (
            ModelFiles::from(&tiny()).text_encoder(&transformer),
            "looked for the text-encoder (Qwen3-VL): blk",
        ),
        (
            ModelFiles::from(&tiny()).tokenizer(at.path()),
            "no tokenizer.json here",
        ),
        (over(&path("nothing.gguf")), "there is no such file"),
    ];
    for (files, part) in cases {
        let text = open(files).to_string();
        if part.ends_with(": blk") {
            assert!(text.contains(part.trim_end_matches(": blk")), "{text}");
            assert!(text.contains("token_embd.weight"), "{text}");
            continue;
        }
        assert!(text.contains(part), "`{part}` in {text}");
    }
}

#[test]
fn a_conversion_keeps_what_is_sensitive_and_follows_rules() {
    let checkpoint = part("transformer");
    let path = tiny().join("transformer");
    let types = |options: &LoadOptions, format: FileFormat| -> Vec<(String, String)> {
        let planned = conversion(&checkpoint, &path, format, options).unwrap();
        let types = planned.tensors();
        types
            .map(|(name, _, to)| (name.to_owned(), to.to_string()))
            .collect()
    };
    let of = |types: &[(String, String)], name: &str| {
        types
            .iter()
            .find(|(found, _)| found == name)
            .unwrap()
            .1
            .clone()
    };
    let q8_0 = LoadOptions::default().weight_type(sd_graph::weight_type("q8_0").unwrap());
    let plain = types(&q8_0, FileFormat::Gguf);
    let outside = [
        "img_in.weight",
        "proj_out.weight",
        "modulation.1.weight",
        "norm_out.linear.weight",
        "txt_in.out_layer.weight",
    ];
    for name in outside {
        assert_eq!(of(&plain, name), "F16", "{name}");
    }
    assert_eq!(
        of(&plain, "transformer_blocks.6.attn.to_out.0.weight"),
        "q8_0"
    );
    assert_eq!(of(&plain, "transformer_blocks.6.attn.norm_q.weight"), "F32");
    // A rule comes before.
    let rules = r"^transformer\.norm_out=q4_0,attn\.to_v=f32"
        .parse()
        .unwrap();
    let ruled = types(&q8_0.clone().tensor_types(rules), FileFormat::Gguf);
    assert_eq!(of(&ruled, "norm_out.linear.weight"), "q4_0");
    assert_eq!(of(&ruled, "transformer_blocks.0.attn.to_v.weight"), "F32");
    assert_eq!(of(&ruled, "transformer_blocks.0.attn.to_q.weight"), "q8_0");
    assert_eq!(of(&ruled, "proj_out.weight"), "F16");
    // Safetensors hold no blocks, and keep vectors as they are.
    let bf16 = LoadOptions::default().weight_type(sd_graph::weight_type("bf16").unwrap());
    let half = types(&bf16, FileFormat::Safetensors);
    assert_eq!(of(&half, "proj_out.weight"), "BF16");
    assert_eq!(of(&half, "transformer_blocks.6.attn.norm_q.weight"), "F16");
    let error = conversion(&checkpoint, &path, FileFormat::Safetensors, &q8_0).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("a safetensors file holds no q8_0"),
        "{error}"
    );

    // Kernels of five dimensions come back as they were, and a file that is not known has its matrices made.
    let at = tempfile::tempdir().unwrap();
    let (text, any) = (at.path().join("e.gguf"), at.path().join("any.gguf"));
    convert(&tiny().join("text_encoder"), &text, &q8_0);
    let patches = "model.visual.patch_embed.proj.weight";
    let shape = Checkpoint::open(&text)
        .unwrap()
        .get(patches)
        .unwrap()
        .shape
        .clone();
    assert_eq!(shape, [96, 3, 2, 16, 16]);
    let strange = at.path().join("strange.safetensors");
    let given = [
        ("a.weight".to_owned(), Dtype::F32, vec![2, 64], vec![0; 512]),
        ("a.bias".to_owned(), Dtype::F32, vec![64], vec![0; 256]),
        ("count".to_owned(), Dtype::I64, vec![], vec![0; 8]),
    ];
    write(&strange, &given, &[]);
    convert(&strange, &any, &q8_0);
    let any = Checkpoint::open(&any).unwrap();
    let stored = |name: &str| any.get(name).unwrap().stored;
    assert_eq!(
        [stored("a.weight"), stored("a.bias"), stored("count")],
        [StoredType::Q8_0, StoredType::F32, StoredType::I64]
    );
}
