//! From a folder and a prompt to a picture. The only place that asks which model a folder holds.

use std::time::{Duration, Instant};

use sd_backend::{Component, Device, MemoryReport, Seat};
use sd_graph::{Cancel, LoadReport, Progress, Reporter};

use crate::builder::{MAIN, PipelineBuilder};
use crate::denoising::{Denoising, Previewing, Took};
use crate::error::{Error, Result};
use crate::image::Image;
use crate::lora::LoraReport;
use crate::model_files::ModelFiles;
use crate::model_index::{ModelIndex, SUPPORTED};
use crate::preview::PreviewBy;
use crate::qwen_image_2_1::{Canvas, Condition, ModelIdentity, QwenImage21, References};
use crate::request::{
    Defaults, GenerateReport, LARGEST_SIDE, Request, SMALLEST_TILE, describe, rounded,
};
use crate::schedule::Scheduler;
use crate::seating::{Backends, DeviceNeed, Seating, Wishes};
use crate::step_cache::StepCache;

/// A loaded model with a device to run on: encodes prompts and makes pictures.
///
/// A pipeline may be sent to another thread; making a picture takes it exclusively.
///
/// ```no_run
/// use sd_models::{Pipeline, Request};
///
/// # fn main() -> Result<(), sd_models::Error> {
/// let mut pipeline = Pipeline::open("models/tiny-qwen-image-2.1")?.device("auto").load()?;
/// let condition = pipeline.encode("a large red circle on a blue background")?;
/// for seed in 0..4 {
///     // Keys and values of the prompt are computed for the first picture and kept with the condition for the others.
///     let request = Request::new(&condition).size(128, 128).steps(20).seed(seed).keep_prefix(true);
///     let (image, _) = pipeline.generate(&request, &mut |_: &sd_graph::Progress| {})?;
///     image.save(format!("circle-{seed}.png"))?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Pipeline {
    pub(crate) model: QwenImage21,
    pub(crate) backends: Backends,
    pub(crate) wishes: Wishes,
    pub(crate) seating: Seating,
    pub(crate) defaults: Defaults,
    pub(crate) loaded: LoadReport,
    pub(crate) cancel: Cancel,
    /// The empty prompt, which guidance leads away from where nothing else is said.
    pub(crate) empty: Option<Condition>,
}

impl Pipeline {
    /// Looks at a model: the path of a folder in the diffusers layout or of a file with all parts, or [`ModelFiles`], which say where
    /// single parts are. Files of weights are looked at when it is planned or loaded.
    ///
    /// # Errors
    /// [`Error::Missing`] if it is no such folder, [`Error::UnsupportedModel`], [`Error::Config`].
    pub fn open(files: impl Into<ModelFiles>) -> Result<PipelineBuilder> {
        let files = files.into();
        let folder = files.model.as_deref().filter(|path| !path.is_file());
        let index = folder.map(ModelIndex::read).transpose()?;
        if let Some(index) = index.filter(|index| !index.is_supported()) {
            return Err(Error::UnsupportedModel {
                path: files.label().join("model_index.json"),
                class: index.class_name().to_owned(),
                supported: SUPPORTED,
            });
        }
        Ok(PipelineBuilder::new(files))
    }

    /// Encodes a prompt. The result may be kept and used for any number of pictures.
    ///
    /// # Errors
    /// [`Error::Prompt`], or the engine's.
    pub fn encode(&mut self, prompt: &str) -> Result<Condition> {
        self.encode_with(prompt, &References::none())
    }

    /// Makes a picture.
    ///
    /// # Errors
    /// [`Error::Size`], [`Error::Tile`], [`Error::Steps`], [`Error::Sigma`], [`Error::FixedSchedule`], [`Error::Guidance`],
    /// [`Error::StepCache`], [`Error::NotFinite`], or the engine's. Afterwards the pipeline can be used again.
    pub fn generate(
        &mut self,
        request: &Request<'_>,
        progress: &mut dyn Reporter,
    ) -> Result<(Image, GenerateReport)> {
        let plan = self.resolve(request)?;
        let scale = self.model.scale_factor();
        let canvas = Canvas::from((plan.height / scale, plan.width / scale))
            .circular(plan.circular)
            .tile(plan.vae_tile.map(|tile| tile / scale));
        let schedule = self
            .model
            .schedule_as(&request.scheduler, plan.steps, canvas.tokens())?;
        let negative = if plan.guidance > 1.0 {
            Some(self.negative(request)?)
        } else {
            None
        };
        // A picture that cannot be decoded is refused before minutes go into its latents.
        let saves = plan.sampler.calls(schedule.steps()) > 1 || request.keeps_prefix;
        let mut canvas = self.make_room(request, negative.as_ref(), canvas, saves, progress)?;
        let kept = self.seating.prefix.filter(|prefix| prefix.fits);
        let release = (!request.keeps_prefix).then(|| Release {
            model: self.model.identity(),
            conditions: [request.condition]
                .into_iter()
                .chain(negative.as_ref())
                .cloned()
                .collect(),
        });

        let preview = self.prepare_preview(request, canvas)?;
        let started = Instant::now();
        let idle = self.neighbours(Component::Diffusion);
        let (latents, took) = self.with_retry(Component::Diffusion, |pipeline| {
            pipeline.with_part(
                Component::Diffusion,
                progress,
                |model, backend, cancel, progress| {
                    progress.report(&Progress::Stage("denoise"));
                    let mut run = Denoising {
                        model,
                        backend,
                        cancel,
                        canvas,
                        prefix: kept.map(|prefix| prefix.dtype),
                        idle: &idle,
                        preview: preview.clone(),
                        took: Took::default(),
                    };
                    let latents = run.denoise(
                        request.condition,
                        negative.as_ref(),
                        &plan,
                        &schedule,
                        progress,
                    )?;
                    Ok((latents, run.took))
                },
            )
        })?;
        // The decoder needs the room.
        drop(release);
        let denoise = started.elapsed();

        let started = Instant::now();
        let planes = loop {
            let outcome = self.with_retry(Component::Vae, |pipeline| {
                pipeline.with_part(
                    Component::Vae,
                    progress,
                    |model, backend, cancel, progress| {
                        progress.report(&Progress::Stage("decode"));
                        model.decode(backend, &latents, canvas, cancel)
                    },
                )
            });
            let smaller = canvas.halved().filter(|_| plan.vae_tile.is_none());
            match (outcome, smaller) {
                (Err(error), Some(smaller)) if error.is_out_of_memory() => {
                    tracing::warn!("{error}; decoding in smaller squares");
                    canvas = smaller;
                }
                (outcome, _) => break outcome?,
            }
        };
        let mut image =
            Image::from_planes(&planes, plan.width, plan.height).ok_or(Error::Size {
                width: plan.width,
                height: plan.height,
                limit: LARGEST_SIDE,
            })?;
        let report = GenerateReport {
            steps: schedule.steps(),
            denoise,
            decode: started.elapsed(),
            weight_bytes: self.loaded.bytes,
            compute_bytes: self.model.compute_bytes(),
            streamed_bytes: took.streamed_bytes,
            prefix_bytes: took.prefix_bytes,
            prefix_stores: took.stores,
            prefix_reads: took.reads,
            vae_tile: canvas.tile.map(|tile| tile * scale),
            calls: took.calls,
            skipped_calls: took.skipped,
            previews: took.previews,
            ..plan
        };
        describe(&mut image, request, &report);
        Ok((image, report))
    }

    /// What previews of `request` take, made ready; nothing if there are to be none, or if there is no room for them.
    fn prepare_preview(
        &mut self,
        request: &Request<'_>,
        canvas: Canvas,
    ) -> Result<Option<Previewing>> {
        let Some((every, by)) = request.preview else {
            return Ok(None);
        };
        if by == PreviewBy::Linear {
            let fitted = self.with_retry(Component::Vae, |pipeline| {
                let quiet = &mut |_: &Progress| {};
                pipeline.with_part(Component::Vae, quiet, |model, backend, cancel, _| {
                    model.fit_preview(backend, cancel)
                })
            });
            match fitted {
                Err(error) if error.is_cancelled() => return Err(error),
                Err(error) => {
                    tracing::warn!("{error}; there are no previews");
                    return Ok(None);
                }
                Ok(()) => {}
            }
        }
        Ok(Some(Previewing {
            every,
            by,
            canvas,
            device: self.device_of(Component::Vae),
            options: self.backends.options().clone(),
        }))
    }

    /// Memory of the device that runs the steps: what it says, what was granted, what is held.
    pub fn memory(&self) -> MemoryReport {
        self.backends.ledger().report(self.device())
    }

    /// Where the parts are, and why.
    pub fn seats(&self) -> &[Seat] {
        &self.seating.seats
    }

    /// What each device has to hold, the one that runs the steps first.
    pub fn devices(&self) -> &[DeviceNeed] {
        &self.seating.devices
    }

    /// What the checkpoint's author recommends.
    pub fn defaults(&self) -> Defaults {
        self.defaults
    }

    /// The device that runs the steps.
    pub fn device(&self) -> Device {
        self.device_of(MAIN)
    }

    /// Threads that compute on the device that runs the steps; 1 where that is not the processor.
    pub fn threads(&self) -> usize {
        self.backends.threads(self.device())
    }

    pub(crate) fn device_of(&self, component: Component) -> Device {
        // Every component has a seat.
        let first = self.seating.devices[0].device;
        self.seating.device(component).unwrap_or(first)
    }

    /// What became of each LoRA.
    pub fn loras(&self) -> &[LoraReport] {
        self.model.loras()
    }

    /// What loading did.
    pub fn loaded(&self) -> LoadReport {
        self.loaded
    }

    /// Uses `cancel` to stop encoding and making pictures from now on.
    pub fn set_cancel(&mut self, cancel: Cancel) {
        self.cancel = cancel;
    }

    /// Fills in what the request leaves open and refuses what cannot be made.
    fn resolve(&self, request: &Request<'_>) -> Result<GenerateReport> {
        let last = request.condition.references().sizes().last();
        let default = last.unwrap_or((self.defaults.width, self.defaults.height));
        let (width, height) = (
            request.width.unwrap_or(default.0),
            request.height.unwrap_or(default.1),
        );
        let (width, height) = rounded((width, height))?;
        let steps = match &request.scheduler {
            Scheduler::Exact(levels) => levels.len(),
            _ => {
                let fixed = self.model.fixed_steps().or(request.steps);
                fixed.unwrap_or(self.defaults.steps)
            }
        };
        let guidance = request.guidance.unwrap_or(self.defaults.guidance);
        if !(guidance.is_finite() && guidance >= 1.0) {
            return Err(Error::Guidance(guidance));
        }
        StepCache::check(request.step_cache)?;
        let multiple = self.model.scale_factor();
        let vae_tile = request.vae_tile.map(|tile| tile / multiple * multiple);
        if let Some(tile) = request.vae_tile.filter(|&tile| tile < SMALLEST_TILE) {
            return Err(Error::Tile(tile));
        }
        Ok(GenerateReport {
            width,
            height,
            steps,
            guidance,
            sampler: request.sampler,
            scheduler: request.scheduler.name(),
            seed: request.seed,
            rng: request.rng,
            calls: 0,
            skipped_calls: 0,
            previews: 0,
            step_cache: request.step_cache,
            circular: request.circular,
            vae_tile,
            denoise: Duration::ZERO,
            decode: Duration::ZERO,
            weight_bytes: 0,
            compute_bytes: 0,
            streamed_bytes: 0,
            prefix_bytes: 0,
            prefix_stores: 0,
            prefix_reads: 0,
        })
    }

    /// The negative condition of a guided run; without one the empty prompt's, about the same reference pictures.
    fn negative(&mut self, request: &Request<'_>) -> Result<Condition> {
        if let Some(negative) = request.negative {
            return Ok(negative.clone());
        }
        let references = request.condition.references();
        let kept = self.empty.take();
        let empty = match kept.filter(|empty| empty.references().is(references)) {
            Some(empty) => empty,
            None => self.encode_with("", references)?,
        };
        Ok(self.empty.insert(empty).clone())
    }
}

/// Gives up what was kept of conditions when the steps are over, however they end.
struct Release {
    model: ModelIdentity,
    conditions: Vec<Condition>,
}

impl Drop for Release {
    fn drop(&mut self) {
        for condition in &self.conditions {
            condition.prefixes.release(Some(&self.model));
        }
    }
}
