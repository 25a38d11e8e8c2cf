//! From a prompt, keyframes and references to a clip with sound.

use std::time::Instant;

use sd_backend::{Component, Device, MemoryReport, Seat};
use sd_graph::{Cancel, LoadReport, Reporter};

use super::builder::seat;
use super::conditioning::TextRows;
use super::denoise::distinct_times;
use super::diffusion::{Diffusion, Task};
use super::layout::{Conditions, Layout};
use super::model::Stage;
use super::parts::{Draws, Readers, Settings};
use super::prompt::Tokens;
use super::references::{Outline, Subject, keyframes, prepare};
use super::request::{VideoDefaults, VideoReport, VideoRequest};
use super::schedule::Schedule;
use super::seating::{Scene, find};
use super::sizes::{Adjustment, Extent, FRAME_RATE};
use super::stages::evict;
use crate::builder::PipelineBuilder;
use crate::error::{Error, Result};
use crate::frame_rate::FrameRate;
use crate::image::Image;
use crate::model_files::ModelFiles;
use crate::qwen_image_2_1::IN_ORDER;
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
pub(super) struct Work<'r> {
    pub(super) extent: Extent,
    pub(super) adjustments: Vec<Adjustment>,
    pub(super) subjects: Vec<Subject<'r>>,
    pub(super) outlines: Vec<Outline>,
    pub(super) tokens: Tokens,
    pub(super) layout: Layout,
    pub(super) schedules: [Schedule; 2],
    pub(super) task: Task,
}

impl VideoPipeline {
    /// Looks at a model: the path of a folder with `modular_model_index.json` or `model_index.json` or of a file with all parts, or
    /// [`ModelFiles`], which say where single parts are. Files of weights are looked at when it is planned or loaded.
    ///
    /// # Errors
    /// [`Error::Missing`] if it is no such folder, [`Error::UnsupportedModel`], [`Error::Config`].
    pub fn open(files: impl Into<ModelFiles>) -> Result<PipelineBuilder<VideoPipeline>> {
        let files = files.into();
        if let Some(model) = files.model.as_ref().filter(|model| !model.exists()) {
            return Err(Error::Missing {
                path: model.clone(),
                what: "model folder",
            });
        }
        Settings::read(&files)?;
        Ok(PipelineBuilder::new(files))
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

    /// Looks at a request without computing anything: what would be changed of it.
    ///
    /// # Errors
    /// Those of [`VideoPipeline::generate_with`] that follow from the request alone.
    pub fn check(&self, request: &VideoRequest) -> Result<Vec<Adjustment>> {
        Ok(self.begin(request)?.adjustments)
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
        let task = request.task();
        self.diffusion.check(task)?;
        let (extent, mut adjustments) = request.extent(&self.settings)?;
        let subjects = match task {
            Task::Prompt => keyframes(request.keyframes(), extent.size),
            Task::References => prepare(
                &request.references,
                extent,
                &self.settings.rule,
                &mut adjustments,
            )?,
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

    /// Takes the transformer that a request needs, and sees to it that every part can run for it: if what stays on a device leaves
    /// too little, parts whose place nobody chose come and go from now on. Refuses a clip that would not fit even so, and says what
    /// would do.
    fn make_room(&mut self, work: &Work<'_>, progress: &mut dyn Reporter) -> Result<()> {
        let is_other = self.diffusion.choose(work.task)?;
        let held = self.seating.held(&|device| self.held_on(device));
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
        if is_other || self.seating.gives_way_to(&seating) {
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
            self.seating.settle(seating);
        }
        let is_streamed = self.is_streamed(Component::Diffusion);
        let weights = self.diffusion.current_mut().weights_mut(Stage::Preparation);
        weights.stream(is_streamed);
        Ok(())
    }

    /// Whether what `component` has in memory for a moment only passes through it.
    pub(super) fn is_streamed(&self, component: Component) -> bool {
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

    pub(super) fn device_of(&self, component: Component) -> Device {
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
