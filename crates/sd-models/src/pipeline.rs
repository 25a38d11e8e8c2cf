//! From a folder and a prompt to a picture. The only place that asks which model a folder holds.

use std::path::Path;
use std::time::{Duration, Instant};

use sd_backend::{Backend, BackendOptions, Device, MemoryReport};
use sd_graph::{Cancel, LoadOptions, LoadReport, Progress, Reporter};

use crate::builder::PipelineBuilder;
use crate::error::{Error, Result};
use crate::image::Image;
use crate::model_index::{ModelIndex, SUPPORTED};
use crate::noise;
use crate::qwen_image_2_1::{Condition, QwenImage21};
use crate::request::{Defaults, GenerateReport, LARGEST_SIDE, Request, describe, rounded};
use crate::schedule::Schedule;

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
///     let request = Request::new(&condition).size(128, 128).steps(20).seed(seed);
///     let (image, _) = pipeline.generate(&request, &mut |_: &sd_graph::Progress| {})?;
///     image.save(format!("circle-{seed}.png"))?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Pipeline {
    pub(crate) model: QwenImage21,
    pub(crate) backend: Backend,
    pub(crate) defaults: Defaults,
    pub(crate) loaded: LoadReport,
    pub(crate) cancel: Cancel,
}

impl Pipeline {
    /// Looks at a model folder in the diffusers layout and decides what it holds.
    ///
    /// # Errors
    /// [`Error::Missing`] if it is no such folder, [`Error::UnsupportedModel`], [`Error::Config`].
    pub fn open(folder: impl AsRef<Path>) -> Result<PipelineBuilder> {
        let folder = folder.as_ref();
        let index = ModelIndex::read(folder)?;
        if !index.is_supported() {
            return Err(Error::UnsupportedModel {
                path: folder.join("model_index.json"),
                class: index.class_name().to_owned(),
                supported: SUPPORTED,
            });
        }
        Ok(PipelineBuilder {
            folder: folder.to_owned(),
            device: "auto".to_owned(),
            backend: BackendOptions::default(),
            load: LoadOptions::default(),
        })
    }

    /// Encodes a prompt. The result may be kept and used for any number of pictures.
    ///
    /// # Errors
    /// [`Error::Prompt`], or the engine's.
    pub fn encode(&mut self, prompt: &str) -> Result<Condition> {
        self.model.encode(&mut self.backend, prompt, &self.cancel)
    }

    /// Makes a picture.
    ///
    /// # Errors
    /// [`Error::Size`], [`Error::Steps`], [`Error::Guidance`], [`Error::NotFinite`], or the engine's. Afterwards the
    /// pipeline can be used again.
    pub fn generate(
        &mut self,
        request: &Request<'_>,
        progress: &mut dyn Reporter,
    ) -> Result<(Image, GenerateReport)> {
        let plan = self.resolve(request)?;
        let scale = self.model.scale_factor();
        let size = (plan.height / scale, plan.width / scale);
        let schedule = self.model.schedule(plan.steps, size.0 * size.1)?;
        let negative = if plan.guidance > 1.0 {
            Some(self.negative(request)?)
        } else {
            None
        };
        // A picture that cannot be decoded is refused before minutes go into its latents.
        self.check_memory(request, negative.as_ref(), size)?;

        let started = Instant::now();
        let latents = self.with_retry(|pipeline| {
            progress.report(&Progress::Stage("denoise"));
            pipeline.denoise(
                request.condition,
                negative.as_ref(),
                &plan,
                &schedule,
                size,
                progress,
            )
        })?;
        let denoise = started.elapsed();

        let started = Instant::now();
        let planes = self.with_retry(|pipeline| {
            progress.report(&Progress::Stage("decode"));
            pipeline
                .model
                .decode(&mut pipeline.backend, &latents, size, &pipeline.cancel)
        })?;
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
            ..plan
        };
        describe(&mut image, request, &report);
        Ok((image, report))
    }

    /// From noise to latents `[tokens, channels]`.
    fn denoise(
        &mut self,
        condition: &Condition,
        negative: Option<&Condition>,
        plan: &GenerateReport,
        schedule: &Schedule,
        size: (usize, usize),
        progress: &mut dyn Reporter,
    ) -> Result<Vec<f32>> {
        let mut latents =
            starting_latents(plan.seed, size.0 * size.1, self.model.latent_channels());
        for step in 0..schedule.steps() {
            self.cancel.check().map_err(sd_graph::Error::from)?;
            let timestep = schedule.timestep(step) / 1000.0;
            let (model, backend, cancel) = (&mut self.model, &mut self.backend, &self.cancel);
            let mut call = |condition: &Condition| {
                model.velocity(backend, condition, &latents, size, timestep, cancel)
            };
            let mut velocity = call(condition)?;
            if let Some(negative) = negative {
                guide(&mut velocity, &call(negative)?, plan.guidance);
            }
            schedule.euler_step(step, &mut latents, &velocity);
            if !latents.iter().all(|value| value.is_finite()) {
                return Err(Error::NotFinite { step: step + 1 });
            }
            progress.report(&Progress::Step {
                done: step + 1,
                total: schedule.steps(),
            });
        }
        Ok(latents)
    }

    /// Does `work`; if memory runs out, gives up all plans and does it once more.
    fn with_retry<T>(&mut self, mut work: impl FnMut(&mut Pipeline) -> Result<T>) -> Result<T> {
        match work(self) {
            Err(error) if error.is_out_of_memory() => {
                tracing::warn!("{error}; giving up idle plans and trying once more");
                self.model.drop_plans();
                work(self)
            }
            outcome => outcome,
        }
    }

    /// Refuses a picture that would not fit even alone, and says what would do.
    fn check_memory(
        &self,
        request: &Request<'_>,
        negative: Option<&Condition>,
        size: (usize, usize),
    ) -> Result<()> {
        let tokens = request
            .condition
            .tokens()
            .max(negative.map_or(0, Condition::tokens));
        let needed = self
            .model
            .estimate(&self.backend, tokens, size)?
            .peak_bytes();
        let report = self.memory();
        let own_plans = self.model.compute_bytes();
        match report.available {
            Some(available) if needed > available.saturating_add(own_plans) => {
                Err(Error::TooLittleMemory {
                    source: self.backend.out_of_memory(needed),
                    smallest: report
                        .used
                        .total()
                        .saturating_sub(own_plans)
                        .saturating_add(needed),
                })
            }
            _ => Ok(()),
        }
    }

    /// Memory of the device this runs on: what it says, what was granted, what is held.
    pub fn memory(&self) -> MemoryReport {
        self.backend.ledger().report(self.backend.device())
    }

    /// What the checkpoint's author recommends.
    pub fn defaults(&self) -> Defaults {
        self.defaults
    }

    /// The device this runs on.
    pub fn device(&self) -> Device {
        self.backend.device()
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.backend.threads()
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
        let (width, height) = (
            request.width.unwrap_or(self.defaults.width),
            request.height.unwrap_or(self.defaults.height),
        );
        let (width, height) = rounded((width, height))?;
        let steps = self
            .model
            .fixed_steps()
            .or(request.steps)
            .unwrap_or(self.defaults.steps);
        let guidance = request.guidance.unwrap_or(self.defaults.guidance);
        if !(guidance.is_finite() && guidance >= 1.0) {
            return Err(Error::Guidance(guidance));
        }
        Ok(GenerateReport {
            width,
            height,
            steps,
            guidance,
            seed: request.seed,
            denoise: Duration::ZERO,
            decode: Duration::ZERO,
            weight_bytes: 0,
            compute_bytes: 0,
        })
    }

    /// The negative condition of a guided run; without one the empty prompt's.
    fn negative(&mut self, request: &Request<'_>) -> Result<Condition> {
        match request.negative {
            Some(negative) => Ok(negative.clone()),
            None => self.encode(""),
        }
    }
}

/// Noise for `tokens` latent pixels, `[tokens, channels]`, drawn plane by plane as the reference does.
fn starting_latents(seed: u64, tokens: usize, channels: usize) -> Vec<f32> {
    let planes = noise::normal(seed, tokens * channels);
    (0..tokens)
        .flat_map(|token| (0..channels).map(move |channel| (token, channel)))
        .map(|(token, channel)| planes[channel * tokens + token])
        .collect()
}

/// `velocity = negative + guidance * (velocity - negative)`.
fn guide(velocity: &mut [f32], negative: &[f32], guidance: f32) {
    for (velocity, negative) in velocity.iter_mut().zip(negative) {
        *velocity = negative + guidance * (*velocity - negative);
    }
}
