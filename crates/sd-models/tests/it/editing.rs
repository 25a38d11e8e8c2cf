//! Prompts about reference pictures, against runs that diffusers recorded with the trained tiny checkpoint.

use sd_backend::fake::{FakeDevice, FakeOptions};
use sd_backend::{
    Backend, BackendOptions, Component, DType, Device, Ledger, Mapping, MemoryBudget,
    MemoryBudgets, MemoryKind, Placement, Residence,
};
use sd_graph::{Cancel, LoadOptions, Progress};
use sd_models::qwen_image_2_1::{Canvas, QwenImage21, Step};
use sd_models::{
    Condition, Error, GenerateReport, Image, Pipeline, PipelineBuilder, PrefixCache, References,
    Request,
};

use crate::fixtures::{Array, Case, cases, psnr, relative_l2, tiny};

/// Bytes that the tiny checkpoint keeps of one token: keys and values of 192 channels in 7 blocks, in single precision.
const TOKEN: u64 = 2 * 192 * 7 * 4;

fn open() -> PipelineBuilder {
    Pipeline::open(tiny()).unwrap().threads(2)
}

fn quiet() -> impl FnMut(&Progress) {
    |_: &Progress| {}
}

fn picture(array: &Array) -> Image {
    let bytes = array.i32.iter().map(|&byte| byte as u8).collect();
    let (height, width) = (array.shape[0] as u32, array.shape[1] as u32);
    Image::from_rgba(width, height, bytes).unwrap()
}

fn pictures(case: &Case) -> Vec<Image> {
    (0..)
        .map(|index| format!("in.picture{index}"))
        .take_while(|name| case.has(name))
        .map(|name| picture(case.get(&name)))
        .collect()
}

/// A rectangle on a ground that is clear at the left, in colours of its own.
fn reference(seed: u8, width: u32, height: u32) -> Image {
    let pixel = |at: u32| {
        let (x, y) = (at % width, at / width);
        let inside = (x * 2).abs_diff(width) < width / 2 && (y * 2).abs_diff(height) < height / 2;
        match inside {
            true => [200, seed, 30, 255],
            false => [seed, 60, 200, if x < width / 8 { 0 } else { 255 }],
        }
    };
    Image::from_rgba(width, height, (0..width * height).flat_map(pixel).collect()).unwrap()
}

fn levels(image: &Image) -> Vec<f32> {
    let bytes = image.pixels().as_raw().iter();
    bytes.map(|&byte| f32::from(byte) / 127.5 - 1.0).collect()
}

/// Relative error of single precision over text encoder, vision tower and VAE. The issue asks for 1e-4; here it is 3e-7, and the
/// reference repeated on another build moves by up to 1e-5.
const TOLERANCE: f64 = 1e-5;

#[test]
fn pictures_of_any_size_are_edited_as_by_the_reference() {
    let recorded = cases("qwenimage21_references");
    assert_eq!(recorded.len(), 4);
    let builder = open().device("cpu").weight_type(DType::F32);
    let mut pipeline = builder.load().unwrap();
    for (name, case) in recorded {
        let number = |key: &str| case.meta[key].as_u64().unwrap() as usize;
        let images = pictures(&case);
        for (index, image) in images.iter().enumerate() {
            // To the last bit: one shade more or less is seen by nobody, but says that something is done otherwise.
            let should = picture(case.get(&format!("out.resized{index}")));
            assert!(
                image.resized(should.width(), should.height()) == should,
                "{name}, picture {index}"
            );
        }
        let mut stages = Vec::new();
        let references = pipeline
            .read_references(
                &images,
                Some(number("resolution")),
                &mut |progress: &Progress| match progress {
                    Progress::Stage(stage) => stages.push((stage.to_string(), 0)),
                    Progress::Step { done, total } => stages.push((total.to_string(), *done)),
                    _ => {}
                },
            )
            .unwrap();
        // Two steps for each picture.
        assert_eq!(stages.len(), 1 + 2 * images.len(), "{stages:?}");
        assert_eq!(stages[0].0, "read references");
        let latents: Vec<f32> = (0..references.len())
            .flat_map(|index| references.latents(index).unwrap().to_vec())
            .collect();
        let error = relative_l2(&latents, &case.get("out.reference_latents").f32);
        println!("{name}: latents {error:e}");
        assert!(error <= TOLERANCE, "{name}: latents {error:e}");

        let check = |condition: &Condition, kind: &str| {
            let ids = case.get(&format!("out.{kind}input_ids"));
            assert_eq!(condition.token_ids(), ids.i32, "{name}");
            let embeds = text_rows(&case, "out.", kind);
            let error = relative_l2(condition.hidden_states(), &embeds);
            println!("{name}: {kind}embeddings {error:e}");
            assert!(error <= TOLERANCE, "{name}: {kind}embeddings {error:e}");
        };
        let prompt = case.meta["prompt"].as_str().unwrap();
        let condition = pipeline.encode_with(prompt, &references).unwrap();
        check(&condition, "");
        let negative = case.meta["negative"].as_str();
        if let Some(negative) = negative {
            check(
                &pipeline.encode_with(negative, &references).unwrap(),
                "negative_",
            );
        }
        // The negative is the empty prompt about the same pictures, which is what a request has without one.
        assert!(negative.is_none_or(str::is_empty));
        let request = Request::new(&condition)
            .steps(number("steps"))
            .guidance(case.meta["guidance"].as_f64().unwrap() as f32)
            .seed(number("seed") as u64);
        let (image, report) = pipeline.generate(&request, &mut quiet()).unwrap();
        // The last reference's aspect, since nothing else was said.
        assert_eq!(
            (report.width, report.height),
            (number("width"), number("height")),
            "{name}"
        );
        let text = &image.text()[0].1;
        assert!(text.contains(", References: "), "{text}");
        let quality = psnr(&levels(&image), &levels(&picture(case.get("out.image"))));
        println!("{name}: picture {quality:.1} dB");
        assert!(quality >= 55.0, "{name}: {quality:.1} dB");
    }
}

/// The recorded hidden states of a prompt's text, without those in the places of pictures.
pub(crate) fn text_rows(case: &Case, prefix: &str, kind: &str) -> Vec<f32> {
    let name = |what: &str| format!("{prefix}{kind}{what}");
    let named = |recorded: &str, made: &str| {
        let (recorded, made) = (name(recorded), name(made));
        if case.has(&recorded) { recorded } else { made }
    };
    let embeds = case.get(&named("prompt_embeds", "embeds"));
    let slots = case.get(&named("image_slots", "slots"));
    let width = embeds.shape[2];
    let rows = embeds.f32.chunks_exact(width).zip(&slots.i32);
    let text = rows.filter(|(_, slot)| **slot == 0);
    text.flat_map(|(row, _)| row).copied().collect()
}

/// Conditions about pictures of their own.
fn conditions(prompts: [&str; 2], resolution: usize) -> Vec<Condition> {
    let builder = open().device("cpu").weight_type(DType::F32);
    let mut pipeline = builder.load().unwrap();
    let pairs = prompts.into_iter().zip([10, 240]);
    pairs
        .map(|(prompt, seed)| {
            let images = [reference(seed, 90, 50), reference(seed / 2, 40, 64)];
            let references = pipeline.read_references(&images, Some(resolution), &mut quiet());
            pipeline.encode_with(prompt, &references.unwrap()).unwrap()
        })
        .collect()
}

#[test]
fn conditions_with_pictures_take_turns_and_each_reads_its_own() {
    let conditions = conditions(["make the circle red", "make the square red"], 64);
    assert_eq!(conditions[0].tokens(), conditions[1].tokens());
    let prefix = conditions[0].prefix_tokens();
    assert!(prefix > conditions[0].tokens() + 20, "{prefix}");
    let all: Vec<&Condition> = conditions.iter().collect();
    for device in crate::fixtures::devices() {
        let options = LoadOptions::default().weight_type(DType::F32);
        let mut model = QwenImage21::open(tiny(), &options).unwrap();
        let options = BackendOptions::default().threads(2);
        let mut backend = Backend::new(device, &options).unwrap();
        model.load(&backend, &Cancel::new(), &mut quiet()).unwrap();
        let canvas = Canvas::from((4, 6));
        let latents: Vec<f32> = (0..24 * 16)
            .map(|n| (n * 37 % 229) as f32 / 64.0 - 1.8)
            .collect();
        let mut call = |conditions: &[&Condition], index: usize, prefix| {
            let step = Step {
                canvas,
                timestep: 0.9 - 0.1 * index as f32,
                prefix,
            };
            let (cancel, quiet) = (Cancel::new(), &mut quiet());
            let called = model.velocities(&mut backend, conditions, &latents, step, &cancel, quiet);
            let (velocities, report) = called.unwrap();
            (velocities, (report.stored, report.read))
        };
        // The bound in F32; elsewhere than on the processor products may be in half precision.
        let is_cpu = device.kind() == sd_backend::DeviceKind::Cpu;
        let tolerance = if is_cpu { 1e-4 } else { 0.05 };
        for index in 0..3 {
            let (plain, _) = call(&all, index, None);
            // What differs is told apart.
            assert!(relative_l2(&plain[0], &plain[1]) > 10.0 * tolerance);
            let (first, one) = call(&all[..1], index, Some(DType::F32));
            let (second, other) = call(&all[1..], index, Some(DType::F32));
            let counts = if index == 0 { (1, 0) } else { (0, 1) };
            assert_eq!((one, other), (counts, counts));
            for (kept, plain) in first.iter().chain(&second).zip(&plain) {
                let error = relative_l2(kept, plain);
                println!("{device} step {index}: {error:e}");
                assert!(error <= tolerance, "{device} step {index}: {error:e}");
            }
        }
        // Text and pictures are kept.
        let bytes = conditions[0].prefix_bytes(device);
        let wanted = prefix as u64 * TOKEN;
        assert!((wanted..wanted + 4096).contains(&bytes), "{bytes}");
        all.iter().for_each(|condition| condition.release_prefix());
    }
}

fn ledger(budget: MemoryBudget) -> Ledger {
    Ledger::with_headroom(MemoryBudgets::every(budget), 0)
}

fn draw(pipeline: &mut Pipeline, request: &Request<'_>) -> Result<(Image, GenerateReport), Error> {
    pipeline.generate(request, &mut quiet())
}

/// From pictures to a picture, all of it.
fn edit(pipeline: &mut Pipeline, guidance: f32) -> Result<(Image, GenerateReport), Error> {
    let images = [reference(90, 70, 40), reference(20, 40, 40)];
    let references = pipeline.read_references(&images, Some(64), &mut quiet())?;
    let condition = pipeline.encode_with("make it blue", &references)?;
    let request = Request::new(&condition).steps(2).guidance(guidance);
    draw(pipeline, &request)
}

/// Pixels differ by rounding at most, where products of other sizes sum in another order.
fn assert_alike(found: &Image, wanted: &Image, what: &str) {
    let levels = found.pixels().as_raw().iter().zip(wanted.pixels().as_raw());
    let worst = levels.map(|(a, b)| a.abs_diff(*b)).max();
    assert!(worst <= Some(1), "{what}: {worst:?}");
}

#[test]
fn pictures_of_one_condition_compute_its_references_once() {
    let ledger = ledger(MemoryBudget::Automatic);
    let mut pipeline = open().device("cpu").ledger(&ledger).load().unwrap();
    let images = [reference(90, 70, 40)];
    let references = pipeline
        .read_references(&images, Some(64), &mut quiet())
        .unwrap();
    for guidance in [1.0, 2.0] {
        let passes = if guidance > 1.0 { 2 } else { 1 };
        let condition = pipeline.encode_with("make it blue", &references).unwrap();
        let request = Request::new(&condition).steps(3).guidance(guidance);
        for seed in 0..3 {
            let request = request.clone().seed(seed).keep_prefix(true);
            let (_, report) = draw(&mut pipeline, &request).unwrap();
            let stores = if seed == 0 { passes } else { 0 };
            assert_eq!(
                (report.prefix_stores, report.prefix_reads),
                (stores, 3 * passes - stores)
            );
            assert!(report.prefix_bytes >= condition.prefix_tokens() as u64 * TOKEN);
        }
        let once = Request::new(&condition).steps(3).guidance(guidance).seed(2);
        let (kept, _) = draw(&mut pipeline, &once.clone().keep_prefix(true)).unwrap();
        let mut plain = open()
            .device("cpu")
            .prefix_cache(PrefixCache::Off)
            .load()
            .unwrap();
        let (plain, report) = draw(&mut plain, &once).unwrap();
        assert_eq!(report.prefix_stores, 0);
        assert_alike(&kept, &plain, "kept");
    }
    drop((pipeline, references));
    assert_eq!(ledger.report(Device::cpu().unwrap()).used.total(), 0);
}

#[test]
fn no_pictures_are_a_prompt_alone() {
    let mut pipeline = open().device("cpu").load().unwrap();
    let none = pipeline.read_references(&[], None, &mut quiet()).unwrap();
    assert!(none.is_empty() && none == References::none());
    for prompt in ["a red circle", ""] {
        let with = pipeline.encode_with(prompt, &none).unwrap();
        assert_eq!(with, pipeline.encode(prompt).unwrap());
        assert_eq!(with.prefix_tokens(), with.tokens());
    }
}

#[test]
fn pictures_that_cannot_be_referred_to_say_why() {
    let mut pipeline = open().device("cpu").load().unwrap();
    let mut refused = |images: &[Image], resolution| {
        let outcome = pipeline.read_references(images, resolution, &mut quiet());
        outcome.unwrap_err().to_string()
    };
    let small = reference(1, 32, 32);
    let empty = Image::from_rgba(0, 7, Vec::new()).unwrap();
    let long = Image::from_rgba(4000, 1, vec![9; 16_000]).unwrap();
    let text = refused(&vec![small.clone(); 5], None);
    assert!(text.contains("at most 4"), "{text}");
    for (images, resolution, parts) in [
        (
            vec![small.clone(), empty],
            None,
            ["reference picture 2, 0x7", "no pixels"],
        ),
        (
            vec![long],
            None,
            ["reference picture 1, 4000x1", "200 times"],
        ),
        // The tiny vision tower takes a mebipixel at most.
        (
            vec![small.clone()],
            Some(2048),
            ["scaled to 2048x2048", "1048576 pixels"],
        ),
        (vec![small.clone()], Some(31), ["31", "from 32 to 2048"]),
        (vec![small], Some(4096), ["4096", "from 32 to 2048"]),
    ] {
        let text = refused(&images, resolution);
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn a_checkpoint_without_a_vision_tower_makes_pictures_from_text() {
    let folder = tempfile::tempdir().unwrap();
    copy(&tiny(), folder.path());
    let path = folder.path().join("text_encoder/config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config.as_object_mut().unwrap().remove("vision_config");
    std::fs::write(&path, config.to_string()).unwrap();
    let builder = || {
        Pipeline::open(folder.path())
            .unwrap()
            .device("cpu")
            .threads(2)
    };
    let mut pipeline = builder().load().unwrap();
    let images = [reference(90, 70, 40)];
    let error = pipeline
        .read_references(&images, None, &mut quiet())
        .unwrap_err();
    assert!(matches!(error, Error::NoReferences(_)), "{error}");
    let error = builder().plan_with(None, 8, &[(70, 40)], None).unwrap_err();
    assert!(error.to_string().contains("no vision tower"), "{error}");
    let condition = pipeline.encode("a red circle").unwrap();
    draw(
        &mut pipeline,
        &Request::new(&condition).size(32, 32).steps(1),
    )
    .unwrap();
}

fn copy(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        match path.is_dir() {
            true => copy(&path, &to),
            false => drop(std::fs::copy(path, to).unwrap()),
        }
    }
}

fn fake() -> FakeDevice {
    FakeDevice::new(FakeOptions {
        memory: 64 << 20,
        ..FakeOptions::default()
    })
}

#[test]
fn every_budget_from_the_smallest_on_edits_the_same() {
    let sizes = [(70, 40), (40, 40)];
    let free = ledger(MemoryBudget::Automatic);
    let plan = |references: &[(u32, u32)]| {
        let device = fake().device();
        let builder = open().device(device).mapping(Mapping::Never).ledger(&free);
        builder.plan_with(None, 24, references, None).unwrap()
    };
    // At the model's own size the references are of 128 x 128 pixels; a plan says so and counts them.
    let (with, without) = (plan(&sizes), plan(&[]));
    assert_eq!(with.references, [(160, 96), (128, 128)]);
    assert_eq!((with.readers.len(), without.readers.len()), (2, 0));
    let kept = with.prefix_cache.unwrap().bytes - without.prefix_cache.unwrap().bytes;
    let tokens = kept / TOKEN;
    assert!((60 + 64..60 + 64 + 32).contains(&tokens), "{tokens}");
    assert!(with.devices[0].smallest >= without.devices[0].smallest);

    let expected = {
        let mut pipeline = open().device(fake().device()).ledger(&free).load().unwrap();
        edit(&mut pipeline, 2.0).unwrap().0
    };
    let (most, least) = (with.devices[0].peak * 5 / 4, with.devices[0].smallest);
    let mut residences = std::collections::BTreeSet::new();
    for part in 0..=4 {
        let budget = least + (most - least) * part / 4;
        let fake = fake();
        let budgets = MemoryBudgets::default().with("Fake0", MemoryBudget::Bytes(budget));
        let ledger = Ledger::with_headroom(budgets, 0);
        let builder = open().device(fake.device()).mapping(Mapping::Never);
        let mut pipeline = builder.ledger(&ledger).load().unwrap();
        let (image, _) = edit(&mut pipeline, 2.0).unwrap();
        assert_alike(&image, &expected, &format!("budget {budget}"));
        residences.insert(pipeline.seats()[1].residence.name());
        assert!(fake.counts().peak_bytes as u64 <= budget);
        drop(pipeline);
        assert_eq!(ledger.report(fake.device()).used.total(), 0);
        assert_eq!(fake.counts().buffers, 0);
    }
    assert!(residences.len() > 1, "{residences:?}");
}

#[test]
fn whatever_allocation_fails_references_are_read_and_nothing_is_left() {
    let fake = fake();
    let device = fake.device();
    let ledger = ledger(MemoryBudget::Automatic);
    let placement = Component::ALL
        .into_iter()
        .fold(Placement::default(), |placement, component| {
            placement.residence(component, Residence::Device)
        });
    let builder = open().device(device).placement(placement).ledger(&ledger);
    let mut pipeline = builder.load().unwrap();
    let images = [reference(90, 70, 40), reference(20, 40, 40)];
    let read = |pipeline: &mut Pipeline| -> Result<Condition, Error> {
        let references = pipeline.read_references(&images, Some(64), &mut quiet())?;
        pipeline.encode_with("make it blue", &references)
    };
    let expected = read(&mut pipeline).unwrap();
    let held = ledger.report(device).used.of(MemoryKind::Weights);
    for nth in 1.. {
        fake.fail_allocation(nth);
        let before = fake.counts().allocations;
        let condition = read(&mut pipeline).unwrap();
        fake.fail_allocation(0);
        let is_last = fake.counts().allocations - before < nth;
        let error = relative_l2(condition.hidden_states(), expected.hidden_states());
        assert!(error <= TOLERANCE, "allocation {nth}: {error:e}");
        // What reads is gone; what lives here may have had to go, and comes back.
        assert!(
            ledger.report(device).used.of(MemoryKind::Weights) <= held,
            "{nth}"
        );
        if is_last {
            assert!(nth > 6, "{nth}");
            break;
        }
    }
    // Cancelled at any event, it leaves nothing either, and can be done again.
    let mut at = 1;
    loop {
        let cancel = Cancel::new();
        pipeline.set_cancel(cancel.clone());
        let mut events = 0;
        let outcome = pipeline.read_references(&images, Some(64), &mut |_: &Progress| {
            events += 1;
            if events == at {
                cancel.cancel();
            }
        });
        if events < at {
            outcome.unwrap();
            break;
        }
        if let Err(error) = outcome {
            assert!(error.is_cancelled(), "{error}");
        }
        assert!(ledger.report(device).used.of(MemoryKind::Weights) <= held);
        at += 1;
    }
    assert!(at > 5, "{at}");
    drop(pipeline);
    assert_eq!(ledger.report(device).used.total(), 0);
    assert_eq!(fake.counts().buffers, 0);
}
