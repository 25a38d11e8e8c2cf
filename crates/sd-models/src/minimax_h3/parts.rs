//! The parts of a MiniMax H3 checkpoint beside its transformers, and what each does to get from a request to a clip.

use std::path::{Path, PathBuf};

use image::RgbaImage;
use sd_backend::Backend;
use sd_graph::{Cancel, LoadOptions, Reporter};
use serde::Deserialize;

use super::conditioning::Conditioner;
use super::layout::{CONDITION_TIME, patchify};
use super::references::Subject;
use super::request::VideoDefaults;
use super::schedule::Shifts;
use super::sizes::{CanvasRule, Extent};
use super::sound_vae::{Latents, SoundVae};
use super::video_vae::{Encoding, Posterior, Tiling, VideoVae};
use crate::config::read_json;
use crate::error::{Error, Result};
use crate::image::Image;
use crate::model_files::ModelFiles;
use crate::noise::{self, Generator};
use crate::qwen3_vl::TEXT_ENCODER;
use crate::resample::on_white;
use crate::rope::Size;
use crate::sources::{Described, Opened, text_encoder};
use crate::wan_vae::Clip;

/// Seed under which latents of what is given are drawn, whatever the request's is: the same picture is always the same latents.
const CONDITION_SEED: u64 = 42;

/// Everything that reads a request and makes a clip of latents.
#[derive(Debug)]
pub(crate) struct Readers {
    pub(crate) conditioner: Conditioner,
    pub(crate) vae: VideoVae,
    pub(crate) sound_vae: SoundVae,
}

/// What stands beside the weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) rule: CanvasRule,
    pub(crate) defaults: VideoDefaults,
    pub(crate) shifts: Shifts,
}

impl Settings {
    /// The published model's, and what the files of a folder say.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Config`], [`Error::UnsupportedModel`], [`Error::Missing`] for a folder of something else.
    pub(crate) fn read(files: &ModelFiles) -> Result<Settings> {
        let mut settings = Settings {
            rule: CanvasRule::default(),
            defaults: VideoDefaults::default(),
            shifts: Shifts::default(),
        };
        let Some(folder) = files.folder() else {
            return Ok(settings);
        };
        settings.rule = read_index(folder)?;
        let defaults = folder.join("sd-defaults.json");
        if defaults.is_file() {
            settings.defaults = read_json(&defaults)?;
        }
        settings.shifts = Shifts::read(folder)?;
        Ok(settings)
    }
}

/// Indices that a folder may have: of diffusers' modular pipelines, and of the others.
const INDICES: [&str; 2] = ["modular_model_index.json", "model_index.json"];

/// What class names of pipelines of this model begin with.
const CLASS: &str = "MiniMaxH3";

/// What a folder is, and the canvases that it is for.
fn read_index(folder: &Path) -> Result<CanvasRule> {
    #[derive(Deserialize)]
    struct Index {
        #[serde(rename = "_class_name")]
        class: String,
        #[serde(flatten)]
        rule: CanvasRule,
    }
    if !folder.is_dir() {
        return Err(Error::Missing {
            path: folder.to_owned(),
            what: "model folder",
        });
    }
    let mut paths = INDICES.iter().map(|name| folder.join(name));
    let path = paths.find(|path| path.is_file()).ok_or(Error::Missing {
        path: folder.to_owned(),
        what: "modular_model_index.json",
    })?;
    let index: Index = read_json(&path)?;
    if !index.class.starts_with(CLASS) {
        return Err(Error::UnsupportedModel {
            path,
            class: index.class,
            supported: &["MiniMaxH3ModularPipeline"],
        });
    }
    let rule = index.rule;
    crate::config::check(
        &path,
        &[
            ("canvas_short_edge > 0", rule.short_edge > 0),
            ("canvas_max_pixels > 0", rule.most_pixels > 0),
            (
                "reference_image_short_edge > 0",
                rule.reference_short_edge > 0,
            ),
        ],
    )?;
    Ok(rule)
}

/// Where a part is: at the path that was given, in its folder of the model's, or in the file of all parts.
pub(crate) fn path_of(
    files: &ModelFiles,
    given: Option<&Path>,
    folder: &str,
    (part, hint): (&'static str, &'static str),
) -> Result<PathBuf> {
    match (given, &files.model) {
        (Some(path), _) => Ok(path.to_owned()),
        (None, Some(model)) if model.is_dir() => Ok(model.join(folder)),
        (None, Some(model)) => Ok(model.clone()),
        (None, None) => Err(Error::MissingPart {
            path: files.label().to_owned(),
            part,
            hint,
        }),
    }
}

impl Readers {
    /// Opens text encoder, tokenizer and both VAEs. No weight is read.
    ///
    /// # Errors
    /// Everything that can be wrong with files.
    pub(crate) fn open(files: &ModelFiles, options: &LoadOptions) -> Result<Readers> {
        let (folder, hint) = ("text_encoder", "--text-encoder");
        let opened = &mut Opened::default();
        let text = Described::find(files, &TEXT_ENCODER, folder, hint, opened)?;
        let (text, tokenizer) = text_encoder(files, text)?;
        let vae = path_of(files, files.vae.as_deref(), "vae", ("video VAE", "--vae"))?;
        let sound_vae = path_of(
            files,
            files.sound_vae.as_deref(),
            "audio_vae",
            ("sound VAE", "--sound-vae"),
        )?;
        Ok(Readers {
            conditioner: Conditioner::open(files, options, &text, tokenizer)?,
            vae: VideoVae::open(&vae, options)?,
            sound_vae: SoundVae::open(&sound_vae)?,
        })
    }

    /// Latents of the pictures of a subject, as the transformer sees them without noise; none of sound.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn encode_pictures(
        &mut self,
        backend: &mut Backend,
        subject: &Subject<'_>,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Option<Clip>> {
        let posterior = match subject {
            Subject::Sound(_) => return Ok(None),
            Subject::Picture(picture) => {
                let size = (picture.height() as usize, picture.width() as usize);
                let planes = planes(picture);
                self.vae.encode_picture(
                    backend,
                    &planes,
                    size,
                    Tiling::default(),
                    (cancel, progress),
                )?
            }
            Subject::Clip(clip) => {
                let first = clip.frame(0);
                let size = (first.height() as usize, first.width() as usize);
                let frames = (0..clip.read()).map(|index| planes(&clip.frame(index)));
                let mut encoding = self
                    .vae
                    .encoding(backend, size, Tiling::default(), cancel)?;
                encode_all(&mut encoding, backend, frames, cancel, progress)?
            }
        };
        let numbers = posterior.mean.values.len();
        let noise = noise::normal(CONDITION_SEED, numbers);
        Ok(Some(posterior.sample_in_half(self.vae.config(), &noise)?))
    }

    /// Latents of the sound of a subject, if it has any.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn encode_sound(
        &mut self,
        backend: &mut Backend,
        subject: &Subject<'_>,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Option<Latents>> {
        let sound = subject.sound();
        sound
            .map(|sound| self.sound_vae.encode(backend, sound, cancel, progress))
            .transpose()
    }
}

fn encode_all(
    encoding: &mut Encoding<'_>,
    backend: &mut Backend,
    frames: impl Iterator<Item = Vec<f32>>,
    cancel: &Cancel,
    progress: &mut dyn Reporter,
) -> Result<Posterior> {
    let mut whole: Option<Posterior> = None;
    for frame in frames {
        if let Some(part) = encoding.push(backend, &frame, cancel, progress)? {
            whole = Some(joined(whole, part));
        }
    }
    let last = encoding.finish(backend, cancel, progress)?;
    Ok(joined(whole, last))
}

fn joined(whole: Option<Posterior>, part: Posterior) -> Posterior {
    match whole {
        None => part,
        Some(mut whole) => {
            whole.append(&part);
            whole
        }
    }
}

/// Red, green and blue planes with values from 0 to 1.
fn planes(picture: &RgbaImage) -> Vec<f32> {
    let bytes = on_white(picture);
    bytes
        .into_iter()
        .map(|byte| f32::from(byte) / 255.0)
        .collect()
}

/// A picture of red, green and blue planes with values from 0 to 1.
pub(crate) fn image_of(planes: &[f32], size: Size) -> Option<Image> {
    let pixels = size.height * size.width;
    if planes.len() != 3 * pixels {
        return None;
    }
    let mut bytes = vec![u8::MAX; 4 * pixels];
    for (channel, plane) in planes.chunks_exact(pixels.max(1)).enumerate() {
        for (pixel, value) in bytes.chunks_exact_mut(4).zip(plane) {
            pixel[channel] = (value.clamp(0.0, 1.0) * 255.0).round_ties_even() as u8;
        }
    }
    Image::from_rgba(size.width as u32, size.height as u32, bytes)
}

/// What the transformer begins with: noise, and what is given with a little noise on it.
#[derive(Debug)]
pub(crate) struct Draws {
    /// Rows of what is given, as the transformer sees them.
    pub(crate) given_video: Vec<f32>,
    pub(crate) given_sound: Vec<f32>,
    /// Latents `[channels, frames, height, width]`.
    pub(crate) video: Vec<f32>,
    /// Rows `[2 * latents, channels]`, those of the left channel first.
    pub(crate) sound: Vec<f32>,
}

impl Draws {
    /// Draws all noise in the reference's order: for each picture or clip that is given, then for the frames, then for the
    /// sound.
    pub(crate) fn draw(
        generator: &mut Generator,
        extent: Extent,
        (channels, sound_channels): (usize, usize),
        given: &[Clip],
        heard: &[Latents],
    ) -> Draws {
        let mut given_video = Vec::new();
        for clip in given {
            let mut latents = clip.channels_first();
            let noise = generator.normal(latents.len());
            for (value, noise) in latents.iter_mut().zip(noise) {
                *value = CONDITION_TIME * *value + (1.0 - CONDITION_TIME) * noise;
            }
            let size = Size::new(clip.height, clip.width);
            given_video.extend(patchify(&latents, clip.frames, size));
        }
        let latents = extent.latents();
        let video = channels * extent.latent_frames() * latents.height * latents.width;
        let sound = 2 * extent.sound_latents() * sound_channels;
        Draws {
            given_video,
            given_sound: heard
                .iter()
                .flat_map(|heard| &heard.values)
                .copied()
                .collect(),
            video: generator.normal(video),
            sound: generator.normal(sound),
        }
    }
}
