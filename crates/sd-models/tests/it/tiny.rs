//! The trained tiny checkpoint against runs that diffusers recorded.

use sd_backend::{Backend, BackendOptions, DType, Device};
use sd_graph::{Cancel, LoadOptions, Progress};
use sd_models::qwen_image_2_1::{QwenImage21, Step};
use sd_models::{Image, Pipeline, References, Request};

use crate::editing::text_rows;
use crate::fixtures::{Array, Case, folder, psnr, relative_l2, tiny};

/// Facts of a recorded run that are not arrays.
fn manifest(case: &str) -> serde_json::Value {
    let path = folder("tiny-qwen-image-2.1-reference").join("manifest.json");
    let manifest: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    manifest["cases"][case].clone()
}

fn recorded(case: &str) -> Case {
    Case::read(&folder("tiny-qwen-image-2.1-reference").join(format!("{case}.safetensors")))
}

/// The reference picture of a recorded run, if it has one, at the run's own resolution.
fn references(pipeline: &mut Pipeline, facts: &serde_json::Value) -> References {
    let Some(file) = facts["reference_image"].as_str() else {
        return References::none();
    };
    let image = Image::open(folder("tiny-qwen-image-2.1-reference").join(file)).unwrap();
    let read = pipeline.read_references(&[image], None, &mut |_: &Progress| {});
    read.unwrap()
}

fn step(array: &Array, step: usize) -> &[f32] {
    let len = array.shape[1..].iter().product::<usize>();
    &array.f32[step * len..(step + 1) * len]
}

/// Relative error of single precision over seven blocks and twenty steps. The issue asks for 1e-3; the reference
/// repeated on another build differs by 6.5e-6, this engine by about 1e-5.
const TOLERANCE: f64 = 1e-4;

#[test]
fn recorded_runs_are_repeated_step_by_step() {
    let runs = [
        "t2i_128_cfg_uncached",
        "t2i_160x96",
        "edit_128_cfg",
        "edit_128_transparent",
    ];
    let runs = runs.map(|name| [(name, None), (name, Some(DType::F32))]);
    for (name, prefix) in runs.into_iter().flatten() {
        let (facts, case) = (manifest(name), recorded(name));
        let number = |key: &str| facts[key].as_u64().unwrap() as usize;
        let (width, height, steps) = (number("width"), number("height"), number("steps"));
        let guidance = facts["guidance"].as_f64().unwrap() as f32;
        let size = (height / 16, width / 16);

        let mut model =
            QwenImage21::open(tiny(), &LoadOptions::default().weight_type(DType::F32)).unwrap();
        let device = Device::cpu().unwrap();
        let mut backend = Backend::new(device, &BackendOptions::default().threads(2)).unwrap();
        let cancel = Cancel::new();
        model
            .load(&backend, &cancel, &mut |_: &Progress| {})
            .unwrap();

        let mut pipeline = Pipeline::open(tiny()).unwrap().device(device).threads(2);
        pipeline = pipeline.weight_type(DType::F32);
        let mut pipeline = pipeline.load().unwrap();
        let references = references(&mut pipeline, &facts);
        if let Some(latents) = references.latents(0) {
            let error = relative_l2(latents, &case.get("reference_latents").f32);
            println!("{name}: reference latents {error:e}");
            assert!(error <= TOLERANCE, "{name}: reference latents {error:e}");
        }
        let mut encode = |prompt: &str, kind: &str| {
            let condition = pipeline.encode_with(prompt, &references).unwrap();
            let ids = case.get(&format!("{kind}input_ids"));
            assert_eq!(condition.token_ids(), ids.i32, "{name}");
            let should = match references.is_empty() {
                true => case.get(&format!("{kind}prompt_embeds")).f32.clone(),
                false => text_rows(&case, "", kind),
            };
            let error = relative_l2(condition.hidden_states(), &should);
            println!("{name}: {kind}embeddings {error:e}");
            assert!(error <= TOLERANCE, "{name}: {kind}embeddings {error:e}");
            condition
        };
        let condition = encode(facts["prompt"].as_str().unwrap(), "");
        let negative = (guidance > 1.0).then(|| encode(" ", "negative_"));

        let schedule = model.schedule(steps, size.0 * size.1).unwrap();
        assert!(relative_l2(schedule.sigmas(), &case.get("sigmas").f32) <= 1e-6);
        let mut latents = case.get("initial_latents").f32.clone();
        for index in 0..steps {
            let step_of = Step {
                canvas: size.into(),
                timestep: schedule.timestep(index) / 1000.0,
                prefix,
            };
            let mut call = |condition| {
                let called = model.velocities(
                    &mut backend,
                    &[condition],
                    &latents,
                    step_of,
                    &cancel,
                    &mut |_: &sd_graph::Progress| {},
                );
                let (mut velocities, report) = called.unwrap();
                let counts = match (prefix, index) {
                    (None, _) => (0, 0),
                    (_, 0) => (1, 0),
                    _ => (0, 1),
                };
                assert_eq!((report.stored, report.read), counts, "{name} step {index}");
                velocities.remove(0)
            };
            let mut velocity = call(&condition);
            let error = relative_l2(&velocity, step(case.get("cond"), index));
            assert!(
                error <= TOLERANCE,
                "{name} step {index}: model output {error:e}"
            );
            if let Some(negative) = &negative {
                let unconditional = call(negative);
                let error = relative_l2(&unconditional, step(case.get("uncond"), index));
                assert!(
                    error <= TOLERANCE,
                    "{name} step {index}: negative model output {error:e}"
                );
                for (velocity, unconditional) in velocity.iter_mut().zip(unconditional) {
                    *velocity = unconditional + guidance * (*velocity - unconditional);
                }
            }
            schedule.euler_step(index, &mut latents, &velocity);
            let error = relative_l2(&latents, step(case.get("latents"), index));
            println!("{name} {prefix:?} step {index}: latents {error:e}");
            assert!(error <= TOLERANCE, "{name} step {index}: latents {error:e}");
        }

        let picture = model.decode(&mut backend, &latents, size, &cancel).unwrap();
        let quality = psnr(&picture, &case.get("image").f32);
        println!("{name}: picture {quality:.1} dB");
        assert!(quality >= 55.0, "{name}: {quality:.1} dB");
    }
}

#[test]
fn the_pipeline_makes_the_recorded_picture_from_the_seed_alone() {
    for name in ["t2i_128_cfg_uncached", "t2i_160x96", "edit_128_cfg"] {
        let (facts, case) = (manifest(name), recorded(name));
        let number = |key: &str| facts[key].as_u64().unwrap() as usize;
        // At least 55 dB in single precision; 35 dB with the file's own half precision, which every product rounds to.
        for (convert, least) in [(Some(DType::F32), 55.0), (None, 35.0)] {
            for device in crate::fixtures::devices() {
                let builder = Pipeline::open(tiny()).unwrap().device(device).threads(2);
                let builder = match convert {
                    Some(dtype) => builder.weight_type(dtype),
                    None => builder,
                };
                let mut pipeline = builder.load().unwrap();
                let references = references(&mut pipeline, &facts);
                let prompt = facts["prompt"].as_str().unwrap();
                let condition = pipeline.encode_with(prompt, &references).unwrap();
                let request = Request::new(&condition)
                    .size(number("width"), number("height"))
                    .steps(number("steps"))
                    .guidance(facts["guidance"].as_f64().unwrap() as f32)
                    .seed(number("seed") as u64);
                let (image, report) = pipeline.generate(&request, &mut |_: &Progress| {}).unwrap();
                assert_eq!(
                    (report.width, report.height),
                    (number("width"), number("height"))
                );

                let should = sd_models::Image::from_planes(
                    &case.get("image").f32,
                    report.width,
                    report.height,
                )
                .unwrap();
                let level = |image: &sd_models::Image| -> Vec<f32> {
                    image
                        .pixels()
                        .as_raw()
                        .iter()
                        .map(|&byte| f32::from(byte) / 127.5 - 1.0)
                        .collect()
                };
                let quality = psnr(&level(&image), &level(&should));
                println!("{name} with {convert:?} on {device}: {quality:.1} dB");
                let least = if device.kind() == sd_backend::DeviceKind::Cpu {
                    least
                } else {
                    30.0
                };
                assert!(
                    quality >= least,
                    "{name} with {convert:?} on {device}: {quality:.1} dB"
                );
            }
        }
    }
}

/// The picture of a prompt with weights as `builder` asks for, as levels from -1 to 1, and the bytes of all weights.
fn drawn(builder: sd_models::PipelineBuilder) -> (Vec<f32>, u64) {
    let mut pipeline = builder.threads(2).load().unwrap();
    let condition = pipeline
        .encode("a large red circle on a blue background")
        .unwrap();
    let request = Request::new(&condition).size(96, 96).steps(4).seed(7);
    let (image, report) = pipeline.generate(&request, &mut |_: &Progress| {}).unwrap();
    let levels = image.pixels().as_raw().iter();
    let levels = levels.map(|&byte| f32::from(byte) / 127.5 - 1.0).collect();
    (levels, report.weight_bytes)
}

#[test]
fn weights_of_other_types_draw_the_same_picture() {
    // Read: a mapped file counts as a whole.
    let open = || {
        let builder = Pipeline::open(tiny()).unwrap().device("cpu");
        builder.mapping(sd_backend::Mapping::Never)
    };
    let (exact, bytes) = drawn(open().weight_type(DType::F32));
    // Least quality in dB, and most of the bytes of single precision. A type loses a part of each weight: a 2^12th, a
    // 2^9th, one in 270 and one in 18 (root mean square). What was measured is 71, 61, 52 and 39 dB; the bounds leave 6 dB, which is twice the error, for processors that sum in another order.
    // Rows of this small model are no super-blocks: `q4_K` is mostly `q5_0` here, and the table `q8_0`.
    let rules = r"^transformer\.=q8_0,.*=f32";
    let cases = [
        ("f16", "", 64.0, 0.51),
        ("bf16", "", 55.0, 0.51),
        ("q8_0", "", 45.0, 0.33),
        ("q4_K", "", 32.0, 0.26),
        ("", rules, 45.0, 0.53),
    ];
    for (default, rules, least, part) in cases {
        let mut builder = open();
        if !default.is_empty() {
            builder = builder.weight_type(sd_graph::weight_type(default).unwrap());
        }
        if !rules.is_empty() {
            builder = builder.tensor_types(rules.parse().unwrap());
        }
        let planned = builder.plan(Some((96, 96)), 16).unwrap();
        let (picture, of) = drawn(builder);
        let quality = psnr(&picture, &exact);
        let share = of as f64 / bytes as f64;
        println!("{default}{rules}: {quality:.1} dB, {share:.3} of the bytes");
        assert!(quality >= least, "{default}{rules}: {quality:.1} dB");
        assert!(share <= part, "{default}{rules}: {share:.3} of the bytes");
        // A plan counts what is loaded.
        let planned: u64 = planned.seats.iter().map(|seat| seat.weights).sum();
        assert_eq!(planned, of);
    }
}

#[test]
fn the_same_seed_gives_the_same_picture_on_every_number_of_threads() {
    let draw = |threads: usize, dtype: Option<DType>| {
        let builder = Pipeline::open(tiny()).unwrap().device("cpu");
        let mut builder = builder.threads(threads);
        if let Some(dtype) = dtype {
            builder = builder.weight_type(dtype);
        }
        let mut pipeline = builder.load().unwrap();
        let condition = pipeline.encode("a small green square").unwrap();
        let request = Request::new(&condition).size(96, 64).steps(3).guidance(3.0);
        let (image, _) = pipeline
            .generate(&request.seed(5), &mut |_: &Progress| {})
            .unwrap();
        image.pixels().as_raw().clone()
    };
    for dtype in [None, Some(DType::F32), Some(DType::Q8_0)] {
        let one = draw(1, dtype);
        for threads in [2, 3, 4] {
            assert!(
                draw(threads, dtype) == one,
                "{dtype:?}: another picture with {threads} threads"
            );
        }
    }
}
