//! The stages of making a clip: reading what is given, the steps, decoding. Each is tried a second time after other parts gave up their
//! memory.

use sd_backend::{Component, Device, Residence};
use sd_graph::{Cancel, Progress, Relief, Reporter, with_relief};

use super::conditioning::TextRows;
use super::denoise::{ClipLatents, Denoising, DenoisingReport, Start};
use super::model::Stage;
use super::parts::{Draws, Readers, image_of};
use super::pipeline::{VideoPipeline, Work};
use super::references::Subject;
use super::sound_vae::Latents;
use super::video_vae::Tiling;
use crate::error::{Error, Result};
use crate::image::Image;
use crate::qwen_image_2_1::IN_ORDER;
use crate::qwen3_vl::Seen;
use crate::sound::Sound;
use crate::wan_vae::Clip;

impl VideoPipeline {
    /// Looks at what there is to see, and reads the prompt about it.
    pub(super) fn encode_work(
        &mut self,
        work: &Work<'_>,
        progress: &mut dyn Reporter,
    ) -> Result<TextRows> {
        let device = self.device_of(Component::TextEncoder);
        let mut seen: Vec<Seen> = Vec::new();
        let sees = |subject: &Subject<'_>| !matches!(subject, Subject::Sound(_));
        if work.subjects.iter().any(sees) {
            progress.report(&Progress::Stage("look"));
            let is_streamed = self.is_streamed(Component::TextEncoder);
            self.readers.conditioner.stream_sight(is_streamed);
            let looked: Result<()> = work.subjects.iter().try_for_each(|subject| {
                seen.extend(self.with_retry(device, None, |pipeline| {
                    let backend = pipeline.backends.on(device)?;
                    let conditioner = &mut pipeline.readers.conditioner;
                    conditioner.look(backend, subject, &pipeline.cancel, progress)
                })?);
                Ok(())
            });
            self.readers.conditioner.release_sight();
            looked?;
        }
        progress.report(&Progress::Stage("encode"));
        let own = Component::TextEncoder;
        let rows = self.with_retry(device, Some(own), |pipeline| {
            let backend = pipeline.backends.on(device)?;
            let conditioner = &mut pipeline.readers.conditioner;
            let cancel = &pipeline.cancel;
            conditioner.text.weights.bring(backend, cancel, progress)?;
            conditioner.read(backend, &work.tokens, &seen, cancel, progress)
        });
        self.readers.conditioner.release();
        rows
    }

    /// Latents of pictures and clips, and of sounds, that are given.
    pub(super) fn encode_given(
        &mut self,
        work: &Work<'_>,
        progress: &mut dyn Reporter,
    ) -> Result<(Vec<Clip>, Vec<Latents>)> {
        let (mut given, mut heard) = (Vec::new(), Vec::new());
        if work.subjects.is_empty() {
            return Ok((given, heard));
        }
        progress.report(&Progress::Stage("encode references"));
        let device = self.device_of(Component::Vae);
        let encoded: Result<()> = work.subjects.iter().try_for_each(|subject| {
            given.extend(self.with_retry(device, None, |pipeline| {
                let backend = pipeline.backends.on(device)?;
                let cancel = &pipeline.cancel;
                pipeline
                    .readers
                    .encode_pictures(backend, subject, cancel, progress)
            })?);
            heard.extend(self.with_retry(device, None, |pipeline| {
                let backend = pipeline.backends.on(device)?;
                let cancel = &pipeline.cancel;
                pipeline
                    .readers
                    .encode_sound(backend, subject, cancel, progress)
            })?);
            Ok(())
        });
        // The transformer needs the room, and the decoder comes before the encoder again.
        self.readers.vae.unload();
        self.readers.sound_vae.unload();
        encoded.map(|()| (given, heard))
    }

    /// From noise to latents.
    pub(super) fn denoise(
        &mut self,
        work: &Work<'_>,
        rows: &TextRows,
        draws: &Draws,
        progress: &mut dyn Reporter,
    ) -> Result<(ClipLatents, DenoisingReport)> {
        progress.report(&Progress::Stage("denoise"));
        let device = self.device_of(Component::Diffusion);
        let others = self.parts_on(device, Some(Component::Diffusion));
        if self.diffusion.weights().is_streamed() {
            // What others keep would be moved again and again in every step; they come back once.
            for &part in &others {
                evict(&mut self.readers, part);
            }
        }
        let mut idle = Idle {
            readers: &mut self.readers,
            parts: others,
        };
        let schedules = [&work.schedules[0], &work.schedules[1]];
        let mut run = Denoising::new(
            self.diffusion.current_mut(),
            self.backends.on(device)?,
            &self.cancel,
            Some(&mut idle),
        );
        let outcome = run
            .prepare(&rows.hidden, schedules, progress)
            .and_then(|prepared| {
                let start = Start {
                    layout: &work.layout,
                    seen: &draws.given_video,
                    heard: &draws.given_sound,
                    video: &draws.video,
                    sound: &draws.sound,
                    schedules,
                };
                run.denoise(&prepared, start, progress)
            });
        let took = run.took();
        let denoiser = self.diffusion.current_mut();
        denoiser.release(Stage::Preparation);
        denoiser.release(Stage::Steps);
        let latents = outcome.map_err(|error| self.seating.explain(error))?;
        Ok((latents, took))
    }

    /// From latents to what is heard.
    pub(super) fn decode_sound(
        &mut self,
        work: &Work<'_>,
        values: Vec<f32>,
        progress: &mut dyn Reporter,
    ) -> Result<Sound> {
        progress.report(&Progress::Stage("decode sound"));
        let device = self.device_of(Component::Vae);
        let latents = Latents {
            count: work.extent.sound_latents(),
            values,
        };
        let sound = self.with_retry(device, None, |pipeline| {
            let backend = pipeline.backends.on(device)?;
            let vae = &mut pipeline.readers.sound_vae;
            vae.decode(backend, &latents, &pipeline.cancel, progress)
        });
        self.readers.sound_vae.unload();
        sound
    }

    /// From latents to frames, which `frame` is given one by one.
    pub(super) fn decode_frames(
        &mut self,
        work: &Work<'_>,
        values: Vec<f32>,
        progress: &mut dyn Reporter,
        frame: &mut dyn FnMut(Image) -> Result<()>,
    ) -> Result<()> {
        progress.report(&Progress::Stage("decode"));
        let (size, in_latents) = (work.extent.size, work.extent.latents());
        let channels = self.readers.vae.config().latent_channels;
        let frames = work.extent.latent_frames();
        let sides = [channels, frames, in_latents.height, in_latents.width];
        let latents = Clip::from_channels_first(sides, &values);
        drop(values);
        let (device, own) = (self.device_of(Component::Vae), Component::Vae);
        let mut given = 0;
        let decoded = self.with_retry(device, Some(own), |pipeline| {
            let backend = pipeline.backends.on(device)?;
            let mut index = 0;
            let mut each = |planes: &[f32]| {
                index += 1;
                // A second attempt makes the first frames again.
                if index <= given {
                    return Ok(());
                }
                given = index;
                let image = image_of(planes, size).ok_or(Error::Clip {
                    what: "pixel values",
                    found: planes.len(),
                    wanted: 3 * size.height * size.width,
                })?;
                frame(image)
            };
            let (cancel, vae) = (&pipeline.cancel, &mut pipeline.readers.vae);
            let mut told = |event: &Progress| progress.report(event);
            let reports: (&Cancel, &mut dyn Reporter) = (cancel, &mut told);
            vae.decode(backend, &latents, Tiling::default(), reports, &mut each)
        });
        let vae = &mut self.readers.vae;
        if vae.decoder_weights().residence() != Residence::Device {
            vae.unload();
        }
        decoded.map(drop)
    }

    /// Does `work` on `device` with the weights of the part `own`, if it has a place of its own; if memory runs out, gives up what
    /// can be had again and does it once more.
    fn with_retry<T>(
        &mut self,
        device: Device,
        own: Option<Component>,
        mut work: impl FnMut(&mut VideoPipeline) -> Result<T>,
    ) -> Result<T> {
        let idle = self.parts_on(device, own);
        let mut working = Working {
            pipeline: self,
            idle,
        };
        let outcome = with_relief(&mut working, |working| work(working.pipeline));
        outcome.map_err(|error| self.seating.explain(error))
    }

    /// All parts with a place on `device` but one.
    pub(super) fn parts_on(&self, device: Device, but: Option<Component>) -> Vec<Component> {
        let parts = IN_ORDER.into_iter();
        parts
            .filter(|&part| self.device_of(part) == device && Some(part) != but)
            .collect()
    }
}

/// Takes what a part of the readers has in memory out of it, wherever it lives, and says whether that was anything.
pub(super) fn evict(readers: &mut Readers, component: Component) -> bool {
    match component {
        Component::TextEncoder => {
            let conditioner = &mut readers.conditioner;
            let had_plans = conditioner.drop_plans();
            let had_any = conditioner.text.weights.device_bytes() > 0;
            conditioner.text.weights.unload();
            had_any || had_plans
        }
        Component::Vae => {
            let vae = &mut readers.vae;
            let halves = [vae.encoder_weights(), vae.decoder_weights()];
            let had_any = halves.iter().any(|weights| weights.device_bytes() > 0);
            vae.unload();
            had_any
        }
        Component::Diffusion => false,
    }
}

/// Whoever runs a part of a pipeline.
struct Working<'p> {
    pipeline: &'p mut VideoPipeline,
    /// Other parts on the same device.
    idle: Vec<Component>,
}

impl Relief for Working<'_> {
    fn release_plans(&mut self) -> bool {
        let had_plans = self.pipeline.diffusion.current_mut().drop_plans();
        self.pipeline.readers.conditioner.drop_plans() || had_plans
    }

    fn evict_weights(&mut self) -> bool {
        let mut had_any = false;
        for &part in &self.idle {
            had_any |= match part {
                Component::Diffusion => self.pipeline.diffusion.current_mut().evict(Stage::Steps),
                _ => evict(&mut self.pipeline.readers, part),
            };
        }
        had_any
    }
}

/// Parts that the transformer's steps can do without.
struct Idle<'p> {
    readers: &'p mut Readers,
    parts: Vec<Component>,
}

impl Relief for Idle<'_> {
    fn release_plans(&mut self) -> bool {
        self.readers.conditioner.drop_plans()
    }

    fn evict_weights(&mut self) -> bool {
        let mut had_any = false;
        for &part in &self.parts {
            had_any |= evict(self.readers, part);
        }
        had_any
    }
}
