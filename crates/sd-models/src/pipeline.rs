//! From a folder and a prompt to a picture. The only place that asks which model a folder holds.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sd_backend::{Backend, BackendOptions, DType, Device, Ledger, MemoryBudgets, MemoryReport};
use sd_graph::{Cancel, LoadOptions, LoadReport, Progress, Reporter};
use serde::Deserialize;

use crate::config::read_json;
use crate::error::{Error, Result};
use crate::image::Image;
use crate::model_index::{ModelIndex, SUPPORTED};
use crate::noise;
use crate::qwen_image_2_1::{QwenImage21, SIZE_MULTIPLE, StageEstimates};
use crate::schedule::Schedule;

pub use crate::qwen_image_2_1::Condition;

/// Most pixels along a side: where rotary tables of the reference end.
const LARGEST_SIDE: usize = 16_384;

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

/// A model that was opened and checked but not yet loaded.
#[derive(Debug)]
pub struct PipelineBuilder {
    folder: PathBuf,
    device: String,
    backend: BackendOptions,
    load: LoadOptions,
}

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
    model: QwenImage21,
    backend: Backend,
    defaults: Defaults,
    loaded: LoadReport,
    cancel: Cancel,
}

/// What to make of an encoded prompt.
#[derive(Debug, Clone)]
pub struct Request<'c> {
    condition: &'c Condition,
    negative: Option<&'c Condition>,
    width: Option<usize>,
    height: Option<usize>,
    steps: Option<usize>,
    guidance: Option<f32>,
    seed: u64,
}

/// What a picture needs, found without loading anything.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// Name of the device.
    pub device: String,
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Bytes of weights by part.
    pub weights: Vec<(&'static str, u64)>,
    /// What each stage computes in, beside the weights.
    pub stages: StageEstimates,
    /// Bytes of the smallest budget that does: all weights and the stage that needs most.
    pub smallest: u64,
    /// Bytes that may be taken now, if anything is known.
    pub available: Option<u64>,
}

impl MemoryPlan {
    /// Whether it fits now.
    pub fn fits(&self) -> bool {
        self.available
            .is_none_or(|available| self.smallest <= available)
    }
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
    /// Seed of the starting noise.
    pub seed: u64,
    /// Time for the transformer's calls, the building of their plans included.
    pub denoise: Duration,
    /// Time for the decoder, the building of its plan included.
    pub decode: Duration,
    /// Bytes that weights take.
    pub weight_bytes: u64,
    /// Bytes that plans hold for what they compute.
    pub compute_bytes: u64,
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

impl PipelineBuilder {
    /// Chooses a device, in the words of [`Device::select`]. `auto` if not called.
    pub fn device(mut self, selector: &str) -> Self {
        selector.clone_into(&mut self.device);
        self
    }

    /// Threads that compute on the processor; as many as the machine runs at once if not called.
    pub fn threads(mut self, threads: usize) -> Self {
        self.backend = self.backend.threads(threads);
        self
    }

    /// Grants memory: a number of bytes, all that is free but some, or (if not called) what is free. Replaces an account
    /// set by [`PipelineBuilder::ledger`].
    pub fn memory_budget(mut self, budgets: MemoryBudgets) -> Self {
        self.backend = self.backend.ledger(&Ledger::new(budgets));
        self
    }

    /// Uses an account of memory that other pipelines of this process share.
    pub fn ledger(mut self, ledger: &Ledger) -> Self {
        self.backend = self.backend.ledger(ledger);
        self
    }

    /// Converts floating-point weights on loading: F32 for the reference's own numbers, F16 for less memory.
    pub fn convert_to(mut self, dtype: DType) -> Self {
        self.load = self.load.convert_to(dtype);
        self
    }

    /// What the model needs for one picture of the given size (the model's default if none) and a prompt of `tokens`
    /// tokens. Nothing is loaded.
    ///
    /// # Errors
    /// [`Error::Size`], and everything that can be wrong with files.
    pub fn plan(&self, size: Option<(usize, usize)>, tokens: usize) -> Result<MemoryPlan> {
        let backend = Backend::new(Device::select(&self.device)?, &self.backend)?;
        let defaults = self.defaults()?;
        let model = QwenImage21::open(&self.folder, &self.load)?;
        let (width, height) = rounded(size.unwrap_or((defaults.width, defaults.height)))?;
        let scale = model.scale_factor();
        let stages = model.estimate(&backend, tokens.max(1), (height / scale, width / scale))?;
        Ok(MemoryPlan {
            device: backend.device().name(),
            width,
            height,
            weights: model.weight_bytes_by_part().to_vec(),
            stages,
            smallest: model.weight_bytes() + stages.peak_bytes(),
            available: backend.ledger().report(backend.device()).available,
        })
    }

    /// The author's recommendations, if the folder has any.
    fn defaults(&self) -> Result<Defaults> {
        let path = self.folder.join("sd-defaults.json");
        if path.is_file() {
            read_json(&path)
        } else {
            Ok(Defaults::default())
        }
    }

    /// Loads the weights.
    ///
    /// # Errors
    /// Everything that can be wrong with files, and memory that runs out.
    pub fn load(self) -> Result<Pipeline> {
        self.load_with(&Cancel::new(), &mut |_: &Progress| {})
    }

    /// Loads the weights, telling of progress; `cancel` stops loading, and later everything else too.
    ///
    /// # Errors
    /// Everything that can be wrong with files, memory that runs out, or the run was cancelled.
    pub fn load_with(self, cancel: &Cancel, progress: &mut dyn Reporter) -> Result<Pipeline> {
        let backend = Backend::new(Device::select(&self.device)?, &self.backend)?;
        let defaults = self.defaults()?;
        let mut model = QwenImage21::open(&self.folder, &self.load)?;
        progress.report(&Progress::Stage("load"));
        let loaded = model
            .load(&backend, cancel, progress)
            .map_err(|error| match error {
                Error::Engine(sd_graph::Error::Backend(
                    source @ sd_backend::Error::OutOfMemory { .. },
                )) => {
                    let smallest = smallest_budget(&model, &backend, defaults);
                    smallest.map_or(Error::from(source.clone()), |smallest| {
                        Error::TooLittleMemory { source, smallest }
                    })
                }
                other => other,
            })?;
        Ok(Pipeline {
            model,
            backend,
            defaults,
            loaded,
            cancel: cancel.clone(),
        })
    }
}

impl<'c> Request<'c> {
    /// A picture of `condition` with the model's default settings and seed 0.
    pub fn new(condition: &'c Condition) -> Request<'c> {
        Request {
            condition,
            negative: None,
            width: None,
            height: None,
            steps: None,
            guidance: None,
            seed: 0,
        }
    }

    /// What the picture should not be. Used where guidance is above 1; without it, the empty prompt is.
    pub fn negative(mut self, condition: &'c Condition) -> Self {
        self.negative = Some(condition);
        self
    }

    /// Width and height in pixels; rounded down to the model's multiple, as its users expect.
    pub fn size(mut self, width: usize, height: usize) -> Self {
        (self.width, self.height) = (Some(width), Some(height));
        self
    }

    /// Number of steps. Ignored by models whose author fixed the schedule.
    pub fn steps(mut self, steps: usize) -> Self {
        self.steps = Some(steps);
        self
    }

    /// Classifier-free guidance: how far to go beyond the condition, away from the negative. 1 is none.
    pub fn guidance(mut self, guidance: f32) -> Self {
        self.guidance = Some(guidance);
        self
    }

    /// Seed of the starting noise; the same as PyTorch's on a processor, so only its lower 32 bits matter.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }
}

/// A size as the model can make it: sides rounded down to its multiple, with a warning.
fn rounded((width, height): (usize, usize)) -> Result<(usize, usize)> {
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

/// Bytes of all weights and the stage that needs most, for a picture of the default size and a prompt of common length.
fn smallest_budget(model: &QwenImage21, backend: &Backend, defaults: Defaults) -> Option<u64> {
    const COMMON_PROMPT: usize = 64;
    let scale = model.scale_factor();
    let stages = model
        .estimate(
            backend,
            COMMON_PROMPT,
            (defaults.height / scale, defaults.width / scale),
        )
        .ok()?;
    Some(model.weight_bytes() + stages.peak_bytes())
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

/// Writes beside the pixels what they were made from, in the form that other tools read.
fn describe(image: &mut Image, request: &Request<'_>, report: &GenerateReport) {
    let negative = request.negative.map_or("", |negative| negative.prompt());
    let mut parameters = request.condition.prompt().to_owned();
    if report.guidance > 1.0 {
        parameters.push_str(&format!("\nNegative prompt: {negative}"));
    }
    parameters.push_str(&format!(
        "\nSteps: {}, Sampler: Euler, CFG scale: {}, Seed: {}, Size: {}x{}, Model: Qwen-Image 2.1",
        report.steps, report.guidance, report.seed, report.width, report.height
    ));
    image.add_text("parameters", parameters);
    image.add_text("Software", concat!("sd ", env!("CARGO_PKG_VERSION")));
}
