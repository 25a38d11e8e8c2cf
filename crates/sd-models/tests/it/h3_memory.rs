//! Clips in every budget, on devices that fail, from files of every layout: always the same clip, or an error that says why.

use sd_backend::fake::{FakeDevice, FakeOptions};
use sd_backend::{
    Component, Ledger, MemoryBudget, MemoryBudgets, MemoryKind, Placement, Residence,
};
use sd_graph::{Cancel, Progress};
use sd_models::minimax_h3::Adjustment;
use sd_models::{
    Error, Image, ModelFiles, PipelineBuilder, Reference, Sound, Video, VideoPipeline,
    VideoRequest, VideoShape,
};

use crate::fixtures::{folder, tiny};

fn files() -> ModelFiles {
    ModelFiles::default()
        .model(folder("minimax_h3_pipeline"))
        .text_encoder(tiny().join("text_encoder"))
        .tokenizer(tiny().join("processor"))
}

fn open() -> PipelineBuilder<VideoPipeline> {
    VideoPipeline::open(files()).unwrap().threads(2)
}

fn fake() -> FakeDevice {
    FakeDevice::new(FakeOptions {
        name: "Fake0".to_owned(),
        memory: 256 << 20,
        ..FakeOptions::default()
    })
}

/// No head-room, which a small fake device does not have.
fn ledger(budget: MemoryBudget) -> Ledger {
    Ledger::with_headroom(MemoryBudgets::every(budget), 0)
}

fn quiet() -> impl FnMut(&Progress) {
    |_: &Progress| {}
}

fn picture() -> Image {
    let pixel = |at: u32| [(at * 7 % 256) as u8, (at * 3 % 256) as u8, 90, 255];
    Image::from_rgba(64, 32, (0..64 * 32).flat_map(pixel).collect()).unwrap()
}

fn sound() -> Sound {
    let samples = (0..4000).map(|at| (at % 100) as f32 / 128.0).collect();
    Sound::new(32_000, vec![samples]).unwrap()
}

/// The smallest clip with a first frame: all parts but the encoder of sound have to do with it.
fn request() -> VideoRequest {
    VideoRequest::new("a red circle")
        .frames(5)
        .steps(3)
        .size(64, 32)
        .first_frame(picture())
}

fn referring() -> VideoRequest {
    VideoRequest::new("a red circle")
        .frames(5)
        .steps(2)
        .size(32, 32)
        .reference(Reference::Picture(picture()))
        .reference(Reference::Sound(sound()))
}

fn clip(pipeline: &mut VideoPipeline) -> Result<Video, Error> {
    Ok(pipeline.generate(&request(), &mut quiet())?.0)
}

fn all(residence: Residence) -> Placement {
    let parts = Component::ALL.into_iter();
    parts.fold(Placement::default(), |placement, component| {
        placement.residence(component, residence)
    })
}

fn shape() -> VideoShape {
    VideoShape {
        size: Some((64, 32)),
        frames: Some(5),
        steps: Some(3),
        tokens: 8,
        keyframes: 1,
        references: Vec::new(),
    }
}

#[test]
fn every_budget_from_the_smallest_on_gives_the_same_clip() {
    let fake = fake();
    let plan = open()
        .device(fake.device())
        .ledger(&ledger(MemoryBudget::Automatic))
        .plan(&shape())
        .unwrap();
    let need = &plan.devices[0];
    assert!(need.smallest < need.peak, "{need:?}");
    let expected = {
        let ledger = ledger(MemoryBudget::Automatic);
        let mut pipeline = open().device(fake.device()).ledger(&ledger).load().unwrap();
        clip(&mut pipeline).unwrap()
    };
    let mut residences = std::collections::BTreeSet::new();
    for part in 0..=3 {
        let budget = need.smallest + (need.peak - need.smallest) * part / 3;
        let ledger = ledger(MemoryBudget::Bytes(budget));
        let mut pipeline = open().device(fake.device()).ledger(&ledger).load().unwrap();
        assert!(clip(&mut pipeline).unwrap() == expected, "budget {budget}");
        residences.insert(
            pipeline
                .seats()
                .iter()
                .map(|seat| (seat.residence.name(), seat.is_streamed))
                .collect::<Vec<_>>(),
        );
        drop(pipeline);
        assert_eq!(fake.counts().bytes, 0);
    }
    // The smallest streams weights; where there is room, all parts stay.
    assert!(residences.len() > 1, "{residences:?}");
    assert!(
        residences
            .iter()
            .flatten()
            .any(|(_, is_streamed)| *is_streamed)
    );

    let least = need.smallest;
    let ledger = ledger(MemoryBudget::Bytes(least / 2));
    let mut pipeline = open().device(fake.device()).ledger(&ledger).load().unwrap();
    let error = clip(&mut pipeline).map(drop).unwrap_err();
    assert!(matches!(error, Error::TooLittleMemory { .. }), "{error}");
    assert_eq!(fake.counts().bytes, 0);
}

#[test]
fn parts_that_come_and_go_are_never_there_together() {
    let fake = fake();
    let ledger = ledger(MemoryBudget::Automatic);
    let mut pipeline = open()
        .device(fake.device())
        .placement(all(Residence::Disk))
        .ledger(&ledger)
        .load()
        .unwrap();
    let weights: Vec<u64> = pipeline.seats().iter().map(|seat| seat.weights).collect();
    let mut most = Vec::new();
    let mut stage = "";
    let mut watch = |event: &Progress| {
        if let Progress::Stage(name) = event {
            stage = name;
        }
        most.push((
            stage,
            ledger.report(fake.device()).used.of(MemoryKind::Weights),
        ));
    };
    pipeline.generate(&request(), &mut watch).unwrap();
    let stages: Vec<&str> = most.iter().map(|(stage, _)| *stage).collect();
    for name in [
        "look",
        "encode",
        "encode references",
        "denoise",
        "decode sound",
        "decode",
    ] {
        assert!(stages.contains(&name), "{name} is not among {stages:?}");
    }
    // The text encoder is gone before the transformer comes.
    let [text, transformer, _] = weights[..] else {
        panic!("{weights:?}");
    };
    let while_denoising = most.iter().filter(|(stage, _)| *stage == "denoise");
    let peak = while_denoising.map(|(_, bytes)| *bytes).max().unwrap();
    assert!(peak < text + transformer, "{peak} of {weights:?}");
    assert_eq!(ledger.report(fake.device()).used.total(), 0);
}

#[test]
fn whatever_allocation_fails_the_next_clip_is_right() {
    let fake = fake();
    let ledger = ledger(MemoryBudget::Automatic);
    let load = || open().device(fake.device()).ledger(&ledger).load().unwrap();
    let mut pipeline = load();
    let before = fake.counts().allocations;
    let expected = clip(&mut pipeline).unwrap();
    let allocations = fake.counts().allocations - before;
    assert!(allocations > 10, "{allocations}");
    let mut survived = 0;
    // Every third is enough of them: each costs two clips.
    for nth in (1..=allocations).step_by(3) {
        fake.fail_allocation(nth);
        match clip(&mut pipeline) {
            Ok(found) => {
                assert!(found == expected, "{nth}");
                survived += 1;
            }
            Err(error) => assert!(error.is_out_of_memory(), "{nth}: {error}"),
        }
        fake.fail_allocation(0);
        assert!(clip(&mut pipeline).unwrap() == expected, "{nth}");
    }
    assert!(survived > 3, "{survived} of {allocations}");
    drop(pipeline);
    assert_eq!(ledger.report(fake.device()).used.total(), 0);
    assert_eq!(fake.counts().buffers, 0);
}

#[test]
fn a_cancelled_run_and_frames_that_nobody_takes_leave_a_pipeline_that_works() {
    let mut pipeline = open().device("cpu").load().unwrap();
    let expected = clip(&mut pipeline).unwrap();
    for stop in ["look", "encode", "encode references", "denoise", "decode"] {
        let cancel = Cancel::new();
        pipeline.set_cancel(cancel.clone());
        let mut watch = |event: &Progress| {
            if matches!(event, Progress::Stage(name) if *name == stop) {
                cancel.cancel();
            }
        };
        let error = pipeline.generate(&request(), &mut watch).map(drop);
        let error = error.unwrap_err();
        assert!(error.is_cancelled(), "{stop}: {error}");
        pipeline.set_cancel(Cancel::new());
    }
    let full = || Error::ClipReferences("the disk is full".to_owned());
    let mut taken = 0;
    let error = pipeline.generate_with(&request(), &mut quiet(), &mut |_| {
        taken += 1;
        if taken == 2 { Err(full()) } else { Ok(()) }
    });
    assert!(
        error
            .map(drop)
            .unwrap_err()
            .to_string()
            .contains("disk is full")
    );
    assert_eq!(taken, 2);
    assert!(clip(&mut pipeline).unwrap() == expected);
}

#[test]
fn transformers_take_turns() {
    let fake = fake();
    let ledger = ledger(MemoryBudget::Automatic);
    let mut pipeline = open().device(fake.device()).ledger(&ledger).load().unwrap();
    let first = clip(&mut pipeline).unwrap();
    let (other, _) = pipeline.generate(&referring(), &mut quiet()).unwrap();
    assert!(clip(&mut pipeline).unwrap() == first);
    let (again, _) = pipeline.generate(&referring(), &mut quiet()).unwrap();
    assert!(again == other);
}

#[test]
fn files_one_by_one_make_the_clip_that_the_folder_makes() {
    let model = folder("minimax_h3_pipeline");
    let weights = |part: &str| model.join(part).join("diffusion_pytorch_model.safetensors");
    let single = ModelFiles::default()
        .transformer(weights("transformer"))
        .vae(weights("vae"))
        .sound_vae(weights("audio_vae"))
        .text_encoder(tiny().join("text_encoder/model.safetensors"))
        .tokenizer(tiny().join("processor"));
    let mut from_folder = open().device("cpu").load().unwrap();
    let builder = VideoPipeline::open(single).unwrap().threads(2);
    // There is none of the transformers for references among them, which is said before anything is opened.
    let early = builder.check(&referring()).unwrap_err();
    assert!(matches!(early, Error::NoTransformer(_)), "{early}");
    let shape = VideoShape {
        references: vec![(64, 32)],
        ..VideoShape::default()
    };
    let planned = builder.plan(&shape).unwrap_err();
    assert_eq!(planned.to_string(), early.to_string());
    builder.check(&request()).unwrap();
    let mut one_by_one = builder.device("cpu").load().unwrap();
    assert!(clip(&mut one_by_one).unwrap() == clip(&mut from_folder).unwrap());
    let error = one_by_one.check(&referring()).unwrap_err();
    assert_eq!(error.to_string(), early.to_string());
    let error = one_by_one.generate(&referring(), &mut quiet());
    let error = error.map(drop).unwrap_err();
    assert!(matches!(error, Error::NoTransformer(_)), "{error}");
    assert!(clip(&mut one_by_one).is_ok());
}

#[test]
fn what_is_changed_of_a_request_is_said_and_the_rest_is_refused() {
    let mut pipeline = open().device("cpu").load().unwrap();
    let asked = VideoRequest::new("").size(50, 40).frames(4).steps(2);
    let (video, report) = pipeline.generate(&asked, &mut quiet()).unwrap();
    assert_eq!((report.width, report.height, report.frames), (64, 32, 5));
    assert_eq!((video.frames.len(), video.frames[0].width()), (5, 64));
    let said: Vec<String> = report.adjustments.iter().map(ToString::to_string).collect();
    assert_eq!(said.len(), 3, "{said:?}");
    assert!(matches!(
        report.adjustments[2],
        Adjustment::Untrained { frames: 5 }
    ));

    let refused = [
        (
            request().reference(Reference::Picture(picture())),
            "keyframes and references",
        ),
        (request().steps(1), "steps"),
        (request().shift(-1.0), "shift of -1"),
        (request().frames(0), "0 frames"),
        (request().size(0, 32), "0x32"),
        (
            VideoRequest::new("a <|image_pad|>").frames(5),
            "<|image_pad|>",
        ),
        (
            VideoRequest::new("").reference(Reference::Sound(sound())),
            "beside it",
        ),
    ];
    for (request, reason) in refused {
        let error = pipeline.generate(&request, &mut quiet()).map(drop);
        let said = error.unwrap_err().to_string();
        assert!(said.contains(reason), "{said}");
    }
    assert!(clip(&mut pipeline).is_ok());
}

#[test]
fn folders_of_other_models_and_nothing_are_refused() {
    let said = |files: ModelFiles| {
        let opened = VideoPipeline::open(files);
        opened
            .and_then(|builder| builder.load())
            .map(drop)
            .unwrap_err()
            .to_string()
    };
    assert!(said(ModelFiles::from(&tiny())).contains("QwenImage21Pipeline"));
    assert!(said(ModelFiles::from(&folder("nothing"))).contains("no model folder"));
    assert!(said(ModelFiles::default()).contains("--text-encoder"));
    let without = ModelFiles::from(&folder("minimax_h3_pipeline"));
    assert!(said(without).contains("text_encoder"));
}
