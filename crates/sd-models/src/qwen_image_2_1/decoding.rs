//! From latents to a picture, and to the small ones of previews.

use sd_backend::{Backend, Component};
use sd_graph::{Cancel, Graph, Progress};

use super::VaeDecoder;
use super::model::QwenImage21;
use crate::canvas::{Canvas, Piece};
use crate::error::Result;
use crate::preview::{self, Fitting};
use crate::tiling::Mosaic;

impl QwenImage21 {
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
}

pub(super) fn decoder_graph(g: Graph<'_>, module: &VaeDecoder, channels: usize, piece: Piece) {
    let z = g.input::<f32>("z", [1, channels, piece.height, piece.width]);
    g.output("picture", module.forward(z, piece.circular));
}
