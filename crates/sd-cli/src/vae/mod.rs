//! `sd vae encode` and `sd vae decode`.

use std::path::{Path, PathBuf};

use sd_backend::{Backend, BackendOptions, Device, Ledger};
use sd_graph::{Cancel, LoadOptions};
use sd_models::wan_vae::{Clip, Tiling, WanVae, picture_files};
use sd_models::{Error as ModelError, Image};

use crate::args::{Tile, Vae, VaeFiles};
use crate::error::Error;

pub(crate) fn run(command: &Vae) -> Result<(), Error> {
    match command {
        Vae::Encode(files) => encode(files),
        Vae::Decode(files) => decode(files),
    }
}

fn open(files: &VaeFiles) -> Result<(WanVae, Backend, Option<Tiling>), Error> {
    let vae = WanVae::open(&files.vae, &LoadOptions::default())?;
    let scale = vae.config().scale_factor();
    let tiling = match files.tile {
        Some(Tile::Pixels(pixels)) if pixels / scale < 2 => {
            return Err(Error::Option {
                option: "tile",
                value: pixels.to_string(),
                reason: format!("at least {} pixels are needed", 2 * scale),
            });
        }
        Some(Tile::Pixels(pixels)) => Some(Tiling::Squares(pixels / scale)),
        Some(Tile::Auto) => Some(Tiling::Fit),
        None => None,
    };
    let mut options = BackendOptions::default().ledger(&Ledger::new(files.memory_budget.clone()));
    if let Some(threads) = files.threads {
        options = options.threads(threads);
    }
    let backend = Backend::new(Device::select(&files.device)?, &options)?;
    Ok((vae, backend, tiling))
}

fn encode(files: &VaeFiles) -> Result<(), Error> {
    let paths = picture_files(&files.input)?;
    let (mut vae, mut backend, tiling) = open(files)?;
    let config = vae.config().clone();
    let used = config.frames(config.latent_frames(paths.len()));
    if config.is_for_pictures() && paths.len() > 1 {
        return Err(Error::Model(ModelError::Clip {
            what: "frames for a VAE of pictures",
            found: paths.len(),
            wanted: 1,
        }));
    }
    if used < paths.len() {
        tracing::warn!(
            "the last {} of {} frames are left out: a clip has 1 frame and whole fours after it",
            paths.len() - used,
            paths.len()
        );
    }
    let mut pictures = paths.iter().take(used).map(|path| {
        let image = Image::open(path)?;
        let (height, width) = (image.height() as usize, image.width() as usize);
        Ok::<_, ModelError>((height, width, image.to_planes(config.channels())))
    });
    let Some(first) = pictures.next().transpose()? else {
        return Ok(());
    };
    let (height, width, _) = first;
    let pictures = std::iter::once(Ok(first)).chain(pictures).map(|picture| {
        let (is_height, is_width, planes) = picture?;
        for (what, found, wanted) in [("rows", is_height, height), ("columns", is_width, width)] {
            if found != wanted {
                return Err(ModelError::Clip {
                    what,
                    found,
                    wanted,
                });
            }
        }
        Ok(planes)
    });

    let cancel = Cancel::new();
    let latents = if tiling.is_some() || used == 1 {
        let planes: Vec<Vec<f32>> = pictures.collect::<Result<_, _>>()?;
        let clip = Clip {
            frames: planes.len(),
            channels: config.channels(),
            height,
            width,
            values: planes.concat(),
        };
        vae.encode(
            &mut backend,
            &clip,
            tiling.unwrap_or(Tiling::Whole),
            &cancel,
        )?
    } else {
        let scale = config.scale_factor();
        let mut latents = Clip {
            frames: 0,
            channels: config.z_dim,
            height: height / scale,
            width: width / scale,
            values: Vec::new(),
        };
        let mut encoding = vae.encoding(&backend, (height, width), &cancel)?;
        for planes in pictures {
            if let Some(latent) = encoding.push(&mut backend, &planes?, &cancel)? {
                latents.frames += latent.frames;
                latents.values.extend(latent.values);
            }
        }
        latents
    };
    latents.write_latents(&files.output)?;
    Ok(())
}

fn decode(files: &VaeFiles) -> Result<(), Error> {
    let latents = Clip::read_latents(&files.input)?;
    let (mut vae, mut backend, tiling) = open(files)?;
    let mut output = Output::new(&files.output, vae.config().frames(latents.frames))?;
    let cancel = Cancel::new();
    let alone = latents.frames == 1 || vae.config().is_for_pictures();
    if tiling.is_some() || alone {
        let tiling = tiling.unwrap_or(Tiling::Whole);
        return output.write(&vae.decode(&mut backend, &latents, tiling, &cancel)?);
    }
    let size = (latents.height, latents.width);
    let mut decoding = vae.decoding(&backend, size, &cancel)?;
    for frames in decoding.frames(&mut backend, latents.each_frame(), &cancel) {
        output.write(&frames?)?;
    }
    Ok(())
}

/// One picture, or a folder for many.
struct Output {
    path: PathBuf,
    is_folder: bool,
    written: usize,
}

impl Output {
    fn new(path: &Path, frames: usize) -> Result<Output, Error> {
        let is_picture = path
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("png"));
        let refused = |reason: &str| {
            Err(Error::Model(ModelError::Write {
                path: path.to_owned(),
                reason: reason.to_owned(),
            }))
        };
        if is_picture && frames != 1 {
            return refused(&format!("{frames} frames need a folder"));
        }
        if !is_picture && path.exists() {
            return refused("it is there already");
        }
        Ok(Output {
            path: path.to_owned(),
            is_folder: !is_picture,
            written: 0,
        })
    }

    /// Writes the next frames. The folder is made with the first.
    fn write(&mut self, frames: &Clip) -> Result<(), Error> {
        if self.is_folder && self.written == 0 {
            std::fs::create_dir(&self.path).map_err(|source| ModelError::Io {
                path: self.path.clone(),
                source,
            })?;
        }
        let area = frames.height * frames.width;
        for planes in frames.each_frame() {
            self.written += 1;
            let path = if self.is_folder {
                self.path.join(format!("{:05}.png", self.written))
            } else {
                self.path.clone()
            };
            let mut planes = planes.to_vec();
            // A picture without alpha is opaque.
            planes.resize(planes.len().max(4 * area), 1.0);
            Image::from_planes(&planes, frames.width, frames.height)
                .ok_or(ModelError::Clip {
                    what: "channels",
                    found: frames.channels,
                    wanted: 4,
                })?
                .save(path)?;
        }
        Ok(())
    }
}
