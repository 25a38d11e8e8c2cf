//! Samplers: from latents and the velocities that a model predicts to the latents of the next noise level.
//!
//! A flow-matching model predicts `v = noise - picture`, so that at the noise level `sigma` the latents `x` hold the picture
//! `x - sigma * v`, and `dx / dsigma = v`.

use std::str::FromStr;

use crate::error::{Error, Result};
use crate::schedule::Schedule;

/// How a step is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Sampler {
    /// Along the velocity. First order.
    #[default]
    Euler,
    /// Along the mean of the velocities at both ends: two calls of the model a step, but for the last. Second order.
    Heun,
    /// DPM-Solver++ (2M): the predicted pictures of two steps, extrapolated in the logarithm of the signal-to-noise ratio. Lu
    /// and others, 2022. Second order.
    DpmPlusPlus2M,
    /// UniPC of order 2 with `B(h) = e^h - 1`: as DPM-Solver++ (2M), and each step is corrected by the next prediction. Zhao
    /// and others, 2023. Second order, with smaller errors.
    UniPc,
    /// RES, multistep: as DPM-Solver++ (2M), extrapolated in the logarithm of the noise level and integrated exactly. Zhang
    /// and others, 2023. Second order.
    ResMultistep,
}

impl Sampler {
    /// All there are.
    pub const ALL: [Sampler; 5] = [
        Sampler::Euler,
        Sampler::Heun,
        Sampler::DpmPlusPlus2M,
        Sampler::UniPc,
        Sampler::ResMultistep,
    ];

    /// What users call it.
    pub fn name(self) -> &'static str {
        match self {
            Sampler::Euler => "euler",
            Sampler::Heun => "heun",
            Sampler::DpmPlusPlus2M => "dpm++_2m",
            Sampler::UniPc => "unipc",
            Sampler::ResMultistep => "res_multistep",
        }
    }

    /// As the texts beside a picture name it.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Sampler::Euler => "Euler",
            Sampler::Heun => "Heun",
            Sampler::DpmPlusPlus2M => "DPM++ 2M",
            Sampler::UniPc => "UniPC",
            Sampler::ResMultistep => "Res Multistep",
        }
    }

    /// How often a schedule of `steps` steps asks the model.
    pub fn calls(self, steps: usize) -> usize {
        match self {
            Sampler::Heun => (2 * steps).saturating_sub(1),
            _ => steps,
        }
    }

    /// Begins at the first level of `schedule`.
    pub fn start(self, schedule: &Schedule) -> Sampling<'_> {
        Sampling {
            sampler: self,
            schedule,
            step: 0,
            calls: 0,
            start: Vec::new(),
            earlier: Vec::new(),
        }
    }
}

impl FromStr for Sampler {
    type Err = Error;

    /// # Errors
    /// [`Error::UnknownName`], with all names.
    fn from_str(name: &str) -> Result<Sampler> {
        let mut known = Sampler::ALL.into_iter();
        known
            .find(|sampler| sampler.name() == name)
            .ok_or_else(|| Error::UnknownName {
                what: "sampler",
                name: name.to_owned(),
                known: Sampler::ALL.map(Sampler::name).to_vec(),
            })
    }
}

/// A sampler on its way through a schedule: says at which noise level the model is asked next, and takes its answer.
#[derive(Debug, Clone)]
pub struct Sampling<'s> {
    sampler: Sampler,
    schedule: &'s Schedule,
    step: usize,
    calls: usize,
    /// Latents where the step began, if the sampler comes back to them.
    start: Vec<f32>,
    /// What the model predicted before, as the sampler needs it, the latest last: velocities or pictures.
    earlier: Vec<Vec<f32>>,
}

impl Sampling<'_> {
    /// Steps that are done.
    pub fn step(&self) -> usize {
        self.step
    }

    /// Calls of the model that are done.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Whether the latents are at the last level.
    pub fn is_done(&self) -> bool {
        self.step >= self.schedule.steps()
    }

    /// Whether the next call is the second one within a step.
    fn is_midway(&self) -> bool {
        self.sampler == Sampler::Heun && !self.earlier.is_empty()
    }

    /// The schedule's level at which the model is asked next: a position in [`Schedule::sigmas`].
    pub fn level(&self) -> usize {
        self.step + usize::from(self.is_midway())
    }

    /// The noise level at which the model is asked next.
    pub fn sigma(&self) -> f32 {
        self.schedule.sigmas()[self.level()]
    }

    /// Moves `latents` on, given the velocity that the model predicts for them at [`Sampling::sigma`]. Nothing happens when
    /// the sampler [is done](Sampling::is_done).
    pub fn advance(&mut self, latents: &mut [f32], velocity: &[f32]) {
        if self.is_done() {
            return;
        }
        self.calls += 1;
        match self.sampler {
            Sampler::Euler => {
                self.schedule.euler_step(self.step, latents, velocity);
                self.step += 1;
            }
            Sampler::Heun => self.heun(latents, velocity),
            Sampler::DpmPlusPlus2M | Sampler::ResMultistep => {
                let picture = predicted(latents, velocity, self.sigma());
                self.extrapolate(latents, picture);
            }
            Sampler::UniPc => {
                let picture = predicted(latents, velocity, self.sigma());
                self.correct(latents, &picture);
                self.start.clear();
                self.start.extend_from_slice(latents);
                self.extrapolate(latents, picture);
            }
        }
    }

    fn heun(&mut self, latents: &mut [f32], velocity: &[f32]) {
        let sigmas = self.schedule.sigmas();
        let (sigma, next) = (sigmas[self.step], sigmas[self.step + 1]);
        if let Some(first) = self.earlier.pop() {
            let half = 0.5 * (next - sigma);
            for (x, (start, (first, second))) in latents
                .iter_mut()
                .zip(self.start.iter().zip(first.iter().zip(velocity)))
            {
                *x = start + half * (first + second);
            }
            self.step += 1;
        } else if next > 0.0 {
            self.start.clear();
            self.start.extend_from_slice(latents);
            self.earlier.push(velocity.to_vec());
            self.schedule.euler_step(self.step, latents, velocity);
        } else {
            self.schedule.euler_step(self.step, latents, velocity);
            self.step += 1;
        }
    }

    /// A step of the exponential integrators: the picture as predicted now, and the line through it and the one before.
    ///
    /// `x' = s/r x + (1 - s/r) d + w (d - e)` for levels `r` and then `s`, predictions `d` and before it `e`.
    fn extrapolate(&mut self, latents: &mut [f32], picture: Vec<f32>) {
        let (sigma, next) = self.levels(self.step);
        let keep = next / sigma;
        // The last step goes to where the logarithms are infinite.
        let before = self.earlier.last().filter(|_| next > 0.0);
        match before {
            Some(before) => {
                let (earlier, _) = self.levels(self.step - 1);
                let slope = match self.sampler {
                    Sampler::ResMultistep => {
                        let h = (sigma / next).ln();
                        (h - (1.0 - keep)) / (earlier / sigma).ln()
                    }
                    _ => {
                        let h = self.log_snr(next) - self.log_snr(sigma);
                        let before = self.log_snr(sigma) - self.log_snr(earlier);
                        0.5 * (1.0 - keep) * h / before
                    }
                };
                let slope = slope as f32;
                blend(
                    latents,
                    keep,
                    picture
                        .iter()
                        .zip(before)
                        .map(|(now, before)| (*now, slope * (now - before))),
                );
            }
            None => blend(latents, keep, picture.iter().map(|now| (*now, 0.0))),
        }
        if self.earlier.len() > 1 {
            self.earlier.remove(0);
        }
        self.earlier.push(picture);
        self.step += 1;
    }

    /// Takes the step before once more, knowing what is predicted at its end.
    fn correct(&self, latents: &mut [f32], picture: &[f32]) {
        let Some(before) = self.earlier.last() else {
            return;
        };
        let (sigma, next) = self.levels(self.step - 1);
        let keep = next / sigma;
        let h = self.log_snr(next) - self.log_snr(sigma);
        // Weights of what is predicted now and two steps ago, both as differences to the step before.
        let (now, ago) = match self.earlier.first().filter(|_| self.step > 1) {
            None => (0.5, None),
            Some(two_ago) => {
                let (earlier, _) = self.levels(self.step - 2);
                let ratio = (self.log_snr(earlier) - self.log_snr(sigma)) / h;
                // Two weights from two equations: b_k = k! phi_{k+1}(-h) / phi_1(-h).
                let b1 = phi(2, -h) / phi(1, -h);
                let b2 = 2.0 * phi(3, -h) / phi(1, -h);
                let ago = (b1 - b2) / (1.0 - ratio);
                (b1 - ago, Some((two_ago, ago / ratio)))
            }
        };
        let change = 1.0 - keep;
        let now = (change * now) as f32;
        latents.copy_from_slice(&self.start);
        let corrections = picture.iter().zip(before).enumerate();
        let corrections = corrections.map(|(index, (picture, before))| {
            let mut correction = now * (picture - before);
            if let Some((two_ago, weight)) = ago {
                correction += (change * weight) as f32 * (two_ago[index] - before);
            }
            (*before, correction)
        });
        blend(latents, keep, corrections);
    }

    /// The levels at both ends of a step.
    fn levels(&self, step: usize) -> (f64, f64) {
        let sigmas = self.schedule.sigmas();
        (sigmas[step].into(), sigmas[step + 1].into())
    }

    /// The logarithm of picture to noise at a level; minus infinity where all is noise.
    fn log_snr(&self, sigma: f64) -> f64 {
        let picture = match self.sampler {
            // The reference keeps UniPC this far from where all is noise.
            Sampler::UniPc => (1.0 - sigma).max(1e-6),
            _ => 1.0 - sigma,
        };
        (picture / sigma).ln()
    }
}

/// The picture in latents at a noise level.
pub(crate) fn predicted(latents: &[f32], velocity: &[f32], sigma: f32) -> Vec<f32> {
    let pairs = latents.iter().zip(velocity);
    pairs.map(|(x, v)| x - sigma * v).collect()
}

/// `x = keep * x + (1 - keep) * picture + correction`.
fn blend(latents: &mut [f32], keep: f64, towards: impl Iterator<Item = (f32, f32)>) {
    let (keep, change) = (keep as f32, (1.0 - keep) as f32);
    for (x, (picture, correction)) in latents.iter_mut().zip(towards) {
        *x = keep * *x + change * picture + correction;
    }
}

/// `phi_k(z)`, the sum of `z^n / (n + k)!`: `phi_1(z) = (e^z - 1) / z`, `phi_{k+1}(z) = (phi_k(z) - 1/k!) / z`.
fn phi(k: u32, z: f64) -> f64 {
    let factorial = |k: u32| f64::from((1..=k).product::<u32>());
    if z.abs() > 1.0 {
        let next = |phi: f64, k: u32| (phi - factorial(k).recip()) / z;
        return (1..k).fold(z.exp_m1() / z, next);
    }
    // The recursion loses digits near 0; the series has them all.
    let (mut term, mut sum) = (factorial(k).recip(), 0.0);
    for n in 1..24 {
        sum += term;
        term *= z / f64::from(n + k);
    }
    sum
}
