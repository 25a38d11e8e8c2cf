//! The loop over the steps of a run, from noise to latents.

use sd_backend::Backend;
use sd_graph::{Cancel, Progress, Relief, Reporter, with_relief};

use super::layout::{Layout, patchify, unpatchify};
use super::model::{Denoiser, Noisy, Prepared, Stage, check_length};
use super::schedule::Schedule;
use crate::error::{Error, Result};

/// A run of the transformer on one device.
pub struct Denoising<'r> {
    model: &'r mut Denoiser,
    backend: &'r mut Backend,
    cancel: &'r Cancel,
    others: Option<&'r mut dyn Relief>,
    stage: Stage,
    took: DenoisingReport,
}

impl std::fmt::Debug for Denoising<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Denoising")
            .field("took", &self.took)
            .finish_non_exhaustive()
    }
}

/// What a run took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DenoisingReport {
    /// Times that text and modulations were prepared.
    pub preparations: usize,
    /// Calls of the transformer.
    pub calls: usize,
    /// Bytes of weights that were moved, of those that come and go.
    pub streamed_bytes: u64,
    /// Bytes of the device that keep what was prepared, at most.
    pub prepared_bytes: u64,
}

/// What a run starts from.
#[derive(Debug, Clone, Copy)]
pub struct Start<'r> {
    /// The rows.
    pub layout: &'r Layout,
    /// Rows of pictures and clips that are shown, `[rows, in_channels * 4]`, noised as they are to be seen.
    pub seen: &'r [f32],
    /// Rows of sound that is played, `[rows, audio_in_channels]`.
    pub heard: &'r [f32],
    /// Noise for the video, `[in_channels, frames, height, width]` in latents.
    pub video: &'r [f32],
    /// Noise for the sound, `[2, latents, audio_in_channels]`.
    pub sound: &'r [f32],
    /// Levels of noise of video and of sound, as many of both.
    pub schedules: [&'r Schedule; 2],
}

/// What comes out, as the VAEs' latents lie.
#[derive(Debug, Clone, PartialEq)]
pub struct ClipLatents {
    /// `[in_channels, frames, height, width]`.
    pub video: Vec<f32>,
    /// `[2, latents, audio_in_channels]`.
    pub sound: Vec<f32>,
}

/// All times of the rows of a run with these schedules of video and sound, rising.
pub fn distinct_times(schedules: [&Schedule; 2]) -> Vec<f32> {
    let [video, sound] = schedules;
    let steps = 0..video.steps().min(sound.steps());
    let mut times: Vec<f32> = steps
        .flat_map(|step| Layout::times(video.time(step), sound.time(step)))
        .collect();
    times.sort_by(f32::total_cmp);
    times.dedup();
    times
}

impl Relief for Denoising<'_> {
    fn release_plans(&mut self) -> bool {
        let of_others = self.others.as_mut().is_some_and(|o| o.release_plans());
        self.model.drop_plans() || of_others
    }

    fn evict_weights(&mut self) -> bool {
        let of_others = self.others.as_mut().is_some_and(|o| o.evict_weights());
        let idle = match self.stage {
            Stage::Preparation => Stage::Steps,
            Stage::Steps => Stage::Preparation,
        };
        self.model.evict(idle) || of_others
    }

    fn drop_caches(&mut self) -> bool {
        self.others.as_mut().is_some_and(|o| o.drop_caches())
    }
}

impl<'r> Denoising<'r> {
    /// A run that has not begun, on the device of `backend`. It asks `cancel` before each step; `others` hold memory of the device that
    /// they can do without.
    pub fn new(
        model: &'r mut Denoiser,
        backend: &'r mut Backend,
        cancel: &'r Cancel,
        others: Option<&'r mut dyn Relief>,
    ) -> Denoising<'r> {
        Denoising {
            model,
            backend,
            cancel,
            others,
            stage: Stage::Preparation,
            took: DenoisingReport::default(),
        }
    }

    /// What it took so far.
    pub fn took(&self) -> DenoisingReport {
        self.took
    }

    /// Prepares the text encoder's hidden states `text [rows, text_dim]` and all times of `schedules`. The result serves any number of
    /// runs with that text and these schedules. If memory runs out, once more without what can be done without.
    ///
    /// # Errors
    /// Those of [`Denoiser::prepare`].
    pub fn prepare(
        &mut self,
        text: &[f32],
        schedules: [&Schedule; 2],
        progress: &mut dyn Reporter,
    ) -> Result<Prepared> {
        self.stage = Stage::Preparation;
        let times = distinct_times(schedules);
        let (prepared, bytes) = with_relief(self, |run| {
            let cancel = run.cancel;
            run.model
                .prepare(run.backend, text, &times, cancel, progress)
        })?;
        self.took.preparations += 1;
        self.took.streamed_bytes += bytes;
        let kept = prepared.cache().resident_bytes(self.backend.device());
        self.took.prepared_bytes = self.took.prepared_bytes.max(kept);
        Ok(prepared)
    }

    /// From noise to latents, with text that was prepared for the same schedules. If memory runs out in a step, it is tried once more
    /// without what can be done without.
    ///
    /// # Errors
    /// [`Error::Clip`] for numbers that are not as many as the layout says, [`Error::NotPrepared`], [`Error::NotFinite`], or the
    /// engine's.
    pub fn denoise(
        &mut self,
        prepared: &Prepared,
        start: Start<'_>,
        progress: &mut dyn Reporter,
    ) -> Result<ClipLatents> {
        let (config, layout) = (self.model.config(), start.layout);
        let (wide, of_sound) = (config.video_channels(), config.audio_in_channels);
        let video_rows = layout.target_video_rows();
        let sound_rows = layout.target_sound_rows();
        let seen = (layout.video_rows() - video_rows).saturating_mul(wide);
        let heard = (layout.sound_rows() - sound_rows).saturating_mul(of_sound);
        check_length("numbers of shown rows", start.seen, seen)?;
        check_length("numbers of played rows", start.heard, heard)?;
        let made = video_rows.saturating_mul(wide);
        check_length("numbers of video noise", start.video, made)?;
        let made = sound_rows.saturating_mul(of_sound);
        check_length("numbers of sound noise", start.sound, made)?;
        let [of_video, of_sound] = start.schedules;
        let steps = of_video.steps();
        if of_sound.steps() != steps {
            return Err(Error::Clip {
                what: "steps of the sound",
                found: of_sound.steps(),
                wanted: steps,
            });
        }

        self.stage = Stage::Steps;
        let clip = layout.target();
        let noise = patchify(start.video, clip.frames, clip.latents);
        let mut video = [start.seen, &noise].concat();
        let mut sound = [start.heard, start.sound].concat();
        for step in 0..steps {
            self.cancel.check().map_err(sd_graph::Error::from)?;
            let times = [of_video.time(step), of_sound.time(step)];
            let velocity = with_relief(self, |run| {
                let noisy = Noisy {
                    video: &video,
                    sound: &sound,
                    times,
                };
                let (cancel, weights) = (run.cancel, run.model.weights_mut(Stage::Steps));
                weights.bring(run.backend, cancel, progress)?;
                run.model
                    .velocity(run.backend, layout, prepared, noisy, cancel, progress)
            })?;
            self.took.calls += 1;
            self.took.streamed_bytes += velocity.weight_bytes;
            // Conditions stay what they are.
            let (video, sound) = (&mut video[seen..], &mut sound[heard..]);
            of_video.advance(step, video, &velocity.video);
            of_sound.advance(step, sound, &velocity.sound);
            if !video.iter().chain(&*sound).all(|value| value.is_finite()) {
                return Err(Error::NotFinite { step: step + 1 });
            }
            progress.report(&Progress::Step {
                done: step + 1,
                total: steps,
            });
        }
        Ok(ClipLatents {
            video: unpatchify(&video[seen..], clip.frames, clip.latents),
            sound: sound.split_off(heard),
        })
    }
}
