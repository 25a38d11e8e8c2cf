//! `sd vae encode` and `sd vae decode`.

mod minimax_h3;

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use sd_backend::{Backend, Bytes};
use sd_graph::{Cancel, Checkpoint, LoadOptions};
use sd_models::minimax_h3::video_vae::VideoVae;
use sd_models::wan_vae::{Clip, ClipReport, Latents, Tiling, WanVae, Work};
use sd_models::{Error as ModelError, FrameRate, Image};
use serde::Serialize;

use crate::args::{Tile, Vae, VaeFiles};
use crate::clips::{Input, Output};
use crate::error::{Error, refuse};
use crate::json;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    output: String,
    device: String,
    frames: usize,
    width: usize,
    height: usize,
    frame_rate: Option<String>,
    /// Pixels along a side of the squares that frames were worked on in; none if all was worked on at once.
    tile: Option<usize>,
    /// The most bytes that were held on the device at once.
    peak_bytes: u64,
    seconds: f64,
}

pub(crate) fn run(command: &Vae, cancel: &Cancel) -> Result<(), Error> {
    let started = Instant::now();
    let (Vae::Encode(files) | Vae::Decode(files)) = command;
    // What is wrong with files is told by whoever opens them as a VAE.
    let is_of_h3 = Checkpoint::open(&files.vae).is_ok_and(|weights| VideoVae::is_in(&weights));
    let mut report = match (command, is_of_h3) {
        (Vae::Encode(files), false) => encode(files, cancel)?,
        (Vae::Decode(files), false) => decode(files, cancel)?,
        (Vae::Encode(files), true) => minimax_h3::encode(files, cancel)?,
        (Vae::Decode(files), true) => minimax_h3::decode(files, cancel)?,
    };
    report.seconds = (started.elapsed().as_secs_f64() * 1e4).round() / 1e4;
    let mut out = std::io::stdout().lock();
    if files.json {
        json::print(&mut out, &report)?;
    } else {
        let tile = match report.tile {
            Some(tile) => format!("in squares of {tile} pixels"),
            None => "at once".to_owned(),
        };
        writeln!(
            out,
            "{}: {} of {}x{}, each {tile} in up to {} of {}, {:.1} s",
            report.output,
            match report.frames {
                1 => "1 frame".to_owned(),
                frames => format!("{frames} frames"),
            },
            report.width,
            report.height,
            Bytes(report.peak_bytes),
            report.device,
            report.seconds
        )?;
    }
    Ok(())
}

/// A VAE and where it runs.
struct Opened {
    vae: WanVae,
    backend: Backend,
    work: Work,
    cancel: Cancel,
}

fn open(files: &VaeFiles, cancel: &Cancel) -> Result<Opened, Error> {
    let vae = WanVae::open(&files.vae, &LoadOptions::default())?;
    let scale = vae.config().scale_factor();
    let tiling = match files.tile {
        Tile::Pixels(pixels) if pixels / scale < 2 => {
            let reason = format!("at least {} pixels are needed", 2 * scale);
            return refuse("tile", pixels, reason);
        }
        Tile::Pixels(pixels) => Tiling::Squares(pixels / scale),
        Tile::Auto => Tiling::Fit,
        Tile::Whole => Tiling::Whole,
    };
    Ok(Opened {
        vae,
        backend: files.machine.backend()?,
        work: Work::from(tiling).circular(files.circular.map(Into::into).unwrap_or_default()),
        cancel: cancel.clone(),
    })
}

/// Refuses a clip where the VAE is for pictures.
fn check_frames(vae: &WanVae, frames: usize) -> Result<(), Error> {
    if !vae.config().is_for_pictures() || frames <= 1 {
        return Ok(());
    }
    Err(Error::Model(ModelError::Clip {
        what: "frames for a VAE of pictures",
        found: frames,
        wanted: 1,
    }))
}

/// Refuses a picture of another size than the first.
fn check_same(image: &Image, (height, width): (usize, usize)) -> Result<(), Error> {
    let (is_height, is_width) = (image.height() as usize, image.width() as usize);
    for (what, found, wanted) in [("rows", is_height, height), ("columns", is_width, width)] {
        if found != wanted {
            return Err(Error::Model(ModelError::Clip {
                what,
                found,
                wanted,
            }));
        }
    }
    Ok(())
}

fn encode(files: &VaeFiles, cancel: &Cancel) -> Result<Report, Error> {
    let mut input = Input::open(&files.input, &files.ffmpeg, None)?;
    let mut opened = open(files, cancel)?;
    let config = opened.vae.config().clone();
    check_frames(&opened.vae, input.count.unwrap_or(1))?;
    let Some(first) = input.pictures.next().transpose()? else {
        return Err(Error::Model(ModelError::Missing {
            path: files.input.clone(),
            what: "pictures",
        }));
    };
    let size = (first.height() as usize, first.width() as usize);
    // Those behind the last whole chunk are not even read.
    let used = |count| config.frames(config.latent_frames(count));
    let most = input.count.map_or(usize::MAX, used);
    let pictures = std::iter::once(Ok(first))
        .chain(input.pictures)
        .take(most)
        .map(|image| {
            let image = image?;
            check_same(&image, size)?;
            Ok::<_, Error>(image.to_planes(config.channels()))
        });

    let expected = input.count.unwrap_or(usize::MAX);
    let (latents, report, found) = encode_all(&mut opened, pictures, expected, size)?;
    let found = input.count.unwrap_or(found);
    if used(found) < found {
        tracing::warn!(
            "the last {} of {found} frames are left out: a clip has 1 frame and whole fours after it",
            found - used(found),
        );
    }
    let frame_rate = files.frame_rate.or(input.frame_rate);
    let latents = Latents {
        clip: latents,
        frame_rate,
    };
    latents.write(&files.output)?;
    Ok(Report {
        output: files.output.display().to_string(),
        device: opened.backend.device().name(),
        frames: used(found),
        width: size.1,
        height: size.0,
        frame_rate: frame_rate.map(|rate| rate.to_string()),
        tile: report.tile.map(|tile| tile * config.scale_factor()),
        peak_bytes: report.peak,
        seconds: 0.0,
    })
}

/// The latents of pictures, what it took, and how many pictures there were.
fn encode_all(
    opened: &mut Opened,
    pictures: impl Iterator<Item = Result<Vec<f32>, Error>>,
    expected: usize,
    (height, width): (usize, usize),
) -> Result<(Clip, ClipReport, usize), Error> {
    let Opened {
        vae,
        backend,
        work,
        cancel,
    } = opened;
    let config = vae.config().clone();
    let fit = vae.fit_encoding(backend, expected, (height, width), *work)?;
    if fit.tile.is_some() || !fit.fits() || expected == 1 || config.is_for_pictures() {
        let planes: Vec<Vec<f32>> = pictures.collect::<Result<_, _>>()?;
        check_frames(vae, planes.len())?;
        let clip = Clip {
            frames: planes.len(),
            channels: config.channels(),
            height,
            width,
            values: planes.concat(),
        };
        let (latents, report) = vae.encode(backend, &clip, *work, cancel)?;
        return Ok((latents, report, clip.frames));
    }
    let scale = config.scale_factor();
    let mut latents = Clip {
        frames: 0,
        channels: config.z_dim,
        height: height / scale,
        width: width / scale,
        values: Vec::new(),
    };
    let encoding = vae.encoding(backend, (height, width), cancel)?;
    let mut encoding = encoding.circular(work.circular);
    let mut found = 0;
    for planes in pictures {
        found += 1;
        if let Some(latent) = encoding.push(backend, &planes?, cancel)? {
            latents.frames += latent.frames;
            latents.values.extend(latent.values);
        }
    }
    let mut report = ClipReport::default();
    report.peak = encoding.peak();
    Ok((latents, report, found))
}

fn decode(files: &VaeFiles, cancel: &Cancel) -> Result<Report, Error> {
    let Latents { clip, frame_rate } = Latents::read(&files.input)?;
    let mut opened = open(files, cancel)?;
    let config = opened.vae.config().clone();
    let frames = config.frames(clip.frames);
    let rate = files.frame_rate.or(frame_rate);
    let ffmpeg: &Path = &files.ffmpeg;
    let mut output = Output::new(
        &files.output,
        frames,
        rate.unwrap_or(FrameRate::USUAL),
        ffmpeg,
    )?;
    let report = decode_all(&mut opened, &clip, &mut output)?;
    output.finish()?;
    let scale = config.scale_factor();
    Ok(Report {
        output: files.output.display().to_string(),
        device: opened.backend.device().name(),
        frames,
        width: clip.width * scale,
        height: clip.height * scale,
        frame_rate: rate.map(|rate| rate.to_string()),
        tile: report.tile.map(|tile| tile * scale),
        peak_bytes: report.peak,
        seconds: 0.0,
    })
}

/// Decodes `latents` into `output`: as they come, unless they are a picture or have to be cut.
fn decode_all(
    opened: &mut Opened,
    latents: &Clip,
    output: &mut Output,
) -> Result<ClipReport, Error> {
    let Opened {
        vae,
        backend,
        work,
        cancel,
    } = opened;
    let size = (latents.height, latents.width);
    let fit = vae.fit_decoding(backend, latents.frames, size, *work)?;
    if fit.tile.is_some() || !fit.fits() || latents.frames == 1 || vae.config().is_for_pictures() {
        let (frames, report) = vae.decode(backend, latents, *work, cancel)?;
        output.write(&frames)?;
        return Ok(report);
    }
    let mut decoding = vae.decoding(backend, size, cancel)?.circular(work.circular);
    for frames in decoding.frames(backend, latents.each_frame(), cancel) {
        output.write(&frames?)?;
    }
    let mut report = ClipReport::default();
    report.peak = decoding.peak();
    Ok(report)
}
