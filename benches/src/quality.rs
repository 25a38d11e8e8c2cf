//! How many of 64 pictures of the tiny checkpoint show what was asked for: the colour of the shape, the background, and whether
//! that is clear. diffusers draws the same prompts from the same seeds beside it (`peers/quality.py`), and one judge looks at both.
//!
//! ```sh
//! cargo xtask bench quality --model models/tiny-qwen-image-2.1 --python python3
//! ```
//!
//! Each of eight colours is asked for on each of the other seven as background, and on a clear one. Pictures stay in `--folder`.
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;
use sd_graph::Progress;
use sd_models::{Image, Pipeline, PrefixCache, Request};
use serde_json::json;

/// What the tiny checkpoint learned to draw, and in which colours.
const COLOURS: [(&str, [u8; 3]); 8] = [
    ("red", [220, 40, 40]),
    ("green", [40, 160, 60]),
    ("blue", [40, 80, 220]),
    ("yellow", [245, 215, 50]),
    ("purple", [140, 50, 180]),
    ("orange", [245, 140, 30]),
    ("white", [250, 250, 250]),
    ("black", [20, 20, 20]),
];
const SHAPES: [&str; 6] = ["circle", "square", "triangle", "star", "ring", "cross"];
const PLACES: [&str; 5] = [
    "",
    " on the left",
    " on the right",
    " at the top",
    " at the bottom",
];
/// The class of a clear pixel, after those of the colours.
const CLEAR: usize = COLOURS.len();
/// Fewer pixels than these of another colour are no second shape.
const SPECK: usize = 12;

/// How many pictures show what was asked for.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Folder of the tiny checkpoint.
    #[arg(long)]
    model: PathBuf,
    /// A Python with torch and diffusers, to draw the same.
    #[arg(long)]
    python: Option<String>,
    /// Device to run on.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Type of the weights in memory.
    #[arg(long, value_parser = sd_graph::weight_type, default_value_t = sd_backend::DType::F32)]
    weight_type: sd_backend::DType,
    /// Do not keep keys and values of the prompt between steps.
    #[arg(long)]
    no_prefix_cache: bool,
    /// Sides of a picture in pixels.
    #[arg(long, default_value_t = 128)]
    size: usize,
    /// Steps of a picture.
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Strength of guidance away from the empty prompt.
    #[arg(long, default_value_t = 3.0)]
    guidance: f32,
    /// Threads that compute.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Where the pictures go.
    #[arg(long, default_value_os_t = std::env::temp_dir().join("sd-quality"))]
    folder: PathBuf,
}

/// One prompt, and what its picture is to show.
struct Task {
    prompt: String,
    colour: usize,
    background: usize,
}

/// Draws, and prints what was counted.
pub fn run(arguments: &Arguments) -> Result<()> {
    std::fs::create_dir_all(&arguments.folder)?;
    let tasks = tasks();
    let ours = draw(arguments, &tasks)?;
    println!(
        "{:>10} {:>8} {:>7} {:>11} {:>12} {:>4}",
        "", "pictures", "colour", "background", "transparency", "all"
    );
    report("sd", &tasks, &ours);
    let Some(python) = &arguments.python else {
        return Ok(());
    };
    let script = arguments.folder.join("peer.py");
    std::fs::write(&script, include_str!("../peers/quality.py"))?;
    let status = Command::new(python)
        .arg(script)
        .args([&arguments.folder, &arguments.model])
        .status()
        .with_context(|| format!("{python} could not be started"))?;
    ensure!(status.success(), "the peer failed: {status}");
    let open = |number| Image::open(arguments.folder.join(format!("diffusers-{number:02}.png")));
    let theirs = (0..tasks.len()).map(open).collect::<Result<Vec<_>, _>>()?;
    report("diffusers", &tasks, &theirs);
    let alike: Vec<u8> = ours.iter().zip(&theirs).map(|(a, b)| worst(a, b)).collect();
    let within = |levels| alike.iter().filter(|worst| **worst <= levels).count();
    println!(
        "pictures that differ nowhere by more than 1 of 255: {}; by more than 3: {}; at most: {}",
        within(1),
        within(3),
        alike.iter().max().copied().unwrap_or_default()
    );
    Ok(())
}

/// Every colour on every other colour and on nothing; shapes, sizes and places take turns.
fn tasks() -> Vec<Task> {
    let pairs = (0..COLOURS.len()).flat_map(|colour| {
        let backgrounds = (0..=CLEAR).filter(move |background| *background != colour);
        backgrounds.map(move |background| (colour, background))
    });
    pairs
        .enumerate()
        .map(|(number, (colour, background))| {
            let size = if number % 3 == 0 { "small" } else { "large" };
            let shape = SHAPES[(number + colour) % SHAPES.len()];
            // The checkpoint draws a shape in the middle where no place is named.
            let place = PLACES[number % PLACES.len()];
            let article = if name(background).starts_with('o') {
                "an"
            } else {
                "a"
            };
            let prompt = format!(
                "a {size} {} {shape}{place} on {article} {} background",
                name(colour),
                name(background)
            );
            Task {
                prompt,
                colour,
                background,
            }
        })
        .collect()
}

fn name(class: usize) -> &'static str {
    COLOURS.get(class).map_or("transparent", |(name, _)| name)
}

fn draw(arguments: &Arguments, tasks: &[Task]) -> Result<Vec<Image>> {
    let prefix = if arguments.no_prefix_cache {
        PrefixCache::Off
    } else {
        PrefixCache::F32
    };
    let mut pipeline = Pipeline::open(&arguments.model)?
        .device(sd_backend::Device::select(&arguments.device)?)
        .threads(arguments.threads)
        .weight_type(arguments.weight_type)
        .prefix_cache(prefix)
        .load()?;
    let negative = pipeline.encode("")?;
    let mut images = Vec::new();
    for (seed, task) in tasks.iter().enumerate() {
        let condition = pipeline.encode(&task.prompt)?;
        let request = Request::new(&condition)
            .negative(&negative)
            .size(arguments.size, arguments.size)
            .steps(arguments.steps)
            .guidance(arguments.guidance)
            .seed(seed as u64);
        let (image, _) = pipeline.generate(&request, &mut |_: &Progress| {})?;
        image.save(arguments.folder.join(format!("sd-{seed:02}.png")))?;
        images.push(image);
    }
    let prompts: Vec<&str> = tasks.iter().map(|task| task.prompt.as_str()).collect();
    let wanted = json!({
        "prompts": prompts, "size": arguments.size, "steps": arguments.steps,
        "guidance": arguments.guidance, "threads": arguments.threads,
    });
    std::fs::write(
        arguments.folder.join("prompts.json"),
        serde_json::to_string_pretty(&wanted)?,
    )?;
    Ok(images)
}

/// Prints how many are right, and which are not.
fn report(who: &str, tasks: &[Task], images: &[Image]) {
    let verdicts: Vec<[bool; 3]> = tasks.iter().zip(images).map(|(t, i)| judge(i, t)).collect();
    let count = |right: &dyn Fn(&[bool; 3]) -> bool| verdicts.iter().filter(|v| right(v)).count();
    println!(
        "{who:>10} {:>8} {:>7} {:>11} {:>12} {:>4}",
        verdicts.len(),
        count(&|v| v[0]),
        count(&|v| v[1]),
        count(&|v| v[2]),
        count(&|v| v == &[true; 3])
    );
    for (task, verdict) in tasks.iter().zip(&verdicts) {
        if verdict != &[true; 3] {
            println!("{:>10} {} {verdict:?}", "wrong:", task.prompt);
        }
    }
}

/// Whether the colour of the shape, the background, and what is clear are as asked for.
///
/// A pixel is of the nearest colour, or clear where less than half covers. The background is what most of the border is of; the
/// shape's colour is the only other one that has pixels whose four neighbours are of it too, so that soft edges do not count.
fn judge(image: &Image, task: &Task) -> [bool; 3] {
    let pixels = image.pixels();
    let (width, height) = pixels.dimensions();
    let class = |x: u32, y: u32| classify(pixels.get_pixel(x, y).0);
    let mut border = [0; CLEAR + 1];
    let mut inside = [0; CLEAR + 1];
    for (y, x) in (0..height).flat_map(|y| (0..width).map(move |x| (y, x))) {
        let this = class(x, y);
        if x.min(y).min(width - 1 - x).min(height - 1 - y) < 3 {
            border[this] += 1;
        }
        let is_edge = x == 0 || y == 0 || x == width - 1 || y == height - 1;
        let is_inside = !is_edge
            && [(x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1)]
                .iter()
                .all(|&(x, y)| class(x, y) == this);
        if is_inside && this != task.background {
            inside[this] += 1;
        }
    }
    let commonest = (0..=CLEAR).max_by_key(|class| border[*class]);
    let seen: Vec<usize> = (0..=CLEAR)
        .filter(|class| inside[*class] >= SPECK)
        .collect();
    let is_clear = border[CLEAR] * 2 > border.iter().sum::<usize>();
    [
        seen == [task.colour],
        commonest == Some(task.background),
        is_clear == (task.background == CLEAR),
    ]
}

fn classify([red, green, blue, alpha]: [u8; 4]) -> usize {
    if alpha < 128 {
        return CLEAR;
    }
    let distance = |class: &usize| -> u32 {
        let of = COLOURS[*class].1.into_iter().zip([red, green, blue]);
        of.map(|(a, b)| u32::from(a.abs_diff(b)).pow(2)).sum()
    };
    (0..CLEAR).min_by_key(distance).unwrap_or(CLEAR)
}

/// How far two pictures are from each other at most, in levels of 255; colours that nobody sees do not count.
fn worst(a: &Image, b: &Image) -> u8 {
    let pixels = a.pixels().pixels().zip(b.pixels().pixels());
    pixels
        .flat_map(|(a, b)| {
            let channels = if a.0[3] == 0 && b.0[3] == 0 {
                3..4
            } else {
                0..4
            };
            channels.map(|channel| a.0[channel].abs_diff(b.0[channel]))
        })
        .max()
        .unwrap_or_default()
}
