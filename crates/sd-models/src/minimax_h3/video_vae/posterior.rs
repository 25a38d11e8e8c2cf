//! What the encoder says of a clip: a distribution of latents.

use half::f16;

use super::config::Config;
use crate::error::{Error, Result};
use crate::wan_vae::Clip;

/// Means and logarithms of variances of the latents of a picture or clip, `[frames, channels, height, width]` each.
#[derive(Debug, Clone, PartialEq)]
pub struct Posterior {
    /// The means.
    pub mean: Clip,
    /// Natural logarithms of the variances.
    pub logvar: Clip,
}

impl Posterior {
    /// Both halves of `moments [frames, 2 * channels, height, width]`.
    pub(super) fn new(moments: Clip) -> Posterior {
        let half = moments.frame_len() / 2;
        let part = |first: usize| {
            let frames = moments.each_frame();
            Clip {
                channels: moments.channels / 2,
                values: frames
                    .flat_map(|frame| &frame[first..first + half])
                    .copied()
                    .collect(),
                ..moments
            }
        };
        let (mean, logvar) = (part(0), part(half));
        Posterior { mean, logvar }
    }

    /// A clip's next latent frames behind these.
    pub fn append(&mut self, later: &Posterior) {
        for (clip, later) in [
            (&mut self.mean, &later.mean),
            (&mut self.logvar, &later.logvar),
        ] {
            clip.frames += later.frames;
            clip.values.extend_from_slice(&later.values);
        }
    }

    /// The likeliest latents, as the diffusion model sees them: with mean 0 and deviation 1.
    pub fn mode(&self, config: &Config) -> Clip {
        let mut latents = self.mean.clone();
        config.normalize(&mut latents);
        latents
    }

    /// Latents drawn by `noise [channels, frames, height, width]`, the order in which the reference draws it, as the diffusion
    /// model sees them.
    ///
    /// # Errors
    /// [`Error::Clip`] for another number of values.
    pub fn sample(&self, config: &Config, noise: &[f32]) -> Result<Clip> {
        let mut latents = self.drawn(noise)?;
        config.normalize(&mut latents);
        Ok(latents)
    }

    /// As [`Posterior::sample`], rounded to half precision before they are brought to mean 0 and deviation 1: what the diffusion
    /// model was given of pictures and clips while it was trained.
    ///
    /// # Errors
    /// As for [`Posterior::sample`].
    pub fn sample_in_half(&self, config: &Config, noise: &[f32]) -> Result<Clip> {
        let mut latents = self.drawn(noise)?;
        for value in &mut latents.values {
            *value = f16::from_f32(*value).to_f32();
        }
        config.normalize(&mut latents);
        Ok(latents)
    }

    fn drawn(&self, noise: &[f32]) -> Result<Clip> {
        /// Between which logarithms of variances are taken.
        const RANGE: [f32; 2] = [-30.0, 20.0];
        let mean = &self.mean;
        if noise.len() != mean.values.len() {
            return Err(Error::Clip {
                what: "values of noise",
                found: noise.len(),
                wanted: mean.values.len(),
            });
        }
        let sides = [mean.channels, mean.frames, mean.height, mean.width];
        let mut latents = Clip::from_channels_first(sides, noise);
        let moments = mean.values.iter().zip(&self.logvar.values);
        for (value, (mean, logvar)) in latents.values.iter_mut().zip(moments) {
            let [least, most] = RANGE;
            *value = mean + (0.5 * logvar.clamp(least, most)).exp() * *value;
        }
        Ok(latents)
    }
}
