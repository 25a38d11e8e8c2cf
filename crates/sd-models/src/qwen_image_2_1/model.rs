//! The parts of a Qwen-Image 2.1 checkpoint: opened, loaded, and what they need. What each does is in `encoding.rs`, `velocity.rs`,
//! `decoding.rs` and `reading.rs`.

use std::path::Path;

use sd_backend::{Backend, Component, DType};
use sd_graph::{
    Cancel, Declarations, Estimate, Fallback, LoadOptions, LoadReport, PlanCache, Reporter, Weights,
};

use super::decoding::decoder_graph;
use super::files::Sources;
use super::layout::Segment;
use super::names::with_loras;
use super::prefix::{ModelIdentity, Prefix, WeakPrefixes};
use super::prompt::PromptTokenizer;
use super::reading::Reader;
use super::references::parts;
use super::transformer::{Transformer, TransformerConfig};
use super::velocity::{Call, layout_of, transformer_graph};
use super::{VaeConfig, VaeDecoder};
use crate::canvas::{Canvas, Piece};
use crate::error::{Error, Result};
use crate::lora::{Adapted, LoraReport};
use crate::model_files::ModelFiles;
use crate::part::Part;
use crate::preview::LinearMap;
use crate::qwen3_vl::{self, TextModel, text_graph};
use crate::rope;
use crate::schedule::{FlowMatchEuler, Schedule, Scheduler};
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
    pub(super) vae_config: VaeConfig,
    pub(super) text_encoder: Part<TextModel>,
    pub(super) transformer: Part<Transformer>,
    pub(super) vae: Part<VaeDecoder>,
    pub(super) reader: Option<Reader>,
    pub(super) text_plans: PlanCache<Vec<rope::Part>>,
    pub(super) transformer_plans: PlanCache<Call>,
    pub(super) vae_plans: PlanCache<Piece>,
    /// From latents to small pictures, once one was needed.
    pub(super) preview: Option<LinearMap>,
    pub(super) identity: ModelIdentity,
    /// Conditions that keep something of this model.
    pub(super) keepers: Vec<WeakPrefixes>,
    loras: Vec<LoraReport>,
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
        let text = Part::open(&text_encoder.checkpoint, of("text_encoder"), |root| {
            TextModel::new(root, &text_encoder.config.text_config)
        })?;
        let reader = Reader::open(&files, options, &text_encoder, &vae)?;
        let declarations = Declarations::new(&transformer.checkpoint, of("transformer"));
        let transformer = Part::declared(
            &transformer.checkpoint,
            declarations.adapt(adapters),
            |root| Transformer::new(root, &transformer.config),
        )?;
        let declarations = Declarations::new(&vae.checkpoint, of("vae"));
        let declarations = declarations.translate(move |name| vae_names.in_file(name));
        let vae_config = vae.config;
        let vae = Part::declared(&vae.checkpoint, declarations, |root| {
            VaeDecoder::new(root, &vae_config)
        })?;
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

    /// What tells it from other models.
    pub(crate) fn identity(&self) -> ModelIdentity {
        self.identity.clone()
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
