//! From a prompt, keyframes and references to a clip with sound.

use std::path::Path;
use std::time::Instant;

use sd_backend::{BackendOptions, Component, Device, Mapping, MemoryReport, Residence, Seat};
use sd_graph::{Cancel, LoadOptions, LoadReport, Progress, Relief, Reporter, with_relief};

use super::builder::{VideoPipelineBuilder, seat};
use super::conditioning::TextRows;
use super::denoise::{ClipLatents, Denoising, DenoisingReport, Start, distinct_times};
use super::diffusion::{Diffusion, Task};
use super::layout::{Conditions, Layout};
use super::model::Stage;
use super::names::QkvOrder;
use super::parts::{Draws, Readers, Settings, image_of};
use super::prompt::Tokens;
use super::references::{Outline, Subject, keyframes, prepare};
use super::request::{VideoDefaults, VideoReport, VideoRequest};
use super::schedule::Schedule;
use super::seating::{Scene, find};
use super::sizes::{Adjustment, Extent, FRAME_RATE};
use super::sound_vae::Latents;
use super::video_vae::Tiling;
use crate::error::{Error, Result};
use crate::frame_rate::FrameRate;
use crate::image::Image;
use crate::model_files::ModelFiles;
use crate::qwen_image_2_1::IN_ORDER;
use crate::qwen3_vl::Seen;
use crate::seating::{Backends, DeviceNeed, Seating, Wishes};
use crate::sound::Sound;
use crate::video::Video;
use crate::wan_vae::Clip;

/// A loaded model of clips with devices to run on.
///
/// Where memory does not suffice for all parts at once, each is in it only while it is needed: the text encoder before the
/// transformer, the VAE behind it. A pipeline may be sent to another thread; making a clip takes it exclusively.
///
/// ```no_run
/// use sd_models::{VideoPipeline, VideoRequest};
///
/// # fn main() -> Result<(), sd_models::Error> {
/// let mut pipeline = VideoPipeline::open("MiniMax-H3")?.device("auto").load()?;
/// let request = VideoRequest::new("a red circle moves right").frames(124).seed(1);
/// let (video, report) = pipeline.generate(&request, &mut |_: &sd_graph::Progress| {})?;
/// for adjustment in &report.adjustments {
///     eprintln!("{adjustment}");
/// }
/// # let _ = video;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct VideoPipeline {
    pub(super) readers: Readers,
    pub(super) diffusion: Diffusion,
    pub(super) settings: Settings,
    pub(super) backends: Backends,
    pub(super) wishes: Wishes,
    pub(super) seating: Seating,
    pub(super) loaded: LoadReport,
    pub(super) cancel: Cancel,
}

/// Latents of what a request gives.
#[derive(Debug, Clone, PartialEq)]
pub struct GivenLatents {
    /// Of each picture and clip, in their order, `[channels, frames, height, width]`, as the transformer sees them but for a little
    /// noise.
    pub pictures: Vec<Vec<f32>>,
    /// Of each sound, in their order, `[2, latents, channels]`.
    pub sounds: Vec<Vec<f32>>,
}

/// What [`VideoPipeline::generate_with`] makes, in the order in which it comes.
#[derive(Debug)]
pub enum Made {
    /// What is heard, and how many frames there will be. Comes first, once.
    Sound {
        /// Of two channels.
        sound: Sound,
        /// Frames of the clip.
        frames: usize,
    },
    /// The next frame.
    Frame(Image),
}

/// A request, with everything that follows from it before anything is computed.
#[derive(Debug)]
struct Work<'r> {
    extent: Extent,
    adjustments: Vec<Adjustment>,
    subjects: Vec<Subject<'r>>,
    outlines: Vec<Outline>,
    tokens: Tokens,
    layout: Layout,
    schedules: [Schedule; 2],
    task: Task,
}

impl VideoPipeline {
    /// Looks at a model folder with `modular_model_index.json` or `model_index.json`; or takes a file of the transformer, or of several
    /// parts.
    ///
    /// # Errors
    /// [`Error::Missing`] if it is no such folder, [`Error::UnsupportedModel`], [`Error::Config`].
    pub fn open(path: impl AsRef<Path>) -> Result<VideoPipelineBuilder> {
        VideoPipeline::from_files(ModelFiles::from(path.as_ref()))
    }

    /// As [`VideoPipeline::open`], for a model whose parts are given one by one.
    ///
    /// # Errors
    /// As for [`VideoPipeline::open`]; files of weights are looked at when the model is planned or loaded.
    pub fn from_files(files: ModelFiles) -> Result<VideoPipelineBuilder> {
        if let Some(model) = files.model.as_ref().filter(|model| !model.exists()) {
            return Err(Error::Missing {
                path: model.clone(),
                what: "model folder",
            });
        }
        Settings::read(&files)?;
        Ok(VideoPipelineBuilder {
            files,
            wishes: Wishes::default(),
            backend: BackendOptions::default(),
            load: LoadOptions::default(),
            order: QkvOrder::default(),
        })
    }

    /// Makes a clip. Its frames are in memory all at once: [`VideoPipeline::generate_with`] gives them one by one.
    ///
    /// # Errors
    /// As for [`VideoPipeline::generate_with`].
    pub fn generate(
        &mut self,
        request: &VideoRequest,
        progress: &mut dyn Reporter,
    ) -> Result<(Video, VideoReport)> {
        let (mut frames, mut heard) = (Vec::new(), None);
        let report = self.generate_with(request, progress, &mut |made| {
            match made {
                Made::Sound { sound, .. } => heard = Some(sound),
                Made::Frame(frame) => frames.push(frame),
            }
            Ok(())
        })?;
        let frame_rate = FrameRate::new(FRAME_RATE, 1).unwrap_or(FrameRate::USUAL);
        let video = Video {
            frames,
            frame_rate,
            sound: heard,
        };
        Ok((video, report))
    }

    /// Makes a clip and gives what it is made of to `give` as soon as it is there: behind the last step first what is heard, then frame
    /// by frame.
    ///
    /// # Errors
    /// [`Error::Size`], [`Error::Frames`], [`Error::Aspect`], [`Error::Steps`], [`Error::Shift`], [`Error::Prompt`],
    /// [`Error::ClipReferences`], [`Error::NoReferences`], [`Error::NoTransformer`], [`Error::NotFinite`], the engine's, or what
    /// `give` fails with. Afterwards the pipeline can be used again.
    pub fn generate_with(
        &mut self,
        request: &VideoRequest,
        progress: &mut dyn Reporter,
        give: &mut dyn FnMut(Made) -> Result<()>,
    ) -> Result<VideoReport> {
        let started = Instant::now();
        let work = self.begin(request)?;
        self.make_room(&work, progress)?;
        let rows = self.encode_work(&work, progress)?;
        let (given, heard) = self.encode_given(&work, progress)?;
        let encode = started.elapsed();

        let started = Instant::now();
        let config = self.diffusion.current().config();
        let channels = (config.in_channels, config.audio_in_channels);
        let mut generator = request.rng.start(request.seed);
        let draws = Draws::draw(&mut generator, work.extent, channels, &given, &heard);
        drop(given);
        let (latents, took) = self.denoise(&work, &rows, &draws, progress)?;
        let denoise = started.elapsed();

        let started = Instant::now();
        let sound = self.decode_sound(&work, latents.sound, progress)?;
        let frames = work.extent.frames;
        give(Made::Sound { sound, frames })?;
        let mut each = |frame| give(Made::Frame(frame));
        self.decode_frames(&work, latents.video, progress, &mut each)?;
        let report = VideoReport {
            width: work.extent.size.width,
            height: work.extent.size.height,
            frames: work.extent.frames,
            steps: took.calls + 1,
            calls: took.calls,
            seed: request.seed,
            rng: request.rng,
            text_rows: rows.tags.len(),
            encode,
            denoise,
            decode: started.elapsed(),
            streamed_bytes: took.streamed_bytes,
            adjustments: work.adjustments,
        };
        Ok(report)
    }

    /// The rows of text that the transformer is given for a request.
    ///
    /// # Errors
    /// As for [`VideoPipeline::generate_with`], as far as that goes.
    pub fn encode(
        &mut self,
        request: &VideoRequest,
        progress: &mut dyn Reporter,
    ) -> Result<TextRows> {
        let work = self.begin(request)?;
        self.make_room(&work, progress)?;
        self.encode_work(&work, progress)
    }

    /// The latents of everything that a request gives beside its prompt.
    ///
    /// # Errors
    /// As for [`VideoPipeline::generate_with`], as far as that goes.
    pub fn encode_given_latents(
        &mut self,
        request: &VideoRequest,
        progress: &mut dyn Reporter,
    ) -> Result<GivenLatents> {
        let work = self.begin(request)?;
        self.make_room(&work, progress)?;
        let (given, heard) = self.encode_given(&work, progress)?;
        Ok(GivenLatents {
            pictures: given.iter().map(Clip::channels_first).collect(),
            sounds: heard.into_iter().map(|latents| latents.values).collect(),
        })
    }

    /// Checks a request and puts everything it gives into the model's sizes.
    fn begin<'r>(&self, request: &'r VideoRequest) -> Result<Work<'r>> {
        request.check()?;
        let (extent, mut adjustments) = request.extent(&self.settings)?;
        let (task, subjects) = match request.references.is_empty() {
            true => (Task::Prompt, keyframes(request.keyframes(), extent.size)),
            false => (
                Task::References,
                prepare(
                    &request.references,
                    extent,
                    &self.settings.rule,
                    &mut adjustments,
                )?,
            ),
        };
        let outlines: Vec<Outline> = subjects.iter().map(Subject::outline).collect();
        let tokens = self
            .readers
            .conditioner
            .tokens(&request.prompt, &outlines)?;
        let conditions = match task {
            Task::Prompt => Conditions::Keyframes(request.anchors()),
            Task::References => {
                Conditions::References(outlines.iter().map(|outline| outline.rows()).collect())
            }
        };
        let layout = Layout::new(tokens.tags.clone(), conditions, extent.rows())?;
        let schedules = request.schedules(&self.settings)?;
        for adjustment in &adjustments {
            tracing::info!("{adjustment}");
        }
        Ok(Work {
            extent,
            adjustments,
            subjects,
            outlines,
            tokens,
            layout,
            schedules,
            task,
        })
    }

    /// Looks at what there is to see, and reads the prompt about it.
    fn encode_work(&mut self, work: &Work<'_>, progress: &mut dyn Reporter) -> Result<TextRows> {
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
    fn encode_given(
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
                pipeline.readers.encode_sound(backend, subject, cancel)
            })?);
            Ok(())
        });
        // The transformer needs the room, and the decoder comes before the encoder again.
        self.readers.vae.unload();
        self.readers.sound_vae.unload();
        encoded.map(|()| (given, heard))
    }

    /// From noise to latents.
    fn denoise(
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

    fn decode_sound(
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
            vae.decode(backend, &latents, &pipeline.cancel)
        });
        self.readers.sound_vae.unload();
        sound
    }

    fn decode_frames(
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
    fn parts_on(&self, device: Device, but: Option<Component>) -> Vec<Component> {
        let parts = IN_ORDER.into_iter();
        parts
            .filter(|&part| self.device_of(part) == device && Some(part) != but)
            .collect()
    }

    /// Takes the transformer that a request needs, and sees to it that every part can run for it: if what stays on a device leaves
    /// too little, parts whose place nobody chose come and go from now on. Refuses a clip that would not fit even so, and says what
    /// would do.
    fn make_room(&mut self, work: &Work<'_>, progress: &mut dyn Reporter) -> Result<()> {
        let is_other = self.diffusion.choose(work.task)?;
        let held: Vec<(Device, u64)> = self
            .seating
            .devices
            .iter()
            .map(|need| (need.device, self.held_on(need.device)))
            .collect();
        let held = |device| {
            let mut held = held.iter();
            let bytes = held.find(|(found, _)| *found == device);
            bytes.map_or(0, |(_, bytes)| *bytes)
        };
        let scene = Scene {
            prompt: &work.tokens.parts,
            subjects: &work.outlines,
            extent: work.extent,
            layout: &work.layout,
            times: distinct_times([&work.schedules[0], &work.schedules[1]]).len(),
        };
        let parts = (&self.readers, &self.diffusion);
        let seating = find(parts, &self.wishes, &mut self.backends, scene, held)?;
        seating.check(self.backends.ledger())?;
        let stays = |seat: &Seat| seat.residence == Residence::Device;
        let mut seats = self.seating.seats.iter().zip(&seating.seats);
        let moves = seats.any(|(was, is)| stays(was) && !stays(is));
        let unmaps = seating.mapping == Mapping::Never && self.seating.mapping != Mapping::Never;
        if is_other || moves || unmaps {
            for component in IN_ORDER {
                evict(&mut self.readers, component);
            }
            for stage in [Stage::Preparation, Stage::Steps] {
                self.diffusion.current_mut().evict(stage);
            }
            let parts = (&mut self.readers, &mut self.diffusion);
            self.loaded = seat(parts, &seating, &mut self.backends, &self.cancel, progress)?;
            self.seating = seating;
        } else {
            // Where things are stays; what they need, and whether they stream for it, is this clip's.
            for (found, component) in seating.seats.iter().zip(IN_ORDER) {
                let is_streamed = found.is_streamed;
                match component {
                    Component::TextEncoder => {
                        self.readers.conditioner.text.weights.stream(is_streamed);
                    }
                    Component::Diffusion => {
                        let denoiser = self.diffusion.current_mut();
                        denoiser.weights_mut(Stage::Steps).stream(is_streamed);
                    }
                    Component::Vae => self.readers.vae.stream(is_streamed),
                }
            }
            for (kept, found) in self.seating.seats.iter_mut().zip(&seating.seats) {
                kept.is_streamed = found.is_streamed && kept.residence != Residence::Device;
            }
            self.seating.readers = seating.readers;
            self.seating.devices = seating.devices;
        }
        let is_streamed = self.is_streamed(Component::Diffusion);
        let weights = self.diffusion.current_mut().weights_mut(Stage::Preparation);
        weights.stream(is_streamed);
        Ok(())
    }

    /// Whether what `component` has in memory for a moment only passes through it.
    fn is_streamed(&self, component: Component) -> bool {
        let mut readers = self.seating.readers.iter();
        readers.any(|seat| seat.component == component && seat.is_streamed)
    }

    /// Bytes of `device` that this pipeline holds and could give back.
    fn held_on(&self, device: Device) -> u64 {
        let bytes = |component| match component {
            Component::TextEncoder => {
                let conditioner = &self.readers.conditioner;
                conditioner.text.weights.device_bytes() + conditioner.compute_bytes()
            }
            Component::Diffusion => {
                self.diffusion.weights().device_bytes() + self.diffusion.current().compute_bytes()
            }
            Component::Vae => self.readers.vae.decoder_weights().device_bytes(),
        };
        let parts = self.parts_on(device, None).into_iter();
        parts.map(bytes).sum()
    }

    fn device_of(&self, component: Component) -> Device {
        // Every component has a seat.
        let first = self.seating.devices[0].device;
        self.seating.device(component).unwrap_or(first)
    }

    /// Where text encoder, transformer and video VAE are, and why.
    pub fn seats(&self) -> &[Seat] {
        &self.seating.seats
    }

    /// What each device has to hold, the one that runs the steps first.
    pub fn devices(&self) -> &[DeviceNeed] {
        &self.seating.devices
    }

    /// What the checkpoint's author recommends.
    pub fn defaults(&self) -> VideoDefaults {
        self.settings.defaults
    }

    /// The device that runs the steps.
    pub fn device(&self) -> Device {
        self.device_of(Component::Diffusion)
    }

    /// Memory of the device that runs the steps: what it says, what was granted, what is held.
    pub fn memory(&self) -> MemoryReport {
        self.backends.ledger().report(self.device())
    }

    /// What loading did.
    pub fn loaded(&self) -> LoadReport {
        self.loaded
    }

    /// Uses `cancel` to stop making clips from now on.
    pub fn set_cancel(&mut self, cancel: Cancel) {
        self.cancel = cancel;
    }
}

/// Takes what a part of the readers has in memory out of it, wherever it lives, and says whether that was anything.
fn evict(readers: &mut Readers, component: Component) -> bool {
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
