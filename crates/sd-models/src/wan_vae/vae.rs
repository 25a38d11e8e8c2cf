//! A VAE by itself: its files, and whole pictures and clips in and out.

use std::path::Path;

use sd_backend::{Backend, Mapping, Residence};
use sd_graph::{Cancel, Checkpoint, Declarations, LoadOptions, Progress};

use super::clip::Clip;
use super::config::Config;
use super::decoder::Decoder;
use super::encoder::Encoder;
use super::fit::{ClipReport, Fit, Tiling, Work, attempt};
use super::names::{Names, VAE};
use super::stream::{Decoding, Encoding, Rest, expect};
use crate::canvas::Canvas;
use crate::error::{Error, Result};
use crate::families::part_in;
use crate::part::Part;
use crate::tiling::{Mosaic, Tiles};

/// A VAE of this family. Opening checks names and shapes of all tensors; the weights of each half are loaded when it is
/// first used.
#[derive(Debug)]
pub struct WanVae {
    config: Config,
    encoder: Part<Encoder>,
    decoder: Part<Decoder>,
}

impl WanVae {
    /// Opens a VAE: a folder with `config.json` and weights, as diffusers has it, or a file of weights, whose
    /// configuration is the `config.json` beside it or, where there is none, what names and shapes say. Tensors may have the
    /// names of diffusers or those of the models' authors. No weight is read.
    ///
    /// # Errors
    /// Everything that can be wrong with files; see [`Error`].
    pub fn open(path: &Path, options: &LoadOptions) -> Result<WanVae> {
        let beside = match path.parent() {
            Some(folder) if path.is_file() => folder.join("config.json"),
            _ => path.join("config.json"),
        };
        let told = match path.is_file() && !beside.is_file() {
            true => None,
            false => Some(Config::read(&beside)?),
        };
        let mut checkpoint = Checkpoint::open(path)?;
        // The file may have other parts of a model.
        if let Ok(found) = part_in(&checkpoint, &VAE) {
            checkpoint = found.select(&checkpoint)?;
        }
        let config = match told {
            Some(config) => config,
            None => Config::of(&checkpoint)?,
        };
        WanVae::new(&checkpoint, config, options)
    }

    /// A VAE with this configuration, whose tensors are those of `checkpoint`. Checks names and shapes.
    ///
    /// # Errors
    /// What does not fit.
    pub(crate) fn new(
        checkpoint: &Checkpoint,
        config: Config,
        options: &LoadOptions,
    ) -> Result<WanVae> {
        let declarations = || {
            let names = Names::of(checkpoint);
            let declarations = Declarations::new(checkpoint, options.clone().component("vae"));
            declarations.translate(move |name| names.in_file(name))
        };
        let encoder = Part::declared(checkpoint, declarations(), |root| {
            Encoder::new(root, &config)
        })?;
        let decoder = Part::declared(checkpoint, declarations(), |root| {
            Decoder::new(root, &config)
        })?;
        Ok(WanVae {
            config,
            encoder,
            decoder,
        })
    }

    /// Says whether the weights' files may be used where they lie in memory: [`Mapping::Auto`] if not called.
    pub fn mapping(mut self, mapping: Mapping) -> WanVae {
        for weights in [&mut self.encoder.weights, &mut self.decoder.weights] {
            weights.live(Residence::Device, mapping);
        }
        self
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Takes the weights of both halves out of memory; they come back when they are needed.
    pub fn unload(&mut self) {
        self.encoder.weights.unload();
        self.decoder.weights.unload();
    }

    /// Begins to decode a clip whose latents have `height` rows and `width` columns.
    ///
    /// # Errors
    /// Files, memory, or a cancelled run.
    pub fn decoding(
        &mut self,
        backend: &Backend,
        (height, width): (usize, usize),
        cancel: &Cancel,
    ) -> Result<Decoding<'_>> {
        let quiet = &mut |_: &Progress| {};
        self.decoder.weights.bring(backend, cancel, quiet)?;
        let piece = Canvas::from((height, width)).piece();
        Ok(Decoding::new(&self.decoder.module, &self.config, piece))
    }

    /// Begins to encode a clip of pictures with `height` rows and `width` columns.
    ///
    /// # Errors
    /// [`Error::FrameSize`] unless both are multiples of [`Config::scale_factor`]; files, memory, or a cancelled run.
    pub fn encoding(
        &mut self,
        backend: &Backend,
        (height, width): (usize, usize),
        cancel: &Cancel,
    ) -> Result<Encoding<'_>> {
        self.check_size(height, width)?;
        let quiet = &mut |_: &Progress| {};
        self.encoder.weights.bring(backend, cancel, quiet)?;
        let piece = Canvas::from((height, width)).piece();
        Ok(Encoding::new(&self.encoder.module, &self.config, piece))
    }

    /// What decoding a clip takes of the memory of the device of `backend`: `frames` of latents with `height` rows and `width`
    /// columns. Nothing is loaded.
    ///
    /// # Errors
    /// The engine's.
    pub fn fit_decoding(
        &self,
        backend: &Backend,
        frames: usize,
        size: (usize, usize),
        work: impl Into<Work>,
    ) -> Result<Fit> {
        let work = work.into();
        let halves = (&self.decoder.weights, self.encoder.weights.device_bytes());
        Fit::find(backend, work.canvas(size), work.tiling, halves, |canvas| {
            Decoding::new(&self.decoder.module, &self.config, canvas.piece())
                .need(backend, rest_of(frames))
        })
    }

    /// What encoding a clip takes of the memory of the device of `backend`: `frames` pictures with `height` rows and `width`
    /// columns. Nothing is loaded.
    ///
    /// # Errors
    /// [`Error::FrameSize`], and the engine's.
    pub fn fit_encoding(
        &self,
        backend: &Backend,
        frames: usize,
        (height, width): (usize, usize),
        work: impl Into<Work>,
    ) -> Result<Fit> {
        self.check_size(height, width)?;
        let (work, scale) = (work.into(), self.config.scale_factor());
        let canvas = work.canvas((height / scale, width / scale));
        let halves = (&self.encoder.weights, self.decoder.weights.device_bytes());
        Fit::find(backend, canvas, work.tiling, halves, |canvas| {
            let pixels = canvas.piece().scaled(scale);
            let rest = rest_of(self.config.latent_frames(frames));
            Encoding::new(&self.encoder.module, &self.config, pixels).need(backend, rest)
        })
    }

    /// The clip `[frames, channels, height, width]`, values from -1 to 1, of latents `[t, z, height / scale, width / scale]`
    /// that have their means and deviations back ([`Config::denormalize`]), and what it took.
    ///
    /// In tiles, squares are decoded one after the other and blended, each for the whole clip: less memory, and slightly
    /// another picture, since they do not see each other.
    ///
    /// # Errors
    /// [`Error::Clip`] for latents that are not what they say, or of more than one frame where the VAE is for pictures;
    /// with [`Tiling::Fit`](super::Tiling::Fit) [`Error::TooLittleMemory`] where not even the smallest squares fit; files,
    /// memory, or a cancelled run.
    pub fn decode(
        &mut self,
        backend: &mut Backend,
        latents: &Clip,
        work: impl Into<Work>,
        cancel: &Cancel,
    ) -> Result<(Clip, ClipReport)> {
        let work = work.into();
        self.check_clip(latents, self.config.z_dim)?;
        let size = (latents.height, latents.width);
        let mut canvas = work.canvas(size);
        if work.tiling == Tiling::Fit {
            let fit = self.fit_decoding(backend, latents.frames, size, work)?;
            let own = &self.decoder.weights;
            fit.make_room(backend, own, &mut self.encoder.weights)?;
            canvas.tile = fit.tile;
        }
        let quiet = &mut |_: &Progress| {};
        self.decoder.weights.bring(backend, cancel, quiet)?;
        let (config, decoder) = (&self.config, &self.decoder.module);
        let scale = config.scale_factor();
        let mut peak = 0;
        let (clip, tile) = attempt(work.tiling, canvas, |canvas| {
            let (rows, columns) = canvas.tiles();
            let out = (rows.scaled(scale), columns.scaled(scale));
            by_tiles(latents, (&rows, &columns), out, |tile| {
                let mut decoding = Decoding::new(decoder, config, canvas.piece());
                let rest = rest_of(tile.frames);
                let part = collect(config.frames(tile.frames), tile.each_frame(), |latent| {
                    let frames = decoding.push_one_of(backend, latent, rest, cancel)?;
                    Ok(Some(frames))
                });
                peak = peak.max(decoding.peak());
                part
            })
        })?;
        Ok((clip, ClipReport { tile, peak }))
    }

    /// The means `[t, z, height / scale, width / scale]` of the latents of a clip `[frames, channels, height, width]` with
    /// values from -1 to 1, and what it took. Frames that make no whole chunk are left out: [`Config::latent_frames`] says how
    /// many there will be, [`Config::frames`] how many pictures these are.
    ///
    /// # Errors
    /// [`Error::FrameSize`], and as for [`WanVae::decode`].
    pub fn encode(
        &mut self,
        backend: &mut Backend,
        clip: &Clip,
        work: impl Into<Work>,
        cancel: &Cancel,
    ) -> Result<(Clip, ClipReport)> {
        let work = work.into();
        self.check_clip(clip, self.config.channels())?;
        self.check_size(clip.height, clip.width)?;
        let scale = self.config.scale_factor();
        let mut canvas = work.canvas((clip.height / scale, clip.width / scale));
        if work.tiling == Tiling::Fit {
            let size = (clip.height, clip.width);
            let fit = self.fit_encoding(backend, clip.frames, size, work)?;
            let own = &self.encoder.weights;
            fit.make_room(backend, own, &mut self.decoder.weights)?;
            canvas.tile = fit.tile;
        }
        let quiet = &mut |_: &Progress| {};
        self.encoder.weights.bring(backend, cancel, quiet)?;
        let (config, encoder) = (&self.config, &self.encoder.module);
        let mut peak = 0;
        let (latents, tile) = attempt(work.tiling, canvas, |canvas| {
            let out = canvas.tiles();
            let pixels = (out.0.scaled(scale), out.1.scaled(scale));
            by_tiles(clip, (&pixels.0, &pixels.1), out, |tile| {
                let piece = canvas.piece().scaled(scale);
                let mut encoding = Encoding::new(encoder, config, piece);
                let latents = config.latent_frames(tile.frames);
                let whole = tile.each_frame().take(config.frames(latents));
                let part = collect(latents, whole, |picture| {
                    encoding.push_one_of(backend, picture, rest_of(latents), cancel)
                });
                peak = peak.max(encoding.peak());
                part
            })
        })?;
        Ok((latents, ClipReport { tile, peak }))
    }

    fn check_size(&self, height: usize, width: usize) -> Result<()> {
        let multiple = self.config.scale_factor();
        let fits = |side: usize| side > 0 && side.is_multiple_of(multiple);
        if fits(height) && fits(width) {
            Ok(())
        } else {
            Err(Error::FrameSize {
                width,
                height,
                multiple,
            })
        }
    }

    fn check_clip(&self, clip: &Clip, channels: usize) -> Result<()> {
        expect("channels", clip.channels, channels)?;
        expect("frames", clip.frames, clip.frames.max(1))?;
        let sides = [clip.frames, clip.channels, clip.height, clip.width];
        let wanted = sides
            .iter()
            .try_fold(1_usize, |product, &side| product.checked_mul(side));
        expect("values", clip.values.len(), wanted.unwrap_or(usize::MAX))?;
        if self.config.is_for_pictures() {
            expect("frames", clip.frames, 1)?;
        }
        Ok(())
    }
}

fn rest_of(chunks: usize) -> Rest {
    if chunks > 1 {
        Rest::Unknown
    } else {
        Rest::Nothing
    }
}

/// What comes of `frames`, one behind the other: `count` frames in all.
fn collect<'f>(
    count: usize,
    frames: impl Iterator<Item = &'f [f32]>,
    mut push: impl FnMut(&'f [f32]) -> Result<Option<Clip>>,
) -> Result<Clip> {
    let mut whole: Option<Clip> = None;
    for frame in frames {
        let Some(part) = push(frame)? else { continue };
        match &mut whole {
            None => {
                let mut part = part;
                let rest = count.saturating_sub(part.frames);
                let frame = part.values.len() / part.frames.max(1);
                // Long clips are not to be moved each time that they grow.
                part.values.reserve_exact(rest.saturating_mul(frame));
                whole = Some(part);
            }
            Some(whole) => {
                whole.frames += part.frames;
                whole.values.extend_from_slice(&part.values);
            }
        }
    }
    whole.ok_or(Error::Clip {
        what: "frames",
        found: 0,
        wanted: 1,
    })
}

/// Does `run` for each tile of `clip` and puts the results together, whose tiles are `out`.
fn by_tiles(
    clip: &Clip,
    (rows, columns): (&Tiles, &Tiles),
    (out_rows, out_columns): (Tiles, Tiles),
    mut run: impl FnMut(&Clip) -> Result<Clip>,
) -> Result<Clip> {
    if rows.is_whole() && columns.is_whole() {
        return run(clip);
    }
    let (height, width) = (out_rows.side(), out_columns.side());
    let starts = |from: &Tiles, to: &Tiles| -> Vec<(usize, usize)> {
        let pairs = from.starts.iter().zip(&to.starts);
        pairs.map(|(&from, &to)| (from, to)).collect()
    };
    let (down, along) = (starts(rows, &out_rows), starts(columns, &out_columns));
    let mut mosaic: Option<(Mosaic, Clip)> = None;
    for &(row, out_row) in &down {
        for &(column, out_column) in &along {
            let mut part = run(&clip.tile((rows, row), (columns, column)))?;
            let values = std::mem::take(&mut part.values);
            let (mosaic, _) = mosaic.get_or_insert_with(|| {
                let planes = part.frames * part.channels;
                (
                    Mosaic::new(planes, out_rows.clone(), out_columns.clone()),
                    part,
                )
            });
            mosaic.add((out_row, out_column), &values);
        }
    }
    match mosaic {
        Some((mosaic, part)) => Ok(Clip {
            height,
            width,
            values: mosaic.finish(),
            ..part
        }),
        None => run(clip),
    }
}
