//! `sd generate`.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use sd_graph::{Cancel, Progress, Reporter};
use sd_models::qwen_image_2_1::{MOST_REFERENCES, RESOLUTIONS};
use sd_models::{Image, Pipeline, Request};
use serde::Serialize;

use crate::args::Generate;
use crate::error::{Error, refuse};
use crate::figures::{file_size, peak_resident, seconds, timed};
use crate::json;
use crate::makes::Makes;
use crate::preview::Previews;
use crate::progress::Display;
use crate::terminal::Protocol;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    model: String,
    device: String,
    threads: usize,
    prompt: &'a str,
    negative_prompt: Option<&'a str>,
    /// Width and height that reference pictures were scaled to.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    references: Vec<[usize; 2]>,
    width: usize,
    height: usize,
    steps: usize,
    guidance: f32,
    sampler: &'static str,
    schedule: &'static str,
    rng: String,
    circular: String,
    vae_tile: Option<usize>,
    /// In all.
    seconds: Seconds,
    bytes: Bytes,
    pictures: Vec<Picture>,
}

/// One picture.
#[derive(Debug, Serialize)]
struct Picture {
    output: String,
    seed: u64,
    /// Calls of the model, a guided one counted as one.
    calls: usize,
    /// Of these, those that were left out.
    skipped_calls: usize,
    previews: usize,
    /// How often keys and values of a prompt were computed and stored, and how often they were read instead.
    prefix_stores: usize,
    prefix_reads: usize,
    seconds: PictureSeconds,
    /// Of its file.
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct PictureSeconds {
    denoise: f64,
    decode: f64,
    save: f64,
    total: f64,
}

#[derive(Debug, Serialize)]
struct Seconds {
    load: f64,
    read_references: f64,
    encode: f64,
    denoise: f64,
    decode: f64,
    save: f64,
    total: f64,
}

#[derive(Debug, Serialize)]
struct Bytes {
    weights: u64,
    /// Of them, those that are used where they lie in a file.
    mapped: u64,
    copied: u64,
    converted: u64,
    compute: u64,
    /// The most that keys and values of the prompts took while the steps ran.
    prefix_cache: u64,
    files: u64,
    /// Most bytes of this process in memory at once, where the system tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_resident: Option<u64>,
}

pub(crate) fn run(
    arguments: &Generate,
    is_quiet: bool,
    terminal: Option<Protocol>,
    cancel: &Cancel,
) -> Result<(), Error> {
    let started = Instant::now();
    check(arguments)?;
    let parts = &arguments.loading.parts;
    let model = Makes::Pictures.find(arguments.model.as_deref(), parts)?;
    let images = arguments.references.ref_image.iter().map(Image::open);
    let images: Vec<Image> = images.collect::<Result<_, _>>()?;
    let files = parts.files(model.as_deref());
    let is_silent = arguments.json || is_quiet;
    let terminal = terminal.filter(|_| !is_silent && std::io::stderr().is_terminal());
    let previews = Previews::new(&arguments.preview, terminal);
    let preview = arguments.preview.preview.filter(|_| previews.is_anywhere());
    if preview.is_none() && arguments.preview.preview.is_some() {
        tracing::warn!(
            "nobody would see previews: this is no terminal that shows pictures, and there is no --preview-file"
        );
    }
    let mut display = Display::new(is_silent, previews);

    let builder = arguments.loading.apply(Pipeline::open(files)?);
    let builder = arguments.options.apply(builder);
    let (mut pipeline, load) = timed(|| builder.load_with(cancel, &mut display))?;

    let resolution = arguments.references.ref_size;
    let (references, read) = timed(|| pipeline.read_references(&images, resolution, &mut display))?;

    display.report(&Progress::Stage("encode"));
    let negative = arguments.negative_prompt.as_deref();
    let (conditions, encode) = timed(|| {
        let condition = pipeline.encode_with(&arguments.prompt, &references)?;
        let negative = negative.map(|prompt| pipeline.encode_with(prompt, &references));
        let negative = negative.transpose()?;
        Ok::<_, sd_models::Error>((condition, negative))
    })?;

    let mut request = Request::new(&conditions.0)
        .rng(arguments.noise.rng)
        .circular(arguments.circular.map(Into::into).unwrap_or_default());
    if let Some(pixels) = arguments.vae_tile {
        request = request.vae_tile(pixels);
    }
    if let Some(negative) = &conditions.1 {
        request = request.negative(negative);
    }
    let defaults = pipeline.defaults();
    if let Some((width, height)) = arguments.size.sides() {
        request = request.size(width, height);
    }
    if let Some(steps) = arguments.steps {
        request = request.steps(steps);
    }
    if let Some(guidance) = arguments.guidance {
        request = request.guidance(guidance);
    }
    request = arguments.sampling.apply(request)?;
    if let Some((every, by)) = preview {
        request = request.preview(every, by);
    }
    if let Some(threshold) = arguments.step_cache {
        request = request.step_cache(threshold);
    }
    let guidance = arguments.guidance.unwrap_or(defaults.guidance);
    if guidance <= 1.0 && negative.is_some() {
        tracing::warn!(
            "--negative-prompt has no effect with a guidance of {guidance}; give --guidance above 1"
        );
    }
    let mut pictures = Vec::new();
    let mut last = None;
    let mut failure = None;
    for index in 0..arguments.count {
        let picture_started = Instant::now();
        let seed = arguments.noise.seed + index;
        if arguments.count > 1 {
            display.begin(index + 1, arguments.count, seed);
        }
        // What is kept of the prompts serves all pictures.
        let request = request
            .clone()
            .seed(seed)
            .keep_prefix(index + 1 < arguments.count);
        let output = output_of(&arguments.output, seed, index, arguments.count);
        let made = pipeline
            .generate(&request, &mut display)
            .and_then(|(image, made)| Ok((made, timed(|| image.save(&output))?)));
        let (made, ((), save)) = match made {
            Ok(made) => made,
            Err(error) => {
                failure = Some(error);
                break;
            }
        };
        pictures.push(Picture {
            output: output.display().to_string(),
            seed,
            calls: made.calls,
            skipped_calls: made.skipped_calls,
            previews: made.previews,
            prefix_stores: made.prefix_stores,
            prefix_reads: made.prefix_reads,
            seconds: PictureSeconds {
                denoise: seconds(made.denoise),
                decode: seconds(made.decode),
                save: seconds(save),
                total: seconds(picture_started.elapsed()),
            },
            bytes: file_size(&output),
        });
        last = Some(made);
    }
    display.finish();
    let Some(made) = last else {
        return failure.map_or(Ok(()), |error| Err(error.into()));
    };
    let sum = |of: fn(&PictureSeconds) -> f64| {
        let all = pictures.iter().map(|picture| of(&picture.seconds));
        (all.sum::<f64>() * 1e4).round() / 1e4
    };
    let report = Report {
        model: model
            .or(parts.transformer.clone())
            .unwrap_or_default()
            .display()
            .to_string(),
        device: pipeline.device().name(),
        threads: pipeline.threads(),
        prompt: &arguments.prompt,
        negative_prompt: negative,
        references: references
            .sizes()
            .map(|(width, height)| [width, height])
            .collect(),
        width: made.width,
        height: made.height,
        steps: made.steps,
        guidance: made.guidance,
        sampler: made.sampler.name(),
        schedule: made.scheduler,
        rng: made.rng.to_string(),
        circular: made.circular.to_string(),
        vae_tile: made.vae_tile,
        seconds: Seconds {
            load: seconds(load),
            read_references: seconds(read),
            encode: seconds(encode),
            denoise: sum(|seconds| seconds.denoise),
            decode: sum(|seconds| seconds.decode),
            save: sum(|seconds| seconds.save),
            total: seconds(started.elapsed()),
        },
        bytes: Bytes {
            weights: made.weight_bytes,
            mapped: pipeline.loaded().mapped,
            copied: pipeline.loaded().copied,
            converted: pipeline.loaded().converted,
            compute: made.compute_bytes,
            prefix_cache: made.prefix_bytes,
            files: pictures.iter().map(|picture| picture.bytes).sum(),
            peak_resident: peak_resident(),
        },
        pictures,
    };
    let mut out = std::io::stdout().lock();
    if arguments.json {
        json::print(&mut out, &report)?;
    } else if !is_quiet {
        for picture in &report.pictures {
            let total = match arguments.count {
                1 => report.seconds.total,
                _ => picture.seconds.total,
            };
            writeln!(
                out,
                "{}: {}x{}, {} steps, seed {}, {total:.1} s",
                picture.output, report.width, report.height, report.steps, picture.seed,
            )?;
        }
    }
    failure.map_or(Ok(()), |error| Err(error.into()))
}

/// The file of one picture of `count`: the seed in place of `{seed}`, or its number behind the name where there are several.
fn output_of(output: &Path, seed: u64, index: u64, count: u64) -> PathBuf {
    let name = output.file_name().unwrap_or_default();
    if let Some(name) = name.to_str().filter(|name| name.contains(SEED)) {
        return output.with_file_name(name.replace(SEED, &seed.to_string()));
    }
    if count == 1 {
        return output.to_owned();
    }
    let mut numbered = output.file_stem().unwrap_or_default().to_owned();
    numbered.push(format!("-{}", index + 1));
    if let Some(extension) = output.extension() {
        numbered.push(".");
        numbered.push(extension);
    }
    output.with_file_name(numbered)
}

/// What stands for the seed in a file's name.
const SEED: &str = "{seed}";

/// Refuses what can be refused before a model is loaded.
fn check(arguments: &Generate) -> Result<(), Error> {
    for (option, value) in [
        ("width", arguments.size.width),
        ("height", arguments.size.height),
    ] {
        if let Some(value) = value.filter(|&value| value < sd_models::qwen_image_2_1::SIZE_MULTIPLE)
        {
            return refuse(
                option,
                value,
                "a side has at least 32 pixels, in multiples of 32",
            );
        }
    }
    let count = arguments.references.ref_image.len();
    if count > MOST_REFERENCES {
        return refuse(
            "ref-image",
            format!("({count} pictures)"),
            format!("at most {MOST_REFERENCES} are possible"),
        );
    }
    let ref_size = arguments.references.ref_size;
    if let Some(side) = ref_size.filter(|side| !RESOLUTIONS.contains(side)) {
        return refuse("ref-size", side, "a side has from 32 to 2048 pixels");
    }
    if let Some(tile) = arguments
        .vae_tile
        .filter(|&tile| tile < sd_models::SMALLEST_TILE)
    {
        return refuse("vae-tile", tile, "a tile has at least 64 pixels");
    }
    arguments.sampling.check()?;
    if arguments.steps == Some(0) {
        return refuse("steps", 0, "at least 1 step is needed");
    }
    if let Some(threshold) = arguments
        .step_cache
        .filter(|threshold| !(threshold.is_finite() && *threshold >= 0.0))
    {
        return refuse(
            "step-cache",
            threshold,
            "it must be a number from 0 (none) up",
        );
    }
    if arguments.count == 0 {
        return refuse("count", 0, "at least 1 picture is needed");
    }
    if arguments
        .noise
        .seed
        .checked_add(arguments.count - 1)
        .is_none()
    {
        return refuse(
            "count",
            arguments.count,
            "there are not so many seeds from the given one up",
        );
    }
    if let Some(guidance) = arguments
        .guidance
        .filter(|guidance| !(guidance.is_finite() && *guidance >= 1.0))
    {
        return refuse(
            "guidance",
            guidance,
            "it must be a number from 1 (no guidance) up",
        );
    }
    let mut files = vec![("output", &arguments.output)];
    files.extend(
        arguments
            .preview
            .preview_file
            .iter()
            .map(|file| ("preview-file", file)),
    );
    for (option, file) in files {
        let value = || file.display().to_string();
        let extension = file
            .extension()
            .map(|extension| extension.to_ascii_lowercase());
        if extension.is_none_or(|extension| extension != "png") {
            return refuse(option, value(), "the file must end in .png");
        }
        let folder = file
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
            let reason = format!("there is no folder {}", folder.display());
            return refuse(option, value(), reason);
        }
    }
    Ok(())
}
