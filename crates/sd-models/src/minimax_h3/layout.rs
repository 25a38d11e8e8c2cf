//! The packed rows of one request: what each is, when and where it lies, and how much noise it has.

use super::config::{MODALITIES, PATCH};
use crate::error::{Error, Result};
use crate::rope::{self, Embedding, H3Axis, H3Clip, H3Keyframe, H3Reference, Size, TooLarge};

/// Most rows of a sequence. A clip of 15 seconds has a hundred thousand.
const MOST_ROWS: usize = 1 << 24;
/// Channels of sound, one behind the other.
pub(super) const SOUND_CHANNELS: usize = 2;
/// Pixels along a side of a latent.
const SCALE: usize = 16;
/// Time at which pictures that are shown to the transformer are noised, and from which on they count as they are.
pub(super) const CONDITION_TIME: f32 = 0.999;

/// What a row is, which says how it is modulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tag {
    /// A square of latents of a picture or clip, or a row of text that stands for a part of a picture.
    Video,
    /// Text.
    Text,
    /// A latent of one channel of sound.
    Sound,
}

impl Tag {
    fn number(self) -> usize {
        match self {
            Tag::Video => 0,
            Tag::Text => 1,
            Tag::Sound => 2,
        }
    }
}

/// What the transformer is shown beside text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Conditions {
    /// Frames of the clip itself, of its size.
    Keyframes(Vec<H3Keyframe>),
    /// Pictures, clips and sound of any sizes.
    References(Vec<H3Reference>),
}

/// Rows of one kind side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) tag: Tag,
    pub(super) rows: usize,
    /// Which of the times these rows have: see [`Layout::times`].
    time: usize,
}

/// The rows of one request in order: text, conditions, the sound that is made, the video that is made.
///
/// Sound has a row for each latent, those of the left channel first. Video has a row for each square of 2x2 latents of a frame.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    text: Vec<Tag>,
    conditions: Conditions,
    target: H3Clip,
}

impl Layout {
    /// Rows of text with their tags, conditions, and the clip that is made. Sizes are in latents.
    ///
    /// # Errors
    /// [`Error::FrameSize`] for odd sides, [`Error::Clip`] for what has no rows, [`Error::TooManyRows`].
    pub fn new(text: Vec<Tag>, conditions: Conditions, target: H3Clip) -> Result<Layout> {
        let layout = Layout {
            text,
            conditions,
            target,
        };
        let some = |what, found: usize| match found {
            0 => Err(Error::Clip {
                what,
                found,
                wanted: 1,
            }),
            _ => Ok(()),
        };
        let whole = |latents: Size| {
            let [_, rows, columns] = PATCH;
            let is_whole = |side: usize, patch: usize| side > 0 && side.is_multiple_of(patch);
            match is_whole(latents.height, rows) && is_whole(latents.width, columns) {
                true => Ok(()),
                false => Err(Error::FrameSize {
                    width: latents.width.saturating_mul(SCALE),
                    height: latents.height.saturating_mul(SCALE),
                    multiple: rows * SCALE,
                }),
            }
        };
        let clip = |clip: H3Clip| {
            some("frames", clip.frames)?;
            whole(clip.latents)
        };
        some("rows of text", layout.text.len())?;
        clip(target)?;
        if let Conditions::References(references) = &layout.conditions {
            for reference in references {
                match *reference {
                    H3Reference::Picture(latents) => whole(latents)?,
                    H3Reference::Sound(latents) => some("latents of sound", latents)?,
                    H3Reference::Clip(reference) => clip(reference)?,
                }
            }
        }
        match layout.rows() {
            rows if rows <= MOST_ROWS => Ok(layout),
            rows => Err(Error::TooManyRows {
                rows,
                most: MOST_ROWS,
            }),
        }
    }

    /// The clip that is made, in latents.
    pub fn target(&self) -> H3Clip {
        self.target
    }

    /// All rows in order.
    pub(super) fn runs(&self) -> Vec<Run> {
        let text = Run {
            tag: Tag::Text,
            rows: self.text.len(),
            time: 0,
        };
        let sound = |latents: usize, time| Run {
            tag: Tag::Sound,
            rows: latents.saturating_mul(SOUND_CHANNELS),
            time,
        };
        let video = |frames: usize, latents: Size, time| Run {
            tag: Tag::Video,
            rows: [rows_of(latents), frames]
                .into_iter()
                .fold(1, usize::saturating_mul),
            time,
        };
        const SEEN: usize = 2;
        const HEARD: usize = 3;
        let mut runs = vec![text];
        match &self.conditions {
            Conditions::Keyframes(keyframes) => {
                let frame = video(1, self.target.latents, SEEN);
                runs.extend(keyframes.iter().map(|_| frame));
            }
            Conditions::References(references) => {
                for reference in references {
                    match *reference {
                        H3Reference::Picture(latents) => runs.push(video(1, latents, SEEN)),
                        H3Reference::Sound(latents) => runs.push(sound(latents, HEARD)),
                        H3Reference::Clip(clip) => runs.extend([
                            sound(clip.sound, HEARD),
                            video(clip.frames, clip.latents, SEEN),
                        ]),
                    }
                }
            }
        }
        let target = self.target;
        runs.push(sound(target.sound, 1));
        runs.push(video(target.frames, target.latents, 0));
        runs.retain(|run| run.rows > 0);
        runs
    }

    /// All rows.
    pub fn rows(&self) -> usize {
        sum(self.runs().iter())
    }

    /// Rows of text.
    pub fn text_rows(&self) -> usize {
        self.text.len()
    }

    /// Rows of video, those of conditions included, which come first.
    pub fn video_rows(&self) -> usize {
        self.rows_of(Tag::Video)
    }

    /// Rows of sound, those of conditions included, which come first.
    pub fn sound_rows(&self) -> usize {
        self.rows_of(Tag::Sound)
    }

    fn rows_of(&self, tag: Tag) -> usize {
        sum(self.runs().iter().filter(|run| run.tag == tag))
    }

    /// Rows of the video that is made, the last of all.
    pub fn target_video_rows(&self) -> usize {
        rows_of(self.target.latents).saturating_mul(self.target.frames)
    }

    /// Rows of the sound that is made, just before those of the video.
    pub fn target_sound_rows(&self) -> usize {
        self.target.sound.saturating_mul(SOUND_CHANNELS)
    }

    /// The times in a sequence whose video is at time `video` and whose sound is at `sound`, 0 being noise and 1 the clip: those of
    /// the video that is made and of text, of the sound that is made, of pictures that are shown and of sound that is.
    pub fn times(video: f32, sound: f32) -> [f32; 4] {
        [video, sound, video.max(CONDITION_TIME), 1.0]
    }

    /// For each row the number of its modulation: three of each time, for video, text and sound.
    pub fn modulation_rows(&self) -> Vec<i32> {
        let runs = self.runs();
        let (text, others) = runs.split_at(1.min(runs.len()));
        let time = text.first().map_or(0, |run| run.time);
        let number = |time: usize, tag: Tag| (time * MODALITIES + tag.number()) as i32;
        let of_text = self.text.iter().map(|&tag| number(time, tag));
        let of_run = |run: &Run| std::iter::repeat_n(number(run.time, run.tag), run.rows);
        of_text.chain(others.iter().flat_map(of_run)).collect()
    }

    /// Where each row lies in time, rows and columns, and how it is turned: see [`rope::minimax_h3`].
    ///
    /// # Errors
    /// [`TooLarge`].
    pub fn rotary_embedding(&self, axis: H3Axis) -> Result<Embedding, TooLarge> {
        let text = self.text.len();
        match &self.conditions {
            Conditions::Keyframes(keyframes) => {
                rope::minimax_h3(text, keyframes, self.target, axis)
            }
            Conditions::References(references) => {
                rope::minimax_h3_references(text, references, self.target, axis)
            }
        }
    }
}

fn sum<'r>(runs: impl Iterator<Item = &'r Run>) -> usize {
    runs.map(|run| run.rows).fold(0, usize::saturating_add)
}

/// Rows of a frame.
fn rows_of(latents: Size) -> usize {
    let [_, rows, columns] = PATCH;
    (latents.height / rows).saturating_mul(latents.width / columns)
}

/// Latents `[channels, frames, height, width]` as rows `[frames * height / 2 * width / 2, channels * 4]`, frame by frame and line by
/// line; the channels of a row are those of the latents, each with its square of four. Sides must be even.
pub fn patchify(latents: &[f32], frames: usize, size: Size) -> Vec<f32> {
    let places = places(latents.len(), frames, size);
    places.map(|place| latents[place]).collect()
}

/// The inverse of [`patchify`].
pub fn unpatchify(rows: &[f32], frames: usize, size: Size) -> Vec<f32> {
    let mut latents = vec![0.0; rows.len()];
    for (place, &value) in places(rows.len(), frames, size).zip(rows) {
        latents[place] = value;
    }
    latents
}

/// For each element of rows its place among `elements` latents.
fn places(elements: usize, frames: usize, size: Size) -> impl Iterator<Item = usize> {
    let [_, height, width] = PATCH;
    let plane = size.height.saturating_mul(size.width);
    let of_channel = plane.saturating_mul(frames);
    let channels = elements.checked_div(of_channel).unwrap_or(0);
    let (down, along) = (size.height / height, size.width / width);
    (0..frames).flat_map(move |frame| {
        (0..down * along).flat_map(move |square| {
            let (row, column) = (square / along * height, square % along * width);
            (0..channels * height * width).map(move |at| {
                let (channel, y, x) = (at / (height * width), at / width % height, at % width);
                channel * of_channel + frame * plane + (row + y) * size.width + column + x
            })
        })
    })
}
