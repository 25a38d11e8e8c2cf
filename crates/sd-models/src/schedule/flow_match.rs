//! Noise levels of flow-matching models, as their configuration has them.

use std::path::Path;

use serde::Deserialize;

use crate::config::{check, read_json};
use crate::error::Result;

use super::{Schedule, Scheduler, check_steps, spacing};

/// The settings of diffusers' [`FlowMatchEulerDiscreteScheduler`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/schedulers/scheduling_flow_match_euler_discrete.py).
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct FlowMatchEuler {
    /// Timesteps that the model was trained with; a sigma of 1 is this timestep.
    pub num_train_timesteps: usize,
    /// Fixed shift, used where the shift is not dynamic.
    pub shift: f32,
    /// Whether the shift follows the number of tokens.
    pub use_dynamic_shifting: bool,
    /// Shift at `base_image_seq_len` tokens.
    pub base_shift: f64,
    /// Shift at `max_image_seq_len` tokens.
    pub max_shift: f64,
    /// Tokens with the smallest shift.
    pub base_image_seq_len: usize,
    /// Tokens with the largest shift.
    pub max_image_seq_len: usize,
    /// Sigma that the last step is stretched to start from.
    pub shift_terminal: Option<f32>,
    /// How a dynamic shift bends the schedule.
    pub time_shift_type: TimeShift,
    use_karras_sigmas: bool,
    use_exponential_sigmas: bool,
    use_beta_sigmas: bool,
    invert_sigmas: bool,
    stochastic_sampling: bool,
}

/// The two ways a dynamic shift bends a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TimeShift {
    /// `e^mu / (e^mu + (1/s - 1))`.
    Exponential,
    /// `mu / (mu + (1/s - 1))`.
    Linear,
}

impl Default for FlowMatchEuler {
    /// The defaults of the reference's constructor and of its Qwen-Image pipelines.
    fn default() -> Self {
        FlowMatchEuler {
            num_train_timesteps: 1000,
            shift: 1.0,
            use_dynamic_shifting: false,
            base_shift: 0.5,
            max_shift: 1.15,
            base_image_seq_len: 256,
            max_image_seq_len: 4096,
            shift_terminal: None,
            time_shift_type: TimeShift::Exponential,
            use_karras_sigmas: false,
            use_exponential_sigmas: false,
            use_beta_sigmas: false,
            invert_sigmas: false,
            stochastic_sampling: false,
        }
    }
}

impl FlowMatchEuler {
    /// Reads `scheduler_config.json`.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io), [`Error::Config`](crate::Error::Config) (also for options that are not implemented).
    pub fn read(path: &Path) -> Result<FlowMatchEuler> {
        let config: FlowMatchEuler = read_json(path)?;
        check(
            path,
            &[
                (
                    "at most one of use_karras_sigmas, use_exponential_sigmas and use_beta_sigmas",
                    config.spacings().count() <= 1,
                ),
                ("invert_sigmas = false", !config.invert_sigmas),
                ("stochastic_sampling = false", !config.stochastic_sampling),
                ("num_train_timesteps > 0", config.num_train_timesteps > 0),
                ("shift > 0", config.shift > 0.0),
                (
                    "base_image_seq_len < max_image_seq_len",
                    config.base_image_seq_len < config.max_image_seq_len,
                ),
                (
                    "0 <= shift_terminal < 1",
                    config
                        .shift_terminal
                        .is_none_or(|terminal| (0.0..1.0).contains(&terminal)),
                ),
            ],
        )?;
        Ok(config)
    }

    /// The dynamic shift `mu` for a picture of `tokens` tokens. Linear, and beyond both ends too.
    pub fn mu(&self, tokens: usize) -> f64 {
        let range = self.max_image_seq_len as f64 - self.base_image_seq_len as f64;
        let slope = (self.max_shift - self.base_shift) / range;
        tokens as f64 * slope + (self.base_shift - slope * self.base_image_seq_len as f64)
    }

    /// The spacings that the configuration asks for; one makes sense.
    fn spacings(&self) -> impl Iterator<Item = Scheduler> {
        let asked = [
            (self.use_karras_sigmas, Scheduler::Karras),
            (self.use_exponential_sigmas, Scheduler::Exponential),
            (self.use_beta_sigmas, Scheduler::Beta),
        ];
        asked
            .into_iter()
            .filter_map(|(is_asked, scheduler)| is_asked.then_some(scheduler))
    }

    /// The schedule of `steps` evenly spaced levels, shifted for a picture of `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Steps`](crate::Error::Steps).
    pub fn schedule(&self, steps: usize, tokens: usize) -> Result<Schedule> {
        self.schedule_as(&Scheduler::Model, steps, tokens)
    }

    /// The schedule of `steps` levels laid out as `scheduler` says, for a picture of `tokens` tokens. Exact levels are as
    /// many as they are.
    ///
    /// # Errors
    /// [`Error::Steps`](crate::Error::Steps); [`Error::Sigma`](crate::Error::Sigma) for exact levels.
    pub fn schedule_as(
        &self,
        scheduler: &Scheduler,
        steps: usize,
        tokens: usize,
    ) -> Result<Schedule> {
        if let Scheduler::Exact(sigmas) = scheduler {
            return Schedule::exact(sigmas, self.num_train_timesteps);
        }
        check_steps(steps)?;
        let table = self.num_train_timesteps as f64;
        let bent = |t: f64| f64::from(self.bend(t as f32, tokens));
        match scheduler {
            Scheduler::Simple => {
                let every = table / steps as f64;
                let levels = (0..steps).map(|step| table - (step as f64 * every).floor());
                Ok(self.finish(levels.map(|t| bent(t / table))))
            }
            Scheduler::SgmUniform => {
                let (first, last) = (bent(1.0), bent(1.0 / table));
                let levels = (0..steps)
                    .map(|step| first + step as f64 / steps as f64 * (last - first))
                    .map(bent);
                Ok(self.finish(levels))
            }
            _ => {
                let last = 1.0 / steps as f64;
                let spacing = if steps > 1 {
                    (last - 1.0) / (steps - 1) as f64
                } else {
                    0.0
                };
                let levels: Vec<f32> = (0..steps)
                    .map(|step| if step > 0 && step + 1 == steps { last } else { 1.0 + step as f64 * spacing } as f32)
                    .collect();
                Ok(self.respaced(self.shifted(&levels, tokens), scheduler))
            }
        }
    }

    /// The schedule of given levels from 1 down, without the final 0, shifted for a picture of `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Steps`](crate::Error::Steps) if there are none or too many.
    pub fn schedule_of(&self, levels: &[f32], tokens: usize) -> Result<Schedule> {
        check_steps(levels.len())?;
        Ok(self.respaced(self.shifted(levels, tokens), &Scheduler::Model))
    }

    /// A level as the model shifts it for a picture of `tokens` tokens.
    fn bend(&self, s: f32, tokens: usize) -> f32 {
        let mu = self.mu(tokens);
        match (self.use_dynamic_shifting, self.time_shift_type) {
            (true, TimeShift::Exponential) => mu.exp() as f32 / (mu.exp() as f32 + (1.0 / s - 1.0)),
            (true, TimeShift::Linear) => mu as f32 / (mu as f32 + (1.0 / s - 1.0)),
            (false, _) => self.shift * s / (1.0 + (self.shift - 1.0) * s),
        }
    }

    /// Levels shifted, and stretched to where the last step starts from.
    fn shifted(&self, levels: &[f32], tokens: usize) -> Vec<f32> {
        let mut sigmas: Vec<f32> = levels.iter().map(|&s| self.bend(s, tokens)).collect();
        if let Some(terminal) = self.shift_terminal.filter(|&terminal| terminal != 0.0) {
            let scale = (1.0 - sigmas[sigmas.len() - 1]) / (1.0 - terminal);
            // A single step starts at 1 and cannot be stretched; the reference divides 0 by 0 there.
            if scale != 0.0 {
                for sigma in &mut sigmas {
                    *sigma = 1.0 - (1.0 - *sigma) / scale;
                }
            }
        }
        sigmas
    }

    /// As many levels between the first and the last of `sigmas`, laid out as asked for, or as the configuration asks.
    fn respaced(&self, sigmas: Vec<f32>, scheduler: &Scheduler) -> Schedule {
        let scheduler = match scheduler {
            Scheduler::Model => self.spacings().next().unwrap_or_default(),
            asked => asked.clone(),
        };
        let lay_out = match scheduler {
            Scheduler::Karras => spacing::karras,
            Scheduler::Exponential => spacing::exponential,
            Scheduler::Beta => spacing::beta,
            _ => return self.finish(sigmas.into_iter().map(f64::from)),
        };
        let (first, last) = (sigmas[0], sigmas[sigmas.len() - 1]);
        self.finish(lay_out(first.into(), last.into(), sigmas.len()).into_iter())
    }

    fn finish(&self, levels: impl Iterator<Item = f64>) -> Schedule {
        let sigmas = levels.map(|level| level as f32).chain([0.0]).collect();
        Schedule {
            sigmas,
            num_train_timesteps: self.num_train_timesteps,
        }
    }
}
