//! The video VAE of MiniMax H3, whose tiles belong to its pictures.

use sd_backend::Backend;
use sd_graph::{Cancel, LoadOptions, Progress};
use sd_models::minimax_h3::video_vae::{Posterior, Tiling, VideoVae};
use sd_models::wan_vae::{Clip, Latents};
use sd_models::{Error as ModelError, FrameRate, Image};

use super::{Report, check_same};
use crate::args::{Tile, VaeFiles};
use crate::clips::{Input, Output};
use crate::error::{Error, refuse};

struct Opened {
    vae: VideoVae,
    backend: Backend,
    tiling: Tiling,
    cancel: Cancel,
}

fn open(files: &VaeFiles, cancel: &Cancel) -> Result<Opened, Error> {
    if let Some(sides) = files.circular {
        let sides = format!("{sides:?}").to_lowercase();
        return refuse("circular", sides, "this VAE cannot join sides");
    }
    let vae = VideoVae::open(&files.vae, &LoadOptions::default())?;
    let scale = vae.config().scale_factor();
    let tiling = match files.tile {
        Tile::Auto => Tiling::default(),
        Tile::Whole => Tiling::Whole,
        // A quarter in common, as much as released tiles have.
        Tile::Pixels(size) => Tiling::Tiles {
            size,
            overlap: (size / 4).next_multiple_of(scale),
        },
    };
    Ok(Opened {
        vae,
        backend: files.machine.backend()?,
        tiling,
        cancel: cancel.clone(),
    })
}

pub(super) fn encode(files: &VaeFiles, cancel: &Cancel) -> Result<Report, Error> {
    let mut input = Input::open(&files.input, &files.ffmpeg, None)?;
    let mut opened = open(files, cancel)?;
    let Some(first) = input.pictures.next().transpose()? else {
        return Err(Error::Model(ModelError::Missing {
            path: files.input.clone(),
            what: "pictures",
        }));
    };
    let size = (first.height() as usize, first.width() as usize);
    let (tiling, cancel) = (opened.tiling, &opened.cancel);
    let quiet = &mut |_: &Progress| {};
    let backend = &mut opened.backend;
    let expected = input.count.unwrap_or(usize::MAX);
    let fit = opened.vae.fit_encoding(backend, expected, size, tiling)?;
    let mut encoding = opened.vae.encoding(backend, size, tiling, cancel)?;
    let mut whole: Option<Posterior> = None;
    let mut add = |part: Posterior| match &mut whole {
        Some(whole) => whole.append(&part),
        None => whole = Some(part),
    };
    let mut found = 0;
    for image in std::iter::once(Ok(first)).chain(input.pictures) {
        let image: Image = image?;
        check_same(&image, size)?;
        let planes = image.to_planes(3).into_iter();
        let planes: Vec<f32> = planes.map(|value| f32::midpoint(value, 1.0)).collect();
        if let Some(part) = encoding.push(backend, &planes, cancel, quiet)? {
            add(part);
        }
        found += 1;
    }
    add(encoding.finish(backend, cancel, quiet)?);
    let peak = encoding.peak();
    let config = opened.vae.config();
    let frames = config.frames(config.latent_frames(found));
    if frames != found {
        tracing::warn!(
            "of {found} frames the latents hold {frames}: a clip has {} and {} for each further latent clip, or is a picture",
            config.frames(config.latent_frames(2)),
            config.clip_length,
        );
    }
    let latents = whole.map(|posterior| posterior.mean);
    let Some(clip) = latents else {
        return Err(Error::Model(ModelError::Clip {
            what: "frames",
            found: 0,
            wanted: 1,
        }));
    };
    let frame_rate = files.frame_rate.or(input.frame_rate);
    Latents { clip, frame_rate }.write(&files.output)?;
    Ok(Report {
        output: files.output.display().to_string(),
        device: backend.device().name(),
        frames,
        width: size.1,
        height: size.0,
        frame_rate: frame_rate.map(|rate| rate.to_string()),
        tile: fit.tile.map(|tile| tile * config.scale_factor()),
        peak_bytes: peak,
        seconds: 0.0,
    })
}

pub(super) fn decode(files: &VaeFiles, cancel: &Cancel) -> Result<Report, Error> {
    let Latents {
        clip: mut latents,
        frame_rate,
    } = Latents::read(&files.input)?;
    let mut opened = open(files, cancel)?;
    let config = opened.vae.config().clone();
    let (frames, scale) = (config.frames(latents.frames), config.scale_factor());
    let rate = files.frame_rate.or(frame_rate);
    let usual = rate.unwrap_or(FrameRate::USUAL);
    let mut output = Output::new(&files.output, frames, usual, &files.ffmpeg)?;
    // Files have latents as the encoder makes them.
    config.normalize(&mut latents);
    let (height, width) = (latents.height * scale, latents.width * scale);
    let mut write = |planes: &[f32]| {
        output.write(&Clip {
            frames: 1,
            channels: 3,
            height,
            width,
            values: planes.iter().map(|value| value * 2.0 - 1.0).collect(),
        })
    };
    let backend = &mut opened.backend;
    let mut quiet = |_: &Progress| {};
    let with = (&opened.cancel, &mut quiet as &mut dyn sd_graph::Reporter);
    let report = opened
        .vae
        .decode(backend, &latents, opened.tiling, with, &mut write)?;
    output.finish()?;
    Ok(Report {
        output: files.output.display().to_string(),
        device: backend.device().name(),
        frames,
        width,
        height,
        frame_rate: rate.map(|rate| rate.to_string()),
        tile: report.tile.map(|tile| tile * scale),
        peak_bytes: report.peak,
        seconds: 0.0,
    })
}
