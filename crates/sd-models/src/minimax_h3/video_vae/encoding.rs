//! Clips of any length to latents, a whole number of frames at a time.

use sd_backend::Backend;
use sd_graph::{Cancel, Estimate, PlanCache, Progress, Reporter};

use super::config::Config;
use super::encoder::Encoder;
use super::posterior::Posterior;
use super::tiles::{Mosaic, Tiles, Tiling};
use crate::error::{Error, Result};
use crate::rope::{Circular, Size};
use crate::wan_vae::{Chunk, Clip, Memory, Place};

/// Mean and deviation of red, green and blue that the model takes pixels from 0 to 1 less of, those of ImageNet.
pub(super) const PIXELS: [[f32; 2]; 3] = [[0.485, 0.229], [0.456, 0.224], [0.406, 0.225]];

/// A clip that is being encoded: pictures go in frame by frame, latents come out clip by clip.
///
/// Made by [`VideoVae::encoding`](super::VideoVae::encoding). Frames wait until it is known that they are not the clip's
/// last, of which less is computed; so [`Encoding::finish`] belongs to every clip.
#[derive(Debug)]
pub struct Encoding<'v> {
    config: &'v Config,
    tiles: TileEncoder<'v>,
    /// Rows and columns of tiles, in latents.
    rows: Tiles,
    columns: Tiles,
    /// Frames `[n, 3, height, width]` that wait, less the mean and by the deviation of their colours.
    waiting: Vec<f32>,
    given: usize,
    /// Frames that there will be at least.
    expected: usize,
    /// Tiles of clips that were encoded.
    done: usize,
}

/// Encodes tiles of a clip, one after the other, and each by chunks: its first frame, then as many at a time as make a latent
/// frame. What convolutions saw of the chunk before goes on to the next; a tile begins with zeros.
#[derive(Debug)]
struct TileEncoder<'v> {
    encoder: &'v Encoder,
    config: &'v Config,
    /// Pixels of a tile.
    size: Size,
    memory: Memory,
    is_allocated: bool,
    plans: PlanCache<Step>,
    /// The most bytes that were held on the device while a chunk ran.
    peak: u64,
}

/// What graphs differ in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    place: Place,
    /// Whether nothing follows.
    is_alone: bool,
}

impl Step {
    const PICTURE: Step = Step {
        place: Place::First,
        is_alone: true,
    };
    const FIRST: Step = Step {
        place: Place::First,
        is_alone: false,
    };
    const LATER: Step = Step {
        place: Place::Later,
        is_alone: false,
    };
}

impl<'v> TileEncoder<'v> {
    fn new(encoder: &'v Encoder, config: &'v Config, size: Size) -> TileEncoder<'v> {
        TileEncoder {
            encoder,
            config,
            size,
            memory: Memory::default(),
            is_allocated: false,
            plans: PlanCache::new(2),
            peak: 0,
        }
    }

    /// Frames of a chunk.
    fn count(&self, step: Step) -> usize {
        match step.place {
            Place::First => 1,
            Place::Second | Place::Later => self.config.frames_per_latent(),
        }
    }

    /// The graph of a chunk, with the input `frames` and the output `moments`.
    fn record(&self, g: sd_graph::Graph<'_>, step: Step, memory: &Memory) {
        let sides = [self.count(step), 3, self.size.height, self.size.width];
        let chunk = Chunk {
            place: step.place,
            circular: Circular::NONE,
            memory: (!step.is_alone).then_some(memory),
        };
        let frames = g.input::<f32>("frames", sides);
        g.output("moments", self.encoder.forward_chunk(frames, &chunk));
    }

    /// Bytes that a clip of `frames` runs in beside weights.
    fn need(&self, backend: &Backend, frames: usize) -> Result<u64> {
        let memory = Memory::default();
        let bytes = |step: Step| -> Result<u64> {
            let estimate = Estimate::of(backend, |g| self.record(g, step, &memory))?;
            Ok(estimate.compute_bytes + estimate.constant_bytes)
        };
        if frames <= 1 {
            return bytes(Step::PICTURE);
        }
        let chunks = bytes(Step::FIRST)? + bytes(Step::LATER)?;
        Ok(chunks + memory.bytes(backend.device()))
    }

    /// Means and logarithms of variances `[1 + n, 2 * channels, height, width]` of a tile of frames, whose number is one more
    /// than `n` times as many as make a latent frame.
    fn run(
        &mut self,
        backend: &mut Backend,
        frames: &[f32],
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Vec<f32>> {
        let frame = 3 * self.size.height * self.size.width;
        let (first, later) = frames.split_at(frame.min(frames.len()));
        let is_alone = later.is_empty();
        if !is_alone && !self.is_allocated {
            // Recording a chunk that has all that goes from chunk to chunk tells the sizes.
            Estimate::of(backend, |g| self.record(g, Step::LATER, &self.memory))?;
            self.memory.allocate(backend)?;
            self.is_allocated = true;
        }
        let step = if is_alone { Step::PICTURE } else { Step::FIRST };
        let mut moments = self.run_chunk(backend, step, first, cancel, progress)?;
        for chunk in later.chunks_exact(frame * self.count(Step::LATER)) {
            moments.extend(self.run_chunk(backend, Step::LATER, chunk, cancel, progress)?);
        }
        Ok(moments)
    }

    fn run_chunk(
        &mut self,
        backend: &mut Backend,
        step: Step,
        frames: &[f32],
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Vec<f32>> {
        let mut plans = std::mem::replace(&mut self.plans, PlanCache::new(1));
        let outcome = plans
            .get_or_build_with(step, backend, cancel, progress, |g| {
                self.record(g, step, &self.memory);
            })
            .and_then(|plan| {
                plan.set("frames", frames)?;
                let report = plan.run_with(backend, cancel, progress)?;
                Ok((report, plan.read("moments")?))
            });
        self.plans = plans;
        let (report, moments) = outcome?;
        self.peak = self.peak.max(report.used.total());
        Ok(moments)
    }
}

impl<'v> Encoding<'v> {
    /// Begins a clip of frames of `size` pixels.
    pub(super) fn new(
        encoder: &'v Encoder,
        config: &'v Config,
        size: Size,
        tiling: Tiling,
    ) -> Encoding<'v> {
        let scale = config.scale_factor();
        let rows = tiling.over(size.height / scale, scale);
        let columns = tiling.over(size.width / scale, scale);
        let tile = Size::new(rows.length() * scale, columns.length() * scale);
        Encoding {
            config,
            tiles: TileEncoder::new(encoder, config, tile),
            rows,
            columns,
            waiting: Vec::new(),
            given: 0,
            expected: 0,
            done: 0,
        }
    }

    /// The same, of which it is known that so many frames will come.
    pub(super) fn expecting(mut self, frames: usize) -> Encoding<'v> {
        self.expected = frames;
        self
    }

    /// Bytes that a clip of `frames` runs in beside weights.
    pub(super) fn need(&self, backend: &Backend, frames: usize) -> Result<u64> {
        self.tiles.need(backend, frames)
    }

    /// Encodes one more picture: planes of red, green and blue `[3, height, width]` from 0 to 1. Where the picture begins
    /// another clip of [`Config::clip_length`] frames, the latents of those before it come out.
    ///
    /// # Errors
    /// [`Error::Clip`] for a wrong number of values; memory, and a cancelled run. The same picture may be given again then.
    pub fn push(
        &mut self,
        backend: &mut Backend,
        picture: &[f32],
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Option<Posterior>> {
        let frame = self.frame_len();
        if picture.len() != frame {
            return Err(Error::Clip {
                what: "pixel values",
                found: picture.len(),
                wanted: frame,
            });
        }
        let is_whole = self.waiting() == self.config.clip_length;
        self.expected = self.expected.max(self.given + 1);
        let posterior = is_whole
            .then(|| self.run(backend, self.config.clip_length, cancel, progress))
            .transpose()?;
        if is_whole {
            self.waiting.clear();
        }
        self.given += 1;
        let planes = picture.chunks_exact((frame / 3).max(1)).zip(PIXELS);
        let normed = planes
            .flat_map(|(plane, [mean, std])| plane.iter().map(move |value| (value - mean) / std));
        self.waiting.extend(normed);
        Ok(posterior)
    }

    /// Encodes what is left: a picture where only one was given, and else the last frames of a clip, of which the last is
    /// repeated as often as is needed. [`Config::latent_frames`] says how many latent frames there are in all.
    ///
    /// # Errors
    /// [`Error::Clip`] without a picture; memory, and a cancelled run. It may be tried again then.
    pub fn finish(
        &mut self,
        backend: &mut Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Posterior> {
        let frames = match self.given {
            0 => {
                return Err(Error::Clip {
                    what: "frames",
                    found: 0,
                    wanted: 1,
                });
            }
            1 => 1,
            _ => self.config.last_frames(),
        };
        self.run(backend, frames, cancel, progress)
    }

    /// The most bytes that were held on the device through its ledger while a chunk ran.
    pub fn peak(&self) -> u64 {
        self.tiles.peak
    }

    /// Frames that wait.
    fn waiting(&self) -> usize {
        self.waiting.len() / self.frame_len().max(1)
    }

    fn frame_len(&self) -> usize {
        let scale = self.config.scale_factor();
        3 * self.rows.side() * self.columns.side() * scale * scale
    }

    /// Encodes the first `frames` of those that wait, tile by tile.
    fn run(
        &mut self,
        backend: &mut Backend,
        frames: usize,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Posterior> {
        let latents = self.config.latent_frames_of_clip(frames);
        let channels = 2 * self.config.latent_channels;
        let scale = self.config.scale_factor();
        let (rows, columns) = (self.rows.scaled(scale), self.columns.scaled(scale));
        let last = self.waiting().saturating_sub(1);
        let frame = self.frame_len();
        let mut mosaic = Mosaic::new(latents * channels, &self.rows, &self.columns);
        let count = rows.count() * columns.count();
        for (row, column) in (0..count).map(|tile| (tile / columns.count(), tile % columns.count()))
        {
            let mut values = Vec::with_capacity(frames * 3 * rows.length() * columns.length());
            for at in (0..frames).map(|index| index.min(last)) {
                let planes = self.waiting[at * frame..(at + 1) * frame].chunks_exact(frame / 3);
                for plane in planes {
                    for y in rows.range(row) {
                        values
                            .extend_from_slice(&plane[y * columns.side()..][columns.range(column)]);
                    }
                }
            }
            let moments = self.tiles.run(backend, &values, cancel, progress)?;
            mosaic.add((row, column), &moments);
            self.done += 1;
            let clips = self.expected.div_ceil(self.config.clip_length);
            progress.report(&Progress::Chunk {
                done: self.done,
                total: (clips * count).max(self.done),
            });
        }
        Ok(Posterior::new(Clip {
            frames: latents,
            channels,
            height: self.rows.side(),
            width: self.columns.side(),
            values: mosaic.finish(),
        }))
    }
}
