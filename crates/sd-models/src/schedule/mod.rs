//! Noise levels from noise to picture.

mod flow_match;
mod spacing;

pub use flow_match::{FlowMatchEuler, TimeShift};

use std::str::FromStr;

use crate::error::{Error, Result};

/// Most steps of a schedule.
const MOST_STEPS: usize = 1000;

/// How noise levels are laid out.
///
/// The model's own follow its scheduler's configuration, and so the size of the picture. All others but exact ones start
/// from what the model says: `simple` and `sgm_uniform` bend evenly spaced levels as the model does, the others lie between
/// the model's first and last level.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub enum Scheduler {
    /// As the checkpoint's author has them.
    #[default]
    Model,
    /// Every so manieth of the levels that the model was trained with, bent but not stretched to the model's last level.
    Simple,
    /// Evenly spaced down to the last level that the model was trained with, which is left out, bent but not stretched.
    SgmUniform,
    /// Quantiles of the beta distribution with both parameters 0.6: close together at both ends.
    Beta,
    /// Evenly spaced in the seventh root: close together at the end.
    Karras,
    /// Evenly spaced in the logarithm.
    Exponential,
    /// These, as they are: as many as steps, falling, above 0 and not above 1. The final 0 is implied.
    Exact(Vec<f32>),
}

impl Scheduler {
    /// All that have a name.
    pub const NAMED: [Scheduler; 6] = [
        Scheduler::Model,
        Scheduler::Simple,
        Scheduler::SgmUniform,
        Scheduler::Beta,
        Scheduler::Karras,
        Scheduler::Exponential,
    ];

    /// What users call it.
    pub fn name(&self) -> &'static str {
        match self {
            Scheduler::Model => "model",
            Scheduler::Simple => "simple",
            Scheduler::SgmUniform => "sgm_uniform",
            Scheduler::Beta => "beta",
            Scheduler::Karras => "karras",
            Scheduler::Exponential => "exponential",
            Scheduler::Exact(_) => "exact",
        }
    }

    /// As the texts beside a picture name it.
    pub(crate) fn title(&self) -> &'static str {
        match self {
            Scheduler::Model => "Model",
            Scheduler::Simple => "Simple",
            Scheduler::SgmUniform => "SGM Uniform",
            Scheduler::Beta => "Beta",
            Scheduler::Karras => "Karras",
            Scheduler::Exponential => "Exponential",
            Scheduler::Exact(_) => "Exact",
        }
    }
}

impl FromStr for Scheduler {
    type Err = Error;

    /// # Errors
    /// [`Error::UnknownName`], with all names.
    fn from_str(name: &str) -> Result<Scheduler> {
        let mut known = Scheduler::NAMED.into_iter();
        known
            .find(|scheduler| scheduler.name() == name)
            .ok_or_else(|| Error::UnknownName {
                what: "schedule",
                name: name.to_owned(),
                known: Scheduler::NAMED.iter().map(Scheduler::name).collect(),
            })
    }
}

/// Noise levels from the first down to 0: one more than there are steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    sigmas: Vec<f32>,
    num_train_timesteps: usize,
}

impl Schedule {
    /// Exactly these levels, the final 0 left out, for a model that was trained with `num_train_timesteps`.
    ///
    /// # Errors
    /// [`Error::Steps`] if there are none or too many; [`Error::Sigma`] for one that is no number, above 1, not above 0, or
    /// not below the one before.
    pub fn exact(sigmas: &[f32], num_train_timesteps: usize) -> Result<Schedule> {
        check_steps(sigmas.len())?;
        let mut before = f32::INFINITY;
        for (index, &sigma) in sigmas.iter().enumerate() {
            let reason = match sigma {
                sigma if !(sigma > 0.0 && sigma <= 1.0) => {
                    "levels are above 0 and not above 1 (the final 0 is implied)"
                }
                sigma if sigma >= before => "each level is below the one before",
                _ => {
                    before = sigma;
                    continue;
                }
            };
            return Err(Error::Sigma {
                value: sigma,
                position: index + 1,
                reason,
            });
        }
        Ok(Schedule {
            sigmas: [sigmas, &[0.0]].concat(),
            num_train_timesteps,
        })
    }

    /// Noise levels, the final 0 included.
    pub fn sigmas(&self) -> &[f32] {
        &self.sigmas
    }

    /// Number of steps.
    pub fn steps(&self) -> usize {
        self.sigmas.len() - 1
    }

    /// The timestep of `step`, as the model was trained with: `sigma * num_train_timesteps`.
    pub fn timestep(&self, step: usize) -> f32 {
        self.sigmas[step] * self.num_train_timesteps as f32
    }

    /// One Euler step: `x += (sigma[step + 1] - sigma[step]) * velocity`.
    pub fn euler_step(&self, step: usize, x: &mut [f32], velocity: &[f32]) {
        let dt = self.sigmas[step + 1] - self.sigmas[step];
        for (x, v) in x.iter_mut().zip(velocity) {
            *x += dt * v;
        }
    }
}

fn check_steps(steps: usize) -> Result<()> {
    match steps {
        1..=MOST_STEPS => Ok(()),
        _ => Err(Error::Steps(steps)),
    }
}
