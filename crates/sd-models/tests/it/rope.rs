//! Rotary embeddings against diffusers, and against formulas written down in another language.

use sd_models::rope::{
    self, Circular, Embedding, FluxOptions, H3Axis, H3Clip, H3Keyframe, H3Reference, Joint, Part,
    ReferenceMode, Size, TooLarge,
};
use serde_json::Value;

use crate::fixtures::{Case, folder, max_error};

/// Families computed in double precision, rounded once at the end: the last bit may fall either way (6e-8), twice where
/// both sides round.
const DOUBLE: f32 = 1.2e-7;
/// Families computed in single precision: one unit in the last place of a frequency (6e-8) moves the angle by that much
/// at each unit of position, and positions here stay below 100.
const SINGLE: f32 = 6e-6;
/// Families in double precision whose positions are fractions below 16, kept in single precision: half a unit in the last
/// place is 4.8e-7 there, the harmonic of a period that is such a fraction may double it.
const FRACTION: f32 = 1e-6;
/// Ideogram 4, in single precision with positions from 65536 on: half a unit in the last place of the angle is 0.004.
const FAR: f32 = 4e-3;

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(number).collect()
}

fn size(value: &Value) -> Size {
    let sides = numbers(value);
    Size::new(sides[0], sides[1])
}

fn sizes(value: &Value) -> Vec<Size> {
    value
        .as_array()
        .map_or_else(Vec::new, |sizes| sizes.iter().map(size).collect())
}

fn mode(value: &Value, otherwise: ReferenceMode) -> ReferenceMode {
    match value.as_str() {
        Some("fixed") => ReferenceMode::Fixed,
        Some("increase") => ReferenceMode::Increase,
        Some("decrease") => ReferenceMode::Decrease,
        _ => otherwise,
    }
}

fn clip(sizes: &[usize]) -> H3Clip {
    H3Clip {
        frames: sizes[0],
        latents: Size::new(sizes[1], sizes[2]),
        sound: sizes[3],
    }
}

fn h3_reference(value: &Value) -> H3Reference {
    let parts = value.as_array().unwrap();
    let sizes: Vec<usize> = parts[1..].iter().map(number).collect();
    match parts[0].as_str().unwrap() {
        "image" => H3Reference::Picture(Size::new(sizes[0], sizes[1])),
        "audio" => H3Reference::Sound(sizes[0]),
        _ => H3Reference::Clip(clip(&sizes)),
    }
}

/// What a case asks of a family.
fn embed(family: &str, ask: &Value) -> Result<Embedding, TooLarge> {
    let text = ask["text"].as_u64().unwrap_or(0) as usize;
    let batch = ask["batch"].as_u64().unwrap_or(1) as usize;
    let references = match family {
        "minimax_h3_references" => Vec::new(),
        _ => sizes(&ask["references"]),
    };
    let target = || size(&ask["target"]);
    let joint = || {
        Joint::new(text, target())
            .references(&references)
            .batch(batch)
    };
    let options = FluxOptions {
        patch: ask["patch"].as_u64().unwrap_or(2) as usize,
        references: mode(&ask["mode"], ReferenceMode::Fixed),
        scale: ask["scale"].as_f64().unwrap_or(1.0) as f32,
    };
    match family {
        "flux" => rope::flux(&joint(), &options),
        "flux_2" => rope::flux_2(&joint()),
        "ovis_image" => rope::ovis_image(&joint(), &options),
        "longcat_image" => rope::longcat_image(&joint(), &options),
        "krea_2" => {
            let head_dim = ask["head_dim"].as_u64().unwrap_or(128) as usize;
            rope::krea_2(&joint(), &options, head_dim)
        }
        "qwen_image" => {
            let mode = mode(&ask["mode"], ReferenceMode::Increase);
            rope::qwen_image(&joint(), number(&ask["frames"]), mode)
        }
        "qwen_image_layered" => {
            rope::qwen_image(&joint(), number(&ask["frames"]), ReferenceMode::Decrease)
        }
        "qwen_image_2_1" => {
            let parts = ask["parts"].as_array().unwrap().iter();
            let parts = parts.map(|part| match part.as_u64() {
                Some(tokens) => Part::Text(tokens as usize),
                None => Part::Picture(size(part)),
            });
            rope::qwen_image_2_1(parts, [16, 56, 56], batch)
        }
        "mage_flow" => rope::mage_flow(&joint()),
        "lens" => rope::lens(text, target(), batch),
        "z_image" => rope::z_image(text, target(), batch),
        "llada_image" => rope::llada_image(text, target(), batch),
        "llada_image_edit" => {
            rope::llada_image_edit(text, target(), number(&ask["semantic"]), batch)
        }
        "ernie_image" => rope::ernie_image(&numbers(&ask["texts"]), target()),
        "ideogram_4" => rope::ideogram_4(&numbers(&ask["texts"]), target()),
        "anima" => rope::anima(target(), &references, batch),
        "boogu" => rope::boogu(&joint()),
        "minit2i" => rope::minit2i(number(&ask["side"]), number(&ask["head_dim"])),
        "pid" => {
            let reference = ask.get("reference").map(size);
            rope::pid(target(), number(&ask["head_dim"]), reference)
        }
        "wan" => rope::wan(number(&ask["frames"]), target(), 128, batch),
        "minimax_h3" => {
            let keyframes: Vec<H3Keyframe> = ask["keyframes"]
                .as_array()
                .unwrap()
                .iter()
                .map(|end| match end.as_str().unwrap() {
                    "first" => H3Keyframe::First,
                    _ => H3Keyframe::Last,
                })
                .collect();
            rope::minimax_h3(
                text,
                &keyframes,
                clip(&numbers(&ask["target"])),
                H3Axis::PUBLISHED,
            )
        }
        "minimax_h3_references" => {
            let references: Vec<H3Reference> = ask["references"]
                .as_array()
                .unwrap()
                .iter()
                .map(h3_reference)
                .collect();
            rope::minimax_h3_references(
                text,
                &references,
                clip(&numbers(&ask["target"])),
                H3Axis::PUBLISHED,
            )
        }
        other => panic!("{other} is no family"),
    }
}

fn tolerance(family: &str) -> f32 {
    match family {
        "ideogram_4" => FAR,
        "qwen_image"
        | "qwen_image_layered"
        | "qwen_image_2_1"
        | "ernie_image"
        | "anima"
        | "minimax_h3"
        | "minimax_h3_references" => SINGLE,
        // Angles rounded to single precision: half a unit in the last place at up to 100 radians.
        "z_image" => SINGLE,
        "lens" | "pid" => FRACTION,
        _ => DOUBLE,
    }
}

/// Compares every case of a folder; returns how many.
fn compare(name: &str) -> usize {
    let mut compared = 0;
    let mut files: Vec<_> = std::fs::read_dir(folder(name))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    for path in files {
        let family = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let case = Case::read(&path);
        for (case_name, ask) in case.meta["cases"].as_object().unwrap() {
            let what = format!("{name}/{family} {case_name}");
            let plain = embed(&family, ask).unwrap();
            let circular = ask["circular"].as_str().unwrap_or("");
            let embedding = plain.circular(Circular {
                x: circular.contains('x'),
                y: circular.contains('y'),
            });
            let step = number(&ask["pair_step"]);
            let (cos, sin) = (
                case.get(&format!("out.{case_name}.cos")),
                case.get(&format!("out.{case_name}.sin")),
            );
            let recorded = cos.shape[0];
            let tokens = embedding.batch() * embedding.tokens();
            assert!(
                tokens > 0 && tokens.is_multiple_of(recorded),
                "{what}: {tokens} tokens, {recorded} recorded"
            );
            assert_eq!(embedding.values().len(), tokens * embedding.pairs() * 4);
            let pairs: Vec<usize> = (0..embedding.pairs()).step_by(step).collect();
            assert_eq!(pairs.len(), cos.shape[1], "{what}: pairs");
            // Where the record has one item of a batch, all items are like it.
            for first in (0..tokens).step_by(recorded) {
                let is: Vec<[f32; 2]> = (first..first + recorded)
                    .flat_map(|token| pairs.iter().map(move |&pair| (token, pair)))
                    .map(|(token, pair)| embedding.rotation(token, pair).unwrap())
                    .collect();
                for (part, should) in [(0, cos), (1, sin)] {
                    let is: Vec<f32> = is.iter().map(|rotation| rotation[part]).collect();
                    let error = max_error(&is, &should.f32);
                    let worst = is
                        .iter()
                        .zip(&should.f32)
                        .position(|(is, should)| (is - should).abs() == error)
                        .map(|at| (at / pairs.len(), pairs[at % pairs.len()]));
                    println!("{what}, part {part}: {error:e}");
                    assert!(
                        error <= tolerance(&family),
                        "{what}: off by {error:e} at token and pair {worst:?}"
                    );
                }
            }
            compared += 1;
        }
    }
    compared
}

#[test]
fn every_family_of_the_reference_turns_as_it_does() {
    assert_eq!(compare("rope"), 35);
}

#[test]
fn every_other_family_and_all_circular_ones_follow_their_formulas() {
    assert_eq!(compare("rope_formulas"), 44);
}

/// The numbers that the change to stable-diffusion.cpp which made pictures periodic can be checked with by hand.
#[test]
fn harmonics_are_those_worked_out_by_hand() {
    let joint = Joint::new(4, Size::new(4, 16));
    let references = [Size::new(4, 2)];
    let plain = rope::flux(&joint.references(&references), &FluxOptions::default()).unwrap();
    let regions: Vec<_> = plain
        .layout()
        .regions
        .iter()
        .map(|region| {
            (
                region.tokens.clone(),
                region.height_period,
                region.width_period,
            )
        })
        .collect();
    assert_eq!(regions, [(4..20, 2.0, 8.0), (20..22, 2.0, 1.0)]);
    assert_eq!(plain.tokens(), 22);

    let wrapped = plain.clone().circular(Circular::X);
    for token in 0..22 {
        for pair in 0..64 {
            let rotation = wrapped.rotation(token, pair).unwrap();
            if token < 4 || pair < 8 + 28 {
                assert_eq!(rotation, plain.rotation(token, pair).unwrap());
                continue;
            }
            let index = pair - 8 - 28;
            let turns = match (token < 20, index) {
                (true, 0..3) => ((token - 4) % 8) as f32 / 8.0,
                _ => 0.0,
            };
            let angle = turns * std::f32::consts::TAU;
            assert!((rotation[0] - angle.cos()).abs() < 1e-6, "{token} {pair}");
            assert!((rotation[1] - angle.sin()).abs() < 1e-6, "{token} {pair}");
        }
    }
}

#[test]
fn values_lie_as_they_say() {
    let matrix = rope::wan(1, Size::new(2, 4), 128, 1).unwrap();
    let [cos, sin] = matrix.rotation(1, 43).unwrap();
    assert_eq!(matrix.values()[(64 + 43) * 4..][..4], [cos, -sin, sin, cos]);

    let split = rope::ernie_image(&[1], Size::new(1, 2)).unwrap();
    assert_eq!(split.value_layout(), rope::ValueLayout::Split);
    let [cos, sin] = split.rotation(1, 50).unwrap();
    let (cosines, sines) = split.values().split_at(split.values().len() / 2);
    assert_eq!(cosines[128 + 100..][..2], [cos, cos]);
    assert_eq!(sines[128 + 100..][..2], [sin, sin]);
    assert_eq!(split.rotation(3, 0), None);
    assert_eq!(split.rotation(0, 64), None);
}

#[test]
fn sizes_beyond_memory_are_refused_before_it_is_taken() {
    let huge = Size::new(usize::MAX, usize::MAX);
    let text = Size::new(2, 2);
    for too_large in [
        rope::flux(&Joint::new(1, huge), &FluxOptions::default()),
        rope::flux(&Joint::new(usize::MAX, text), &FluxOptions::default()),
        rope::flux(
            &Joint::new(1, text).batch(usize::MAX),
            &FluxOptions::default(),
        ),
        rope::qwen_image(
            &Joint::new(usize::MAX, text),
            usize::MAX,
            ReferenceMode::Decrease,
        ),
        rope::z_image(usize::MAX, text, 1),
        rope::llada_image_edit(usize::MAX, text, usize::MAX, 1),
        rope::anima(huge, &[huge], 1),
        rope::pid(huge, 64, None),
        rope::ernie_image(&[usize::MAX, 1], text),
        rope::qwen_image_2_1([Part::Text(usize::MAX); 2], [16, 56, 56], 1),
        rope::one_axis(1 << 20, 1 << 20, 1e4, rope::Precision::Single),
    ] {
        assert_eq!(too_large.unwrap_err(), TooLarge);
    }
}

#[test]
fn nothing_asked_is_nothing_given() {
    let nothing = Size::new(0, 0);
    let empty = rope::flux(&Joint::new(0, nothing), &FluxOptions::default()).unwrap();
    assert!(empty.values().is_empty());
    let none = rope::flux(
        &Joint::new(3, Size::new(2, 2)).batch(0),
        &FluxOptions::default(),
    );
    assert!(none.unwrap().circular(Circular::XY).values().is_empty());
    assert!(
        rope::ideogram_4(&[], Size::new(2, 2))
            .unwrap()
            .values()
            .is_empty()
    );
}
