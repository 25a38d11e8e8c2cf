//! Between files and a loaded model of clips: planning and loading.

use sd_backend::Component;
use sd_graph::{Cancel, LoadReport, Progress, Reporter};

use super::denoise::distinct_times;
use super::diffusion::Diffusion;
use super::layout::{Conditions, Layout, Tag};
use super::model::Stage;
use super::names::QkvOrder;
use super::parts::{Readers, Settings};
use super::pipeline::VideoPipeline;
use super::references::Outline;
use super::request::VideoRequest;
use super::seating::{Scene, VideoMemoryPlan, find};
use super::sizes::Extent;
use crate::builder::{COMMON_PROMPT, PipelineBuilder};
use crate::error::Result;
use crate::qwen_image_2_1::IN_ORDER;
use crate::rope::{H3Keyframe, Part};
use crate::seating::{Backends, Seating, Wishes};

/// A clip to plan for. What is left open is as a request would have it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VideoShape {
    /// Width and height in pixels.
    pub size: Option<(usize, usize)>,
    /// Frames.
    pub frames: Option<usize>,
    /// Tokens of the prompt; a prompt of common length if 0.
    pub tokens: usize,
    /// Keyframes, up to 2.
    pub keyframes: usize,
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

    /// What the model needs for one clip. Nothing is loaded.
    ///
    /// # Errors
    /// [`Error::Size`](crate::Error::Size), [`Error::Frames`](crate::Error::Frames), and everything that can be wrong with files.
    pub fn plan(&self, shape: &VideoShape) -> Result<VideoMemoryPlan> {
        let Opened {
            settings,
            readers,
            diffusion,
        } = self.open()?;
        let backends = &mut Backends::new(self.backend.clone());
        let parts = (&readers, &diffusion);
        let (seating, extent, rows) = find_for(parts, &settings, &self.wishes, backends, shape)?;
        let fallbacks = readers.conditioner.text.fallbacks.iter();
        Ok(VideoMemoryPlan {
            width: extent.size.width,
            height: extent.size.height,
            frames: extent.frames,
            rows,
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
    let subjects = vec![Outline::Picture(extent.size); shape.keyframes.min(2)];
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
    let anchors = [H3Keyframe::First, H3Keyframe::Last];
    let anchors = anchors.into_iter().take(subjects.len()).collect();
    let conditions = Conditions::Keyframes(anchors);
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
