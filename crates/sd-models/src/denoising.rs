//! The loop over the steps of a schedule, from noise to latents.

use sd_backend::{Backend, BackendOptions, Component, DType, Device};
use sd_graph::{Cancel, Progress, Relief, Reporter, with_relief};

use crate::error::{Error, Result};
use crate::image::Image;
use crate::preview::PreviewBy;
use crate::qwen_image_2_1::{Canvas, Condition, QwenImage21, Step};
use crate::request::GenerateReport;
use crate::sampler::predicted;
use crate::schedule::Schedule;
use crate::step_cache::StepCache;

/// The loop over the steps of a schedule.
pub(crate) struct Denoising<'r> {
    pub model: &'r mut QwenImage21,
    pub backend: &'r mut Backend,
    pub cancel: &'r Cancel,
    pub canvas: Canvas,
    /// The type in which keys and values of the conditions are kept, as long as they are.
    pub prefix: Option<DType>,
    /// Other parts on this device.
    pub idle: &'r [Component],
    pub preview: Option<Previewing>,
    pub took: Took,
}

/// How what is made so far is shown.
#[derive(Debug, Clone)]
pub(crate) struct Previewing {
    /// Behind so many steps each.
    pub every: usize,
    pub by: PreviewBy,
    /// As the picture is decoded.
    pub canvas: Canvas,
    /// The decoder's, and how work is done on it.
    pub device: Device,
    pub options: BackendOptions,
}

/// What the steps took.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Took {
    pub streamed_bytes: u64,
    pub prefix_bytes: u64,
    pub calls: usize,
    /// Of the calls, those that were left out.
    pub skipped: usize,
    pub previews: usize,
    pub stores: usize,
    pub reads: usize,
}

impl Relief for Denoising<'_> {
    fn release_plans(&mut self) -> bool {
        self.model.drop_plans()
    }

    fn evict_weights(&mut self) -> bool {
        evict(self.model, self.idle)
    }

    fn drop_caches(&mut self) -> bool {
        let was_kept = self.prefix.take().is_some();
        if was_kept {
            tracing::warn!(
                "too little memory to keep keys and values of the prompt; they are computed at every step of this picture"
            );
        }
        self.model.drop_prefixes() || was_kept
    }
}

/// Takes the weights of `parts` out of memory, and says whether any were there.
pub(crate) fn evict(model: &mut QwenImage21, parts: &[Component]) -> bool {
    let mut had_any = false;
    for &part in parts {
        had_any |= model.weights(part).device_bytes() > 0;
        model.evict(part);
    }
    had_any
}

impl Denoising<'_> {
    /// From noise to latents `[tokens, channels]`.
    pub(crate) fn denoise(
        &mut self,
        condition: &Condition,
        negative: Option<&Condition>,
        plan: &GenerateReport,
        schedule: &Schedule,
        progress: &mut dyn Reporter,
    ) -> Result<Vec<f32>> {
        let (tokens, channels) = (self.canvas.tokens(), self.model.latent_channels());
        let planes = plan.rng.normal(plan.seed, tokens * channels);
        let mut latents = tokens_first(&planes, tokens);
        let conditions: Vec<&Condition> = [condition].into_iter().chain(negative).collect();
        let mut sampling = plan.sampler.start(schedule);
        let calls = plan.sampler.calls(schedule.steps());
        let mut cache = StepCache::new(plan.step_cache, calls, conditions.len());
        while !sampling.is_done() {
            self.cancel.check().map_err(sd_graph::Error::from)?;
            let step = sampling.step() + 1;
            let timestep = schedule.timestep(sampling.level()) / 1000.0;
            let mut velocities = match cache.guess(&latents) {
                Some(velocities) => {
                    self.took.skipped += 1;
                    velocities
                }
                None => {
                    let velocities = self.velocities(&conditions, &latents, timestep, progress)?;
                    cache.learn(&latents, &velocities);
                    velocities
                }
            };
            if let (Some(negative), Some(velocity)) = (
                negative.and_then(|_| velocities.pop()),
                velocities.first_mut(),
            ) {
                guide(velocity, &negative, plan.guidance);
            }
            let velocity = velocities.pop().unwrap_or_default();
            self.took.calls += 1;
            let shown = self.preview.as_ref();
            let shown = shown
                .filter(|preview| step.is_multiple_of(preview.every))
                .map(|_| predicted(&latents, &velocity, sampling.sigma()));
            sampling.advance(&mut latents, &velocity);
            if !latents.iter().all(|value| value.is_finite()) {
                return Err(Error::NotFinite { step });
            }
            progress.report(&Progress::Step {
                done: sampling.calls(),
                total: calls,
            });
            // Not in the middle of a step, and not the picture itself.
            let is_between = sampling.step() == step && !sampling.is_done();
            if let Some(shown) = shown.filter(|_| is_between) {
                self.show(&shown, (step, schedule.steps()), progress)?;
            }
        }
        Ok(latents)
    }

    /// Shows latents `[tokens, channels]`. Whatever is in the way of it, but for a cancelled run, is only a warning, and the
    /// end of previews.
    fn show(
        &mut self,
        latents: &[f32],
        (step, steps): (usize, usize),
        progress: &mut dyn Reporter,
    ) -> Result<()> {
        let Some(preview) = self.preview.take() else {
            return Ok(());
        };
        let scale = match preview.by {
            PreviewBy::Linear => 1,
            PreviewBy::Decoder => self.model.scale_factor(),
        };
        let planes = match preview.by {
            PreviewBy::Linear => Ok(self.model.small_picture(latents)),
            PreviewBy::Decoder if preview.device == self.backend.device() => self
                .model
                .decode_between(self.backend, latents, preview.canvas, self.cancel)
                .map(Some),
            PreviewBy::Decoder => Backend::new(preview.device, &preview.options)
                .map_err(Error::from)
                .and_then(|mut backend| {
                    let backend = &mut backend;
                    self.model
                        .decode_between(backend, latents, preview.canvas, self.cancel)
                })
                .map(Some),
        };
        let (height, width) = (preview.canvas.height * scale, preview.canvas.width * scale);
        let image = match planes {
            Err(error) if error.is_cancelled() => return Err(error),
            Err(error) => {
                tracing::warn!("{error}; there are no more previews");
                return Ok(());
            }
            Ok(planes) => planes.and_then(|planes| Image::from_planes(&planes, width, height)),
        };
        if let Some(image) = image {
            progress.report(&Progress::Preview {
                step,
                steps,
                width,
                height,
                rgba: image.pixels().as_raw().clone(),
            });
            self.took.previews += 1;
            self.preview = Some(preview);
        }
        Ok(())
    }

    /// One call for each condition. If memory runs out, once more without what is kept between steps.
    fn velocities(
        &mut self,
        conditions: &[&Condition],
        latents: &[f32],
        timestep: f32,
        progress: &mut dyn Reporter,
    ) -> Result<Vec<Vec<f32>>> {
        let (velocities, report) = with_relief(self, |run| {
            let step = Step {
                canvas: run.canvas,
                timestep,
                prefix: run.prefix,
            };
            let cancel = run.cancel;
            run.model
                .velocities(run.backend, conditions, latents, step, cancel, progress)
        })?;
        if report.is_incomplete {
            self.prefix = None;
            tracing::warn!(
                "keys and values of the prompt were not stored as a whole; they are computed at every step"
            );
        }
        let device = self.backend.device();
        let kept = conditions
            .iter()
            .map(|condition| condition.prefix_bytes(device));
        self.took.prefix_bytes = self.took.prefix_bytes.max(kept.sum());
        self.took.streamed_bytes += report.weight_bytes;
        self.took.stores += report.stored;
        self.took.reads += report.read;
        Ok(velocities)
    }
}

/// Planes `[channels, tokens]` as `[tokens, channels]`: noise is drawn plane by plane, as the reference does.
fn tokens_first(planes: &[f32], tokens: usize) -> Vec<f32> {
    let channels = planes.len() / tokens.max(1);
    (0..tokens)
        .flat_map(|token| (0..channels).map(move |channel| planes[channel * tokens + token]))
        .collect()
}

/// `velocity = negative + guidance * (velocity - negative)`.
fn guide(velocity: &mut [f32], negative: &[f32], guidance: f32) {
    for (velocity, negative) in velocity.iter_mut().zip(negative) {
        *velocity = negative + guidance * (*velocity - negative);
    }
}
