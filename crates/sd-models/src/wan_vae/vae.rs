//! A VAE by itself: its files, and whole pictures and clips in and out.

use std::path::Path;

use sd_backend::Backend;
use sd_graph::{Cancel, Checkpoint, Declarations, LoadOptions, Progress, Scope, Weights};

use super::clip::Clip;
use super::config::Config;
use super::decoder::Decoder;
use super::encoder::Encoder;
use super::names::Names;
use super::stream::{Decoding, Encoding, Rest, expect};
use crate::canvas::{Canvas, Piece};
use crate::error::{Error, Result};
use crate::tiling::{Mosaic, Tiles};

/// A VAE of this family. Opening checks names and shapes of all tensors; the weights of each half are loaded when it is
/// first used.
#[derive(Debug)]
pub struct WanVae {
    config: Config,
    encoder: Half<Encoder>,
    decoder: Half<Decoder>,
}

/// How much of each frame is worked on at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tiling {
    /// All of it.
    Whole,
    /// Overlapping squares of so many latents along a side.
    Squares(usize),
    /// All of it if memory suffices, else squares as large as memory allows: half as large each time that it runs out, and
    /// at least [`Tiling::SMALLEST`].
    Fit,
}

impl Tiling {
    /// Latents along a side of the smallest squares that [`Tiling::Fit`] tries.
    pub const SMALLEST: usize = 8;

    /// Gives `run` the squares to take, again with smaller ones while memory runs out and these may be had.
    fn attempt<T>(
        self,
        longest: usize,
        mut run: impl FnMut(Option<usize>) -> Result<T>,
    ) -> Result<T> {
        let mut tile = match self {
            Tiling::Whole => return run(None),
            Tiling::Squares(side) => return run(Some(side)),
            Tiling::Fit => longest,
        };
        loop {
            let outcome = run((tile < longest).then_some(tile));
            match outcome {
                Err(error) if error.is_out_of_memory() && tile > Tiling::SMALLEST => {
                    tile = tile.div_ceil(2).max(Tiling::SMALLEST);
                    tracing::info!("{error}; trying squares of {tile} latents");
                }
                outcome => return outcome,
            }
        }
    }
}

#[derive(Debug)]
struct Half<M> {
    module: M,
    weights: Weights,
}

impl<M> Half<M> {
    fn open(
        path: &Path,
        config: &Config,
        options: &LoadOptions,
        new: impl FnOnce(&Scope<'_>) -> M,
    ) -> Result<Half<M>> {
        let checkpoint = Checkpoint::open(path)?;
        let names = Names::of(&checkpoint, config);
        let declarations = Declarations::new(&checkpoint, options.clone().component("vae"))
            .translate(move |name| names.in_file(name));
        let module = new(&declarations.root());
        let params = declarations.finish()?;
        Ok(Half {
            module,
            weights: Weights::new(checkpoint, params),
        })
    }

    fn bring(&mut self, backend: &Backend, cancel: &Cancel) -> Result<()> {
        Ok(self
            .weights
            .bring(backend, cancel, &mut |_: &Progress| {})?)
    }
}

impl WanVae {
    /// Opens a VAE: a folder with `config.json` and weights, as diffusers has it, or a file of weights with a `config.json`
    /// beside it. Tensors may have the names of diffusers or those of the models' authors. No weight is read.
    ///
    /// # Errors
    /// Everything that can be wrong with files; see [`Error`].
    pub fn open(path: &Path, options: &LoadOptions) -> Result<WanVae> {
        let folder = match path.parent() {
            Some(folder) if path.is_file() => folder,
            _ => path,
        };
        let config = Config::read(&folder.join("config.json"))?;
        let encoder = Half::open(path, &config, options, |root| Encoder::new(root, &config))?;
        let decoder = Half::open(path, &config, options, |root| Decoder::new(root, &config))?;
        Ok(WanVae {
            config,
            encoder,
            decoder,
        })
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
        self.decoder.bring(backend, cancel)?;
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
        self.encoder.bring(backend, cancel)?;
        let piece = Canvas::from((height, width)).piece();
        Ok(Encoding::new(&self.encoder.module, &self.config, piece))
    }

    /// The clip `[frames, channels, height, width]`, values from -1 to 1, of latents `[t, z, height / scale, width / scale]`
    /// that have their means and deviations back ([`Config::denormalize`]).
    ///
    /// In tiles, squares are decoded one after the other and blended, each for the whole clip: less memory, and slightly
    /// another picture, since they do not see each other.
    ///
    /// # Errors
    /// [`Error::Clip`] for latents that are not what they say, or of more than one frame where the VAE is for pictures;
    /// files, memory, or a cancelled run.
    pub fn decode(
        &mut self,
        backend: &mut Backend,
        latents: &Clip,
        tiling: Tiling,
        cancel: &Cancel,
    ) -> Result<Clip> {
        self.check_clip(latents, self.config.z_dim)?;
        self.decoder.bring(backend, cancel)?;
        let (config, decoder) = (&self.config, &self.decoder.module);
        let scale = config.scale_factor();
        tiling.attempt(latents.height.max(latents.width), |tile| {
            let (rows, columns) = Canvas::from((latents.height, latents.width))
                .tile(tile)
                .tiles();
            let out = (rows.scaled(scale), columns.scaled(scale));
            by_tiles(latents, (&rows, &columns), out, |tile| {
                let mut decoding = Decoding::new(decoder, config, piece_of(tile));
                let rest = rest_of(tile.frames);
                collect(tile.each_frame(), |latent| {
                    let frames = decoding.push_one_of(backend, latent, rest, cancel)?;
                    Ok(Some(frames))
                })
            })
        })
    }

    /// The means `[t, z, height / scale, width / scale]` of the latents of a clip `[frames, channels, height, width]` with
    /// values from -1 to 1. Frames that make no whole chunk are left out: [`Config::latent_frames`] says how many there will
    /// be, [`Config::frames`] how many pictures these are.
    ///
    /// # Errors
    /// [`Error::FrameSize`], [`Error::Clip`]; files, memory, or a cancelled run.
    pub fn encode(
        &mut self,
        backend: &mut Backend,
        clip: &Clip,
        tiling: Tiling,
        cancel: &Cancel,
    ) -> Result<Clip> {
        self.check_clip(clip, self.config.channels())?;
        self.check_size(clip.height, clip.width)?;
        self.encoder.bring(backend, cancel)?;
        let (config, encoder) = (&self.config, &self.encoder.module);
        let scale = config.scale_factor();
        let (height, width) = (clip.height / scale, clip.width / scale);
        tiling.attempt(height.max(width), |tile| {
            let out = Canvas::from((height, width)).tile(tile).tiles();
            let pixels = (out.0.scaled(scale), out.1.scaled(scale));
            by_tiles(clip, (&pixels.0, &pixels.1), out, |tile| {
                let mut encoding = Encoding::new(encoder, config, piece_of(tile));
                let latents = config.latent_frames(tile.frames);
                let whole = tile.each_frame().take(config.frames(latents));
                collect(whole, |picture| {
                    encoding.push_one_of(backend, picture, rest_of(latents), cancel)
                })
            })
        })
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

fn piece_of(clip: &Clip) -> Piece {
    Canvas::from((clip.height, clip.width)).piece()
}

fn rest_of(chunks: usize) -> Rest {
    if chunks > 1 {
        Rest::Unknown
    } else {
        Rest::Nothing
    }
}

/// What comes of `frames`, one behind the other.
fn collect<'f>(
    frames: impl Iterator<Item = &'f [f32]>,
    mut push: impl FnMut(&'f [f32]) -> Result<Option<Clip>>,
) -> Result<Clip> {
    let mut whole: Option<Clip> = None;
    for frame in frames {
        let Some(part) = push(frame)? else { continue };
        match &mut whole {
            None => whole = Some(part),
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
