//! What to make, with which settings, and what making it took.

use std::time::Duration;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::image::Image;
use crate::noise::Rng;
use crate::preview::PreviewBy;
use crate::qwen_image_2_1::{Condition, RESOLUTIONS, SIZE_MULTIPLE};
use crate::rope::Circular;
use crate::sampler::Sampler;
use crate::schedule::Scheduler;

/// Most pixels along a side: where rotary tables of the reference end.
pub(crate) const LARGEST_SIDE: usize = 16_384;

/// Least pixels along a side of what is decoded at once: below, a tile is hardly more than what its neighbours share.
pub const SMALLEST_TILE: usize = 64;

/// What a checkpoint's author recommends, from the optional file `sd-defaults.json` beside `model_index.json`; where it
/// is silent, the reference pipeline's own defaults.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Defaults {
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Steps.
    pub steps: usize,
    /// Guidance scale; 1 is none.
    pub guidance: f32,
}

impl Default for Defaults {
    fn default() -> Self {
        Defaults {
            width: 1024,
            height: 1024,
            steps: 40,
            guidance: 1.0,
        }
    }
}

impl Defaults {
    /// Pixels that reference pictures are scaled to: those of a square of `resolution` by side, or of a picture.
    pub(crate) fn reference_area(&self, resolution: Option<usize>) -> Result<usize> {
        match resolution {
            Some(side) if RESOLUTIONS.contains(&side) => Ok(side * side),
            Some(side) => Err(Error::Resolution { side }),
            None => Ok(self.width.saturating_mul(self.height)),
        }
    }
}

/// What to make of an encoded prompt.
#[derive(Debug, Clone)]
pub struct Request<'c> {
    pub(crate) condition: &'c Condition,
    pub(crate) negative: Option<&'c Condition>,
    pub(crate) width: Option<usize>,
    pub(crate) height: Option<usize>,
    pub(crate) steps: Option<usize>,
    pub(crate) guidance: Option<f32>,
    pub(crate) sampler: Sampler,
    pub(crate) scheduler: Scheduler,
    pub(crate) step_cache: f32,
    pub(crate) preview: Option<(usize, PreviewBy)>,
    pub(crate) seed: u64,
    pub(crate) rng: Rng,
    pub(crate) circular: Circular,
    pub(crate) vae_tile: Option<usize>,
    pub(crate) keeps_prefix: bool,
}

/// What making a picture took.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct GenerateReport {
    /// Width in pixels, after rounding down to the model's multiple.
    pub width: usize,
    /// Height in pixels, after rounding down to the model's multiple.
    pub height: usize,
    /// Steps that were taken.
    pub steps: usize,
    /// Guidance scale that was used.
    pub guidance: f32,
    /// How the steps were taken.
    pub sampler: Sampler,
    /// How noise levels were laid out: a name as of [`Scheduler::name`].
    pub scheduler: &'static str,
    /// Seed of the starting noise.
    pub seed: u64,
    /// Whose random numbers the seed stands for.
    pub rng: Rng,
    /// How often the sampler asked the model; a guided call, of which there are two of the transformer, is one.
    pub calls: usize,
    /// Of these, how many were left out because their answer would hardly have differed from the last one.
    pub skipped_calls: usize,
    /// Pictures that were shown while the steps were taken.
    pub previews: usize,
    /// Below which estimated change calls were left out; 0 if none were to be.
    pub step_cache: f32,
    /// Sides that join.
    pub circular: Circular,
    /// Pixels along a side of what was decoded at once, as asked for (rounded down to the model's multiple) or as memory
    /// allowed; none if all was.
    pub vae_tile: Option<usize>,
    /// Time for the transformer's calls, the building of their plans included.
    pub denoise: Duration,
    /// Time for the decoder, the building of its plan included.
    pub decode: Duration,
    /// Bytes that weights take.
    pub weight_bytes: u64,
    /// Bytes that plans hold for what they compute.
    pub compute_bytes: u64,
    /// Bytes of the transformer's weights that were moved to the device while it ran, of those that come and go.
    pub streamed_bytes: u64,
    /// The most bytes that keys and values of the conditions took while the steps ran.
    pub prefix_bytes: u64,
    /// How often those of a condition were computed and stored.
    pub prefix_stores: usize,
    /// How often those of a condition were read instead of computed.
    pub prefix_reads: usize,
}

impl<'c> Request<'c> {
    /// A picture of `condition` with the model's default settings and seed 0; where the prompt has reference pictures, as
    /// large as the last of them was scaled to.
    pub fn new(condition: &'c Condition) -> Request<'c> {
        Request {
            condition,
            negative: None,
            width: None,
            height: None,
            steps: None,
            guidance: None,
            sampler: Sampler::default(),
            scheduler: Scheduler::default(),
            step_cache: 0.0,
            preview: None,
            seed: 0,
            rng: Rng::default(),
            circular: Circular::NONE,
            vae_tile: None,
            keeps_prefix: false,
        }
    }

    /// What the picture should not be. Used where guidance is above 1; without it, the empty prompt is, about the same
    /// reference pictures. A negative of one's own should have them too: that is how the model was trained.
    pub fn negative(mut self, condition: &'c Condition) -> Self {
        self.negative = Some(condition);
        self
    }

    /// Width and height in pixels; rounded down to the model's multiple, as its users expect.
    pub fn size(mut self, width: usize, height: usize) -> Self {
        (self.width, self.height) = (Some(width), Some(height));
        self
    }

    /// Number of steps. Ignored by models whose author fixed the schedule, and where noise levels are given exactly.
    pub fn steps(mut self, steps: usize) -> Self {
        self.steps = Some(steps);
        self
    }

    /// How steps are taken. [`Sampler::Euler`] if not called, as in the reference.
    pub fn sampler(mut self, sampler: Sampler) -> Self {
        self.sampler = sampler;
        self
    }

    /// How noise levels are laid out: the model's own if not called. Where the model's author fixed them, only exact ones
    /// take their place.
    pub fn scheduler(mut self, scheduler: Scheduler) -> Self {
        self.scheduler = scheduler;
        self
    }

    /// Classifier-free guidance: how far to go beyond the condition, away from the negative. 1 is none.
    pub fn guidance(mut self, guidance: f32) -> Self {
        self.guidance = Some(guidance);
        self
    }

    /// Joins sides of the picture: laid beside itself it shows no seam there. Nothing else is asked of the prompt; the
    /// model itself sees the picture as continued.
    pub fn circular(mut self, circular: Circular) -> Self {
        self.circular = circular;
        self
    }

    /// Decodes the picture in overlapping squares of so many pixels, rounded down to the model's multiple, at least 64.
    /// Takes less memory and more time, and changes the picture a little. A square as large as the picture is the whole
    /// picture. Without it, squares are chosen where memory does not suffice for the whole, and only there.
    pub fn vae_tile(mut self, pixels: usize) -> Self {
        self.vae_tile = Some(pixels);
        self
    }

    /// Keeps the keys and values of the conditions with them when the steps are over, so that further pictures of the same
    /// prompt need not compute them again; they take memory until the condition is dropped or
    /// [releases](Condition::release_prefix) them, or memory runs out. Otherwise they are gone behind the last step.
    pub fn keep_prefix(mut self, keeps: bool) -> Self {
        self.keeps_prefix = keeps;
        self
    }

    /// Leaves out calls of the model whose answer is estimated to differ from the last one by less than this part of it,
    /// summed over the calls left out one after the other; the last answer is taken instead. Saves time and changes the
    /// picture. Never the first and the last calls. 0, as if not called, leaves out none.
    pub fn step_cache(mut self, threshold: f32) -> Self {
        self.step_cache = threshold;
        self
    }

    /// Shows what is made so far behind every so many steps but the last, as
    /// [`Progress::Preview`](sd_graph::Progress::Preview): the picture that the model predicts in the latents. 0 shows none.
    ///
    /// What has no room for it is not shown, with a warning; the picture is made all the same.
    pub fn preview(mut self, every: usize, by: PreviewBy) -> Self {
        self.preview = (every > 0).then_some((every, by));
        self
    }

    /// Whose random numbers the seed stands for: PyTorch's on a processor if not called.
    pub fn rng(mut self, rng: Rng) -> Self {
        self.rng = rng;
        self
    }

    /// Seed of the starting noise. Of PyTorch's on a processor only the lower 32 bits matter.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }
}

/// A size as the model can make it: sides rounded down to its multiple, with a warning.
pub(crate) fn rounded((width, height): (usize, usize)) -> Result<(usize, usize)> {
    let possible = SIZE_MULTIPLE..=LARGEST_SIDE;
    if !possible.contains(&width) || !possible.contains(&height) {
        return Err(Error::Size {
            width,
            height,
            limit: LARGEST_SIDE,
        });
    }
    let round = |side: usize| side / SIZE_MULTIPLE * SIZE_MULTIPLE;
    let size = (round(width), round(height));
    if size != (width, height) {
        tracing::warn!(
            "{width}x{height} is rounded down to {}x{}: sides are multiples of {SIZE_MULTIPLE} pixels",
            size.0,
            size.1
        );
    }
    Ok(size)
}

/// Writes beside the pixels what they were made from, in the form that other tools read.
pub(crate) fn describe(image: &mut Image, request: &Request<'_>, report: &GenerateReport) {
    let negative = request.negative.map_or("", |negative| negative.prompt());
    let mut parameters = request.condition.prompt().to_owned();
    if report.guidance > 1.0 {
        parameters.push_str(&format!("\nNegative prompt: {negative}"));
    }
    parameters.push_str(&format!(
        "\nSteps: {}, Sampler: {}, CFG scale: {}, Seed: {}, Size: {}x{}, Model: Qwen-Image 2.1",
        report.steps,
        report.sampler.title(),
        report.guidance,
        report.seed,
        report.width,
        report.height
    ));
    let references = request.condition.references();
    if !references.is_empty() {
        let sizes = references.sizes();
        let sizes: Vec<String> = sizes.map(|(w, h)| format!("{w}x{h}")).collect();
        parameters.push_str(&format!(", References: {}", sizes.join(" ")));
    }
    if request.scheduler != Scheduler::Model {
        parameters.push_str(&format!(", Schedule type: {}", request.scheduler.title()));
    }
    if report.step_cache > 0.0 {
        parameters.push_str(&format!(", Step cache: {}", report.step_cache));
    }
    if report.rng != Rng::default() {
        parameters.push_str(&format!(", RNG: {}", report.rng));
    }
    if report.circular.any() {
        parameters.push_str(&format!(", Circular: {}", report.circular));
    }
    image.add_text("parameters", parameters);
    image.add_text("Software", concat!("sd ", env!("CARGO_PKG_VERSION")));
}
