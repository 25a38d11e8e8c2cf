//! Reading a prompt and what it speaks of: the text encoder, and the vision tower that sees pictures for it.

use sd_backend::{Backend, Residence};
use sd_graph::{Cancel, Estimate, LoadOptions, PlanCache, Reporter, Weights};
use tokenizers::Tokenizer;

use super::layout::Tag;
use super::prompt::{Mention, Presentation, Tokens, seen_of_clip};
use super::references::{Outline, Subject};
use super::sizes::FRAME_RATE;
use crate::error::{Error, Result};
use crate::model_files::ModelFiles;
use crate::part::Part;
use crate::qwen3_vl::{
    self, ImageProcessor, Seen, Sight, TextModel, VideoProcessor, set_pictures, text_graph,
};
use crate::resample::{bicubic, on_white};
use crate::rope::{self, Size};
use crate::sources::Source;

/// Layers of the text encoder behind which the transformer takes the hidden states, before any norm. A text encoder with fewer is
/// read to its last, which is what the reference refuses, as the published one has 64.
const LAYERS: usize = 50;

/// Rows of text as the transformer is given them.
#[derive(Debug, Clone, PartialEq)]
pub struct TextRows {
    /// Hidden states `[rows, width]`.
    pub hidden: Vec<f32>,
    /// What each row stands for.
    pub tags: Vec<Tag>,
}

/// The text encoder with everything that makes rows of a prompt.
#[derive(Debug)]
pub(crate) struct Conditioner {
    pub(crate) text: Part<TextModel>,
    presentation: Presentation,
    eyes: Option<Eyes>,
    plans: PlanCache<Vec<rope::Part>>,
}

/// The vision tower and how pictures and clips are made ready for it.
#[derive(Debug)]
struct Eyes {
    sight: Sight,
    pictures: ImageProcessor,
    clips: VideoProcessor,
    /// Pixels along a side of what becomes one token.
    token: usize,
}

impl Conditioner {
    /// Opens the text encoder, and its vision tower if it has one. Checks names and shapes.
    ///
    /// # Errors
    /// Everything that can be wrong with files.
    pub(crate) fn open(
        files: &ModelFiles,
        options: &LoadOptions,
        source: &Source<qwen3_vl::Config>,
        tokenizer: Tokenizer,
    ) -> Result<Conditioner> {
        let own = options.clone().component("text_encoder");
        let text = Part::open(&source.checkpoint, own, |root| {
            TextModel::truncated(root, &source.config.text_config, LAYERS)
        })?;
        let mut names = source.checkpoint.tensors().map(|(name, _)| name);
        let has_tower = names.any(|name| name.starts_with("model.visual."));
        let vision = source.config.vision_config.as_ref().filter(|_| has_tower);
        let eyes = vision.map(|vision| -> Result<Eyes> {
            Ok(Eyes {
                sight: Sight::open(source, vision, options)?,
                pictures: ImageProcessor::read(&files.processor(), vision)?,
                clips: VideoProcessor::read(&files.processor(), vision)?,
                token: vision.token_side(),
            })
        });
        Ok(Conditioner {
            text,
            presentation: Presentation::new(tokenizer, &source.config)?,
            eyes: eyes.transpose()?,
            plans: PlanCache::new(1),
        })
    }

    /// Channels of a row.
    pub(crate) fn width(&self) -> usize {
        self.text.module.config().hidden_size
    }

    fn eyes(&self) -> Result<&Eyes> {
        self.eyes.as_ref().ok_or(Error::NoReferences(NO_TOWER))
    }

    /// The tokens of a prompt that speaks of `subjects`.
    ///
    /// # Errors
    /// [`Error::Prompt`], [`Error::ClipReferences`]; [`Error::NoReferences`] without a vision tower.
    pub(crate) fn tokens(&self, prompt: &str, subjects: &[Outline]) -> Result<Tokens> {
        let mentions = subjects.iter().map(|&subject| {
            Ok(match subject {
                Outline::Sound(_) => Mention::Sound,
                Outline::Picture(size) => {
                    let eyes = self.eyes()?;
                    Mention::Picture(eyes.picture(size)?.whole_patches(eyes.token))
                }
                Outline::Clip {
                    size,
                    frames,
                    samples,
                } => {
                    let eyes = self.eyes()?;
                    let (seen, times) = seen_of_clip(frames, FRAME_RATE, eyes.clips.frames())?;
                    Mention::Clip {
                        tokens: eyes.clip(seen.len(), size)?.whole_patches(eyes.token),
                        times,
                        has_sound: samples.is_some(),
                    }
                }
            })
        });
        let mentions: Vec<Mention> = mentions.collect::<Result<_>>()?;
        self.presentation.tokenize(prompt, &mentions)
    }

    /// What the vision tower makes of the pictures of `subjects`, in their order; of a clip, one for each group of frames.
    ///
    /// # Errors
    /// As for [`Conditioner::tokens`], or the engine's.
    pub(crate) fn look(
        &mut self,
        backend: &mut Backend,
        subject: &Subject<'_>,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Vec<Seen>> {
        let eyes = match (subject, &mut self.eyes) {
            (Subject::Sound(_), _) => return Ok(Vec::new()),
            (_, None) => return Err(Error::NoReferences(NO_TOWER)),
            (_, Some(eyes)) => eyes,
        };
        match subject {
            Subject::Sound(_) => Ok(Vec::new()),
            Subject::Picture(picture) => {
                let size = Size::new(picture.height() as usize, picture.width() as usize);
                let size = eyes.picture(size)?;
                let planes = on_white(&bicubic(picture, size.width as u32, size.height as u32));
                let patches = eyes.pictures.patches(&planes, size);
                let grid = eyes.pictures.grid(size);
                let seen = eyes
                    .sight
                    .look(backend, (&patches, grid), cancel, progress)?;
                Ok(vec![seen])
            }
            Subject::Clip(clip) => {
                let joined = eyes.clips.frames().max(1);
                let (indices, _) = seen_of_clip(clip.len(), FRAME_RATE, joined)?;
                let Outline::Clip { size, .. } = subject.outline() else {
                    return Ok(Vec::new());
                };
                let size = eyes.clip(indices.len(), size)?;
                let grid = eyes.clips.grid(size);
                let groups = indices.chunks(joined).map(|group| {
                    let planes: Vec<Vec<u8>> = group
                        .iter()
                        .map(|&index| {
                            let frame = clip.frame(index);
                            on_white(&bicubic(&frame, size.width as u32, size.height as u32))
                        })
                        .collect();
                    let planes: Vec<&[u8]> = planes.iter().map(Vec::as_slice).collect();
                    let patches = eyes.clips.patches(&planes, size);
                    eyes.sight.look(backend, (&patches, grid), cancel, progress)
                });
                groups.collect()
            }
        }
    }

    /// Reads `tokens`, in whose pictures' places is what was `seen` of them.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn read(
        &mut self,
        backend: &mut Backend,
        tokens: &Tokens,
        seen: &[Seen],
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<TextRows> {
        let features = seen.first().map_or(0, |seen| seen.deepstack.len());
        let (module, parts) = (&self.text.module, &tokens.parts);
        let plan = self
            .plans
            .get_or_build_with(parts.clone(), backend, cancel, progress, |g| {
                text_graph(g, module, parts, features);
            })?;
        plan.set("token_ids", &tokens.text_ids())?;
        set_pictures(plan, seen.iter(), features)?;
        plan.run_with(backend, cancel, progress)?;
        Ok(TextRows {
            hidden: plan.read("hidden")?,
            tags: tokens.tags.clone(),
        })
    }

    /// What reading a prompt of these parts takes beside the weights.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn estimate(&self, backend: &Backend, parts: &[rope::Part]) -> Result<Estimate> {
        let features = self.eyes.as_ref().map_or(0, |eyes| eyes.sight.features());
        Ok(Estimate::of(backend, |g| {
            text_graph(g, &self.text.module, parts, features);
        })?)
    }

    /// What looking at the largest of `subjects` takes beside the vision tower's weights; nothing if there is nothing to see.
    ///
    /// # Errors
    /// [`Error::NoReferences`], [`Error::ClipReferences`], or the engine's.
    pub(crate) fn sight_estimate(
        &self,
        backend: &Backend,
        subjects: &[Outline],
    ) -> Result<Option<Estimate>> {
        let grids = subjects.iter().filter_map(|&subject| match subject {
            Outline::Sound(_) => None,
            Outline::Picture(size) => Some(self.eyes().and_then(|eyes| {
                let size = eyes.picture(size)?;
                Ok(eyes.pictures.grid(size))
            })),
            Outline::Clip { size, frames, .. } => Some(self.eyes().and_then(|eyes| {
                let (seen, _) = seen_of_clip(frames, FRAME_RATE, eyes.clips.frames())?;
                let size = eyes.clip(seen.len(), size)?;
                Ok(eyes.clips.grid(size))
            })),
        });
        let grids: Vec<Size> = grids.collect::<Result<_>>()?;
        let largest = grids.iter().max_by_key(|grid| grid.height * grid.width);
        let estimate = |&grid: &Size| self.eyes()?.sight.estimate(backend, grid);
        largest.map(estimate).transpose()
    }

    /// The vision tower's weights.
    ///
    /// # Errors
    /// [`Error::NoReferences`].
    pub(crate) fn sight_weights(&self) -> Result<&Weights> {
        Ok(self.eyes()?.sight.weights())
    }

    /// Says whether the vision tower's weights pass through its device while it looks.
    pub(crate) fn stream_sight(&mut self, is_streamed: bool) {
        if let Some(eyes) = &mut self.eyes {
            eyes.sight.stream(is_streamed);
        }
    }

    /// Gives up what the vision tower has in memory.
    pub(crate) fn release_sight(&mut self) {
        if let Some(eyes) = &mut self.eyes {
            eyes.sight.release();
        }
    }

    /// Gives up what the text encoder has in memory, unless it lives there.
    pub(crate) fn release(&mut self) {
        if self.text.weights.residence() != Residence::Device {
            self.plans.clear();
            self.text.weights.release();
        }
    }

    /// Gives up the plans of the text encoder, and says whether there were any.
    pub(crate) fn drop_plans(&mut self) -> bool {
        let had_any = !self.plans.is_empty();
        self.plans.clear();
        had_any
    }

    /// Bytes that plans hold for what they compute.
    pub(crate) fn compute_bytes(&self) -> u64 {
        self.plans.compute_bytes()
    }
}

impl Eyes {
    /// The size in which a picture is seen.
    fn picture(&self, size: Size) -> Result<Size> {
        let fitting = self.pictures.fitting(size);
        fitting.ok_or_else(|| unseen(size))
    }

    /// The size in which so many frames of a clip are seen.
    fn clip(&self, frames: usize, size: Size) -> Result<Size> {
        let fitting = self.clips.fitting(frames, size);
        fitting.ok_or_else(|| unseen(size))
    }
}

fn unseen(size: Size) -> Error {
    Error::ClipReferences(format!(
        "the text encoder cannot see {}x{}",
        size.width, size.height
    ))
}

const NO_TOWER: &str = "vision tower to see pictures with";
