//! The parts of a Qwen-Image 2.1 checkpoint, and what each does to get from a prompt to a picture.

use std::path::{Path, PathBuf};

use sd_backend::{Backend, Component};
use sd_graph::{
    Cancel, Checkpoint, Declarations, Estimate, Fallback, Graph, LoadOptions, LoadReport, Plan,
    PlanCache, Progress, Reporter, RunReport, Scope, Weights,
};
use serde::Deserialize;

use super::layout::Layout;
use super::prompt::PromptTokenizer;
use super::transformer::{Transformer, TransformerConfig, timestep_embedding};
use super::{VaeConfig, VaeDecoder};
use crate::canvas::{Canvas, Piece};
use crate::config::read_json;
use crate::error::{Error, Result};
use crate::qwen3_vl::{self, TextModel};
use crate::schedule::{FlowMatchEuler, Schedule};
use crate::tiling::Mosaic;

/// What of `model_index.json` bears on sampling.
#[derive(Debug, Deserialize)]
struct ModelIndex {
    #[serde(default)]
    sample_sigmas: Option<Vec<f32>>,
}

/// The parts in the order in which a picture is made.
pub const IN_ORDER: [Component; 3] = [Component::TextEncoder, Component::Diffusion, Component::Vae];

/// One part of a model: what it computes, and the weights that it declared to need.
#[derive(Debug)]
struct Part<M> {
    module: M,
    weights: Weights,
    fallbacks: Vec<Fallback>,
}

impl<M> Part<M> {
    /// Opens the weights in the folder `name` of `model` and declares what `new` needs of them.
    fn open(
        model: &Path,
        name: &str,
        options: &LoadOptions,
        new: impl FnOnce(&Scope<'_>) -> M,
    ) -> Result<Part<M>> {
        let checkpoint = Checkpoint::open(model.join(name))?;
        let declarations = Declarations::new(&checkpoint, options.clone().component(name));
        let module = new(&declarations.root());
        let fallbacks = declarations.fallbacks();
        let params = declarations.finish()?;
        Ok(Part {
            module,
            weights: Weights::new(checkpoint, params),
            fallbacks,
        })
    }
}

/// A Qwen-Image 2.1 model: text encoder, transformer, VAE decoder, tokenizer and schedule.
///
/// Opening checks every name and shape; [`QwenImage21::load`] brings the weights into memory.
#[derive(Debug)]
pub struct QwenImage21 {
    prompts: PromptTokenizer,
    scheduler: FlowMatchEuler,
    sample_sigmas: Option<Vec<f32>>,
    vae_config: VaeConfig,
    text_encoder: Part<TextModel>,
    transformer: Part<Transformer>,
    vae: Part<VaeDecoder>,
    text_plans: PlanCache<usize>,
    /// By layout, and by pass where several run together.
    transformer_plans: PlanCache<(Layout, usize)>,
    vae_plans: PlanCache<Piece>,
}

/// An encoded prompt. May be kept and used for any number of pictures.
#[derive(Debug, Clone, PartialEq)]
pub struct Condition {
    prompt: String,
    token_ids: Vec<i32>,
    /// Hidden states `[tokens, context]` of the prompt without the system message.
    hidden: Vec<f32>,
    tokens: usize,
}

impl Condition {
    /// The prompt this was made from.
    pub fn prompt(&self) -> &str {
        &self.prompt
    }

    /// Token numbers that the text encoder read, template and system message included.
    pub fn token_ids(&self) -> &[i32] {
        &self.token_ids
    }

    /// Hidden states `[tokens, context]`, row by row, the system message's left out.
    pub fn hidden_states(&self) -> &[f32] {
        &self.hidden
    }

    /// Number of rows of [`Condition::hidden_states`].
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

impl QwenImage21 {
    /// Opens a model in the diffusers layout: reads configurations and tokenizer, checks every tensor's name and shape.
    /// No weight is read.
    ///
    /// # Errors
    /// Everything that can be wrong with files; see [`Error`].
    pub fn open(folder: &Path, options: &LoadOptions) -> Result<QwenImage21> {
        let index: ModelIndex = read_json(&folder.join("model_index.json"))?;
        let text_config = qwen3_vl::Config::read(&folder.join("text_encoder/config.json"))?;
        let transformer_config = TransformerConfig::read(&folder.join("transformer/config.json"))?;
        let vae_config = VaeConfig::read(&folder.join("vae/config.json"))?;
        check_joints(folder, &text_config, &transformer_config, &vae_config)?;
        let scheduler = FlowMatchEuler::read(&folder.join("scheduler/scheduler_config.json"))?;
        let prompts = PromptTokenizer::read(&find_tokenizer(folder)?, &text_config)?;

        let text_encoder = Part::open(folder, "text_encoder", options, |root| {
            TextModel::new(root, &text_config.text_config)
        })?;
        let transformer = Part::open(folder, "transformer", options, |root| {
            Transformer::new(root, &transformer_config)
        })?;
        let vae = Part::open(folder, "vae", options, |root| {
            VaeDecoder::new(root, &vae_config)
        })?;
        Ok(QwenImage21 {
            prompts,
            scheduler,
            sample_sigmas: index.sample_sigmas,
            vae_config,
            text_encoder,
            transformer,
            vae,
            text_plans: PlanCache::new(2),
            // A condition and its negative have plans of their own within one run.
            transformer_plans: PlanCache::new(2),
            vae_plans: PlanCache::new(1),
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
    /// [`Error::Steps`].
    pub fn schedule(&self, steps: usize, tokens: usize) -> Result<Schedule> {
        match &self.sample_sigmas {
            Some(sigmas) => self.scheduler.schedule_of(sigmas, tokens),
            None => self.scheduler.schedule(steps, tokens),
        }
    }

    /// Encodes a prompt.
    ///
    /// # Errors
    /// [`Error::Prompt`], or the engine's.
    pub fn encode(
        &mut self,
        backend: &mut Backend,
        prompt: &str,
        cancel: &Cancel,
    ) -> Result<Condition> {
        let tokenized = self.prompts.tokenize(prompt)?;
        let tokens = tokenized.ids.len();
        let module = &self.text_encoder.module;
        let plan = self.text_plans.get_or_build(tokens, backend, |g| {
            text_graph(g, module, tokens);
        })?;
        plan.set("token_ids", &tokenized.ids)?;
        plan.run(backend, cancel)?;
        let mut hidden = plan.read::<f32>("hidden")?;
        hidden.drain(..tokenized.system_tokens * module.config().hidden_size);
        Ok(Condition {
            prompt: prompt.to_owned(),
            tokens: tokens - tokenized.system_tokens,
            token_ids: tokenized.ids,
            hidden,
        })
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
        let layout = layout_of(condition.tokens, canvas.into());
        let module = &self.transformer.module;
        let plan = self
            .transformer_plans
            .get_or_build((layout.clone(), 0), backend, |g| {
                transformer_graph(g, module, &layout);
            })?;
        set_inputs(plan, condition, latents, timestep)?;
        plan.run(backend, cancel)?;
        Ok(plan.read("velocity")?)
    }

    /// As [`QwenImage21::velocity`] for each of `conditions`, and what weights were moved for it. Weights that come and go
    /// do so once for all conditions.
    ///
    /// # Errors
    /// The engine's.
    pub fn velocities(
        &mut self,
        backend: &mut Backend,
        conditions: &[&Condition],
        latents: &[f32],
        canvas: impl Into<Canvas>,
        timestep: f32,
        cancel: &Cancel,
    ) -> Result<(Vec<Vec<f32>>, RunReport)> {
        let canvas = canvas.into();
        if !self.transformer.weights.is_streamed() {
            let velocities: Result<_> = conditions
                .iter()
                .map(|condition| {
                    self.velocity(backend, condition, latents, canvas, timestep, cancel)
                })
                .collect();
            return Ok((velocities?, RunReport::default()));
        }
        let keys: Vec<(Layout, usize)> = conditions
            .iter()
            .enumerate()
            .map(|(pass, condition)| (layout_of(condition.tokens, canvas), pass))
            .collect();
        let module = &self.transformer.module;
        let mut plans =
            self.transformer_plans
                .get_or_build_all(&keys, backend, |(layout, _), g| {
                    transformer_graph(g, module, layout);
                })?;
        for (plan, condition) in plans.iter_mut().zip(conditions) {
            set_inputs(plan, condition, latents, timestep)?;
        }
        let report = Plan::run_together(&mut plans, backend, cancel, &mut |_: &Progress| {})?;
        let velocities: Result<_> = plans
            .iter()
            .map(|plan| Ok(plan.read("velocity")?))
            .collect();
        Ok((velocities?, report))
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
        let plan = self.vae_plans.get_or_build(piece, backend, |g| {
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

    /// What one part needs for latents of `canvas` with `tokens` of text, without allocating anything.
    ///
    /// # Errors
    /// The engine's.
    pub fn estimate(
        &self,
        component: Component,
        backend: &Backend,
        tokens: usize,
        canvas: impl Into<Canvas>,
    ) -> Result<Estimate> {
        let canvas = canvas.into();
        Ok(match component {
            Component::Diffusion => {
                let layout = layout_of(tokens, canvas);
                Estimate::of(backend, |g| {
                    transformer_graph(g, &self.transformer.module, &layout);
                })?
            }
            Component::TextEncoder => {
                let text_tokens = tokens + self.prompts.system_tokens();
                Estimate::of(backend, |g| {
                    text_graph(g, &self.text_encoder.module, text_tokens);
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

    /// Gives up all plans and the memory they compute in; they are built again when needed.
    pub fn drop_plans(&mut self) {
        self.text_plans.clear();
        self.transformer_plans.clear();
        self.vae_plans.clear();
    }
}

fn text_graph(g: Graph<'_>, module: &TextModel, tokens: usize) {
    let ids = g.input::<i32>("token_ids", [tokens]);
    g.output("hidden", module.forward(g, ids));
}

fn decoder_graph(g: Graph<'_>, module: &VaeDecoder, channels: usize, piece: Piece) {
    let z = g.input::<f32>("z", [1, channels, piece.height, piece.width]);
    g.output("picture", module.forward(z, piece.circular));
}

fn layout_of(tokens: usize, canvas: Canvas) -> Layout {
    Layout::text_to_image(tokens, canvas.height, canvas.width).circular(canvas.circular)
}

fn transformer_graph(g: Graph<'_>, module: &Transformer, layout: &Layout) {
    let config = module.config();
    let latents = g.input::<f32>("latents", [layout.image_tokens(), config.in_channels]);
    let text = g.input::<f32>("text", [layout.text_tokens(), config.context_in_dim]);
    let timestep = g.input::<f32>("timestep", [2, timestep_embedding(0.0).len()]);
    g.output(
        "velocity",
        module.forward(g, layout, latents, text, timestep),
    );
}

/// Gives the plan of a transformer what it is asked for.
fn set_inputs(
    plan: &mut Plan,
    condition: &Condition,
    latents: &[f32],
    timestep: f32,
) -> Result<()> {
    plan.set("latents", latents)?;
    plan.set("text", &condition.hidden)?;
    let timesteps = [timestep_embedding(timestep), timestep_embedding(0.0)];
    Ok(plan.set("timestep", timesteps.as_flattened())?)
}

/// Refuses parts that are right by themselves but do not fit each other.
fn check_joints(
    folder: &Path,
    text: &qwen3_vl::Config,
    transformer: &TransformerConfig,
    vae: &VaeConfig,
) -> Result<()> {
    crate::config::check(
        folder,
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

/// `tokenizer.json` of a model: the processor's folder in this family, the tokenizer's in others.
fn find_tokenizer(folder: &Path) -> Result<PathBuf> {
    ["processor", "tokenizer"]
        .iter()
        .map(|part| folder.join(part).join("tokenizer.json"))
        .find(|path| path.is_file())
        .ok_or_else(|| Error::Missing {
            path: folder.to_owned(),
            what: "processor/tokenizer.json",
        })
}
