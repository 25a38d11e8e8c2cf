//! Pictures of the tiny checkpoint whose sides join.

use sd_backend::{Backend, BackendOptions, DType, Device};
use sd_graph::{Cancel, LoadOptions, Progress};
use sd_models::qwen_image_2_1::{Canvas, QwenImage21};
use sd_models::{Circular, noise};

use crate::fixtures::{max_error, tiny};

/// Prompts and the seeds of their noise.
const PROMPTS: [(&str, u64); 8] = [
    ("a large red circle on a blue background", 3),
    ("a small yellow triangle on a green background", 1),
    ("a large white star on a black background", 2),
    ("a small green star on a yellow background", 3),
    ("a small purple square on an orange background", 4),
    ("a large blue cross on a white background", 5),
    (
        "a small red circle left of a small blue square on a white background",
        6,
    ),
    ("a large orange ring on a purple background", 7),
];

struct Painter {
    model: QwenImage21,
    backend: Backend,
}

impl Painter {
    fn new() -> Painter {
        let options = LoadOptions::default().weight_type(DType::F32);
        let mut model = QwenImage21::open(tiny(), &options).unwrap();
        let cpu = Device::cpu().unwrap();
        let backend = Backend::new(cpu, &BackendOptions::default().threads(2)).unwrap();
        model
            .load(&backend, &Cancel::new(), &mut |_: &Progress| {})
            .unwrap();
        Painter { model, backend }
    }

    /// Latents `[tokens, channels]` after `steps` without guidance.
    fn latents(&mut self, prompt: &str, seed: u64, canvas: Canvas, steps: usize) -> Vec<f32> {
        let cancel = Cancel::new();
        let condition = self
            .model
            .encode(&mut self.backend, prompt, &cancel)
            .unwrap();
        let schedule = self.model.schedule(steps, canvas.tokens()).unwrap();
        let mut latents = noise::normal(seed, canvas.tokens() * self.model.latent_channels());
        for step in 0..steps {
            let timestep = schedule.timestep(step) / 1000.0;
            let velocity = self
                .model
                .velocity(
                    &mut self.backend,
                    &condition,
                    &latents,
                    canvas,
                    timestep,
                    &cancel,
                )
                .unwrap();
            schedule.euler_step(step, &mut latents, &velocity);
        }
        latents
    }

    fn decode(&mut self, latents: &[f32], canvas: Canvas) -> Vec<f32> {
        self.model
            .decode(&mut self.backend, latents, canvas, &Cancel::new())
            .unwrap()
    }
}

/// Sizes of pictures and latents on the sheet.
const PIXELS: usize = 128;
const LATENTS: usize = 8;

/// A step that no file can hold, an eighth of one of 256 levels: below, there is nothing to see.
const NOTHING: f32 = 0.125;

fn percentile(mut values: Vec<f32>, share: f64) -> f32 {
    values.sort_by(f32::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}

/// How far neighbouring lines of a square picture are apart, in levels of 256: for each line the median over its pixels,
/// so that shapes, which cross a few pixels of many lines, do not count as seams. The last is the step across the join.
fn steps(picture: &[f32], columns: bool) -> Vec<f32> {
    let pixel = |channel: usize, line: usize, place: usize| {
        let (y, x) = if columns {
            (place, line)
        } else {
            (line, place)
        };
        picture[(channel * PIXELS + y) * PIXELS + x]
    };
    (0..PIXELS)
        .map(|line| {
            let next = (line + 1) % PIXELS;
            let differences = (0..PIXELS)
                .map(|place| {
                    let apart = |c| (pixel(c, next, place) - pixel(c, line, place)).abs();
                    (0..3).map(apart).sum::<f32>() / 3.0 * 127.5
                })
                .collect();
            percentile(differences, 0.5)
        })
        .collect()
}

/// Whether the step across the join is larger than those inside the picture: beyond their 95th percentile, and anything
/// at all.
fn has_seam(picture: &[f32], columns: bool, what: &str) -> bool {
    let mut inside = steps(picture, columns);
    let join = inside.pop().unwrap();
    let most = percentile(inside, 0.95);
    println!("{what}: {join:.3} across the join, {most:.3} inside");
    join > most.max(NOTHING)
}

/// Whether anything was drawn: an edge somewhere.
fn shows_something(picture: &[f32]) -> bool {
    let plane = &picture[..PIXELS * PIXELS];
    let range = |row: &[f32]| {
        let (low, high) = (
            row.iter().copied().reduce(f32::min),
            row.iter().copied().reduce(f32::max),
        );
        high.unwrap() - low.unwrap()
    };
    plane.chunks(PIXELS).any(|row| range(row) > 0.2)
}

/// The proof: eight pictures, joined along each axis and both, decoded whole and in tiles, have no step across a join
/// that is larger than the steps inside them. The same pictures without joined sides do.
#[test]
fn joined_sides_show_no_step() {
    let mut painter = Painter::new();
    let mut unjoined = [0; 2];
    for (number, (prompt, seed)) in PROMPTS.into_iter().enumerate() {
        for circular in [Circular::NONE, Circular::X, Circular::Y, Circular::XY] {
            let canvas = Canvas::from((LATENTS, LATENTS)).circular(circular);
            let latents = painter.latents(prompt, seed, canvas, 5);
            for tile in [None, Some(LATENTS / 2)] {
                // Without joined sides one way of decoding is enough to see the seam.
                if tile.is_some() && circular == Circular::NONE {
                    continue;
                }
                let picture = painter.decode(&latents, canvas.tile(tile));
                assert!(shows_something(&picture), "{prompt}, {circular}");
                for (axis, joined) in [(0, circular.x), (1, circular.y)] {
                    let what = format!("{number}, joined {circular}, tiles {tile:?}, axis {axis}");
                    let seam = has_seam(&picture, axis == 0, &what);
                    assert!(!(seam && joined), "{what}");
                    if circular == Circular::NONE {
                        unjoined[axis] += usize::from(seam);
                    }
                }
            }
        }
    }
    // Every picture has a seam from left to right, and nearly all have one from top to bottom.
    println!("{unjoined:?} of 8 pictures have seams without joined sides");
    assert!(unjoined[0] == 8 && unjoined[1] >= 7, "{unjoined:?}");
}

/// Tiles overlap across the join: a picture that is moved on by one tile's way is decoded into the same, moved on.
#[test]
fn tiles_go_around() {
    let mut painter = Painter::new();
    let channels = painter.model.latent_channels();
    let side = 6;
    let latents = noise::normal(11, side * side * channels);
    let moved: Vec<f32> = (0..latents.len())
        .map(|at| {
            let (token, channel) = (at / channels, at % channels);
            let (y, x) = ((token / side + 3) % side, (token % side + 3) % side);
            latents[(y * side + x) * channels + channel]
        })
        .collect();
    for (circular, same) in [
        (Circular::NONE, false),
        (Circular::X, false),
        (Circular::XY, true),
    ] {
        let canvas = Canvas::from((side, side)).circular(circular).tile(Some(4));
        let picture = painter.decode(&latents, canvas);
        let pixels = side * 16;
        let should: Vec<f32> = (0..picture.len())
            .map(|at| {
                let (line, x) = (at / pixels, at % pixels);
                let (channel, y) = (line / pixels, line % pixels);
                let (y, x) = ((y + pixels / 2) % pixels, (x + pixels / 2) % pixels);
                picture[(channel * pixels + y) * pixels + x]
            })
            .collect();
        let error = max_error(&painter.decode(&moved, canvas), &should);
        println!("{circular}: {error:e}");
        // Tiles are added up in another order.
        assert_eq!(error < 1e-5, same, "{circular}: {error:e}");
    }
}

/// A tile that holds everything is everything, joined by its convolutions.
#[test]
fn a_tile_as_large_as_the_picture_is_the_picture() {
    let mut painter = Painter::new();
    let latents = noise::normal(5, 4 * 6 * painter.model.latent_channels());
    for circular in [Circular::NONE, Circular::XY] {
        let canvas = Canvas::from((4, 6)).circular(circular);
        let whole = painter.decode(&latents, canvas);
        assert_eq!(painter.decode(&latents, canvas.tile(Some(6))), whole);
        assert_ne!(painter.decode(&latents, canvas.tile(Some(4))), whole);
    }
}

/// Plans are kept for the sides that join: going from one to another and back gives what the first run gave.
#[test]
fn runs_do_not_borrow_each_others_values() {
    let mut painter = Painter::new();
    let mut paint = |circular| {
        let canvas = Canvas::from((4, 4)).circular(circular);
        let latents = painter.latents(PROMPTS[0].0, 1, canvas, 2);
        let picture = painter.decode(&latents, canvas);
        (latents, picture)
    };
    let all = [Circular::NONE, Circular::X, Circular::Y, Circular::XY];
    let first = all.map(&mut paint);
    let second = all.map(&mut paint);
    assert!(first == second);
    for (index, one) in first.iter().enumerate() {
        for other in &first[..index] {
            assert!(one.0 != other.0 && one.1 != other.1);
        }
    }
}
