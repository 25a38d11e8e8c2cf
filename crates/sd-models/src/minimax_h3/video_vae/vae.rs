//! The VAE by itself: its files and weights, and pictures and clips in and out.

use std::path::Path;

use sd_backend::{Backend, DType, Mapping, Residence};
use sd_graph::{
    Cancel, Checkpoint, Estimate, LoadOptions, Progress, Reporter, TensorTypes, Weights,
};

use super::config::Config;
use super::decoder::Decoder;
use super::decoding::Decoding;
use super::encoder::Encoder;
use super::encoding::Encoding;
use super::names::VIDEO_VAE;
use super::posterior::Posterior;
use super::tiles::Tiling;
use crate::error::{Error, Result};
use crate::families::{part_in, parts_in};
use crate::part::Part;
use crate::rope::Size;
use crate::wan_vae::{Clip, ClipReport, Fit};

/// Most pixels along a side of a frame.
const MOST_SIDE: usize = 1 << 16;

/// A video VAE of MiniMax H3. Opening checks names and shapes of all tensors; the weights of each half are loaded when it is
/// first used.
///
/// Pictures are planes of red, green and blue `[3, height, width]` with values from 0 to 1. Latents have mean 0 and deviation 1,
/// as the diffusion model sees them.
#[derive(Debug)]
pub struct VideoVae {
    config: Config,
    encoder: Part<Encoder>,
    decoder: Part<Decoder>,
}

impl VideoVae {
    /// Opens a VAE: a folder with `config.json` and weights, as diffusers has it, or a file of weights, whose configuration is
    /// the `config.json` beside it, in its metadata or, of the published size, the published one. Tensors may have the names of
    /// diffusers or those of the model's authors. No weight is read.
    ///
    /// What the reference keeps in single precision, all of the encoder, is brought to it whatever type a file has; a rule of
    /// [`LoadOptions::tensor_types`] can say otherwise. The decoder's weights keep their file's type.
    ///
    /// # Errors
    /// Everything that can be wrong with files, [`Error::Config`] for a file of weights of another size alone among it: its heads
    /// and the means and deviations of its latents do not follow from its tensors.
    pub fn open(path: &Path, options: &LoadOptions) -> Result<VideoVae> {
        let beside = match path.parent() {
            Some(folder) if path.is_file() => folder.join("config.json"),
            _ => path.join("config.json"),
        };
        let whole = Checkpoint::open(path)?;
        let checkpoint = part_in(&whole, &VIDEO_VAE)?.select(&whole)?;
        let config = match path.is_file() {
            true if !beside.is_file() => Config::of(&checkpoint)?,
            // What stands beside a single file may be about another; where the file says nothing itself, its fault is told.
            true => {
                let read = Config::beside(&beside, &checkpoint);
                read.or_else(|told| Config::of(&checkpoint).map_err(|_| told))?
            }
            false => Config::beside(&beside, &checkpoint)?,
        };
        VideoVae::from_checkpoint(&checkpoint, config, options)
    }

    /// Whether `checkpoint` holds such a VAE, by the names of its tensors.
    pub fn is_in(checkpoint: &Checkpoint) -> bool {
        let mut parts = parts_in(checkpoint).into_iter();
        parts.any(|found| std::ptr::eq(found.known, &VIDEO_VAE))
    }

    /// A VAE with this configuration, whose tensors are those of `checkpoint`, under the model's names
    /// ([`Identified::select`](crate::Identified::select)). Checks names and shapes.
    ///
    /// # Errors
    /// What does not fit.
    pub fn from_checkpoint(
        checkpoint: &Checkpoint,
        config: Config,
        options: &LoadOptions,
    ) -> Result<VideoVae> {
        let single = TensorTypes::default().rule("^vae[.](encoder|quant_conv)[.]", DType::F32);
        let single = single.map_err(|error| Error::Config {
            path: checkpoint.path().to_owned(),
            reason: error.to_string(),
        })?;
        let options = options.clone().component("vae");
        let encoder = Part::open(checkpoint, options.clone().tensor_types(single), |root| {
            Encoder::new(root, &config)
        })?;
        let decoder = Part::open(checkpoint, options, |root| Decoder::new(root, &config))?;
        Ok(VideoVae {
            config,
            encoder,
            decoder,
        })
    }

    /// Says where the weights live while they are not used, whether their files may be mapped, and whether the decoder's stay
    /// there and come and go block by block while it runs: [`Residence::Device`], [`Mapping::Auto`] and no if not called.
    pub fn live(&mut self, residence: Residence, mapping: Mapping, is_streamed: bool) {
        self.encoder.weights.live(residence, mapping);
        self.decoder.weights.live(residence, mapping);
        self.decoder.weights.stream(is_streamed);
    }

    /// Says whether the decoder's weights stay where they live while it runs, too, unless that is the device.
    pub(crate) fn stream(&mut self, is_streamed: bool) {
        self.decoder.weights.stream(is_streamed);
    }

    /// What decoding a tile of latents of `(height, width)` takes beside weights.
    pub(crate) fn decoding_estimate(
        &self,
        backend: &Backend,
        size: (usize, usize),
        tiling: Tiling,
    ) -> Result<Estimate> {
        Decoding::new(&self.decoder.module, &self.config, size, tiling).estimate(backend)
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The encoder's weights.
    pub fn encoder_weights(&self) -> &Weights {
        &self.encoder.weights
    }

    /// The decoder's weights.
    pub fn decoder_weights(&self) -> &Weights {
        &self.decoder.weights
    }

    /// Takes the weights of both halves out of memory; they come back when they are needed.
    pub fn unload(&mut self) {
        self.encoder.weights.unload();
        self.decoder.weights.unload();
    }

    /// What encoding a clip takes of the memory of the device of `backend`: `frames` pictures with `height` rows and `width`
    /// columns. Nothing is loaded.
    ///
    /// # Errors
    /// As for [`VideoVae::encoding`], and the engine's.
    pub fn fit_encoding(
        &self,
        backend: &Backend,
        frames: usize,
        size: (usize, usize),
        tiling: Tiling,
    ) -> Result<Fit> {
        self.check_size(size, tiling)?;
        let encoding = Encoding::new(&self.encoder.module, &self.config, sides(size), tiling);
        let need = encoding.need(backend, frames)?;
        let scale = self.config.scale_factor();
        let halves = (&self.encoder.weights, self.decoder.weights.device_bytes());
        Ok(Fit {
            tile: tiling.tile((size.0 / scale, size.1 / scale), scale),
            ..Fit::first_of(backend, halves, &[need])?
        })
    }

    /// What decoding a clip takes of the memory of the device of `backend`: latents with `height` rows and `width` columns, as
    /// many frames of them as there may be. Nothing is loaded.
    ///
    /// # Errors
    /// [`Error::LargeFrame`], [`Error::Tiles`], and the engine's.
    pub fn fit_decoding(
        &self,
        backend: &Backend,
        size: (usize, usize),
        tiling: Tiling,
    ) -> Result<Fit> {
        self.check_latents(size, tiling)?;
        let decoding = Decoding::new(&self.decoder.module, &self.config, size, tiling);
        let needs = self.decoding_needs(backend, &decoding)?;
        let halves = (&self.decoder.weights, self.encoder.weights.device_bytes());
        Ok(Fit {
            tile: tiling.tile(size, self.config.scale_factor()),
            ..Fit::first_of(backend, halves, &needs)?
        })
    }

    /// Bytes that a tile takes beside weights that are loaded: its graph in one piece, and in segments.
    fn decoding_needs(&self, backend: &Backend, decoding: &Decoding<'_>) -> Result<[u64; 2]> {
        let estimate = decoding.estimate(backend)?;
        let segmented = match self.decoder.weights.is_streamed() {
            true => [estimate.segmented_bytes + estimate.streamed_weight_bytes; 2],
            false => [estimate.compute_bytes, estimate.segmented_bytes],
        };
        Ok(segmented.map(|bytes| bytes + estimate.constant_bytes))
    }

    /// Begins to encode a clip of pictures with `height` rows and `width` columns.
    ///
    /// # Errors
    /// [`Error::FrameSize`] unless both are multiples of [`Config::scale_factor`], [`Error::SmallFrame`] unless they are two
    /// latents at least, [`Error::LargeFrame`], [`Error::Tiles`]; [`Error::TooLittleMemory`], other failures of memory or files, a cancelled run.
    pub fn encoding(
        &mut self,
        backend: &Backend,
        size: (usize, usize),
        tiling: Tiling,
        cancel: &Cancel,
    ) -> Result<Encoding<'_>> {
        self.begin_encoding(backend, None, size, tiling, cancel)
    }

    fn begin_encoding(
        &mut self,
        backend: &Backend,
        frames: Option<usize>,
        size: (usize, usize),
        tiling: Tiling,
        cancel: &Cancel,
    ) -> Result<Encoding<'_>> {
        self.check_size(size, tiling)?;
        let encoding = Encoding::new(&self.encoder.module, &self.config, sides(size), tiling);
        let need = encoding.need(backend, frames.unwrap_or(usize::MAX))?;
        let quiet: &mut dyn Reporter = &mut |_: &Progress| {};
        let (own, other) = (&mut self.encoder.weights, &mut self.decoder.weights);
        bring(own, other, backend, &[need], (cancel, quiet))?;
        let encoding = Encoding::new(&self.encoder.module, &self.config, sides(size), tiling);
        Ok(encoding.expecting(frames.unwrap_or(0)))
    }

    /// The latents of one picture `[3, height, width]`.
    ///
    /// # Errors
    /// As for [`VideoVae::encoding`] and [`Encoding::push`].
    pub fn encode_picture(
        &mut self,
        backend: &mut Backend,
        picture: &[f32],
        size: (usize, usize),
        tiling: Tiling,
        (cancel, progress): (&Cancel, &mut dyn Reporter),
    ) -> Result<Posterior> {
        let mut encoding = self.begin_encoding(backend, Some(1), size, tiling, cancel)?;
        encoding.push(backend, picture, cancel, progress)?;
        encoding.finish(backend, cancel, progress)
    }

    /// The latents of a clip `[frames, 3, height, width]`, and what it took. Frames that make no whole clip are taken as if the
    /// last went on: [`Config::latent_frames`] says how many latent frames there will be.
    ///
    /// # Errors
    /// As for [`VideoVae::encoding`] and [`Encoding::push`].
    pub fn encode(
        &mut self,
        backend: &mut Backend,
        clip: &Clip,
        tiling: Tiling,
        (cancel, progress): (&Cancel, &mut dyn Reporter),
    ) -> Result<(Posterior, ClipReport)> {
        check_clip(clip, 3)?;
        let size = (clip.height, clip.width);
        let mut encoding = self.begin_encoding(backend, Some(clip.frames), size, tiling, cancel)?;
        let mut whole: Option<Posterior> = None;
        let mut add = |part: Posterior| match &mut whole {
            Some(whole) => whole.append(&part),
            None => whole = Some(part),
        };
        for picture in clip.each_frame() {
            if let Some(part) = encoding.push(backend, picture, cancel, progress)? {
                add(part);
            }
        }
        add(encoding.finish(backend, cancel, progress)?);
        let peak = encoding.peak();
        let scale = self.config.scale_factor();
        let tile = tiling.tile((clip.height / scale, clip.width / scale), scale);
        let none = Error::Clip {
            what: "frames",
            found: 0,
            wanted: 1,
        };
        Ok((whole.ok_or(none)?, ClipReport { tile, peak }))
    }

    /// Decodes latents `[t, channels, height, width]` and gives `frame` each picture as soon as it is made;
    /// [`Config::frames`] says how many there will be. A latent frame that was encoded of a picture alone is one picture.
    ///
    /// # Errors
    /// [`Error::Clip`] for latents that are not what they say, [`Error::LargeFrame`], [`Error::Tiles`];
    /// [`Error::TooLittleMemory`], other failures of memory or files, a cancelled run; and whatever `frame` fails with.
    pub fn decode<E: From<Error>>(
        &mut self,
        backend: &mut Backend,
        latents: &Clip,
        tiling: Tiling,
        (cancel, progress): (&Cancel, &mut dyn Reporter),
        frame: &mut dyn FnMut(&[f32]) -> Result<(), E>,
    ) -> Result<ClipReport, E> {
        check_clip(latents, self.config.latent_channels)?;
        let size = (latents.height, latents.width);
        self.check_latents(size, tiling)?;
        let decoding = Decoding::new(&self.decoder.module, &self.config, size, tiling);
        let needs = self.decoding_needs(backend, &decoding)?;
        let (own, other) = (&mut self.decoder.weights, &mut self.encoder.weights);
        bring(own, other, backend, &needs, (cancel, &mut *progress))?;
        let mut decoding = Decoding::new(&self.decoder.module, &self.config, size, tiling);
        decoding.run(backend, latents, cancel, progress, frame)?;
        Ok(ClipReport {
            tile: tiling.tile(size, self.config.scale_factor()),
            peak: decoding.peak,
        })
    }

    fn check_size(&self, (height, width): (usize, usize), tiling: Tiling) -> Result<()> {
        let multiple = self.config.scale_factor();
        tiling.check(multiple)?;
        let is_whole = |side: usize| side > 0 && side.is_multiple_of(multiple);
        if !is_whole(height) || !is_whole(width) {
            return Err(Error::FrameSize {
                width,
                height,
                multiple,
            });
        }
        // The last level is reflected by a pixel.
        let least = 2 * multiple;
        if height.min(width) < least {
            return Err(Error::SmallFrame {
                width,
                height,
                least,
            });
        }
        check_large((height, width), 1)
    }

    /// Refuses latents of sizes that cannot be.
    fn check_latents(&self, size: (usize, usize), tiling: Tiling) -> Result<()> {
        let scale = self.config.scale_factor();
        tiling.check(scale)?;
        check_large(size, scale)
    }
}

/// Brings a half's `own` weights, for what takes one of `needs` bytes beside them, after those of the `other` half were given up if
/// there is no room for both.
fn bring(
    own: &mut Weights,
    other: &mut Weights,
    backend: &Backend,
    needs: &[u64],
    (cancel, progress): (&Cancel, &mut dyn Reporter),
) -> Result<()> {
    let fit = Fit::first_of(backend, (own, other.device_bytes()), needs)?;
    fit.make_room(backend, own, other)?;
    if own.residence() != Residence::Device && !own.is_home() {
        own.load(backend, cancel, &mut *progress)?;
    }
    Ok(own.bring(backend, cancel, progress)?)
}

/// Refuses frames whose sides, in units of `scale` pixels, are larger than any.
fn check_large((height, width): (usize, usize), scale: usize) -> Result<()> {
    let (height, width) = (height.saturating_mul(scale), width.saturating_mul(scale));
    match height.max(width) <= MOST_SIDE {
        true => Ok(()),
        false => Err(Error::LargeFrame {
            width,
            height,
            most: MOST_SIDE,
        }),
    }
}

fn sides((height, width): (usize, usize)) -> Size {
    Size::new(height, width)
}

/// Refuses a clip that is empty, has other channels or not the values that it should.
fn check_clip(clip: &Clip, channels: usize) -> Result<()> {
    let sides = [clip.frames, clip.channels, clip.height, clip.width];
    let mut product = sides.iter();
    let wanted = product.try_fold(1_usize, |product, &side| product.checked_mul(side));
    let wanted = wanted.unwrap_or(usize::MAX);
    for (what, found, wanted) in [
        ("channels", clip.channels, channels),
        ("frames", clip.frames, clip.frames.max(1)),
        ("rows", clip.height, clip.height.max(1)),
        ("columns", clip.width, clip.width.max(1)),
        ("values", clip.values.len(), wanted),
    ] {
        if found != wanted {
            return Err(Error::Clip {
                what,
                found,
                wanted,
            });
        }
    }
    Ok(())
}
