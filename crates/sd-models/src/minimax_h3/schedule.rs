//! Noise levels of video and of sound, each with a shift of its own.

use std::path::Path;

use serde::Deserialize;

use crate::config::{check, read_json};
use crate::error::{Error, Result};

/// Most evaluations of a schedule.
const MOST_STEPS: usize = 1000;

/// How far noise levels are shifted towards noise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shifts {
    /// Of the video.
    pub video: f32,
    /// Of the sound.
    pub sound: f32,
}

impl Default for Shifts {
    /// As published.
    fn default() -> Self {
        Shifts {
            video: 12.0,
            sound: 3.0,
        }
    }
}

/// What of `scheduler_config.json` bears on levels.
#[derive(Debug, Deserialize)]
struct SchedulerConfig {
    shift: f32,
}

impl Shifts {
    /// Reads `scheduler/scheduler_config.json` and `audio_scheduler/scheduler_config.json` of a model's folder; what is not there is
    /// as published.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Config`].
    pub fn read(folder: &Path) -> Result<Shifts> {
        let published = Shifts::default();
        let read = |name: &str, otherwise: f32| -> Result<f32> {
            let path = folder.join(name).join("scheduler_config.json");
            if !path.is_file() {
                return Ok(otherwise);
            }
            let SchedulerConfig { shift } = read_json(&path)?;
            check(&path, &[("shift > 0", shift > 0.0 && shift.is_finite())])?;
            Ok(shift)
        };
        Ok(Shifts {
            video: read("scheduler", published.video)?,
            sound: read("audio_scheduler", published.sound)?,
        })
    }
}

/// Noise levels from 1, all noise, to 0, none. Time is one less the level.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    sigmas: Vec<f32>,
}

impl Schedule {
    /// `points` levels, both ends included, so that there is one evaluation of the model fewer. Evenly spaced `b` become
    /// `s b / (1 + (s - 1) b)`.
    ///
    /// # Errors
    /// [`Error::Steps`] for fewer than two points or too many.
    pub fn new(shift: f32, points: usize) -> Result<Schedule> {
        let steps = points.saturating_sub(1);
        if !(1..=MOST_STEPS).contains(&steps) {
            return Err(Error::Steps(steps));
        }
        // From the nearer end and rounded once, as the reference's library does.
        let step = -1.0 / steps as f32;
        let even = |index: usize| match index < points / 2 {
            true => step.mul_add(index as f32, 1.0),
            false => -step * (steps - index) as f32,
        };
        let shifted = |base: f32| shift * base / (1.0 + (shift - 1.0) * base);
        let mut sigmas: Vec<f32> = (0..points).map(|index| shifted(even(index))).collect();
        sigmas.dedup();
        Ok(Schedule { sigmas })
    }

    /// Noise levels, the final 0 included.
    pub fn sigmas(&self) -> &[f32] {
        &self.sigmas
    }

    /// Evaluations of the model.
    pub fn steps(&self) -> usize {
        self.sigmas.len() - 1
    }

    /// The time of `step`, from 0.
    pub fn time(&self, step: usize) -> f32 {
        self.sigmas.get(step).map_or(1.0, |sigma| 1.0 - sigma)
    }

    /// Goes from the level of `step` to the next: the model's `velocity` leads from noise to the clip, so that what it predicts is
    /// `x + (1 - time) * velocity`, and the next `x` lies as far towards that as the noise is less.
    pub fn advance(&self, step: usize, x: &mut [f32], velocity: &[f32]) {
        let Some(&[sigma, next]) = self.sigmas.get(step..).and_then(<[f32]>::first_chunk) else {
            return;
        };
        // By way of the time, whose rounding the reference keeps.
        let left = 1.0 - self.time(step);
        let ratio = next / sigma;
        for (x, velocity) in x.iter_mut().zip(velocity) {
            let predicted = *x + left * velocity;
            *x = ratio * *x + (1.0 - ratio) * predicted;
        }
    }
}
