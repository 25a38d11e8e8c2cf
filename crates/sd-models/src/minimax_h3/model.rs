//! The transformer with its weights: what prepares a run, and what computes its steps.

use std::path::{Path, PathBuf};

use sd_backend::{Backend, Residence};
use sd_graph::{
    Cancel, Checkpoint, Declarations, Estimate, Fallback, Graph, LoadOptions, LoadReport, Plan,
    PlanCache, Reporter, RunnerCache, Weights,
};

use super::config::TransformerConfig;
use super::files::Source;
use super::layout::Layout;
use super::names::{QkvOrder, TRANSFORMER, heads_of, transformer_in};
use super::preparation::{Preparation, kept_modulations, kept_text};
use super::transformer::{Rows, Transformer};
use crate::error::{Error, Result};
use crate::lora::{Adapted, LoraReport, adapt};
use crate::qwen_image_2_1::ModelIdentity;

/// One of the two parts that are never needed at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Refines text and makes the modulations of all steps: once for each run.
    Preparation,
    /// Computes velocities: once for each step.
    Steps,
}

/// What a run computed before its first step: rows of text, and modulations at all times. Clones are the same.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// Whose it is: another transformer of these sizes has other modulations.
    model: ModelIdentity,
    cache: RunnerCache,
    text_rows: usize,
    /// Rising.
    times: Vec<f32>,
}

impl Prepared {
    /// What is kept, and where.
    pub fn cache(&self) -> &RunnerCache {
        &self.cache
    }
}

/// What a call predicts: how to go from noise to the clip.
#[derive(Debug, Clone, PartialEq)]
pub struct Velocity {
    /// Of the rows of video that are made.
    pub video: Vec<f32>,
    /// Of the rows of sound that are made.
    pub sound: Vec<f32>,
    /// Bytes of weights that were moved for it, of those that come and go.
    pub weight_bytes: u64,
}

/// Rows that a call works on, those of conditions before those that are made.
#[derive(Debug, Clone, Copy)]
pub struct Noisy<'r> {
    /// `[video rows, in_channels * 4]`.
    pub video: &'r [f32],
    /// `[sound rows, audio_in_channels]`.
    pub sound: &'r [f32],
    /// The times of video and of sound.
    pub times: [f32; 2],
}

/// What a plan of a step is for.
#[derive(Debug, Clone, PartialEq)]
struct Call {
    layout: Layout,
    /// Times for which there are modulations.
    times: usize,
}

/// A MiniMax H3 transformer and its weights.
#[derive(Debug)]
pub struct Denoiser {
    preparation: Preparation,
    transformer: Transformer,
    weights_of_preparation: Weights,
    weights_of_steps: Weights,
    fallbacks: Vec<Fallback>,
    loras: Vec<LoraReport>,
    preparation_plans: PlanCache<[usize; 2]>,
    plans: PlanCache<Call>,
    identity: ModelIdentity,
}

impl Denoiser {
    /// Opens a transformer: a folder in the diffusers layout (`transformer` or `transformer_ref` of a model's), the authors' folder, a
    /// `.safetensors` or a `.gguf` file; `order` must be said, since no file tells it. Adds LoRAs, each so many times. Checks every
    /// tensor's name and shape. No weight is read.
    ///
    /// # Errors
    /// Everything that can be wrong with files; see [`Error`].
    pub fn open(
        path: &Path,
        order: QkvOrder,
        loras: &[(PathBuf, f32)],
        options: &LoadOptions,
    ) -> Result<Denoiser> {
        Denoiser::declare(Source::open(path, order)?, loras, options)
    }

    /// As [`Denoiser::open`], of a checkpoint with the names of any of these files. Its metadata or its shapes tell what it is like.
    ///
    /// # Errors
    /// As for [`Denoiser::open`].
    pub fn in_checkpoint(
        checkpoint: &Checkpoint,
        order: QkvOrder,
        loras: &[(PathBuf, f32)],
        options: &LoadOptions,
    ) -> Result<Denoiser> {
        let (checkpoint, config) = transformer_in(checkpoint, order)?;
        Denoiser::declare(Source { checkpoint, config }, loras, options)
    }

    fn declare(
        Source { checkpoint, config }: Source,
        loras: &[(PathBuf, f32)],
        options: &LoadOptions,
    ) -> Result<Denoiser> {
        let Adapted {
            checkpoint,
            adapters,
            reports,
        } = adapt(&checkpoint, &TRANSFORMER, loras, Some(heads_of))?;
        for report in reports.iter().filter(|report| !report.is_complete()) {
            tracing::warn!("{report}");
        }
        let options = options.clone().component("transformer");
        let declarations = Declarations::new(&checkpoint, options).adapt(adapters);
        let root = declarations.root();
        let preparation = Preparation::new(&root, &config);
        let first = declarations.declared();
        let transformer = Transformer::new(&root, &config);
        let fallbacks = declarations.fallbacks();
        if let [first, ..] = &declarations.unused_adapters()[..] {
            tracing::warn!(%first, "LoRAs add to weights that are no linear layer; this is left out");
        }
        let mut of_preparation = declarations.finish()?;
        let of_steps = of_preparation.split_off(first.min(of_preparation.len()));
        Ok(Denoiser {
            preparation,
            transformer,
            weights_of_preparation: Weights::new(checkpoint.clone(), of_preparation),
            weights_of_steps: Weights::new(checkpoint, of_steps),
            fallbacks,
            loras: reports,
            preparation_plans: PlanCache::new(1),
            plans: PlanCache::new(1),
            identity: ModelIdentity::default(),
        })
    }

    /// The sizes of the transformer.
    pub fn config(&self) -> &TransformerConfig {
        self.transformer.config()
    }

    /// What became of each LoRA.
    pub fn loras(&self) -> &[LoraReport] {
        &self.loras
    }

    /// Weights that could not be given the type asked for.
    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }

    /// The weights of one stage.
    pub fn weights(&self, stage: Stage) -> &Weights {
        match stage {
            Stage::Preparation => &self.weights_of_preparation,
            Stage::Steps => &self.weights_of_steps,
        }
    }

    /// The weights of one stage, to say where they live and to bring them there.
    pub fn weights_mut(&mut self, stage: Stage) -> &mut Weights {
        match stage {
            Stage::Preparation => &mut self.weights_of_preparation,
            Stage::Steps => &mut self.weights_of_steps,
        }
    }

    /// Brings all weights to where they live.
    ///
    /// # Errors
    /// Memory, files, or a cancelled run.
    pub fn load(
        &mut self,
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<LoadReport> {
        let mut total = LoadReport::default();
        for stage in [Stage::Preparation, Stage::Steps] {
            let weights = self.weights_mut(stage);
            total.add(weights.load(backend, cancel, progress)?);
        }
        Ok(total)
    }

    /// Refines the text encoder's hidden states `text [rows, text_dim]` and makes modulations at all of `times`; both stay on the
    /// device as long as somebody holds them. Its weights are brought for it, and given up again unless they live there.
    /// Gives the bytes of weights that were moved, of those that come and go, too.
    ///
    /// # Errors
    /// [`Error::Clip`] for text that is no whole rows, or the engine's.
    pub fn prepare(
        &mut self,
        backend: &mut Backend,
        text: &[f32],
        times: &[f32],
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<(Prepared, u64)> {
        let width = self.config().text_dim;
        let text_rows = text.len() / width;
        let whole = text_rows.max(1).saturating_mul(width);
        check_length("numbers of text", text, whole)?;
        let mut times = times.to_vec();
        times.sort_by(f32::total_cmp);
        times.dedup();
        let prepared = Prepared {
            model: self.identity.clone(),
            cache: RunnerCache::new(),
            text_rows,
            times,
        };
        let weights = &mut self.weights_of_preparation;
        weights.bring(backend, cancel, progress)?;
        let outcome = self.run_preparation(backend, text, &prepared, cancel, progress);
        self.preparation_plans.clear();
        self.weights_of_preparation.release();
        Ok((prepared, outcome?))
    }

    fn run_preparation(
        &mut self,
        backend: &mut Backend,
        text: &[f32],
        prepared: &Prepared,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<u64> {
        let sizes = [prepared.text_rows, prepared.times.len()];
        let module = &self.preparation;
        let plans = &mut self.preparation_plans;
        let plan = plans.get_or_build_with(sizes, backend, cancel, progress, |g| {
            module.store(g, sizes[0], sizes[1]);
        })?;
        plan.set("text", text)?;
        module.set_times(plan, &prepared.times)?;
        plan.attach(&prepared.cache)?;
        let run = plan.run_with(backend, cancel, progress)?;
        Ok(run.weight_bytes)
    }

    /// Whether `prepared` is whole, and this transformer's own.
    fn is_prepared(&self, prepared: &Prepared) -> bool {
        let entries = self
            .preparation
            .entries(prepared.text_rows, prepared.times.len());
        let is_own = prepared.model == self.identity;
        is_own && entries.iter().all(|entry| prepared.cache.holds(entry))
    }

    /// What the transformer predicts for rows of `layout`, whose text and times were prepared. Weights that do not come and go must
    /// have been brought.
    ///
    /// # Errors
    /// [`Error::Clip`] for rows that are not those of the layout, [`Error::NotPrepared`], or the engine's.
    pub fn velocity(
        &mut self,
        backend: &mut Backend,
        layout: &Layout,
        prepared: &Prepared,
        noisy: Noisy<'_>,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Velocity> {
        let config = self.transformer.config();
        let video = layout.video_rows().saturating_mul(config.video_channels());
        let sound = layout.sound_rows().saturating_mul(config.audio_in_channels);
        check_length("numbers of video rows", noisy.video, video)?;
        check_length("numbers of sound rows", noisy.sound, sound)?;
        let row = |time: f32| {
            let found = prepared.times.iter().position(|&known| known == time);
            found.and_then(|row| i32::try_from(row).ok())
        };
        let [of_video, of_sound] = noisy.times;
        let rows: Option<Vec<i32>> = Layout::times(of_video, of_sound)
            .map(row)
            .into_iter()
            .collect();
        let rows =
            rows.filter(|_| prepared.text_rows == layout.text_rows() && self.is_prepared(prepared));
        let rows = rows.ok_or(Error::NotPrepared)?;

        let call = Call {
            layout: layout.clone(),
            times: prepared.times.len(),
        };
        let module = &self.transformer;
        let plan = self
            .plans
            .get_or_build_with(call.clone(), backend, cancel, progress, |g| {
                step_graph(g, module, &call);
            })?;
        set_inputs(plan, layout, noisy, &rows)?;
        plan.attach(&prepared.cache)?;
        let run = plan.run_with(backend, cancel, progress)?;
        Ok(Velocity {
            video: plan.read("video velocity")?,
            sound: match layout.target_sound_rows() {
                0 => Vec::new(),
                _ => plan.read("sound velocity")?,
            },
            weight_bytes: run.weight_bytes,
        })
    }

    /// What one stage needs for `layout` and as many `times` as [`distinct_times`](super::distinct_times) gives, without allocating
    /// anything. What is prepared is counted as the cache of the first.
    ///
    /// # Errors
    /// The engine's.
    pub fn estimate(
        &self,
        stage: Stage,
        backend: &Backend,
        layout: &Layout,
        times: usize,
    ) -> Result<Estimate> {
        Ok(match stage {
            Stage::Preparation => Estimate::of(backend, |g| {
                self.preparation.store(g, layout.text_rows(), times);
            })?,
            Stage::Steps => Estimate::of(backend, |g| {
                let layout = layout.clone();
                step_graph(g, &self.transformer, &Call { layout, times });
            })?,
        })
    }

    /// Bytes that the plans built so far hold for what they compute.
    pub fn compute_bytes(&self) -> u64 {
        self.preparation_plans.compute_bytes() + self.plans.compute_bytes()
    }

    /// Gives up the plans of one stage, and its weights unless they live on their device.
    pub fn release(&mut self, stage: Stage) {
        if self.weights(stage).residence() != Residence::Device {
            self.drop_plans_of(stage);
            self.weights_mut(stage).release();
        }
    }

    /// Gives up the plans of one stage and takes its weights out of memory, wherever they live, and says whether any were there. They
    /// come back when they are brought.
    pub fn evict(&mut self, stage: Stage) -> bool {
        self.drop_plans_of(stage);
        let had_any = self.weights(stage).device_bytes() > 0;
        self.weights_mut(stage).unload();
        had_any
    }

    fn drop_plans_of(&mut self, stage: Stage) {
        match stage {
            Stage::Preparation => self.preparation_plans.clear(),
            Stage::Steps => self.plans.clear(),
        }
    }

    /// Gives up all plans and the memory they compute in, and says whether there were any.
    pub fn drop_plans(&mut self) -> bool {
        let had_any = !(self.preparation_plans.is_empty() && self.plans.is_empty());
        self.preparation_plans.clear();
        self.plans.clear();
        had_any
    }
}

/// Refuses values that are not as many as there should be.
pub(super) fn check_length(what: &'static str, values: &[f32], wanted: usize) -> Result<()> {
    let found = values.len();
    match found == wanted {
        true => Ok(()),
        false => Err(Error::Clip {
            what,
            found,
            wanted,
        }),
    }
}

fn step_graph(g: Graph<'_>, module: &Transformer, call: &Call) {
    let (config, layout) = (module.config(), &call.layout);
    let sound = || {
        let shape = [layout.sound_rows(), config.audio_in_channels];
        g.input::<f32>("sound", shape)
    };
    let rows = Rows {
        text: kept_text(g, config, layout.text_rows()),
        sound: (layout.sound_rows() > 0).then(sound),
        video: g.input::<f32>("video", [layout.video_rows(), config.video_channels()]),
    };
    let times = g.input::<i32>("times", [Layout::times(0.0, 0.0).len()]);
    let modulations = kept_modulations(g, config, call.times, times);
    let velocities = module.forward(g, layout, rows, &modulations);
    g.output("video velocity", velocities.video);
    if let Some(sound) = velocities.sound {
        g.output("sound velocity", sound);
    }
}

fn set_inputs(plan: &mut Plan, layout: &Layout, noisy: Noisy<'_>, times: &[i32]) -> Result<()> {
    plan.set("video", noisy.video)?;
    if layout.sound_rows() > 0 {
        plan.set("sound", noisy.sound)?;
    }
    Ok(plan.set("times", times)?)
}
