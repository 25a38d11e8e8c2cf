//! What a clip is made from beside the prompt, put into the sizes and rates that the model reads.
//!
//! Source: [`before_encoder.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/modular_pipelines/minimax_h3/before_encoder.py).

use image::RgbaImage;
use image::imageops::crop_imm;

use super::sizes::{
    Adjustment, CanvasRule, Extent, FRAME_RATE, SAMPLE_RATE, SIZE_MULTIPLE,
    SOUND_LATENTS_PER_SECOND, frames_down, latent_frames,
};
use crate::error::{Error, Result};
use crate::frame_rate::FrameRate;
use crate::image::Image;
use crate::resample::{lanczos, opaque};
use crate::rope::{H3Clip, H3Reference, Size};
use crate::sound::Sound;

/// Most pictures, clips and sounds that a request refers to, and most of all together.
pub const MOST_OF_EACH: [usize; 3] = [9, 3, 3];
/// Most references of a request.
pub const MOST_REFERENCES: usize = 12;

/// Something that the made clip refers to. Their order counts: it numbers them for the prompt, by kind, and lays them out in
/// time.
#[derive(Debug, Clone, PartialEq)]
pub enum Reference {
    /// A subject, a style or a scene: `<Picture 1>` in the prompt.
    Picture(Image),
    /// Motion and camera: `<Video 1>` in the prompt, and its sound, if it has one, `<Audio 1>`.
    Clip {
        /// Pictures of one size.
        frames: Vec<Image>,
        /// How many of them there are in a second.
        frame_rate: FrameRate,
        /// What is heard meanwhile.
        sound: Option<Sound>,
    },
    /// A voice or music: `<Audio 1>` in the prompt.
    Sound(Sound),
}

/// Something the text encoder sees or the transformer is given, ready to be read.
#[derive(Debug)]
pub(crate) enum Subject<'r> {
    /// A picture without holes.
    Picture(RgbaImage),
    Clip(ClipSubject<'r>),
    /// Two channels at the model's rate.
    Sound(Sound),
}

/// A clip at the model's frame rate, whose pictures are scaled when they are asked for.
#[derive(Debug)]
pub(crate) struct ClipSubject<'r> {
    frames: &'r [Image],
    /// Which of them is shown, frame by frame.
    slots: Vec<usize>,
    size: Size,
    /// Two channels at the model's rate.
    pub(crate) sound: Option<Sound>,
}

/// What a subject is like, without its pixels and samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outline {
    /// So many pixels.
    Picture(Size),
    Clip {
        size: Size,
        frames: usize,
        /// Samples of a channel, if it has sound.
        samples: Option<usize>,
    },
    /// Samples of a channel.
    Sound(usize),
}

impl Outline {
    /// Samples of a channel of its sound, if it has any.
    pub(crate) fn samples(self) -> Option<usize> {
        match self {
            Outline::Picture(_) => None,
            Outline::Clip { samples, .. } => samples,
            Outline::Sound(samples) => Some(samples),
        }
    }

    /// Latents of sound by channel; none if it is silent.
    fn sound_latents(self) -> usize {
        let hop = (SAMPLE_RATE / SOUND_LATENTS_PER_SECOND) as usize;
        self.samples().map_or(0, |samples| samples.div_ceil(hop))
    }

    /// What the transformer is shown or played of it, in latents.
    pub(crate) fn rows(self) -> H3Reference {
        let latents = |size: Size| size.whole_patches(SIZE_MULTIPLE / 2);
        match self {
            Outline::Picture(size) => H3Reference::Picture(latents(size)),
            Outline::Sound(_) => H3Reference::Sound(self.sound_latents()),
            Outline::Clip { size, frames, .. } => H3Reference::Clip(H3Clip {
                frames: latent_frames(frames_down(frames)),
                latents: latents(size),
                sound: self.sound_latents(),
            }),
        }
    }
}

impl Subject<'_> {
    pub(crate) fn outline(&self) -> Outline {
        match self {
            Subject::Picture(picture) => Outline::Picture(size_of(picture)),
            Subject::Clip(clip) => Outline::Clip {
                size: clip.size,
                frames: clip.len(),
                samples: clip.sound.as_ref().map(Sound::samples),
            },
            Subject::Sound(sound) => Outline::Sound(sound.samples()),
        }
    }

    /// Its sound, if it has one.
    pub(crate) fn sound(&self) -> Option<&Sound> {
        match self {
            Subject::Picture(_) => None,
            Subject::Clip(clip) => clip.sound.as_ref(),
            Subject::Sound(sound) => Some(sound),
        }
    }
}

impl ClipSubject<'_> {
    /// Frames at the model's rate.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Frames that the transformer sees of it.
    pub(crate) fn read(&self) -> usize {
        frames_down(self.len())
    }

    /// A frame; the last for those beyond.
    pub(crate) fn frame(&self, index: usize) -> RgbaImage {
        let slot = self.slots.get(index).or(self.slots.last());
        let frame = slot.and_then(|&slot| self.frames.get(slot));
        match frame {
            Some(frame) => scaled(&opaque(frame.pixels()), self.size),
            None => RgbaImage::new(self.size.width as u32, self.size.height as u32),
        }
    }
}

/// Keyframes on a canvas of `size`: the first of them is stretched over it, one that follows covers it and is cut.
pub(crate) fn keyframes<'r>(
    frames: impl IntoIterator<Item = &'r Image>,
    size: Size,
) -> Vec<Subject<'static>> {
    let frames = frames.into_iter().enumerate();
    let on_canvas = frames.map(|(index, frame)| {
        let frame = opaque(frame.pixels());
        Subject::Picture(match index {
            0 => scaled(&frame, size),
            _ => covering(&frame, size),
        })
    });
    on_canvas.collect()
}

fn covering(frame: &RgbaImage, size: Size) -> RgbaImage {
    let from = size_of(frame);
    if from == size || frame.is_empty() {
        return scaled(frame, size);
    }
    let scale =
        (size.width as f64 / from.width as f64).max(size.height as f64 / from.height as f64);
    let side = |from: usize, to: usize| to.max((from as f64 * scale).round_ties_even() as usize);
    let larger = Size::new(side(from.height, size.height), side(from.width, size.width));
    let (left, top) = (
        (larger.width - size.width) / 2,
        (larger.height - size.height) / 2,
    );
    let resized = scaled(frame, larger);
    let (width, height) = (size.width as u32, size.height as u32);
    crop_imm(&resized, left as u32, top as u32, width, height).to_image()
}

fn scaled(picture: &RgbaImage, size: Size) -> RgbaImage {
    lanczos(picture, size.width as u32, size.height as u32)
}

fn size_of(picture: &RgbaImage) -> Size {
    Size::new(picture.height() as usize, picture.width() as usize)
}

/// Refuses more references than the model was trained with, and sounds alone.
///
/// # Errors
/// [`Error::ClipReferences`].
pub(crate) fn check(references: &[Reference]) -> Result<()> {
    let kinds = ["pictures", "clips", "sounds"];
    let mut counts = [0; 3];
    for reference in references {
        counts[match reference {
            Reference::Picture(_) => 0,
            Reference::Clip { .. } => 1,
            Reference::Sound(_) => 2,
        }] += 1;
    }
    let refused = |reason: String| Err(Error::ClipReferences(reason));
    for ((kind, count), most) in kinds.iter().zip(counts).zip(MOST_OF_EACH) {
        if count > most {
            return refused(too_many(count, kind, most));
        }
    }
    if references.len() > MOST_REFERENCES {
        return refused(format!(
            "{} are too many: at most {MOST_REFERENCES} are possible",
            references.len()
        ));
    }
    if !references.is_empty() && counts[2] == references.len() {
        return refused("sound needs a picture or a clip beside it".to_owned());
    }
    Ok(())
}

/// Why more of a kind are refused than can be.
pub(super) fn too_many(count: usize, kind: &str, most: usize) -> String {
    format!("{count} {kind} are too many: at most {most} are possible")
}

/// Puts references into the sizes and rates that a clip of `extent` is made from, and says in `changes` what is left out.
///
/// # Errors
/// [`Error::ClipReferences`], which says which reference and why.
pub(crate) fn prepare<'r>(
    references: &'r [Reference],
    extent: Extent,
    rule: &CanvasRule,
    changes: &mut Vec<Adjustment>,
) -> Result<Vec<Subject<'r>>> {
    check(references)?;
    let numbered = references.iter().zip(1..);
    let prepared = numbered.map(|(reference, number)| {
        let named = |error: Error| {
            let reason = match error {
                Error::ClipReferences(reason) => reason,
                error => error.to_string(),
            };
            Error::ClipReferences(format!("reference {number}: {reason}"))
        };
        let hear = |sound: &Sound, changes: &mut Vec<Adjustment>| {
            heard(sound, extent, number, changes).map_err(named)
        };
        Ok(match reference {
            Reference::Picture(picture) => {
                let picture = opaque(picture.pixels());
                let size = rule.reference(size_of(&picture)).map_err(named)?;
                Subject::Picture(scaled(&picture, size))
            }
            Reference::Sound(sound) => Subject::Sound(hear(sound, changes)?),
            Reference::Clip {
                frames,
                frame_rate,
                sound,
            } => {
                let sound = sound.as_ref().map(|sound| hear(sound, changes));
                let mut clip = clip(frames, *frame_rate, rule).map_err(named)?;
                clip.sound = sound.transpose()?;
                let whole = clip.len();
                clip.slots.truncate(extent.frames);
                let read = clip.read();
                if read != whole {
                    changes.push(Adjustment::Clip {
                        number,
                        frames: whole,
                        read,
                    });
                }
                Subject::Clip(clip)
            }
        })
    });
    prepared.collect()
}

/// A clip at the model's rate: each picture is shown until the next one is nearer.
fn clip<'r>(frames: &'r [Image], rate: FrameRate, rule: &CanvasRule) -> Result<ClipSubject<'r>> {
    let refused = |reason: &str| Err(Error::ClipReferences(reason.to_owned()));
    let Some(first) = frames.first() else {
        return refused("a clip of no frames");
    };
    let from = size_of(first.pixels());
    if frames.iter().any(|frame| size_of(frame.pixels()) != from) {
        return refused("the frames of a clip are of one size");
    }
    let scale = f64::from(FRAME_RATE) / rate.per_second();
    let slots = match scale == 1.0 {
        true => (0..frames.len()).collect(),
        false => {
            let slot = |index: usize| (index as f64 * scale + 0.5).floor() as usize;
            let shown = |index: usize| slot(index + 1).saturating_sub(slot(index));
            let repeated = (0..frames.len()).map(|index| std::iter::repeat_n(index, shown(index)));
            repeated.flatten().collect()
        }
    };
    Ok(ClipSubject {
        frames,
        slots,
        size: rule.canvas(from)?,
        sound: None,
    })
}

/// Sound as long as the clip that is made, in two channels at the model's rate.
fn heard(
    sound: &Sound,
    extent: Extent,
    number: usize,
    changes: &mut Vec<Adjustment>,
) -> Result<Sound> {
    let most = (extent.seconds() * f64::from(sound.rate())) as usize;
    if sound.samples() > most {
        changes.push(Adjustment::Sound {
            number,
            seconds: sound.seconds(),
            read: extent.seconds(),
        });
    }
    let sound = sound.clone().truncated(most).stereo();
    let resampled = sound.resampled(SAMPLE_RATE);
    let resampled = resampled.filter(|sound| sound.samples() > 0);
    resampled.ok_or_else(|| Error::ClipReferences("a sound of no samples".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(width: u32, height: u32) -> Image {
        Image::from(RgbaImage::from_pixel(
            width,
            height,
            image::Rgba([9, 8, 7, 255]),
        ))
    }

    fn sound(samples: usize) -> Sound {
        Sound::new(SAMPLE_RATE, vec![vec![0.5; samples]]).unwrap()
    }

    #[test]
    fn too_many_references_and_sounds_alone_are_refused() {
        let picture = || Reference::Picture(image(4, 4));
        let clip = || Reference::Clip {
            frames: vec![image(4, 4)],
            frame_rate: FrameRate::USUAL,
            sound: None,
        };
        let heard = || Reference::Sound(sound(4));
        let of = |pictures: usize, clips: usize, sounds: usize| -> Vec<Reference> {
            let pictures = std::iter::repeat_with(picture).take(pictures);
            let clips = std::iter::repeat_with(clip).take(clips);
            let sounds = std::iter::repeat_with(heard).take(sounds);
            pictures.chain(clips).chain(sounds).collect()
        };
        for (counts, reason) in [
            ((9, 3, 0), None),
            ((6, 3, 3), None),
            ((0, 1, 3), None),
            ((10, 0, 0), Some("10 pictures")),
            ((1, 4, 0), Some("4 clips")),
            ((1, 0, 4), Some("4 sounds")),
            ((9, 3, 1), Some("13 are too many")),
            ((0, 0, 1), Some("beside it")),
        ] {
            let outcome = check(&of(counts.0, counts.1, counts.2));
            let said = outcome.err().map(|error| error.to_string());
            match (said, reason) {
                (None, None) => {}
                (Some(said), Some(reason)) => assert!(said.contains(reason), "{said}"),
                (said, _) => panic!("{counts:?}: {said:?}"),
            }
        }
    }

    #[test]
    fn clips_come_to_24_frames_a_second() {
        // Slots of `_normalize_video_condition` of diffusers.
        let rule = CanvasRule {
            short_edge: 32,
            most_pixels: 64 * 64,
            reference_short_edge: 32,
        };
        let frames: Vec<Image> = (0..5).map(|_| image(64, 48)).collect();
        for (rate, slots) in [
            ((24, 1), vec![0, 1, 2, 3, 4]),
            ((12, 1), vec![0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
            ((30, 1), vec![0, 1, 3, 4]),
            ((16, 1), vec![0, 0, 1, 2, 2, 3, 4, 4]),
        ] {
            let clip = clip(&frames, FrameRate::new(rate.0, rate.1).unwrap(), &rule).unwrap();
            assert_eq!(clip.slots, slots, "{rate:?}");
            assert_eq!(clip.size, Size::new(32, 32));
        }
    }

    #[test]
    fn what_is_left_out_is_said() {
        let (extent, _) = Extent::nearest((64, 64), 22).unwrap();
        let rule = CanvasRule::default();
        let references = [
            Reference::Clip {
                frames: (0..30).map(|_| image(32, 32)).collect(),
                frame_rate: FrameRate::new(24, 1).unwrap(),
                sound: Some(sound(40_000)),
            },
            Reference::Sound(sound(100)),
        ];
        let mut changes = Vec::new();
        let subjects = prepare(&references, extent, &rule, &mut changes).unwrap();
        let [
            Adjustment::Sound { number: 1, .. },
            Adjustment::Clip {
                number: 1,
                frames: 30,
                read: 22,
            },
        ] = changes[..]
        else {
            panic!("{changes:?}");
        };
        // 22 / 24 of a second.
        assert_eq!(subjects[0].sound().unwrap().samples(), 29_333);
        assert_eq!(subjects[1].outline(), Outline::Sound(100));
        assert_eq!(subjects[1].outline().rows(), H3Reference::Sound(1));
    }
}
