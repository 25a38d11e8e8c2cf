//! What must hold for every circular embedding, whatever its sizes.

use std::f64::consts::TAU;

use proptest::prelude::*;
use sd_models::rope::{
    self, Circular, Embedding, FluxOptions, Joint, Part, Precision, ReferenceMode, Sequence, Size,
};

fn side() -> impl Strategy<Value = usize> {
    1_usize..12
}

fn size() -> impl Strategy<Value = Size> {
    (side(), side()).prop_map(|(height, width)| Size::new(height, width))
}

fn circular() -> impl Strategy<Value = Circular> {
    (any::<bool>(), any::<bool>()).prop_map(|(x, y)| Circular { x, y })
}

/// One of the families, and how many tokens it must have.
fn embedding() -> impl Strategy<Value = (Embedding, usize)> {
    let references = proptest::collection::vec(size(), 0..4);
    (0..12_usize, 0..9_usize, size(), references, 1..3_usize).prop_map(
        |(family, text, target, references, batch)| {
            let joint = Joint::new(text, target)
                .references(&references)
                .batch(batch);
            let area = |size: Size| size.height * size.width;
            let all = |patch: &dyn Fn(Size) -> Size| {
                let references: usize = references.iter().map(|&size| area(patch(size))).sum();
                text + area(patch(target)) + references
            };
            let nearest = |size: Size| size.patches(2);
            let same = |size: Size| size;
            let padded = |count: usize| count.next_multiple_of(32);
            let options = FluxOptions::default();
            let (embedding, tokens) = match family {
                0 => (rope::flux(&joint, &options), all(&nearest)),
                1 => (rope::flux_2(&joint), all(&same)),
                2 => (rope::longcat_image(&joint, &options), all(&nearest)),
                3 => (rope::krea_2(&joint, &options, 128), all(&nearest)),
                4 => {
                    let mode = ReferenceMode::Increase;
                    let frames = text + 1;
                    let more = text * area(nearest(target));
                    (rope::qwen_image(&joint, frames, mode), all(&nearest) + more)
                }
                5 => {
                    let pictures = references.iter().chain([&target]).copied();
                    let parts =
                        std::iter::once(Part::Text(text)).chain(pictures.map(Part::Picture));
                    (rope::qwen_image_2_1(parts, [16, 56, 56], batch), all(&same))
                }
                6 => (rope::mage_flow(&joint), all(&same)),
                7 => (rope::lens(text, target, batch), text + area(target)),
                8 => {
                    let tokens = padded(text) + padded(area(nearest(target)));
                    (rope::z_image(text, target, batch), tokens)
                }
                9 => {
                    let tokens = 2 * (padded(text) + padded(area(target))) + padded(text);
                    (rope::llada_image_edit(text, target, text, batch), tokens)
                }
                10 => (
                    rope::boogu(&joint),
                    all(&|size: Size| size.padded_patches(2)),
                ),
                _ => (
                    rope::ernie_image(&vec![text; batch], target),
                    text + area(target),
                ),
            };
            (embedding.unwrap(), tokens)
        },
    )
}

/// The period with which `token` of an item wraps on `axis`, if it does.
fn period(embedding: &Embedding, token: usize, axis: usize, circular: Circular) -> Option<f32> {
    let region = embedding
        .layout()
        .regions
        .iter()
        .find(|region| region.tokens.contains(&token))?;
    if circular.y && axis == region.height_axis {
        Some(region.height_period)
    } else if circular.x && axis == region.width_axis {
        Some(region.width_period)
    } else {
        None
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tokens_are_counted_once((embedding, tokens) in embedding()) {
        prop_assert_eq!(embedding.tokens(), tokens);
        let all = tokens * embedding.batch();
        prop_assert_eq!(embedding.positions().len(), all * embedding.axes());
        prop_assert_eq!(embedding.values().len(), all * embedding.pairs() * 4);
        let mut next = 0;
        for region in &embedding.layout().regions {
            prop_assert!(region.tokens.start >= next && region.tokens.end <= tokens);
            next = region.tokens.end;
        }
    }

    #[test]
    fn off_changes_nothing((embedding, _) in embedding()) {
        let plain = embedding.clone();
        prop_assert!(embedding.circular(Circular::NONE) == plain);
    }

    /// Wrapped pairs turn by the nearest harmonic of their own region's period from the position as it was; everything
    /// else is the same to the last bit.
    #[test]
    fn only_wrapped_axes_of_pictures_change((plain, _) in embedding(), circular in circular()) {
        let wrapped = plain.clone().circular(circular);
        prop_assert_eq!(wrapped.positions(), plain.positions());
        let tokens = plain.tokens();
        for token in 0..tokens * plain.batch() {
            for (pair, frequency) in plain.frequencies().iter().enumerate() {
                let is = wrapped.rotation(token, pair).unwrap();
                match period(&plain, token % tokens, frequency.axis, circular) {
                    None => prop_assert_eq!(is, plain.rotation(token, pair).unwrap()),
                    Some(period) => {
                        let period = f64::from(period);
                        let position =
                            f64::from(plain.positions()[token * plain.axes() + frequency.axis]);
                        let turn = |position: f64| {
                            // No harmonic is nearer than the one that was taken.
                            let wanted = frequency.omega * period / TAU;
                            let nearest = (0..=(wanted as u64 + 1))
                                .min_by(|&a, &b| {
                                    (a as f64 - wanted).abs().total_cmp(&(b as f64 - wanted).abs())
                                })
                                .unwrap() as f64;
                            (position * nearest * TAU / period).sin_cos()
                        };
                        // Single precision of cosine and sine, and of a step of 16 / (h - 1).
                        let (sin, cos) = turn(position);
                        prop_assert!((f64::from(is[0]) - cos).abs() < 1e-6);
                        prop_assert!((f64::from(is[1]) - sin).abs() < 1e-6);
                        let (sin, cos) = turn(position + period);
                        prop_assert!((f64::from(is[0]) - cos).abs() < 1e-6);
                        prop_assert!((f64::from(is[1]) - sin).abs() < 1e-6);
                    }
                }
            }
        }
    }

    /// A picture that is continued beyond its period repeats itself: the embedding's own values at `p` and `p + period`.
    #[test]
    fn positions_one_period_apart_turn_alike(
        size in size(),
        start in prop::sample::select(vec![0_i32, -7, 65_536]),
        circular in circular(),
    ) {
        // Two periods of one picture in one region, by telling the region that its sides are half as long.
        let build = |sides: Size, step: f32| {
            let mut sequence = Sequence::new();
            let start = start as f32;
            sequence.frames(1, sides, (step, step), |_, row, column| {
                [0.0, start + row as f32, start + column as f32]
            });
            let frequencies = rope::axes([16, 56, 56], [1e4; 3], Precision::Double);
            sequence.embed(frequencies, Precision::Double, 1).unwrap().circular(circular)
        };
        let twice = build(Size::new(2 * size.height, 2 * size.width), 0.5);
        let columns = 2 * size.width;
        for row in 0..size.height {
            for column in 0..size.width {
                let here = row * columns + column;
                let right = here + size.width;
                let below = here + size.height * columns;
                for (pair, frequency) in twice.frequencies().iter().enumerate() {
                    let at = |token| twice.rotation(token, pair).unwrap();
                    let alike = |other: usize| {
                        (at(here)[0] - at(other)[0]).abs() < 1e-6
                            && (at(here)[1] - at(other)[1]).abs() < 1e-6
                    };
                    if circular.x || frequency.axis != 2 {
                        prop_assert!(alike(right), "{row} {column} {pair}");
                    }
                    if circular.y || frequency.axis != 1 {
                        prop_assert!(alike(below), "{row} {column} {pair}");
                    }
                }
            }
        }
    }

    /// A period that is no period leaves its axis alone.
    #[test]
    fn no_period_is_no_wrap(size in size(), step in prop::sample::select(vec![0.0_f32, -1.0, f32::NAN])) {
        let mut sequence = Sequence::new();
        sequence.frames(1, size, (step, 1.0), |_, row, column| [0.0, row as f32, column as f32]);
        let frequencies = rope::axes([16, 56, 56], [1e4; 3], Precision::Double);
        let plain = sequence.embed(frequencies, Precision::Double, 2).unwrap();
        let both = plain.clone().circular(Circular::XY);
        prop_assert!(both.values() == plain.circular(Circular::X).values());
    }
}
