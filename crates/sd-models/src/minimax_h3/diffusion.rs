//! The transformers of a checkpoint: one for prompts and keyframes, one for references. One of them is in use at a time.

use std::path::{Path, PathBuf};

use sd_backend::{Backend, Component, Mapping, Need, Residence};
use sd_graph::{Estimate, Fallback, LoadOptions, Weights};

use super::layout::Layout;
use super::model::{Denoiser, Stage};
use super::names::QkvOrder;
use super::parts::Readers;
use crate::config::check;
use crate::error::{Error, Result};
use crate::model_files::ModelFiles;
use crate::seating::passing_need;

/// What a transformer was trained for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// Clips from a prompt, and from keyframes.
    Prompt,
    /// Clips from a prompt and references.
    References,
}

impl Task {
    /// The error of a checkpoint without a transformer for it.
    fn refused(self) -> Error {
        Error::NoTransformer(match self {
            Task::Prompt => "prompts and keyframes (the folder `transformer`, or --transformer)",
            Task::References => {
                "references (the folder `transformer_ref`, or --reference-transformer)"
            }
        })
    }
}

/// The transformers that a checkpoint has.
#[derive(Debug)]
pub(crate) struct Diffusion {
    current: Denoiser,
    task: Task,
    other: Option<Denoiser>,
}

impl Diffusion {
    /// Opens all transformers that are there. No weight is read.
    ///
    /// # Errors
    /// [`Error::MissingPart`] if there is none, and everything that can be wrong with files.
    pub(crate) fn open(
        files: &ModelFiles,
        order: QkvOrder,
        options: &LoadOptions,
    ) -> Result<Diffusion> {
        let given = files.transformer.as_deref();
        let prompt = path_of(files, given, "transformer");
        let given = files.reference_transformer.as_deref();
        let references = path_of(files, given, "transformer_ref");
        let open = |path: &PathBuf| Denoiser::open(path, order, &files.loras, options);
        let prompt = prompt.as_ref().map(open).transpose()?;
        let references = references.as_ref().map(open).transpose()?;
        match (prompt, references) {
            (Some(current), other) => Ok(Diffusion {
                current,
                task: Task::Prompt,
                other,
            }),
            (None, Some(current)) => Ok(Diffusion {
                current,
                task: Task::References,
                other: None,
            }),
            (None, None) => Err(Error::MissingPart {
                path: files.label().to_owned(),
                part: "transformer",
                hint: "--transformer",
            }),
        }
    }

    /// Refuses transformers that do not fit the other parts.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub(crate) fn check_joints(&self, path: &Path, readers: &Readers) -> Result<()> {
        for denoiser in [&self.current].into_iter().chain(&self.other) {
            let config = denoiser.config();
            let (video, sound) = (readers.vae.config(), readers.sound_vae.config());
            check(
                path,
                &[
                    (
                        "the transformer's text_dim = the text encoder's hidden_size",
                        config.text_dim == readers.conditioner.width(),
                    ),
                    (
                        "the transformer's in_channels = the video VAE's latent_channels",
                        config.in_channels == video.latent_channels,
                    ),
                    (
                        "the transformer's audio_in_channels = the sound VAE's latent_channels",
                        config.audio_in_channels == sound.latent_channels,
                    ),
                    ("the video VAE's scale is 16", video.scale_factor() == 16),
                    (
                        "the video VAE makes 5 latent frames of 17 frames, and 2 of the last 5",
                        [5, 22, 39].map(|frames| video.latent_frames(frames)) == [2, 7, 12],
                    ),
                    (
                        "the sound VAE has 32000 samples and 40 latents a second",
                        sound.sampling_rate == 32_000 && sound.latents(32_000) == 40,
                    ),
                ],
            )?;
        }
        Ok(())
    }

    /// Refuses a task for which there are no files of a transformer, before any is opened. A file of all parts has one for prompts.
    ///
    /// # Errors
    /// [`Error::NoTransformer`].
    pub(crate) fn check_files(files: &ModelFiles, task: Task) -> Result<()> {
        let prompt = path_of(files, files.transformer.as_deref(), "transformer").is_some();
        let given = files.reference_transformer.as_deref();
        let references = path_of(files, given, "transformer_ref").is_some();
        match (task, prompt, references) {
            // What is there is refused where it is opened.
            (_, false, false) | (Task::Prompt, true, _) | (Task::References, _, true) => Ok(()),
            (task, ..) => Err(task.refused()),
        }
    }

    /// Refuses a task that no transformer is for.
    ///
    /// # Errors
    /// [`Error::NoTransformer`].
    pub(crate) fn check(&self, task: Task) -> Result<()> {
        match self.task == task || self.other.is_some() {
            true => Ok(()),
            false => Err(task.refused()),
        }
    }

    /// Takes the transformer for `task`, after the other's memory was given up, and says whether it is another than before.
    ///
    /// # Errors
    /// [`Error::NoTransformer`] if the checkpoint has none for it.
    pub(crate) fn choose(&mut self, task: Task) -> Result<bool> {
        if self.task == task {
            return Ok(false);
        }
        let Some(other) = &mut self.other else {
            return Err(task.refused());
        };
        for stage in [Stage::Preparation, Stage::Steps] {
            self.current.evict(stage);
        }
        std::mem::swap(&mut self.current, other);
        self.task = task;
        Ok(true)
    }

    /// The transformer in use.
    pub(crate) fn current(&self) -> &Denoiser {
        &self.current
    }

    /// The transformer in use, to use it.
    pub(crate) fn current_mut(&mut self) -> &mut Denoiser {
        &mut self.current
    }

    /// Weights that could not be given the type asked for.
    pub(crate) fn fallbacks(&self) -> impl Iterator<Item = &Fallback> {
        let all = [&self.current].into_iter().chain(&self.other);
        all.flat_map(|denoiser| denoiser.fallbacks())
    }

    /// The weights that the steps of the transformer in use need.
    pub(crate) fn weights(&self) -> &Weights {
        self.current.weights(Stage::Steps)
    }

    /// What the steps of a run take beside the weights, with what was prepared for `times` times.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn estimate(
        &self,
        backend: &Backend,
        layout: &Layout,
        times: usize,
    ) -> Result<Estimate> {
        let of = |stage| self.current.estimate(stage, backend, layout, times);
        let mut steps = of(Stage::Steps)?;
        steps.cache_bytes = of(Stage::Preparation)?.cache_bytes;
        Ok(steps)
    }

    /// What preparing a run needs, which is over before its first step.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn preparation_need(
        &self,
        backend: &Backend,
        layout: &Layout,
        times: usize,
    ) -> Result<Need> {
        let stage = Stage::Preparation;
        let estimate = self.current.estimate(stage, backend, layout, times)?;
        let weights = self.current.weights(stage);
        let mut need = passing_need(Component::Diffusion, backend.device(), weights, &estimate)?;
        need.compute += estimate.cache_bytes;
        if let Some(streamed) = &mut need.streamed {
            streamed.compute += estimate.cache_bytes;
        }
        Ok(need)
    }

    /// Leaves the weights that prepare a run in their files until it begins.
    pub(crate) fn leave_preparation(&mut self) {
        let weights = self.current.weights_mut(Stage::Preparation);
        weights.live(Residence::Disk, Mapping::Never);
    }
}

/// Where a transformer is, if it is there: at the path that was given, or in its folder of the model's. A file of all parts has one
/// for prompts.
fn path_of(files: &ModelFiles, given: Option<&Path>, folder: &str) -> Option<PathBuf> {
    if let Some(given) = given {
        return Some(given.to_owned());
    }
    let model = files.model.as_ref()?;
    if model.is_dir() {
        return Some(model.join(folder)).filter(|folder| folder.is_dir());
    }
    (folder == "transformer").then(|| model.clone())
}
