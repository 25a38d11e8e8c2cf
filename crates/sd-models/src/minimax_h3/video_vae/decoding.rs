//! Latents of any length to frames, seven latent frames at a time.

use rayon::prelude::*;
use sd_backend::Backend;
use sd_graph::{Cancel, Estimate, PlanCache, Progress, Reporter};

use super::config::Config;
use super::decoder::Decoder;
use super::encoding::PIXELS;
use super::tiles::{Mosaic, Tiles, Tiling};
use crate::error::{Error, Result};
use crate::wan_vae::Clip;

/// Decodes the latents of one clip after the other.
#[derive(Debug)]
pub(super) struct Decoding<'v> {
    decoder: &'v Decoder,
    config: &'v Config,
    /// Rows and columns of tiles, in latents.
    rows: Tiles,
    columns: Tiles,
    plans: PlanCache<()>,
    /// The most bytes that were held on the device while a tile ran.
    pub(super) peak: u64,
}

impl<'v> Decoding<'v> {
    /// Begins with latents of so many rows and columns.
    pub(super) fn new(
        decoder: &'v Decoder,
        config: &'v Config,
        (height, width): (usize, usize),
        tiling: Tiling,
    ) -> Decoding<'v> {
        let scale = config.scale_factor();
        Decoding {
            decoder,
            config,
            rows: tiling.over(height, scale),
            columns: tiling.over(width, scale),
            plans: PlanCache::new(1),
            peak: 0,
        }
    }

    /// Latent frames, rows and columns of what is decoded at once.
    fn piece(&self) -> [usize; 3] {
        let frames = self.config.clip_latents() + self.config.latents_overlap();
        [frames, self.rows.length(), self.columns.length()]
    }

    /// What a tile takes.
    pub(super) fn estimate(&self, backend: &Backend) -> Result<Estimate> {
        let channels = self.config.latent_channels;
        let estimate = Estimate::of(backend, |g| self.decoder.record(g, channels, self.piece()));
        Ok(estimate?)
    }

    /// Gives `frame` each frame of `latents`, planes of red, green and blue from 0 to 1, as soon as it is made.
    pub(super) fn run<E: From<Error>>(
        &mut self,
        backend: &mut Backend,
        latents: &Clip,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
        frame: &mut dyn FnMut(&[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let config = self.config;
        let step = config.clip_latents();
        // The last clip of all is decoded behind the one before, where something was left out of it.
        let without = usize::from(config.token_drop > 0);
        let clips = (latents.frames + config.token_drop).div_ceil(step);
        let clips = clips.saturating_sub(without).max(1);
        let tiles = self.rows.count() * self.columns.count();
        let mut left = config.frames(latents.frames);
        let mut emit = |values: &mut [f32], side: usize| -> Result<(), E> {
            let side = side.max(1);
            let pictures = values.par_chunks_exact_mut(side).take(left);
            pictures.for_each(to_pixels);
            for picture in values.chunks_exact(side).take(left) {
                frame(picture)?;
                left -= 1;
            }
            Ok(())
        };
        let scale = config.scale_factor();
        let side = 3 * latents.height * latents.width * scale * scale;
        let mut before: Vec<f32> = Vec::new();
        for clip in 0..clips {
            let mut done = clip * tiles;
            let mut told = |progress: &mut dyn Reporter| {
                done += 1;
                let total = clips * tiles;
                progress.report(&Progress::Chunk { done, total });
            };
            let mut now =
                self.clip(backend, latents, clip * step, (cancel, progress), &mut told)?;
            let mut tail = now.split_off((config.clip_length * side).min(now.len()));
            fade(&before, &mut now, side);
            emit(&mut now, side)?;
            if clip + 1 == clips {
                emit(&mut tail, side)?;
            }
            before = tail;
        }
        Ok(())
    }

    /// Frames of the clip that begins with the latent frame `start`: its own, and behind them those that the next one makes
    /// too. Latent frames beyond the last are as the last.
    fn clip(
        &mut self,
        backend: &mut Backend,
        latents: &Clip,
        start: usize,
        (cancel, progress): (&Cancel, &mut dyn Reporter),
        told: &mut dyn FnMut(&mut dyn Reporter),
    ) -> Result<Vec<f32>> {
        let config = self.config;
        let (scale, ratio) = (config.scale_factor(), config.frames_per_latent());
        let own = config.clip_latents() * ratio;
        let made = own + config.latents_overlap() * ratio;
        // Those that no latent frame stands for are left out, in front of both parts.
        let left_out = config.frames_before();
        let shown = (left_out..own).chain(own + left_out..made);
        let shown: Vec<usize> = shown.collect();
        let (rows, columns) = (self.rows.scaled(scale), self.columns.scaled(scale));
        let mut mosaic = Mosaic::new(3 * shown.len(), &rows, &columns);
        let piece = self.piece();
        let mut add =
            |place, pixels: &[f32]| mosaic.add(place, &planes(config, piece, pixels, &shown));
        let [frames, height, width] = piece;
        let block = config.pixels_per_latent();
        let mut pixels = vec![0.0; frames * height * width * block];
        let mut before = (None, pixels.clone());
        let places = (0..rows.count() * columns.count())
            .map(|tile| (tile / columns.count(), tile % columns.count()));
        for place in places {
            // While a tile is computed the one before finds its place.
            rayon::in_place_scope(|scope| {
                if let (Some(place), pixels) = &before {
                    let add = &mut add;
                    scope.spawn(move |_| add(*place, pixels));
                }
                let tokens = self.tokens(latents, start, place);
                self.run_tile(backend, &tokens, &mut pixels, cancel, progress)
            })?;
            told(progress);
            before.0 = Some(place);
            std::mem::swap(&mut before.1, &mut pixels);
        }
        if let (Some(place), pixels) = &before {
            add(*place, pixels);
        }
        Ok(mosaic.finish())
    }

    /// Latents `[frames * rows * columns, channels]` of a tile, which get their means and deviations back.
    fn tokens(&self, latents: &Clip, start: usize, (row, column): (usize, usize)) -> Vec<f32> {
        let [frames, ..] = self.piece();
        let last = latents.frames.saturating_sub(1);
        let area = latents.height * latents.width;
        let statistics = self
            .config
            .latents_mean
            .iter()
            .zip(&self.config.latents_std);
        let mut tokens =
            Vec::with_capacity(self.piece().iter().product::<usize>() * latents.channels);
        for frame in (start..start + frames).map(|frame| frame.min(last)) {
            let values = &latents.values[frame * latents.frame_len()..];
            for y in self.rows.range(row) {
                for x in self.columns.range(column) {
                    let at = y * latents.width + x;
                    let channels = values.iter().skip(at).step_by(area.max(1));
                    let channels = channels.zip(statistics.clone());
                    tokens.extend(channels.map(|(value, (mean, std))| value * std + mean));
                }
            }
        }
        tokens
    }

    fn run_tile(
        &mut self,
        backend: &mut Backend,
        tokens: &[f32],
        pixels: &mut [f32],
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<()> {
        let (decoder, channels, piece) = (self.decoder, self.config.latent_channels, self.piece());
        let plan = self
            .plans
            .get_or_build_with((), backend, cancel, progress, |g| {
                decoder.record(g, channels, piece);
            })?;
        plan.set("latents", tokens)?;
        let report = plan.run_with(backend, cancel, progress)?;
        self.peak = self.peak.max(report.used.total());
        Ok(plan.read_into("pixels", pixels)?)
    }
}

/// The frames `shown` of a tile of `piece`, `[frames, 3, height, width]`, of the blocks of pixels that its latents became.
fn planes(
    config: &Config,
    [_, rows, columns]: [usize; 3],
    pixels: &[f32],
    shown: &[usize],
) -> Vec<f32> {
    let (scale, ratio) = (config.scale_factor(), config.frames_per_latent());
    let block = config.pixels_per_latent();
    let width = columns * scale;
    let plane = rows * scale * width;
    let mut planes = vec![0.0; shown.len() * 3 * plane];
    let wanted = shown.par_iter().zip(planes.par_chunks_exact_mut(3 * plane));
    wanted.for_each(|(&frame, planes)| {
        let (latent, within) = (frame / ratio, frame % ratio);
        for (line, to) in planes.chunks_exact_mut(width).enumerate() {
            let (channel, y) = (line / (rows * scale), line % (rows * scale));
            let first = (latent * rows + y / scale) * columns;
            let line = ((channel * ratio + within) * scale + y % scale) * scale;
            for (token, to) in to.chunks_exact_mut(scale).enumerate() {
                to.copy_from_slice(&pixels[(first + token) * block + line..][..scale]);
            }
        }
    });
    planes
}

/// Lets the frames `before`, of `side` values each, fade into the first of `now`.
fn fade(before: &[f32], now: &mut [f32], side: usize) {
    let count = before.len() / side.max(1);
    let frames = before.par_chunks_exact(side.max(1));
    let both = frames
        .zip(now.par_chunks_exact_mut(side.max(1)))
        .enumerate();
    both.for_each(|(index, (before, now))| {
        let share = index as f32 / count as f32;
        for (now, before) in now.iter_mut().zip(before) {
            *now = before * (1.0 - share) + *now * share;
        }
    });
}

/// Planes of red, green and blue from the model's numbers to those from 0 to 1.
fn to_pixels(picture: &mut [f32]) {
    let plane = (picture.len() / 3).max(1);
    for (plane, [mean, std]) in picture.chunks_exact_mut(plane).zip(PIXELS) {
        for value in plane {
            *value = (*value * std + mean).clamp(0.0, 1.0);
        }
    }
}
