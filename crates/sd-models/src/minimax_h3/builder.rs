//! Between files and a loaded model of clips: planning and loading.

use sd_backend::Component;
use sd_graph::{Cancel, LoadReport, Progress, Reporter};

use super::denoise::distinct_times;
use super::diffusion::{Diffusion, Task};
use super::layout::{Conditions, Layout, Tag};
use super::model::Stage;
use super::names::QkvOrder;
use super::parts::{Readers, Settings};
use super::pipeline::VideoPipeline;
use super::references::{MOST_OF_EACH, Outline, too_many};
use super::request::{NOT_TOGETHER, VideoRequest};
use super::seating::{Scene, VideoMemoryPlan, find};
use super::sizes::Extent;
use crate::builder::{COMMON_PROMPT, PipelineBuilder};
use crate::error::{Error, Result};
use crate::qwen_image_2_1::IN_ORDER;
use crate::rope::{H3Keyframe, Part, Size};
use crate::seating::{Backends, Seating, Wishes};

/// A clip to plan for. What is left open is as a request would have it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VideoShape {
    /// Width and height in pixels.
    pub size: Option<(usize, usize)>,
    /// Frames.
    pub frames: Option<usize>,
    /// Tokens of the prompt; a prompt of common length if 0.
    pub tokens: usize,
    /// Keyframes, up to 2.
    pub keyframes: usize,
    /// Width and height of each picture that the clip refers to.
    pub references: Vec<(usize, usize)>,
    /// Noise levels.
    pub steps: Option<usize>,
}

impl PipelineBuilder<VideoPipeline> {
    /// Says how queries, keys and values follow each other in files that have them as one matrix, which the files do not tell. As in
    /// ComfyUI's if not called.
    pub fn qkv_order(mut self, order: QkvOrder) -> Self {
        self.order = order;
        self
    }

    /// Refuses a request that no clip can be made from with these files, as far as that is known before they are opened. Nothing is
    /// read.
    ///
    /// # Errors
    /// [`Error::ClipReferences`], [`Error::Aspect`](crate::Error::Aspect), [`Error::Size`](crate::Error::Size),
    /// [`Error::Frames`](crate::Error::Frames), [`Error::Steps`](crate::Error::Steps), [`Error::Shift`](crate::Error::Shift);
    /// [`Error::NoTransformer`](crate::Error::NoTransformer) if there is none for references, or none for anything else.
    pub fn check(&self, request: &VideoRequest) -> Result<()> {
        request.check()?;
        let settings = Settings::read(&self.files)?;
        request.extent(&settings)?;
        request.schedules(&settings)?;
        Diffusion::check_files(&self.files, request.task())
    }

    /// What the model needs for one clip. Nothing is loaded.
    ///
    /// # Errors
    /// As for [`PipelineBuilder::check`], and everything that can be wrong with files.
    pub fn plan(&self, shape: &VideoShape) -> Result<VideoMemoryPlan> {
        let task = shape.task()?;
        Diffusion::check_files(&self.files, task)?;
        let Opened {
            settings,
            readers,
            mut diffusion,
        } = self.open()?;
        diffusion.choose(task)?;
        let backends = &mut Backends::new(self.backend.clone());
        let parts = (&readers, &diffusion);
        let found = find_for(parts, &settings, &self.wishes, backends, shape)?;
        let (seating, extent, rows) = found;
        let references = shape.outlines(&settings, extent)?;
        let references = references.iter().filter_map(|outline| match outline {
            Outline::Picture(size) if task == Task::References => Some((size.width, size.height)),
            _ => None,
        });
        let fallbacks = readers.conditioner.text.fallbacks.iter();
        Ok(VideoMemoryPlan {
            width: extent.size.width,
            height: extent.size.height,
            frames: extent.frames,
            rows,
            references: references.collect(),
            seats: seating.seats,
            readers: seating.readers,
            devices: seating.devices,
            fallbacks: fallbacks.chain(diffusion.fallbacks()).cloned().collect(),
        })
    }

    fn open(&self) -> Result<Opened> {
        let settings = Settings::read(&self.files)?;
        let readers = Readers::open(&self.files, &self.load)?;
        let diffusion = Diffusion::open(&self.files, self.order, &self.load)?;
        diffusion.check_joints(self.files.label(), &readers)?;
        Ok(Opened {
            settings,
            readers,
            diffusion,
        })
    }

    /// Loads the weights.
    ///
    /// # Errors
    /// Everything that can be wrong with files, and memory that runs out.
    pub fn load(self) -> Result<VideoPipeline> {
        self.load_with(&Cancel::new(), &mut |_: &Progress| {})
    }

    /// Loads the weights, telling of progress; `cancel` stops loading, and later everything else too.
    ///
    /// Where parts go is decided for a clip of the model's default size and length and a prompt of common length. It is decided
    /// anew for a clip that needs more. Where memory does not suffice for all parts at once, each is loaded when its turn comes
    /// and given up behind it.
    ///
    /// # Errors
    /// Everything that can be wrong with files, memory that runs out, or the run was cancelled.
    pub fn load_with(self, cancel: &Cancel, progress: &mut dyn Reporter) -> Result<VideoPipeline> {
        let mut backends = Backends::new(self.backend.clone());
        let Opened {
            settings,
            mut readers,
            mut diffusion,
        } = self.open()?;
        let parts = (&readers, &diffusion);
        let shape = VideoShape::default();
        let (seating, ..) = find_for(parts, &settings, &self.wishes, &mut backends, &shape)?;
        // What does not fit now may still do for a smaller clip, unless not even the weights get in.
        progress.report(&Progress::Stage("load"));
        let parts = (&mut readers, &mut diffusion);
        let loaded = seat(parts, &seating, &mut backends, cancel, progress)
            .map_err(|error| seating.explain(error))?;
        Ok(VideoPipeline {
            readers,
            diffusion,
            settings,
            backends,
            wishes: self.wishes,
            seating,
            loaded,
            cancel: cancel.clone(),
        })
    }
}

impl VideoShape {
    /// Which transformer it is for.
    ///
    /// # Errors
    /// [`Error::ClipReferences`] for keyframes and references together, and for more of these than can be.
    fn task(&self) -> Result<Task> {
        let refused = |reason: String| Err(Error::ClipReferences(reason));
        match (self.references.len(), self.keyframes) {
            (0, _) => Ok(Task::Prompt),
            (_, 1..) => refused(NOT_TOGETHER.to_owned()),
            (pictures, 0) if pictures > MOST_OF_EACH[0] => {
                refused(too_many(pictures, "pictures", MOST_OF_EACH[0]))
            }
            _ => Ok(Task::References),
        }
    }

    /// The pictures that are given beside the prompt of a clip of `extent`.
    ///
    /// # Errors
    /// [`Error::Aspect`](crate::Error::Aspect).
    fn outlines(&self, settings: &Settings, extent: Extent) -> Result<Vec<Outline>> {
        if self.references.is_empty() {
            return Ok(vec![Outline::Picture(extent.size); self.keyframes.min(2)]);
        }
        let sizes = self.references.iter();
        let sizes = sizes.map(|&(width, height)| settings.rule.reference(Size::new(height, width)));
        sizes.map(|size| Ok(Outline::Picture(size?))).collect()
    }
}

/// A model whose files were looked at.
struct Opened {
    settings: Settings,
    readers: Readers,
    diffusion: Diffusion,
}

/// Finds places for a clip of `shape` that nobody has asked for yet, and says how large it is and how many rows it has.
fn find_for(
    parts: (&Readers, &Diffusion),
    settings: &Settings,
    wishes: &Wishes,
    backends: &mut Backends,
    shape: &VideoShape,
) -> Result<(Seating, Extent, usize)> {
    let request = VideoRequest {
        size: shape.size,
        frames: shape.frames,
        steps: shape.steps,
        ..VideoRequest::new("")
    };
    let extent = request.extent(settings)?.0;
    let subjects = shape.outlines(settings, extent)?;
    let tokens = match subjects.is_empty() {
        true => Vec::new(),
        false => parts.0.conditioner.tokens("", &subjects)?.parts,
    };
    let words = match shape.tokens {
        0 => COMMON_PROMPT,
        tokens => tokens,
    };
    let prompt = [&tokens[..], &[Part::Text(words)]].concat();
    let rows = prompt.iter().map(|part| part.tokens()).sum();
    let conditions = match shape.references.is_empty() {
        true => {
            let anchors = [H3Keyframe::First, H3Keyframe::Last];
            Conditions::Keyframes(anchors.into_iter().take(subjects.len()).collect())
        }
        false => Conditions::References(subjects.iter().map(|subject| subject.rows()).collect()),
    };
    let layout = Layout::new(vec![Tag::Text; rows], conditions, extent.rows())?;
    let schedules = request.schedules(settings)?;
    let scene = Scene {
        prompt: &prompt,
        subjects: &subjects,
        extent,
        layout: &layout,
        times: distinct_times([&schedules[0], &schedules[1]]).len(),
    };
    let seating = find(parts, wishes, backends, scene, |_| 0)?;
    Ok((seating, extent, layout.rows()))
}

/// Brings the parts of a model to where `seating` has them.
///
/// # Errors
/// Memory, files, or a cancelled run.
pub(super) fn seat(
    (readers, diffusion): (&mut Readers, &mut Diffusion),
    seating: &Seating,
    backends: &mut Backends,
    cancel: &Cancel,
    progress: &mut dyn Reporter,
) -> Result<LoadReport> {
    diffusion.leave_preparation();
    let mut total = LoadReport::default();
    for (seat, component) in seating.seats.iter().zip(IN_ORDER) {
        let weights = match component {
            Component::TextEncoder => &mut readers.conditioner.text.weights,
            Component::Diffusion => diffusion.current_mut().weights_mut(Stage::Steps),
            // It comes to its place when there is something to encode or decode.
            Component::Vae => {
                let vae = &mut readers.vae;
                vae.live(seat.residence, seating.mapping, seat.is_streamed);
                continue;
            }
        };
        weights.live(seat.residence, seating.mapping);
        weights.stream(seat.is_streamed);
        total.add(weights.load(backends.on(seat.device)?, cancel, progress)?);
    }
    Ok(total)
}
