//! MiniMax H3: text, pictures, sound and video on one clock.

use super::embedding::{Embedding, Precision, TooLarge};
use super::frequency::{Frequency, omegas};
use super::sequence::{Sequence, Size};

/// Units of time that one frame of a clip takes.
const FRAME_TIME: f64 = 5.0 / 3.0;
/// Frames that each latent frame stands for, again and again.
const FRAMES_PER_LATENT: [f64; 5] = [1.0, 4.0, 4.0, 4.0, 4.0];
/// Units of position across a square picture.
const EXTENT: f64 = 32.0;
/// Side of a square of latents that makes one token.
const PATCH: usize = 2;
/// Sound comes left, then right.
const CHANNELS: usize = 2;

/// How each axis turns: so many pairs of channels at `theta^(-i / pairs)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct H3Axis {
    /// Pairs of channels that follow one axis.
    pub pairs: usize,
    /// The base of the frequencies.
    pub theta: f64,
}

impl H3Axis {
    /// The published model's.
    pub const PUBLISHED: H3Axis = H3Axis {
        pairs: 16,
        theta: 10_000.0,
    };
}

/// A clip's sizes in latents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct H3Clip {
    /// Latent frames.
    pub frames: usize,
    /// Latents of a frame.
    pub latents: Size,
    /// Latents of sound by channel; 0 is silent.
    pub sound: usize,
}

/// A picture that the made clip shows at one of its ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum H3Keyframe {
    /// At its first frame.
    First,
    /// At its last frame.
    Last,
}

/// Something the made clip refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum H3Reference {
    /// A picture of so many latents.
    Picture(Size),
    /// Sound of so many latents by channel.
    Sound(usize),
    /// A clip, its sound before its frames.
    Clip(H3Clip),
}

/// MiniMax H3 from text and keyframes: text, keyframes of the target's size, the target's sound, the target's frames.
///
/// Text walks along time. Pictures and sound share a clock that starts where text ends; a picture's sides are scaled to
/// the square root of its area, centred, 32 units to a square. Sound lies at the left or right end of its clip's columns.
/// One list of frequencies, `axis`, serves time, rows and columns. The published ones turn the first 96 of 128 channels, by
/// halves.
///
/// Source: [`build_packed_sequence`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/modular_pipelines/minimax_h3/before_denoise.py#L270),
/// [`MiniMaxH3RotaryPosEmbed`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_minimax_h3.py#L76).
///
/// # Errors
/// [`TooLarge`].
pub fn minimax_h3(
    text: usize,
    keyframes: &[H3Keyframe],
    target: H3Clip,
    axis: H3Axis,
) -> Result<Embedding, TooLarge> {
    let mut sequence = text_on_time(text);
    let start = text as f64;
    for keyframe in keyframes {
        let time = match keyframe {
            H3Keyframe::First => start,
            H3Keyframe::Last => start + span(target.frames) - FRAME_TIME,
        };
        frames(&mut sequence, target.latents, 1, |_| time);
    }
    clip(&mut sequence, target, start);
    embed(sequence, axis)
}

/// MiniMax H3 from text and references: text, references in order, the target's sound, the target's frames. The clock
/// moves on by 1 for a picture, by its length for sound, by the longer of sound and frames for a clip.
///
/// Source: [`build_ref2va_packed_sequence`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/modular_pipelines/minimax_h3/before_denoise.py#L567).
///
/// # Errors
/// [`TooLarge`].
pub fn minimax_h3_references(
    text: usize,
    references: &[H3Reference],
    target: H3Clip,
    axis: H3Axis,
) -> Result<Embedding, TooLarge> {
    let mut sequence = text_on_time(text);
    let mut clock = text as f64;
    for reference in references {
        match *reference {
            H3Reference::Picture(latents) => {
                frames(&mut sequence, latents, 1, |_| clock);
                clock += 1.0;
            }
            H3Reference::Sound(latents) => {
                sound(&mut sequence, latents, target.latents, clock);
                clock += latents as f64;
            }
            H3Reference::Clip(reference) => {
                clip(&mut sequence, reference, clock);
                clock += span(reference.frames).max(reference.sound as f64);
            }
        }
    }
    clip(&mut sequence, target, clock);
    embed(sequence, axis)
}

fn text_on_time(text: usize) -> Sequence<3> {
    let mut sequence = Sequence::new();
    sequence.tokens(text, |index| [index as f32, 0.0, 0.0]);
    sequence
}

/// A clip's sound and frames from `start` on.
fn clip(sequence: &mut Sequence<3>, clip: H3Clip, start: f64) {
    sound(sequence, clip.sound, clip.latents, start);
    frames(sequence, clip.latents, clip.frames, |frame| {
        start + span(frame)
    });
}

/// Sound of a clip whose frames have `latents`: all of the left channel, then all of the right.
fn sound(sequence: &mut Sequence<3>, count: usize, latents: Size, start: f64) {
    let columns = coordinates(latents.width, latents);
    let last = (latents.width / PATCH).saturating_sub(1);
    let ends = [columns(0), columns(last)];
    for end in ends.iter().take(CHANNELS) {
        sequence.tokens(count, |index| [(start + index as f64) as f32, 0.0, *end]);
    }
}

/// Frames of `latents`, each at its own time.
fn frames(sequence: &mut Sequence<3>, latents: Size, count: usize, time: impl Fn(usize) -> f64) {
    let times: Vec<f32> = (0..count).map(|frame| time(frame) as f32).collect();
    let (rows, columns) = (
        coordinates(latents.height, latents),
        coordinates(latents.width, latents),
    );
    let size = latents.whole_patches(PATCH);
    let step = |side: usize| (EXTENT * ratio(side, latents) / (side / PATCH).max(1) as f64) as f32;
    sequence.frames(
        count,
        size,
        (step(latents.height), step(latents.width)),
        |frame, row, column| {
            let time = times.get(frame).copied().unwrap_or(0.0);
            [time, rows(row), columns(column)]
        },
    );
}

/// A side by the square root of the area.
fn ratio(side: usize, latents: Size) -> f64 {
    side as f64 / (latents.height as f64 * latents.width as f64).sqrt()
}

/// Positions of the tokens along a side of `side` latents, computed as numpy's `linspace` without its end.
fn coordinates(side: usize, latents: Size) -> impl Fn(usize) -> f32 {
    let ratio = ratio(side, latents);
    let left = (1.0 - ratio) / 2.0;
    let step = ((left + ratio) - left) / (side / PATCH).max(1) as f64;
    move |index| ((index as f64 * step + left) * EXTENT) as f32
}

/// Units of time that the first `frames` latent frames take.
fn span(frames: usize) -> f64 {
    let cycle = FRAMES_PER_LATENT.len();
    let rest: f64 = FRAMES_PER_LATENT.iter().take(frames % cycle).sum();
    let whole: f64 = FRAMES_PER_LATENT.iter().sum();
    // Whole numbers of frames, multiplied once: within a unit of the last place of the reference's running sums.
    FRAME_TIME * ((frames / cycle) as f64 * whole + rest)
}

fn embed(sequence: Sequence<3>, turned: H3Axis) -> Result<Embedding, TooLarge> {
    let channels = turned.pairs.saturating_mul(2);
    let frequencies = (0..3)
        .flat_map(|axis| {
            omegas(channels, turned.theta, Precision::Single)
                .map(move |omega| Frequency { axis, omega })
        })
        .collect();
    sequence.embed(frequencies, Precision::Single, 1)
}
