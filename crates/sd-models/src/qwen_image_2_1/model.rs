//! The parts of a Qwen-Image 2.1 checkpoint, and what each does to get from a prompt to a picture.

use std::path::Path;

use sd_backend::{Backend, Component, DType, Device};
use sd_graph::{
    Cancel, Declarations, Estimate, Fallback, Graph, LoadOptions, LoadReport, Plan, PlanCache,
    Progress, Reporter, RunnerCache, Weights,
};

use super::condition::Condition;
use super::files::Sources;
use super::layout::{Layout, Segment};
use super::names::with_loras;
use super::prefix::{ModelIdentity, Prefix, PrefixCache, PrefixKey, WeakPrefixes};
use super::prompt::PromptTokenizer;
use super::reading::Reader;
use super::references::parts;
use super::transformer::{Transformer, TransformerConfig, timestep_embedding};
use super::{VaeConfig, VaeDecoder};
use crate::canvas::{Canvas, Piece};
use crate::error::{Error, Result};
use crate::lora::{Adapted, LoraReport};
use crate::model_files::ModelFiles;
use crate::part::Part;
use crate::preview::{self, Fitting, LinearMap};
use crate::qwen3_vl::{self, TextModel, text_graph};
use crate::rope;
use crate::schedule::{FlowMatchEuler, Schedule, Scheduler};
use crate::tiling::Mosaic;
use crate::wan_vae::Names;

/// The parts in the order in which a picture is made.
pub const IN_ORDER: [Component; 3] = [Component::TextEncoder, Component::Diffusion, Component::Vae];

/// A Qwen-Image 2.1 model: text encoder, transformer, VAE decoder, tokenizer and schedule, and what reads reference pictures.
///
/// Opening checks every name and shape; [`QwenImage21::load`] brings the weights into memory.
#[derive(Debug)]
pub struct QwenImage21 {
    pub(super) prompts: PromptTokenizer,
    scheduler: FlowMatchEuler,
    sample_sigmas: Option<Vec<f32>>,
    vae_config: VaeConfig,
    pub(super) text_encoder: Part<TextModel>,
    transformer: Part<Transformer>,
    vae: Part<VaeDecoder>,
    pub(super) reader: Option<Reader>,
    pub(super) text_plans: PlanCache<Vec<rope::Part>>,
    transformer_plans: PlanCache<Call>,
    vae_plans: PlanCache<Piece>,
    /// From latents to small pictures, once one was needed.
    preview: Option<LinearMap>,
    identity: ModelIdentity,
    /// Conditions that keep something of this model.
    keepers: Vec<WeakPrefixes>,
    loras: Vec<LoraReport>,
}

/// One call of the transformer for each condition.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// The picture.
    pub canvas: Canvas,
    /// From 0 to 1.
    pub timestep: f32,
    /// The type in which keys and values of the prefix are kept with their conditions, if they are.
    pub prefix: Option<DType>,
}

/// What one call of the transformer for each condition took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepReport {
    /// Bytes of weights that were moved, of those that come and go.
    pub weight_bytes: u64,
    /// Conditions whose keys and values were stored.
    pub stored: usize,
    /// Conditions whose keys and values were read.
    pub read: usize,
    /// Whether something was stored that turned out to be incomplete, and was given up.
    pub is_incomplete: bool,
}

/// What a plan of the transformer is for: a layout, a pass where several run together, and what becomes of the prefix.
#[derive(Debug, Clone, PartialEq)]
struct Call {
    layout: Layout,
    pass: usize,
    prefix: Prefix,
}

impl QwenImage21 {
    /// Opens a model: a folder in the diffusers layout, or [`ModelFiles`]. Reads configurations and tokenizer, checks every
    /// tensor's name and shape. No weight is read.
    ///
    /// # Errors
    /// Everything that can be wrong with files; see [`Error`](crate::Error).
    pub fn open(files: impl Into<ModelFiles>, options: &LoadOptions) -> Result<QwenImage21> {
        let files = files.into();
        let Sources {
            text_encoder,
            mut transformer,
            vae,
            prompts,
            scheduler,
            sample_sigmas,
        } = Sources::open(&files)?;
        let configs = (&text_encoder.config, &transformer.config, &vae.config);
        check_joints(files.label(), configs)?;

        let Adapted {
            checkpoint,
            adapters,
            reports,
        } = with_loras(&transformer.checkpoint, &files.loras)?;
        transformer.checkpoint = checkpoint;
        for report in reports.iter().filter(|report| !report.is_complete()) {
            tracing::warn!("{report}");
        }
        let vae_names = Names::of(&vae.checkpoint);
        let of = |name| options.clone().component(name);
        let text = Part::open(&text_encoder, "text_encoder", options, |root, config| {
            TextModel::new(root, &config.text_config)
        })?;
        let reader = Reader::open(&files, options, &text_encoder, &vae)?;
        let declarations = Declarations::new(&transformer.checkpoint, of("transformer"));
        let transformer =
            Part::declared(&transformer, declarations.adapt(adapters), Transformer::new)?;
        let declarations = Declarations::new(&vae.checkpoint, of("vae"));
        let declarations = declarations.translate(move |name| vae_names.in_file(name));
        let vae_config = vae.config.clone();
        let vae = Part::declared(&vae, declarations, VaeDecoder::new)?;
        Ok(QwenImage21 {
            prompts,
            scheduler,
            sample_sigmas,
            vae_config,
            text_encoder: text,
            transformer,
            vae,
            reader,
            text_plans: PlanCache::new(2),
            // A condition and its negative have plans of their own within one run.
            transformer_plans: PlanCache::new(2),
            vae_plans: PlanCache::new(1),
            preview: None,
            identity: ModelIdentity::default(),
            keepers: Vec::new(),
            loras: reports,
        })
    }

    /// Brings all weights to where they live, which is the memory of the device of `backend` unless
    /// [`QwenImage21::weights_mut`] was told otherwise.
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
        for component in IN_ORDER {
            let weights = self.weights_mut(component);
            total.add(weights.load(backend, cancel, progress)?);
        }
        Ok(total)
    }

    /// The weights of one part.
    pub fn weights(&self, component: Component) -> &Weights {
        match component {
            Component::Diffusion => &self.transformer.weights,
            Component::TextEncoder => &self.text_encoder.weights,
            Component::Vae => &self.vae.weights,
        }
    }

    /// The weights of one part, to say where they live and to bring them there.
    pub fn weights_mut(&mut self, component: Component) -> &mut Weights {
        match component {
            Component::Diffusion => &mut self.transformer.weights,
            Component::TextEncoder => &mut self.text_encoder.weights,
            Component::Vae => &mut self.vae.weights,
        }
    }

    /// What became of each LoRA.
    pub fn loras(&self) -> &[LoraReport] {
        &self.loras
    }

    /// Weights that could not be given the type asked for, part by part.
    pub fn fallbacks(&self) -> impl Iterator<Item = &Fallback> {
        self.text_encoder
            .fallbacks
            .iter()
            .chain(&self.transformer.fallbacks)
            .chain(&self.vae.fallbacks)
    }

    /// Bytes that the plans built so far hold for what they compute.
    pub fn compute_bytes(&self) -> u64 {
        Component::ALL
            .map(|component| self.compute_bytes_of(component))
            .iter()
            .sum()
    }

    /// Bytes that the plans of one part hold for what they compute.
    pub fn compute_bytes_of(&self, component: Component) -> u64 {
        match component {
            Component::Diffusion => self.transformer_plans.compute_bytes(),
            Component::TextEncoder => self.text_plans.compute_bytes(),
            Component::Vae => self.vae_plans.compute_bytes(),
        }
    }

    /// Pixels along a side of a latent.
    pub fn scale_factor(&self) -> usize {
        self.vae_config.scale_factor()
    }

    /// Channels of a latent.
    pub fn latent_channels(&self) -> usize {
        self.vae_config.z_dim
    }

    /// Steps of the schedule that the model's author fixed, if one is.
    pub fn fixed_steps(&self) -> Option<usize> {
        self.sample_sigmas.as_ref().map(Vec::len)
    }

    /// The noise levels for a picture of `tokens` latent pixels: the author's own if there are any, else `steps` of them.
    ///
    /// # Errors
    /// [`Error::Steps`](crate::Error::Steps).
    pub fn schedule(&self, steps: usize, tokens: usize) -> Result<Schedule> {
        self.schedule_as(&Scheduler::Model, steps, tokens)
    }

    /// As [`QwenImage21::schedule`], laid out as `scheduler` says; exact levels are as many as they are.
    ///
    /// # Errors
    /// [`Error::Steps`], [`Error::Sigma`]; [`Error::FixedSchedule`] if the author fixed the levels and neither those nor exact
    /// ones are asked for.
    pub fn schedule_as(
        &self,
        scheduler: &Scheduler,
        steps: usize,
        tokens: usize,
    ) -> Result<Schedule> {
        match (&self.sample_sigmas, scheduler) {
            (Some(sigmas), Scheduler::Model) => self.scheduler.schedule_of(sigmas, tokens),
            (None, _) | (_, Scheduler::Exact(_)) => {
                self.scheduler.schedule_as(scheduler, steps, tokens)
            }
            (Some(_), other) => Err(Error::FixedSchedule(other.name())),
        }
    }

    /// The velocity `[height * width, channels]` that the transformer predicts for latents of `canvas` at `timestep` (from
    /// 0 to 1) under `condition`.
    ///
    /// # Errors
    /// The engine's.
    pub fn velocity(
        &mut self,
        backend: &mut Backend,
        condition: &Condition,
        latents: &[f32],
        canvas: impl Into<Canvas>,
        timestep: f32,
        cancel: &Cancel,
    ) -> Result<Vec<f32>> {
        let step = Step {
            canvas: canvas.into(),
            timestep,
            prefix: None,
        };
        let quiet = &mut |_: &Progress| {};
        let (mut velocities, _) =
            self.velocities(backend, &[condition], latents, step, cancel, quiet)?;
        Ok(velocities.pop().unwrap_or_default())
    }

    /// As [`QwenImage21::velocity`] for each of `conditions`, and what it took. Weights that come and go do so once for all
    /// conditions; `progress` hears of those that are loaded to stay, and of
    /// segments.
    ///
    /// Where `step` says so, the first call for a condition keeps the keys and values of its tokens with it, and later ones
    /// compute the picture's alone, until [`QwenImage21::release_prefix`].
    ///
    /// # Errors
    /// The engine's.
    pub fn velocities(
        &mut self,
        backend: &mut Backend,
        conditions: &[&Condition],
        latents: &[f32],
        step: Step,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<(Vec<Vec<f32>>, StepReport)> {
        let is_streamed = self.transformer.weights.is_streamed();
        let mut calls: Vec<(Call, RunnerCache)> = conditions
            .iter()
            .enumerate()
            .map(|(pass, condition)| {
                let layout = layout_of(&condition.segments, step.canvas);
                let (prefix, cache) = self.prefix_of(condition, &layout, backend.device(), step);
                let pass = if is_streamed { pass } else { 0 };
                (
                    Call {
                        layout,
                        pass,
                        prefix,
                    },
                    cache,
                )
            })
            .collect();
        let stores = |call: &Call| matches!(call.prefix, Prefix::Store(_));
        let is_storing = calls.iter().any(|(call, _)| stores(call));
        if let Some(dtype) = step.prefix.filter(|_| is_streamed && is_storing) {
            // Weights that come and go are laid out for graphs of one kind.
            for (call, _) in &mut calls {
                if let Prefix::Read(_) = call.prefix {
                    call.prefix = Prefix::Store(dtype);
                }
            }
        }

        let module = &self.transformer.module;
        let graph =
            |call: &Call, g: Graph<'_>| transformer_graph(g, module, &call.layout, call.prefix);
        let mut report = StepReport::default();
        let mut velocities = Vec::with_capacity(calls.len());
        if is_streamed {
            let keys: Vec<Call> = calls.iter().map(|(call, _)| call.clone()).collect();
            let plans = &mut self.transformer_plans;
            plans.get_or_build_all(&keys, backend, cancel, progress, graph)?;
            if !is_storing {
                // Only now: what they share with plans that read is loaded.
                plans.retain(|call| !stores(call));
            }
            let mut plans = plans.get_or_build_all(&keys, backend, cancel, progress, graph)?;
            for ((plan, condition), (call, cache)) in plans.iter_mut().zip(conditions).zip(&calls) {
                set_inputs(plan, call, condition, latents, step.timestep, cache)?;
            }
            let run = Plan::run_together(&mut plans, backend, cancel, progress)?;
            report.weight_bytes = run.weight_bytes;
            for plan in plans {
                velocities.push(plan.read("velocity")?);
            }
        } else {
            for (condition, (call, cache)) in conditions.iter().zip(&calls) {
                if !is_storing {
                    // They have done what they are for, and what they compute in is needed now.
                    self.transformer_plans.retain(|call| !stores(call));
                }
                let plan = self.transformer_plans.get_or_build_with(
                    call.clone(),
                    backend,
                    cancel,
                    progress,
                    |g| graph(call, g),
                )?;
                set_inputs(plan, call, condition, latents, step.timestep, cache)?;
                plan.run_with(backend, cancel, progress)?;
                velocities.push(plan.read("velocity")?);
            }
        }
        for (condition, (call, cache)) in conditions.iter().zip(&calls) {
            match call.prefix {
                Prefix::Compute => {}
                Prefix::Read(_) => report.read += 1,
                Prefix::Store(dtype) if self.is_complete(cache, &call.layout, dtype) => {
                    report.stored += 1;
                }
                Prefix::Store(_) => {
                    report.is_incomplete = true;
                    condition.prefixes.release(Some(&self.identity));
                }
            }
        }
        Ok((velocities, report))
    }

    /// What a call does about keys and values of `condition`, and the cache for it.
    fn prefix_of(
        &mut self,
        condition: &Condition,
        layout: &Layout,
        device: Device,
        step: Step,
    ) -> (Prefix, RunnerCache) {
        let is_fixed = self.transformer.module.has_fixed_prefix(layout);
        let Some(dtype) = step.prefix.filter(|_| is_fixed) else {
            return (Prefix::Compute, RunnerCache::new());
        };
        self.keepers.retain(|known| known.upgrade().is_some());
        let mut known = self.keepers.iter();
        if !known.any(|known| known.is_of(&condition.prefixes)) {
            self.keepers.push(condition.prefixes.downgrade());
        }
        let cache = condition.prefixes.cache(&PrefixKey {
            model: self.identity.clone(),
            device,
            circular: step.canvas.circular,
            dtype,
        });
        match self.is_complete(&cache, layout, dtype) {
            true => (Prefix::Read(dtype), cache),
            false => (Prefix::Store(dtype), cache),
        }
    }

    /// Whether a cache holds keys and values of every block, as they should be.
    fn is_complete(&self, cache: &RunnerCache, layout: &Layout, dtype: DType) -> bool {
        let module = &self.transformer.module;
        let entries = module.prefix_entries(layout.prefix_tokens(), dtype);
        entries.iter().all(|entry| cache.holds(entry))
    }

    /// The type in which keys and values of the prefix can be kept: where rows are no whole blocks of Q8_0, F16.
    pub fn prefix_type(&self, wanted: PrefixCache) -> Option<DType> {
        let dtype = wanted.dtype()?;
        let channels = self.transformer.module.config().attention_head_dim;
        Some(match dtype.row_bytes(channels) {
            Some(_) => dtype,
            None => DType::F16,
        })
    }

    /// Gives up what this model has kept with `condition`.
    pub fn release_prefix(&self, condition: &Condition) {
        condition.prefixes.release(Some(&self.identity));
    }

    /// Gives up what this model has kept with any condition, and says whether that was anything.
    pub fn drop_prefixes(&mut self) -> bool {
        self.drop_other_prefixes(&[])
    }

    /// As [`QwenImage21::drop_prefixes`] for all conditions but these.
    pub(crate) fn drop_other_prefixes(&mut self, but: &[&Condition]) -> bool {
        let mut had_any = false;
        for keeper in &self.keepers {
            let is_spared = but
                .iter()
                .any(|condition| keeper.is_of(&condition.prefixes));
            if let Some(prefixes) = keeper.upgrade().filter(|_| !is_spared) {
                had_any |= prefixes.release(Some(&self.identity));
            }
        }
        had_any
    }

    /// What tells it from other models.
    pub(crate) fn identity(&self) -> ModelIdentity {
        self.identity.clone()
    }

    /// The picture `[channels, height, width]`, values from -1 to 1, of latents `[height * width, z]` of `canvas`.
    ///
    /// # Errors
    /// The engine's.
    pub fn decode(
        &mut self,
        backend: &mut Backend,
        latents: &[f32],
        canvas: impl Into<Canvas>,
        cancel: &Cancel,
    ) -> Result<Vec<f32>> {
        let canvas = canvas.into();
        let z = self.denormalized(latents, canvas.tokens());
        let (module, piece) = (&self.vae.module, canvas.piece());
        let channels = self.vae_config.z_dim;
        let quiet = &mut |_: &Progress| {};
        let plan = self
            .vae_plans
            .get_or_build_with(piece, backend, cancel, quiet, |g| {
                decoder_graph(g, module, channels, piece);
            })?;
        let mut run = |z: &[f32]| -> Result<Vec<f32>> {
            plan.set("z", z)?;
            plan.run(backend, cancel)?;
            Ok(plan.read::<f32>("picture")?)
        };

        let (rows, columns) = canvas.tiles();
        let mut picture = if rows.is_whole() && columns.is_whole() {
            run(&z)?
        } else {
            let scale = self.vae_config.scale_factor();
            let (down, along) = (rows.scaled(scale), columns.scaled(scale));
            let mut mosaic = Mosaic::new(self.vae_config.channels(), down, along);
            for &row in &rows.starts {
                for &column in &columns.starts {
                    let tile: Vec<f32> = z
                        .chunks_exact(canvas.tokens())
                        .flat_map(|plane| rows.elements(row).map(move |y| (plane, y)))
                        .flat_map(|(plane, y)| {
                            let line = &plane[y * canvas.width..];
                            columns.elements(column).map(move |x| line[x])
                        })
                        .collect();
                    mosaic.add((row * scale, column * scale), &run(&tile)?);
                }
            }
            mosaic.finish()
        };
        for value in &mut picture {
            *value = value.clamp(-1.0, 1.0);
        }
        Ok(picture)
    }

    /// Fits the map that shows latents as small pictures to the decoder, if that was not done.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn fit_preview(&mut self, backend: &mut Backend, cancel: &Cancel) -> Result<()> {
        if self.preview.is_none() {
            let channels = self.latent_channels();
            let mut fitting = Fitting::new(channels);
            for latents in preview::squares(channels) {
                let picture = self.decode(backend, &latents, preview::canvas(), cancel)?;
                fitting.add(&latents, &picture);
            }
            self.vae_plans.clear();
            self.preview = fitting.finish();
        }
        Ok(())
    }

    /// Planes `[4, tokens]` from -1 to 1 of a small picture of latents `[tokens, z]`, if the map for it is there.
    pub(crate) fn small_picture(&self, latents: &[f32]) -> Option<Vec<f32>> {
        self.preview.as_ref().map(|map| map.planes(latents))
    }

    /// As [`QwenImage21::decode`], with weights that are brought for it and plans that are given up again.
    pub(crate) fn decode_between(
        &mut self,
        backend: &mut Backend,
        latents: &[f32],
        canvas: Canvas,
        cancel: &Cancel,
    ) -> Result<Vec<f32>> {
        let quiet = &mut |_: &Progress| {};
        let brought = self.vae.weights.bring(backend, cancel, quiet);
        let outcome = match brought {
            Ok(()) => self.decode(backend, latents, canvas, cancel),
            Err(error) => Err(error.into()),
        };
        self.vae_plans.clear();
        self.release(Component::Vae);
        outcome
    }

    /// Latents `[pixels, z]` with their means and deviations back, `[z, pixels]`.
    fn denormalized(&self, latents: &[f32], pixels: usize) -> Vec<f32> {
        let channels = self.vae_config.z_dim;
        let mut z = vec![0.0; latents.len()];
        for (channel, plane) in z.chunks_exact_mut(pixels).enumerate() {
            let (mean, std) = (
                self.vae_config.latents_mean[channel],
                self.vae_config.latents_std[channel],
            );
            for (value, token) in plane.iter_mut().zip(latents.chunks_exact(channels)) {
                *value = token[channel] * std + mean;
            }
        }
        z
    }

    /// What one part needs for latents of `canvas` behind `prompt`, without allocating anything. If keys and values of
    /// the prefix are kept in the type `prefix`, that is what the transformer stores.
    ///
    /// # Errors
    /// The engine's.
    pub fn estimate(
        &self,
        component: Component,
        backend: &Backend,
        prompt: &[Segment],
        canvas: impl Into<Canvas>,
        prefix: Option<DType>,
    ) -> Result<Estimate> {
        let canvas = canvas.into();
        Ok(match component {
            Component::Diffusion => {
                let layout = layout_of(prompt, canvas);
                let prefix = prefix.map_or(Prefix::Compute, Prefix::Store);
                Estimate::of(backend, |g| {
                    transformer_graph(g, &self.transformer.module, &layout, prefix);
                })?
            }
            Component::TextEncoder => {
                let parts = parts(prompt, self.prompts.system_tokens());
                let reader = self.reader.as_ref();
                let features = reader.map_or(0, |reader| reader.sight().features());
                Estimate::of(backend, |g| {
                    text_graph(g, &self.text_encoder.module, &parts, features);
                })?
            }
            Component::Vae => Estimate::of(backend, |g| {
                decoder_graph(g, &self.vae.module, self.vae_config.z_dim, canvas.piece());
            })?,
        })
    }

    /// Gives up the plans of one part, and its weights unless they live on their device.
    pub fn release(&mut self, component: Component) {
        if self.weights(component).residence() != sd_backend::Residence::Device {
            self.drop_plans_of(component);
            self.weights_mut(component).release();
        }
    }

    /// Gives up the plans of one part and takes its weights out of memory, wherever they live; they come back when they
    /// are brought.
    pub fn evict(&mut self, component: Component) {
        self.drop_plans_of(component);
        self.weights_mut(component).unload();
    }

    fn drop_plans_of(&mut self, component: Component) {
        match component {
            Component::Diffusion => self.transformer_plans.clear(),
            Component::TextEncoder => self.text_plans.clear(),
            Component::Vae => self.vae_plans.clear(),
        }
    }

    /// Gives up all plans and the memory they compute in, and says whether there were any; they are built again when
    /// needed.
    pub fn drop_plans(&mut self) -> bool {
        let had_any = !(self.text_plans.is_empty()
            && self.transformer_plans.is_empty()
            && self.vae_plans.is_empty());
        for component in IN_ORDER {
            self.drop_plans_of(component);
        }
        had_any
    }
}

fn decoder_graph(g: Graph<'_>, module: &VaeDecoder, channels: usize, piece: Piece) {
    let z = g.input::<f32>("z", [1, channels, piece.height, piece.width]);
    g.output("picture", module.forward(z, piece.circular));
}

fn layout_of(prompt: &[Segment], canvas: Canvas) -> Layout {
    Layout::new(prompt.to_vec(), canvas.height, canvas.width).circular(canvas.circular)
}

fn transformer_graph(g: Graph<'_>, module: &Transformer, layout: &Layout, prefix: Prefix) {
    let config = module.config();
    let is_read = matches!(prefix, Prefix::Read(_));
    let pixels = match is_read {
        true => layout.target_tokens(),
        false => layout.image_tokens(),
    };
    let latents = g.input::<f32>("latents", [pixels, config.in_channels]);
    let text = || g.input::<f32>("text", [layout.text_tokens(), config.context_in_dim]);
    let text = (!is_read).then(text);
    let timestep = g.input::<f32>("timestep", [2, timestep_embedding(0.0).len()]);
    let velocity = module.forward_with(g, layout, latents, text, timestep, prefix);
    g.output("velocity", velocity);
}

/// Gives the plan of a transformer what it is asked for.
fn set_inputs(
    plan: &mut Plan,
    call: &Call,
    condition: &Condition,
    latents: &[f32],
    timestep: f32,
    cache: &RunnerCache,
) -> Result<()> {
    let references = condition.references.0.iter();
    match call.prefix {
        Prefix::Read(_) => plan.set("latents", latents)?,
        Prefix::Compute | Prefix::Store(_) => {
            let before = references.flat_map(|reference| &reference.latents);
            let joint: Vec<f32> = before.chain(latents).copied().collect();
            plan.set("latents", &joint)?;
            plan.set("text", &condition.hidden)?;
        }
    }
    if call.prefix != Prefix::Compute {
        plan.attach(cache)?;
    }
    let timesteps = [timestep_embedding(timestep), timestep_embedding(0.0)];
    Ok(plan.set("timestep", timesteps.as_flattened())?)
}

/// Refuses parts that are right by themselves but do not fit each other.
fn check_joints(
    path: &Path,
    (text, transformer, vae): (&qwen3_vl::Config, &TransformerConfig, &VaeConfig),
) -> Result<()> {
    crate::config::check(
        path,
        &[
            (
                "the transformer's context_in_dim = the text encoder's hidden_size",
                transformer.context_in_dim == text.text_config.hidden_size,
            ),
            (
                "the transformer's in_channels = the VAE's z_dim",
                transformer.in_channels == vae.z_dim,
            ),
            (
                "the transformer's out_channels = in_channels",
                transformer.out_channels() == transformer.in_channels,
            ),
            ("the VAE is one for pictures", vae.is_for_pictures()),
            ("the VAE's out_channels = 4", vae.channels() == 4),
            ("the VAE's scale is 16", vae.scale_factor() == 16),
        ],
    )
}
