//! What clip to make, with which settings, and what making it took.

use std::time::Duration;

use serde::Deserialize;

use super::diffusion::Task;
use super::parts::Settings;
use super::references::Reference;
use super::schedule::Schedule;
use super::sizes::{Adjustment, Extent, USUAL_FRAMES};
use crate::error::{Error, Result};
use crate::image::Image;
use crate::noise::Rng;
use crate::rope::{H3Keyframe, Size};

/// What a checkpoint's author recommends for clips, from the optional file `sd-defaults.json` beside the index of a folder; where
/// it is silent, what the published model makes.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VideoDefaults {
    /// Width in pixels; by the aspect of the first keyframe, or 16 to 9, if there is none.
    pub width: Option<usize>,
    /// Height in pixels.
    pub height: Option<usize>,
    /// Frames.
    pub frames: usize,
    /// Noise levels, the last of which is none: the transformer is asked once less.
    pub steps: usize,
}

impl Default for VideoDefaults {
    fn default() -> VideoDefaults {
        VideoDefaults {
            width: None,
            height: None,
            frames: USUAL_FRAMES,
            steps: 50,
        }
    }
}

/// Why a clip cannot have both.
pub(super) const NOT_TOGETHER: &str =
    "keyframes and references cannot be had together: they are for two transformers";

/// A clip to make: a prompt, and keyframes or references.
#[derive(Debug, Clone)]
pub struct VideoRequest {
    pub(super) prompt: String,
    pub(super) size: Option<(usize, usize)>,
    pub(super) frames: Option<usize>,
    pub(super) steps: Option<usize>,
    pub(super) shift: Option<f32>,
    pub(super) sound_shift: Option<f32>,
    pub(super) seed: u64,
    pub(super) rng: Rng,
    pub(super) first: Option<Image>,
    pub(super) last: Option<Image>,
    pub(super) references: Vec<Reference>,
}

impl VideoRequest {
    /// A clip of `prompt` with the model's default settings and seed 0. The model knows no guidance and no negative prompt.
    pub fn new(prompt: impl Into<String>) -> VideoRequest {
        VideoRequest {
            prompt: prompt.into(),
            size: None,
            frames: None,
            steps: None,
            shift: None,
            sound_shift: None,
            seed: 0,
            rng: Rng::default(),
            first: None,
            last: None,
            references: Vec::new(),
        }
    }

    /// Width and height in pixels, which go to the nearest multiples of 32. If not called: as the checkpoint's author says, or
    /// with the aspect of the first keyframe, or 16 to 9, and about 768 pixels along the shorter side.
    pub fn size(mut self, width: usize, height: usize) -> Self {
        self.size = Some((width, height));
        self
    }

    /// Frames, 24 a second, of which the next 17 n + 5 are made: 124 if not called.
    pub fn frames(mut self, frames: usize) -> Self {
        self.frames = Some(frames);
        self
    }

    /// Noise levels from noise to none, as the reference counts them: the transformer is asked once less. 2 at least.
    pub fn steps(mut self, steps: usize) -> Self {
        self.steps = Some(steps);
        self
    }

    /// How much of the steps is spent where there is much noise, of the pictures: what the checkpoint says if not called.
    pub fn shift(mut self, shift: f32) -> Self {
        self.shift = Some(shift);
        self
    }

    /// As [`VideoRequest::shift`], of the sound.
    pub fn sound_shift(mut self, shift: f32) -> Self {
        self.sound_shift = Some(shift);
        self
    }

    /// Seed of all noise. Of PyTorch's on a processor only the lower 32 bits matter.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Whose random numbers the seed stands for: PyTorch's on a processor if not called.
    pub fn rng(mut self, rng: Rng) -> Self {
        self.rng = rng;
        self
    }

    /// The picture that the clip begins with: `<Picture 1>` in the prompt. It is stretched to the clip's size, which is of its
    /// aspect unless said otherwise.
    pub fn first_frame(mut self, image: Image) -> Self {
        self.first = Some(image);
        self
    }

    /// The picture that the clip ends with. Beside a first one it is `<Picture 2>` and cut to the clip's aspect; alone it is
    /// treated as that.
    pub fn last_frame(mut self, image: Image) -> Self {
        self.last = Some(image);
        self
    }

    /// Adds something that the clip refers to, behind what is there. Keyframes cannot be had with it.
    pub fn reference(mut self, reference: Reference) -> Self {
        self.references.push(reference);
        self
    }

    /// Keyframes in their order.
    pub(super) fn keyframes(&self) -> impl Iterator<Item = &Image> + Clone {
        self.first.iter().chain(&self.last)
    }

    /// What is made, and what that changes of what was asked for.
    ///
    /// # Errors
    /// [`Error::Aspect`], [`Error::Size`], [`Error::Frames`].
    pub(super) fn extent(&self, settings: &Settings) -> Result<(Extent, Vec<Adjustment>)> {
        let (defaults, rule) = (&settings.defaults, &settings.rule);
        let frame = self.keyframes().next();
        let size = match (self.size, frame, defaults.width.zip(defaults.height)) {
            (Some(size), ..) | (None, None, Some(size)) => size,
            (None, Some(frame), _) => {
                let like = Size::new(frame.height() as usize, frame.width() as usize);
                let canvas = rule.canvas(like)?;
                (canvas.width, canvas.height)
            }
            (None, None, None) => {
                let canvas = rule.usual()?;
                (canvas.width, canvas.height)
            }
        };
        Extent::nearest(size, self.frames.unwrap_or(defaults.frames))
    }

    /// The noise levels of pictures and of sound.
    ///
    /// # Errors
    /// [`Error::Steps`], [`Error::Shift`].
    pub(super) fn schedules(&self, settings: &Settings) -> Result<[Schedule; 2]> {
        let points = self.steps.unwrap_or(settings.defaults.steps);
        let schedule = |shift: Option<f32>, usual: f32| {
            let shift = shift.unwrap_or(usual);
            match shift > 0.0 && shift.is_finite() {
                true => Schedule::new(shift, points),
                false => Err(Error::Shift(shift)),
            }
        };
        Ok([
            schedule(self.shift, settings.shifts.video)?,
            schedule(self.sound_shift, settings.shifts.sound)?,
        ])
    }

    /// What the transformer is shown, for a clip that begins or ends with pictures.
    pub(super) fn anchors(&self) -> Vec<H3Keyframe> {
        let first = self.first.iter().map(|_| H3Keyframe::First);
        first
            .chain(self.last.iter().map(|_| H3Keyframe::Last))
            .collect()
    }

    /// Which transformer it is for.
    pub(super) fn task(&self) -> Task {
        match self.references.is_empty() {
            true => Task::Prompt,
            false => Task::References,
        }
    }

    /// Refuses what cannot be had together.
    ///
    /// # Errors
    /// [`Error::ClipReferences`].
    pub(super) fn check(&self) -> Result<()> {
        if !self.references.is_empty() && self.keyframes().next().is_some() {
            return Err(Error::ClipReferences(NOT_TOGETHER.to_owned()));
        }
        super::references::check(&self.references)
    }
}

/// What making a clip took.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct VideoReport {
    /// What was changed of what was asked for.
    pub adjustments: Vec<Adjustment>,
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Frames.
    pub frames: usize,
    /// Noise levels.
    pub steps: usize,
    /// How often the transformer was asked.
    pub calls: usize,
    /// Seed of all noise.
    pub seed: u64,
    /// Whose random numbers the seed stands for.
    pub rng: Rng,
    /// Rows of text that the transformer was given: the prompt with all that it speaks of.
    pub text_rows: usize,
    /// Time to read prompt, keyframes and references.
    pub encode: Duration,
    /// Time for the transformer's calls, the building of their plan included.
    pub denoise: Duration,
    /// Time to make frames and sound of latents.
    pub decode: Duration,
    /// Bytes of the transformer's weights that were moved to the device while it ran, of those that come and go.
    pub streamed_bytes: u64,
}
