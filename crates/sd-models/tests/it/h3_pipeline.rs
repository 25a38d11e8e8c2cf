//! Clips from prompts, keyframes and references, against what diffusers' own blocks made with random weights.

use sd_backend::DType;
use sd_graph::Progress;
use sd_models::minimax_h3::Tag;
use sd_models::{
    FrameRate, Image, ModelFiles, PipelineBuilder, Reference, Sound, VideoPipeline, VideoRequest,
};

use crate::fixtures::{Case, cases, folder, max_error, relative_l2, tiny};

/// Asked of single precision over text encoder, vision tower, VAEs and three calls of the transformer, relative to the whole.
/// Noise itself differs by 4e-6 (see `noise`), of numbers of deviation 1.
const TOLERANCE: f64 = 2e-5;

fn open() -> PipelineBuilder<VideoPipeline> {
    let files = ModelFiles::default()
        .model(folder("minimax_h3_pipeline"))
        .text_encoder(tiny().join("text_encoder"))
        .tokenizer(tiny().join("processor"));
    let builder = VideoPipeline::open(files).unwrap();
    builder.threads(2).weight_type(DType::F32)
}

fn quiet() -> impl FnMut(&Progress) {
    |_: &Progress| {}
}

/// The picture that the generator makes by the same line.
fn picture(width: u32, height: u32, frame: u32) -> Image {
    let pixel = |at: u32| {
        let (x, y) = (at % width, at / width);
        let shade = |c: u32| x * 5 + y * 3 + c * 70 + frame * 9 + (x / 7) * (y / 5) * 31;
        [0, 1, 2]
            .map(|c| (shade(c) % 256) as u8)
            .into_iter()
            .chain([255])
    };
    let bytes = (0..width * height).flat_map(pixel).collect();
    Image::from_rgba(width, height, bytes).unwrap()
}

fn sound(samples: i32) -> Sound {
    let of = |step: i32, modulus: i32, middle: i32| {
        let sample = |i: i32| (i * step % modulus - middle) as f32 / 256.0;
        (0..samples).map(sample).collect()
    };
    Sound::new(32_000, vec![of(13, 201, 100), of(7, 151, 75)]).unwrap()
}

fn clip(size: (u32, u32), frames: u32, rate: u32, sound: Option<Sound>) -> Reference {
    Reference::Clip {
        frames: (0..frames)
            .map(|frame| picture(size.0, size.1, frame))
            .collect(),
        frame_rate: FrameRate::new(rate, 1).unwrap(),
        sound,
    }
}

fn request(name: &str, case: &Case) -> VideoRequest {
    let number = |key: &str| case.meta[key].as_u64().unwrap() as usize;
    let request = VideoRequest::new(case.meta["prompt"].as_str().unwrap())
        .frames(number("frames"))
        .steps(number("steps"))
        .seed(number("seed") as u64);
    match name {
        "text" => request.size(64, 32),
        // As large as follows from the picture.
        "first" => request.first_frame(picture(75, 50, 0)),
        "first_last" => request
            .size(64, 32)
            .first_frame(picture(40, 60, 0))
            .last_frame(picture(90, 41, 0)),
        "last" => request.size(32, 64).last_frame(picture(64, 96, 0)),
        "references" => request
            .size(32, 32)
            .reference(Reference::Picture(picture(50, 70, 0)))
            .reference(clip((48, 40), 20, 30, Some(sound(9000))))
            .reference(Reference::Sound(sound(40_000)))
            .reference(clip((66, 33), 30, 24, None)),
        other => panic!("{other}"),
    }
}

#[track_caller]
fn assert_near(what: &str, is: &[f32], should: &[f32], tolerance: f64) {
    let error = relative_l2(is, should);
    println!("{what}: relative {error:e}");
    assert!(error <= tolerance, "{what}: {error:e}");
}

#[test]
fn clips_of_every_mode_are_the_references() {
    let mut pipeline = open().device("cpu").load().unwrap();
    let recorded = cases("minimax_h3_pipeline");
    assert_eq!(recorded.len(), 5);
    for (name, case) in recorded {
        let request = request(&name, &case);
        let rows = pipeline.encode(&request, &mut quiet()).unwrap();
        let tags = rows.tags.iter().map(|tag| match tag {
            Tag::Video => 0,
            Tag::Text => 1,
            Tag::Sound => 2,
        });
        assert_eq!(
            tags.collect::<Vec<i32>>(),
            case.get("out.tags").i32,
            "{name}"
        );
        assert_near(
            &format!("{name}, text"),
            &rows.hidden,
            &case.get("out.embeds").f32,
            TOLERANCE,
        );

        let given = pipeline
            .encode_given_latents(&request, &mut quiet())
            .unwrap();
        for (kind, found) in [("condition", given.pictures), ("sound", given.sounds)] {
            let recorded = |index: usize| format!("out.{kind}{index}");
            assert!(!case.has(&recorded(found.len())), "{name}");
            for (index, latents) in found.iter().enumerate() {
                let should = &case.get(&recorded(index)).f32;
                let what = format!("{name}, {kind} {index}");
                if kind == "sound" {
                    assert_near(&what, latents, should, TOLERANCE);
                    continue;
                }
                // They are rounded to half precision: where a number lies between two, either may come out.
                let off = |pair: &(&f32, &f32)| (pair.0 - pair.1).abs() > 1e-5;
                let others = latents.iter().zip(should).filter(off).count();
                println!("{what}: {others} of {} are others", should.len());
                assert!(others * 20 <= should.len() + 20, "{what}: {others}");
                // The last bit of a half of up to 8, by deviations of at least a half.
                let error = max_error(latents, should);
                assert!(error <= 2.0 / 128.0, "{what}: {error:e}");
            }
        }

        let (video, report) = pipeline.generate(&request, &mut quiet()).unwrap();
        let number = |key: &str| case.meta[key].as_u64().unwrap() as usize;
        assert_eq!(
            (report.width, report.height),
            (number("width"), number("height")),
            "{name}"
        );
        assert_eq!((report.frames, report.calls), (22, 3), "{name}");
        assert_eq!(video.frames.len(), 22, "{name}");
        let frames = case.get("out.frames");
        let of_frame = 3 * report.width * report.height;
        for (frame, should) in video
            .frames
            .iter()
            .step_by(7)
            .zip(frames.i32.chunks_exact(of_frame))
        {
            let pixels = frame.pixels().pixels();
            let bytes = pixels.flat_map(|pixel| pixel.0[..3].to_vec());
            let worst = bytes
                .zip(should)
                .map(|(is, should)| (i32::from(is) - should).abs())
                .max();
            println!("{name}: shades off by {worst:?}");
            assert!(worst <= Some(1), "{name}: {worst:?}");
        }
        let sound = video.sound.unwrap();
        assert_eq!(sound.samples(), number("samples"), "{name}");
        let thin = |channel: &Vec<f32>| channel.iter().step_by(8).copied().collect::<Vec<f32>>();
        let samples: Vec<f32> = sound.channels().iter().flat_map(thin).collect();
        assert_near(
            &format!("{name}, samples"),
            &samples,
            &case.get("out.samples").f32,
            TOLERANCE,
        );
    }
}
