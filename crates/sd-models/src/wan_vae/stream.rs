//! Clips of any length in constant memory: one chunk after the other.

use sd_backend::Backend;
use sd_graph::{Cancel, Estimate, Graph, PlanCache, Progress};

use super::chunk::{Chunk, Memory, Place};
use super::clip::Clip;
use super::config::Config;
use super::decoder::Decoder;
use super::encoder::Encoder;
use crate::canvas::Piece;
use crate::error::{Error, Result};
use crate::rope::Circular;

/// A clip that is being decoded: latents go in frame by frame, pictures come out.
///
/// Made by [`WanVae::decoding`](super::WanVae::decoding).
#[derive(Debug)]
pub struct Decoding<'v> {
    decoder: &'v Decoder,
    config: &'v Config,
    chunks: Chunks,
}

/// A clip that is being encoded: pictures go in frame by frame, latents come out.
///
/// Made by [`WanVae::encoding`](super::WanVae::encoding).
#[derive(Debug)]
pub struct Encoding<'v> {
    encoder: &'v Encoder,
    config: &'v Config,
    chunks: Chunks,
    /// Frames that wait until a chunk is whole.
    waiting: Vec<f32>,
}

/// Where a clip is, and what goes from chunk to chunk.
#[derive(Debug)]
struct Chunks {
    piece: Piece,
    next: Place,
    /// None until a second chunk may follow.
    memory: Memory,
    is_allocated: bool,
    /// Whether a chunk ended in the middle, so that layers may not have kept the same frames.
    is_interrupted: bool,
    /// The plan of the last chunk. All later chunks share one.
    plans: PlanCache<Place>,
    /// The most bytes that were held on the device while a chunk ran.
    peak: u64,
}

/// Whether more chunks will follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rest {
    /// This is a picture by itself.
    Nothing,
    Unknown,
}

impl Chunks {
    fn new(piece: Piece) -> Chunks {
        Chunks {
            piece,
            next: Place::First,
            memory: Memory::default(),
            is_allocated: false,
            is_interrupted: false,
            plans: PlanCache::new(1),
            peak: 0,
        }
    }

    /// Bytes that all chunks run in beside weights, or the first if it is all.
    fn need(
        &self,
        backend: &Backend,
        rest: Rest,
        build: impl for<'g> Fn(Graph<'g>, &Chunk<'_>),
    ) -> Result<u64> {
        let bytes = |place, memory| -> Result<u64> {
            let chunk = self.chunk(place, memory);
            let estimate = Estimate::of(backend, |g| build(g, &chunk))?;
            Ok(estimate.compute_bytes + estimate.constant_bytes)
        };
        if rest == Rest::Nothing {
            return bytes(Place::First, None);
        }
        let memory = Memory::default();
        let mut most = 0;
        for place in [Place::Later, Place::Second, Place::First] {
            most = most.max(bytes(place, Some(&memory))?);
        }
        Ok(most + memory.bytes(backend.device()))
    }

    fn chunk<'m>(&self, place: Place, memory: Option<&'m Memory>) -> Chunk<'m> {
        Chunk {
            place,
            circular: self.piece.circular,
            memory,
        }
    }

    /// Runs the next chunk, whose graph `build` records, on `values`.
    fn run(
        &mut self,
        backend: &mut Backend,
        values: &[f32],
        rest: Rest,
        cancel: &Cancel,
        build: impl for<'g> Fn(Graph<'g>, &Chunk<'_>),
    ) -> Result<Vec<f32>> {
        if self.is_interrupted {
            return Err(Error::Interrupted);
        }
        let is_alone = self.next == Place::First && rest == Rest::Nothing;
        if !is_alone && !self.is_allocated {
            // A later chunk has all that goes from chunk to chunk: recording it tells the sizes.
            let later = self.chunk(Place::Later, Some(&self.memory));
            Estimate::of(backend, |g| build(g, &later))?;
            self.memory.allocate(backend)?;
            self.is_allocated = true;
        }
        let place = self.next;
        let chunk = Chunk {
            place,
            circular: self.piece.circular,
            memory: (!is_alone).then_some(&self.memory),
        };
        let plan =
            self.plans
                .get_or_build_with(place, backend, cancel, &mut |_: &Progress| {}, |g| {
                    build(g, &chunk);
                })?;
        plan.set("chunk", values)?;
        self.is_interrupted = true;
        let report = plan.run(backend, cancel)?;
        self.peak = self.peak.max(report.used.total());
        let result = plan.read("result")?;
        self.is_interrupted = false;
        self.next = match place {
            Place::First => Place::Second,
            Place::Second | Place::Later => Place::Later,
        };
        Ok(result)
    }
}

impl<'v> Decoding<'v> {
    pub(crate) fn new(decoder: &'v Decoder, config: &'v Config, piece: Piece) -> Decoding<'v> {
        Decoding {
            decoder,
            config,
            chunks: Chunks::new(piece),
        }
    }

    /// Joins sides of the frames. To be said before the first.
    pub fn circular(mut self, circular: Circular) -> Decoding<'v> {
        self.chunks.piece.circular = circular;
        self
    }

    /// The most bytes that were held on the device through its ledger while a chunk ran.
    pub fn peak(&self) -> u64 {
        self.chunks.peak
    }

    /// Bytes that it runs in beside weights.
    pub(crate) fn need(&self, backend: &Backend, rest: Rest) -> Result<u64> {
        let (rest, _) = steps(self.config, Place::First, rest)?;
        let Piece { height, width, .. } = self.chunks.piece;
        let build = decoding_graph(self.decoder, [1, self.config.z_dim, height, width]);
        self.chunks.need(backend, rest, build)
    }

    /// Decodes one more frame of latents `[z, height, width]`, which have their means and deviations back: the clip's first
    /// becomes one picture, each further one four. Pictures are `[frames, channels, scale * height, scale * width]` with
    /// values from -1 to 1.
    ///
    /// # Errors
    /// [`Error::Clip`] for a wrong number of values, or for a second frame where the VAE is for pictures alone;
    /// [`Error::Interrupted`] after a chunk that was cancelled or failed while it was computed; and the engine's. When memory
    /// ran out before that, the same frame may be given again.
    pub fn push(&mut self, backend: &mut Backend, latent: &[f32], cancel: &Cancel) -> Result<Clip> {
        self.push_one_of(backend, latent, Rest::Unknown, cancel)
    }

    pub(crate) fn push_one_of(
        &mut self,
        backend: &mut Backend,
        latent: &[f32],
        rest: Rest,
        cancel: &Cancel,
    ) -> Result<Clip> {
        let Piece { height, width, .. } = self.chunks.piece;
        let z_dim = self.config.z_dim;
        expect("latent values", latent.len(), z_dim * height * width)?;
        let (rest, count) = steps(self.config, self.chunks.next, rest)?;
        let build = decoding_graph(self.decoder, [1, z_dim, height, width]);
        let mut values = self.chunks.run(backend, latent, rest, cancel, build)?;
        for value in &mut values {
            *value = value.clamp(-1.0, 1.0);
        }
        let scale = self.config.scale_factor();
        Ok(Clip {
            frames: count,
            channels: self.config.channels(),
            height: height * scale,
            width: width * scale,
            values,
        })
    }

    /// Decodes frames of latents as they come, as an iterator over the pictures of each.
    pub fn frames<'d, L: AsRef<[f32]>>(
        &'d mut self,
        backend: &'d mut Backend,
        latents: impl IntoIterator<Item = L> + 'd,
        cancel: &'d Cancel,
    ) -> impl Iterator<Item = Result<Clip>> + 'd {
        latents
            .into_iter()
            .map(move |latent| self.push(backend, latent.as_ref(), cancel))
    }
}

impl<'v> Encoding<'v> {
    pub(crate) fn new(encoder: &'v Encoder, config: &'v Config, piece: Piece) -> Encoding<'v> {
        Encoding {
            encoder,
            config,
            chunks: Chunks::new(piece),
            waiting: Vec::new(),
        }
    }

    /// Joins sides of the frames. To be said before the first.
    pub fn circular(mut self, circular: Circular) -> Encoding<'v> {
        self.chunks.piece.circular = circular;
        self
    }

    /// The most bytes that were held on the device through its ledger while a chunk ran.
    pub fn peak(&self) -> u64 {
        self.chunks.peak
    }

    /// Bytes that it runs in beside weights.
    pub(crate) fn need(&self, backend: &Backend, rest: Rest) -> Result<u64> {
        let (rest, _) = steps(self.config, Place::First, rest)?;
        let build = encoding_graph(self.encoder, self.config, self.chunks.piece);
        self.chunks.need(backend, rest, build)
    }

    /// Encodes one more picture `[channels, height, width]` with values from -1 to 1: the clip's first, and each fourth
    /// further, give the means of one frame of latents.
    ///
    /// # Errors
    /// As for [`Decoding::push`].
    pub fn push(
        &mut self,
        backend: &mut Backend,
        picture: &[f32],
        cancel: &Cancel,
    ) -> Result<Option<Clip>> {
        self.push_one_of(backend, picture, Rest::Unknown, cancel)
    }

    pub(crate) fn push_one_of(
        &mut self,
        backend: &mut Backend,
        picture: &[f32],
        rest: Rest,
        cancel: &Cancel,
    ) -> Result<Option<Clip>> {
        let Piece { height, width, .. } = self.chunks.piece;
        let frame = self.config.channels() * height * width;
        expect("pixel values", picture.len(), frame)?;
        let (rest, count) = steps(self.config, self.chunks.next, rest)?;
        let before = self.waiting.len();
        self.waiting.extend_from_slice(picture);
        if self.waiting.len() < count * frame {
            return Ok(None);
        }
        let build = encoding_graph(self.encoder, self.config, self.chunks.piece);
        let outcome = self.chunks.run(backend, &self.waiting, rest, cancel, build);
        let values = match outcome {
            Ok(values) => values,
            Err(error) => {
                self.waiting.truncate(before);
                return Err(error);
            }
        };
        self.waiting.clear();
        let scale = self.config.scale_factor();
        Ok(Some(Clip {
            frames: 1,
            channels: self.config.z_dim,
            height: height / scale,
            width: width / scale,
            values,
        }))
    }

    /// Frames that were given and not encoded, since they make no whole chunk.
    pub fn waiting(&self) -> usize {
        let Piece { height, width, .. } = self.chunks.piece;
        self.waiting.len() / (self.config.channels() * height * width).max(1)
    }
}

/// The graph of a chunk of latents `[1, z, height, width]`.
fn decoding_graph(decoder: &Decoder, latent: [usize; 4]) -> impl for<'g> Fn(Graph<'g>, &Chunk<'_>) {
    move |g: Graph<'_>, chunk: &Chunk<'_>| {
        let z = g.input::<f32>("chunk", latent);
        g.output("result", decoder.forward_chunk(z, chunk));
    }
}

/// The graph of a chunk of frames of the size of `piece`.
fn encoding_graph(
    encoder: &Encoder,
    config: &Config,
    piece: Piece,
) -> impl for<'g> Fn(Graph<'g>, &Chunk<'_>) {
    let (channels, later) = (config.channels(), config.frames_per_latent());
    move |g: Graph<'_>, chunk: &Chunk<'_>| {
        let count = if chunk.is_first() { 1 } else { later };
        let frames = g.input::<f32>("chunk", [count, channels, piece.height, piece.width]);
        g.output("result", encoder.forward_chunk(frames, chunk));
    }
}

/// Whether more may follow, and the number of pictures in the chunk at `next`.
fn steps(config: &Config, next: Place, rest: Rest) -> Result<(Rest, usize)> {
    if next == Place::First {
        let alone = config.is_for_pictures();
        Ok((if alone { Rest::Nothing } else { rest }, 1))
    } else if config.is_for_pictures() {
        Err(Error::Clip {
            what: "frames for a VAE of pictures",
            found: 2,
            wanted: 1,
        })
    } else {
        Ok((rest, config.frames_per_latent()))
    }
}

/// Refuses another number of values.
pub(crate) fn expect(what: &'static str, found: usize, wanted: usize) -> Result<()> {
    if found == wanted {
        Ok(())
    } else {
        Err(Error::Clip {
            what,
            found,
            wanted,
        })
    }
}
