//! Files of the video VAE of MiniMax H3: names, types, what they leave out; and memory that does not suffice.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use sd_backend::fake::{FakeDevice, FakeOptions};
use sd_backend::{
    Backend, BackendOptions, Device, Ledger, Mapping, MemoryBudget, MemoryBudgets, Residence,
};
use sd_graph::{Cancel, Checkpoint, Existing, FileFormat, LoadOptions, Progress, StoredType};
use sd_models::minimax_h3::video_vae::{Config, Tiling, VideoVae};
use sd_models::wan_vae::Clip;
use sd_models::{Error, conversion, identify};

use crate::fixtures::{folder, relative_l2};
use crate::video_vae::{LONG, decode, encode, open};
use crate::wan::{case, clip, processor};
use crate::wan_files::changed;

/// Latents of two tiles, and pictures.
fn latents() -> Clip {
    clip(case(LONG, "decode_7_2x3").get("in.normalized"))
}

fn pixels() -> Clip {
    clip(case(LONG, "encode_22_2x3").get("in.pixels"))
}

/// The tensors of a fixture as its authors would name and keep them: written down from their files, not by our tables.
fn published(
    path: &Path,
    metadata: Option<HashMap<String, String>>,
    statistics: Option<&[Vec<f32>; 2]>,
) {
    let bytes = std::fs::read(folder(LONG).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let values = |name: &str| file.tensor(name).unwrap().data().to_vec();
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    let mut add = |name: String, shape: &[usize], data| tensors.push((name, shape.to_vec(), data));
    for (name, view) in file.iter() {
        let (shape, data) = (view.shape(), view.data());
        if name.contains("attn.to_k") || name.contains("attn.to_v") {
            continue;
        }
        let short = name
            .replace("down_blocks", "down")
            .replace("resnets", "block");
        let short = short
            .replace("conv_shortcut", "nin_shortcut")
            .replace("to_out.0", "to_out");
        let short = short
            .replace("downsamplers.0", "downsample")
            .replace("ff.net.2", "ff.w2");
        let short = short.replace("decoder.proj_in", "decoder.x_embedder");
        if let Some((before, kind)) = short.split_once("to_q.") {
            // Two heads of 16: queries, keys and values of each in turn.
            let parts = ["to_q", "to_k", "to_v"].map(|part| values(&name.replace("to_q", part)));
            let rows = parts[0].len() / 2;
            let heads = (0..2).flat_map(|head| parts.iter().map(move |part| (head, part)));
            let data = heads.flat_map(|(head, part)| &part[head * rows..(head + 1) * rows]);
            let mut shape = shape.to_vec();
            shape[0] *= 3;
            add(
                format!("{before}to_qkv.{kind}"),
                &shape,
                data.copied().collect(),
            );
        } else if let Some((before, kind)) = short.split_once("ff.net.0.proj.") {
            let (value, gate) = data.split_at(data.len() / 2);
            add(
                format!("{before}ff.w1.{kind}"),
                shape,
                [gate, value].concat(),
            );
        } else {
            add(short, shape, data.to_vec());
        }
    }
    add("decoder.mask_token".to_owned(), &[1, 1, 32], vec![0; 128]);
    let names = ["latents_mean", "latents_std"];
    for (name, values) in names.into_iter().zip(statistics.into_iter().flatten()) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        add(name.to_owned(), &[values.len()], bytes.collect());
    }
    let views = tensors.iter().map(|(name, shape, data)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), data).unwrap();
        (format!("first_stage_model.{name}"), view)
    });
    safetensors::serialize_to_file(views, metadata, path).unwrap();
}

#[test]
fn files_of_the_authors_are_read_if_they_say_what_latents_are_like() {
    let target = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(folder(LONG).join("config.json")).unwrap();
    let beside = target.path().join("beside");
    std::fs::create_dir(&beside).unwrap();
    std::fs::write(beside.join("config.json"), &config).unwrap();
    published(&beside.join("vae.safetensors"), None, None);
    let within = target.path().join("within.safetensors");
    let key = "sd.config.vae".to_owned();
    published(&within, Some(HashMap::from([(key, config)])), None);

    let mut backend = processor();
    let mut vae = open(LONG);
    let whole = decode(&mut vae, &mut backend, &latents(), Tiling::Whole);
    let means = encode(&mut vae, &mut backend, &pixels(), Tiling::Whole).mean;
    for path in [beside.join("vae.safetensors"), within] {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let parts = identify(&checkpoint);
        assert_eq!(parts.len(), 1);
        assert_eq!(
            (parts[0].family(), parts[0].naming()),
            ("MiniMax H3", "as published")
        );
        assert_eq!(parts[0].prefix(), "first_stage_model.");
        let mut vae = VideoVae::open(&path, &LoadOptions::default()).unwrap();
        let is = decode(&mut vae, &mut backend, &latents(), Tiling::Whole);
        // Products with three projections at once may sum in another order.
        assert!(relative_l2(&is, &whole) < 1e-6);
        let is = encode(&mut vae, &mut backend, &pixels(), Tiling::Whole).mean;
        assert_eq!(is.values, means.values);
    }

    // A conversion keeps the configuration, and with it all that is needed.
    let converted = target.path().join("converted.safetensors");
    let from = beside.join("vae.safetensors");
    let options = LoadOptions::default();
    let checkpoint = Checkpoint::open(&from).unwrap();
    let planned = conversion(&checkpoint, &from, FileFormat::Safetensors, &options).unwrap();
    let (ledger, quiet) = (Ledger::default(), &mut |_: &Progress| {});
    planned
        .write(&converted, Existing::Keep, &ledger, &Cancel::new(), quiet)
        .unwrap();
    let mut vae = VideoVae::open(&converted, &options).unwrap();
    let is = decode(&mut vae, &mut backend, &latents(), Tiling::Whole);
    assert!(relative_l2(&is, &whole) < 1e-6);
}

/// Names, shapes and the configuration of the published size, whose latents' means and deviations are known.
#[test]
fn the_published_size_is_known_and_planned() {
    let text = std::fs::read_to_string(folder("published").join("minimax_h3_vae.json")).unwrap();
    let table: serde_json::Value = serde_json::from_str(&text).unwrap();
    let tensors = table["tensors"].as_object().unwrap().iter();
    let tensors = tensors.map(|(name, shape)| {
        let shape = serde_json::from_value(shape.clone()).unwrap();
        (name.clone(), StoredType::F16, shape)
    });
    let checkpoint = Checkpoint::from_table("published", tensors).unwrap();
    let parts = identify(&checkpoint);
    let [part] = &parts[..] else {
        panic!("{parts:?}")
    };
    assert!(!part.is_told(&checkpoint));
    let config = part.config(&checkpoint).unwrap();
    let told = table["config"].as_object().unwrap();
    for (field, value) in told {
        if !field.starts_with("latents_") {
            assert_eq!(&config[field], value, "{field}");
        }
    }
    let selected = part.select(&checkpoint).unwrap();
    let config: Config = serde_json::from_value(config).unwrap();
    // Three of the numbers that ComfyUI has for it.
    let known = [
        config.latents_mean[5],
        config.latents_std[0],
        config.latents_std[23],
    ];
    assert_eq!(known, [-1.367_541_4, 1.222_377_4, 2.612_784_4]);
    assert_eq!(
        (config.latents_mean.len(), config.latents_std.len()),
        (24, 24)
    );
    let vae = VideoVae::from_checkpoint(&selected, config, &LoadOptions::default()).unwrap();

    let backend = processor();
    let size = (768, 1344);
    let encoding = vae
        .fit_encoding(&backend, 90, size, Tiling::default())
        .unwrap();
    let decoding = vae
        .fit_decoding(&backend, (48, 84), Tiling::default())
        .unwrap();
    let whole = vae.fit_decoding(&backend, (48, 84), Tiling::Whole).unwrap();
    println!("encode {encoding:?}\ndecode {decoding:?}\nwhole {whole:?}");
    // 180 million numbers of the encoder in F32, 2424 million of the decoder in F16.
    assert!(
        (720_000_000..725_000_000).contains(&encoding.weights),
        "{encoding:?}"
    );
    assert!(
        (4_845_000_000..4_855_000_000).contains(&decoding.weights),
        "{decoding:?}"
    );
    // A tile is what memory is needed for, however large frames are.
    let one = vae
        .fit_encoding(&backend, 22, (256, 256), Tiling::default())
        .unwrap();
    assert_eq!(one.bytes, encoding.bytes);
    assert!(encoding.bytes - encoding.weights < 3 << 30, "{encoding:?}");
    assert!(decoding.bytes - decoding.weights < 1 << 30, "{decoding:?}");
}

/// What the published single file says besides: means and deviations as tensors, and with more digits as metadata.
#[test]
fn statistics_are_taken_from_wherever_a_file_has_them() {
    let target = tempfile::tempdir().unwrap();
    let path = target.path().join("vae.safetensors");
    let text = std::fs::read_to_string(folder(LONG).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let full: Config = serde_json::from_value(config.clone()).unwrap();
    let told = serde_json::json!({
        "vae_clip_length": 17,
        "latents_mean": config["latents_mean"].take(),
        "latents_std": config["latents_std"].take(),
    });
    let fields = config.as_object_mut().unwrap();
    fields.retain(|_, value| !value.is_null());
    let rest = || ("sd.config.video_vae".to_owned(), config.to_string());
    let opened = || VideoVae::open(&path, &LoadOptions::default());

    published(&path, Some(HashMap::from([rest()])), None);
    let error = opened().unwrap_err().to_string();
    assert!(error.contains("means and deviations"), "{error}");

    let metadata = [
        rest(),
        ("minimax_h3_video_vae".to_owned(), told.to_string()),
    ];
    let others = full.latents_mean.iter().map(|mean| mean + 1.0).collect();
    let stored = [others, full.latents_std.clone()];
    published(&path, Some(HashMap::from(metadata)), Some(&stored));
    assert_eq!(opened().unwrap().config(), &full);

    let stored = [full.latents_mean.clone(), full.latents_std.clone()];
    published(&path, Some(HashMap::from([rest()])), Some(&stored));
    assert_eq!(opened().unwrap().config(), &full);
}

#[test]
fn files_that_do_not_say_enough_are_refused() {
    let target = tempfile::tempdir().unwrap();
    let path = target.path().join("vae.safetensors");
    published(&path, None, None);
    let refused = |path: &Path| {
        let error = VideoVae::open(path, &LoadOptions::default()).unwrap_err();
        assert!(matches!(error, Error::Config { .. }), "{error:?}");
        error.to_string()
    };
    // Nothing says how it shortens time.
    let text = refused(&path);
    assert!(text.contains("which levels shorten time"), "{text}");

    let config = std::fs::read_to_string(folder(LONG).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let mut with = |field: &str, value: serde_json::Value| {
        let before = std::mem::replace(&mut config[field], value);
        std::fs::write(target.path().join("config.json"), config.to_string()).unwrap();
        config[field] = before;
        refused(&path)
    };
    let text = with("latents_std", serde_json::json!([]));
    let place = format!("must lie in {}", target.path().display());
    assert!(text.contains(&place), "{text}");
    for (field, value, reason) in [
        (
            "latents_std",
            serde_json::json!([1, 1, 0, 1, 1, 1]),
            "no deviation is 0",
        ),
        (
            "latents_mean",
            serde_json::json!([1, 1]),
            "latent_channels entries",
        ),
        ("clip_length", 16.into(), "clip_length is one frame more"),
        ("token_drop", 5.into(), "token_drop is less"),
        ("norm_num_groups", 3.into(), "divides the channels"),
        ("decoder_rope_dim_ratio", 0.5.into(), "multiple of 6"),
        (
            "spatial_downsample_factors",
            serde_json::json!([2, 1, 1]),
            "factors are 1 or 2",
        ),
        ("spatial_padding_mode", "zeros".into(), "reflect"),
        ("_class_name", "AutoencoderKLWan".into(), "unknown variant"),
    ] {
        let text = with(field, value);
        assert!(text.contains(reason), "{field}: {text}");
    }
}

/// The encoder computes in single precision whatever its file has, as in the reference; the decoder in its file's type.
#[test]
fn a_file_in_half_precision_encodes_in_single() {
    let half = changed(LONG, Dtype::F16, |_, _, _| {});
    let rounded = changed(LONG, Dtype::F32, |_, _, values| {
        for value in values {
            *value = half::f16::from_f32(*value).to_f32();
        }
    });
    let mut backend = processor();
    let mut of = |folder: &Path| {
        let mut vae = VideoVae::open(folder, &LoadOptions::default()).unwrap();
        let mean = encode(&mut vae, &mut backend, &pixels(), Tiling::Whole).mean;
        (
            mean.values,
            decode(&mut vae, &mut backend, &latents(), Tiling::Whole),
        )
    };
    let (half, rounded) = (of(half.path()), of(rounded.path()));
    assert_eq!(half.0, rounded.0);
    let error = relative_l2(&half.1, &rounded.1);
    println!("decoder in half precision: {error:e}");
    // What products see is rounded to 11 bits.
    assert!(error > 1e-6 && error < 5e-3, "{error:e}");
}

#[test]
fn what_cannot_be_is_refused_with_its_reason() {
    let mut backend = processor();
    let mut vae = open(LONG);
    let cancel = Cancel::new();
    let mut quiet = |_: &Progress| {};
    let mut nothing = |_: &[f32]| Ok::<_, Error>(());
    let mut told = Vec::new();
    for (size, tiling) in [
        ((8, 10), Tiling::Whole),
        ((4, 8), Tiling::Whole),
        ((0, 8), Tiling::Whole),
        ((1 << 40, 1 << 40), Tiling::Whole),
        (
            (8, 8),
            Tiling::Tiles {
                size: 4,
                overlap: 4,
            },
        ),
        (
            (8, 8),
            Tiling::Tiles {
                size: 16,
                overlap: 6,
            },
        ),
        (
            (8, 8),
            Tiling::Tiles {
                size: 16,
                overlap: 16,
            },
        ),
        (
            (8, 8),
            Tiling::Tiles {
                size: 16,
                overlap: 0,
            },
        ),
    ] {
        let error = vae.encoding(&backend, size, tiling, &cancel).unwrap_err();
        told.push(error.to_string());
    }
    let mut encoding = vae
        .encoding(&backend, (8, 8), Tiling::Whole, &cancel)
        .unwrap();
    let error = encoding.push(&mut backend, &[0.0; 5], &cancel, &mut quiet);
    told.push(error.unwrap_err().to_string());
    let error = encoding.finish(&mut backend, &cancel, &mut quiet);
    told.push(error.unwrap_err().to_string());
    for broken in [
        Clip {
            channels: 3,
            ..latents()
        },
        Clip {
            frames: 0,
            values: Vec::new(),
            ..latents()
        },
        Clip {
            values: vec![0.0; 7],
            ..latents()
        },
        Clip {
            height: 0,
            values: Vec::new(),
            ..latents()
        },
    ] {
        let outcome = vae.decode(
            &mut backend,
            &broken,
            Tiling::Whole,
            (&cancel, &mut quiet),
            &mut nothing,
        );
        told.push(outcome.unwrap_err().to_string());
    }
    let error = vae.fit_decoding(&backend, (usize::MAX, 2), Tiling::Whole);
    told.push(error.unwrap_err().to_string());
    let wanted = [
        "frames of 10x8 cannot be encoded: both sides must be multiples of 4",
        "frames of 8x4 cannot be encoded: both sides must have at least 8",
        "multiples of 4",
        "are too large: at most 65536",
        "tiles of 4 pixels that overlap by 4 cannot be",
        "tiles of 16 pixels that overlap by 6 cannot be",
        "tiles of 16 pixels that overlap by 16 cannot be",
        "tiles of 16 pixels that overlap by 0 cannot be",
        "5 pixel values instead of 192",
        "0 frames instead of 1",
        "3 channels instead of 6",
        "0 frames instead of 1",
        "7 values instead of 252",
        "0 rows instead of 1",
        "are too large",
    ];
    assert_eq!(told.len(), wanted.len());
    for (told, wanted) in told.iter().zip(wanted) {
        assert!(told.contains(wanted), "{told}");
    }
}

fn with_budget(bytes: u64) -> Backend {
    let ledger = Ledger::new(MemoryBudgets::every(MemoryBudget::Bytes(bytes)));
    let options = BackendOptions::default().threads(2).ledger(&ledger);
    Backend::new(Device::cpu().unwrap(), &options).unwrap()
}

/// Too little memory is an error that names what would do; with that it works, to the same numbers, and nothing stays.
#[test]
fn the_smallest_budget_does_and_changes_no_number() {
    let tiling = Tiling::Tiles {
        size: 8,
        overlap: 4,
    };
    let (cancel, mut quiet) = (Cancel::new(), |_: &Progress| {});
    let mut vae = open(LONG);
    vae.live(Residence::Device, Mapping::Never, false);
    let frames = decode(&mut vae, &mut processor(), &latents(), tiling);
    let means = encode(&mut vae, &mut processor(), &pixels(), tiling).mean;
    vae.unload();
    let smallest = |error: Error| match error {
        Error::TooLittleMemory { smallest, .. } => smallest,
        other => panic!("{other}"),
    };
    let mut all = Vec::new();
    let mut add = |frame: &[f32]| {
        all.extend_from_slice(frame);
        Ok::<_, Error>(())
    };
    let mut backend = with_budget(1000);
    let with = (&cancel, &mut quiet as &mut dyn sd_graph::Reporter);
    let outcome = vae.decode(&mut backend, &latents(), tiling, with, &mut add);
    let enough = smallest(outcome.unwrap_err());
    for (bytes, does) in [(enough - 1, false), (enough, true)] {
        let mut backend = with_budget(bytes);
        let with = (&cancel, &mut quiet as &mut dyn sd_graph::Reporter);
        let outcome = vae.decode(&mut backend, &latents(), tiling, with, &mut add);
        assert_eq!(outcome.is_ok(), does, "{bytes}: {outcome:?}");
        vae.unload();
        assert_eq!(backend.ledger().report(backend.device()).used.total(), 0);
    }
    assert!(all == frames);

    let with = (&cancel, &mut quiet as &mut dyn sd_graph::Reporter);
    let outcome = vae.encode(&mut with_budget(1000), &pixels(), tiling, with);
    let enough = smallest(outcome.unwrap_err());
    let mut backend = with_budget(enough);
    // The encoder gets the room of the decoder, which is loaded.
    let with = (&cancel, &mut quiet as &mut dyn sd_graph::Reporter);
    let (is, report) = vae.encode(&mut backend, &pixels(), tiling, with).unwrap();
    assert!(report.peak <= enough);
    assert!(is.mean.values == means.values);
}

/// Weights that come and go give the same frames, in less memory than they have.
#[test]
fn streamed_weights_give_the_same_frames() {
    let mut backend = processor();
    let mut vae = open(LONG);
    let frames = decode(&mut vae, &mut backend, &latents(), Tiling::Whole);
    for residence in [Residence::Host, Residence::Disk] {
        vae.live(residence, Mapping::Never, true);
        let fit = vae.fit_decoding(&backend, (2, 3), Tiling::Whole).unwrap();
        let weights = vae.decoder_weights().bytes();
        // The host is the device here, which has all of them, each with its padding, if they live there.
        let padded = weights + 64 * vae.decoder_weights().params().len() as u64;
        let mut backend = match residence {
            Residence::Host => with_budget(fit.bytes + padded),
            _ => with_budget(fit.bytes),
        };
        assert!(fit.bytes < weights, "{fit:?} {weights}");
        let is = decode(&mut vae, &mut backend, &latents(), Tiling::Whole);
        assert!(is == frames, "{residence:?}");
    }
}

/// Whichever allocation a device refuses: an error, nothing that stays, and the next run gives all frames.
#[test]
fn allocations_that_fail_are_errors_and_leave_nothing() {
    let fake = FakeDevice::new(FakeOptions::default());
    let ledger = Ledger::with_headroom(MemoryBudgets::default(), 0);
    let options = BackendOptions::default().threads(2).ledger(&ledger);
    let mut backend = Backend::new(fake.device(), &options).unwrap();
    let tiling = Tiling::Tiles {
        size: 8,
        overlap: 4,
    };
    let mut vae = open(LONG);
    let frames = decode(&mut vae, &mut backend, &latents(), tiling);
    let means = encode(&mut vae, &mut backend, &pixels(), tiling);
    let (cancel, mut quiet) = (Cancel::new(), |_: &Progress| {});
    for encodes in [false, true] {
        let mut run = |vae: &mut VideoVae| {
            let with = (&cancel, &mut quiet as &mut dyn sd_graph::Reporter);
            if encodes {
                return vae.encode(&mut backend, &pixels(), tiling, with).map(drop);
            }
            let mut drop_it = |_: &[f32]| Ok::<_, Error>(());
            let outcome = vae.decode(&mut backend, &latents(), tiling, with, &mut drop_it);
            outcome.map(drop)
        };
        vae.unload();
        let before = fake.counts().allocations;
        run(&mut vae).unwrap();
        let all = fake.counts().allocations - before;
        let mut refused = 0;
        for number in 1..=all {
            vae.unload();
            assert_eq!((fake.counts().buffers, fake.counts().bytes), (0, 0));
            fake.fail_allocation(number);
            match run(&mut vae) {
                // Plans are given up and built anew where that helps.
                Ok(()) => {}
                Err(error) => {
                    assert!(error.is_out_of_memory(), "{error}");
                    refused += 1;
                }
            }
        }
        println!("encodes {encodes}: {refused} of {all} allocations that failed were told");
        // Weights are asked for once, and what goes from chunk to chunk.
        assert!(refused > u64::from(encodes), "{refused} of {all}");
    }
    assert!(decode(&mut vae, &mut backend, &latents(), tiling) == frames);
    assert!(encode(&mut vae, &mut backend, &pixels(), tiling) == means);
}
