//! Sizes that the model makes and reads: canvases, frames, latents and sound.
//!
//! Source: [`modular_pipeline.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/modular_pipelines/minimax_h3/modular_pipeline.py#L41).

use std::fmt;
use std::ops::RangeInclusive;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::rope::{H3Clip, Size};

/// Frames a second, of everything that is made and read.
pub const FRAME_RATE: u32 = 24;

/// Samples a second of sound.
pub const SAMPLE_RATE: u32 = 32_000;

/// Latents of sound a second.
pub const SOUND_LATENTS_PER_SECOND: u32 = 40;

/// Frames that are made if nothing is said.
pub const USUAL_FRAMES: usize = 124;

/// Sides of pictures are multiples of this: the VAE's 16 pixels, and two latents to a token.
pub const SIZE_MULTIPLE: usize = 32;

/// Frames of a chunk of the video VAE.
const CHUNK_FRAMES: usize = 17;
/// Latent frames of a chunk.
const CHUNK_LATENTS: usize = 5;

/// Seconds that the published model was trained for.
const TRAINED_SECONDS: RangeInclusive<f64> = 5.0..=15.0;

/// The widest and the highest canvas, as sides of each other.
const STEEPEST: f64 = 4.0;

/// Most frames of a clip: ten minutes, far beyond what the model was trained for.
const MOST_FRAMES: usize = 17 * 848 + 5;

/// Most pixels along a side: where rotary tables of other models end, too.
const LARGEST_SIDE: usize = 16_384;

/// How large pictures are if nothing is said. The published model's, unless `modular_model_index.json` says others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CanvasRule {
    /// Pixels along the shorter side.
    #[serde(rename = "canvas_short_edge")]
    pub short_edge: usize,
    /// Most pixels.
    #[serde(rename = "canvas_max_pixels")]
    pub most_pixels: usize,
    /// Pixels along the shorter side of pictures that are referred to.
    #[serde(rename = "reference_image_short_edge")]
    pub reference_short_edge: usize,
}

impl Default for CanvasRule {
    fn default() -> CanvasRule {
        CanvasRule {
            short_edge: 768,
            most_pixels: 768 * 1344,
            reference_short_edge: 2048,
        }
    }
}

impl CanvasRule {
    /// The canvas of pictures with the sides of `like`, of which the aspect alone counts.
    ///
    /// # Errors
    /// [`Error::Aspect`] for sides of more than 4 to 1.
    pub fn canvas(&self, like: Size) -> Result<Size> {
        check_aspect(like)?;
        let ratio = like.width as f64 / like.height as f64;
        let edge = self.short_edge as f64;
        let (mut width, mut height) = match ratio >= 1.0 {
            true => (edge * ratio, edge),
            false => (edge, edge / ratio),
        };
        let area = width * height;
        if area > self.most_pixels as f64 {
            let scale = (self.most_pixels as f64 / area).powf(0.5);
            (width, height) = (width * scale, height * scale);
        }
        Ok(Size::new(aligned(height), aligned(width)))
    }

    /// The canvas of a clip without a picture to take the aspect from: 16 to 9.
    ///
    /// # Errors
    /// None that a canvas of 16 to 9 has.
    pub fn usual(&self) -> Result<Size> {
        self.canvas(Size::new(9, 16))
    }

    /// What a picture of `size` that is referred to is scaled to: its shorter side to the rule's, its area whatever that makes.
    ///
    /// # Errors
    /// [`Error::Aspect`] for sides of more than 4 to 1.
    pub fn reference(&self, size: Size) -> Result<Size> {
        check_aspect(size)?;
        let shorter = size.height.min(size.width);
        let scale = self.reference_short_edge as f64 / shorter as f64;
        let side = |side: usize| aligned(side as f64 * scale);
        Ok(Size::new(side(size.height), side(size.width)))
    }
}

fn check_aspect(size: Size) -> Result<()> {
    let (longer, shorter) = (size.height.max(size.width), size.height.min(size.width));
    match shorter > 0 && longer as f64 <= STEEPEST * shorter as f64 {
        true => Ok(()),
        false => Err(Error::Aspect {
            width: size.width,
            height: size.height,
        }),
    }
}

/// The nearest multiple of 32, half to even, and at least 32.
fn aligned(side: f64) -> usize {
    let multiple = SIZE_MULTIPLE as f64;
    ((side / multiple).round_ties_even() * multiple).max(multiple) as usize
}

/// What was changed of what a request asks for.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Adjustment {
    /// Sides were not multiples of 32.
    Size {
        /// Width and height that were asked for.
        asked: (usize, usize),
        /// Width and height that are made.
        given: (usize, usize),
    },
    /// Frames were not 17 n + 5.
    Frames {
        /// How many were asked for.
        asked: usize,
        /// How many are made.
        given: usize,
    },
    /// Sides are more than 4 to 1, where the model was trained for no more; it is made all the same, since the size was asked for.
    Aspect {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
    },
    /// The clip is shorter or longer than those the model was trained with; it is made all the same.
    Untrained {
        /// Its frames.
        frames: usize,
    },
    /// A clip that is referred to has more frames than are read.
    Clip {
        /// Which reference, counted from 1.
        number: usize,
        /// Its frames at 24 a second.
        frames: usize,
        /// Those that the transformer sees.
        read: usize,
    },
    /// Sound that is referred to is longer than the clip that is made.
    Sound {
        /// Which reference, counted from 1.
        number: usize,
        /// Its seconds.
        seconds: f64,
        /// Seconds that are read.
        read: f64,
    },
}

impl fmt::Display for Adjustment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Adjustment::Size { asked, given } => write!(
                f,
                "{}x{} becomes {}x{}: sides are multiples of {SIZE_MULTIPLE} pixels",
                asked.0, asked.1, given.0, given.1
            ),
            Adjustment::Frames { asked, given } => {
                let verb = match asked {
                    1 => "frame becomes",
                    _ => "frames become",
                };
                write!(
                    f,
                    "{asked} {verb} {given}: the model makes 17 n + 5 of them"
                )
            }
            Adjustment::Aspect { width, height } => write!(
                f,
                "{width}x{height}: the model was trained for sides of at most {STEEPEST} to 1"
            ),
            Adjustment::Untrained { frames } => write!(
                f,
                "{frames} frames are {:.1} seconds; the model was trained for {} to {}",
                *frames as f64 / f64::from(FRAME_RATE),
                TRAINED_SECONDS.start(),
                TRAINED_SECONDS.end()
            ),
            Adjustment::Clip {
                number,
                frames,
                read,
            } => write!(
                f,
                "of reference {number}, {read} of {frames} frames are read"
            ),
            Adjustment::Sound {
                number,
                seconds,
                read,
            } => write!(
                f,
                "of the sound of reference {number}, {read:.2} of {seconds:.2} seconds are read"
            ),
        }
    }
}

/// What is made, in pixels and frames and in latents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Rows and columns of pixels, multiples of 32.
    pub size: Size,
    /// Frames, 17 n + 5.
    pub frames: usize,
}

impl Extent {
    /// The nearest that can be made to `frames` of `width` and `height` pixels, and what that changes.
    ///
    /// # Errors
    /// [`Error::Size`], [`Error::Frames`].
    pub fn nearest(
        (width, height): (usize, usize),
        frames: usize,
    ) -> Result<(Extent, Vec<Adjustment>)> {
        let possible = 1..=LARGEST_SIDE;
        if !possible.contains(&width) || !possible.contains(&height) {
            return Err(Error::Size {
                width,
                height,
                limit: LARGEST_SIDE,
            });
        }
        if !(1..=MOST_FRAMES).contains(&frames) {
            return Err(Error::Frames {
                frames,
                most: MOST_FRAMES,
            });
        }
        let mut changes = Vec::new();
        let size = Size::new(aligned(height as f64), aligned(width as f64));
        if (size.width, size.height) != (width, height) {
            changes.push(Adjustment::Size {
                asked: (width, height),
                given: (size.width, size.height),
            });
        }
        if check_aspect(size).is_err() {
            changes.push(Adjustment::Aspect {
                width: size.width,
                height: size.height,
            });
        }
        let given = frames_up(frames);
        if given != frames {
            changes.push(Adjustment::Frames {
                asked: frames,
                given,
            });
        }
        let extent = Extent {
            size,
            frames: given,
        };
        if !TRAINED_SECONDS.contains(&extent.seconds()) {
            changes.push(Adjustment::Untrained { frames: given });
        }
        Ok((extent, changes))
    }

    /// How long it is.
    pub fn seconds(&self) -> f64 {
        self.frames as f64 / f64::from(FRAME_RATE)
    }

    /// Frames of latents.
    pub fn latent_frames(&self) -> usize {
        latent_frames(self.frames)
    }

    /// Rows and columns of latents, of 16 by 16 pixels each.
    pub fn latents(&self) -> Size {
        self.size.whole_patches(SIZE_MULTIPLE / 2)
    }

    /// The rows that the transformer makes, in latents.
    pub fn rows(&self) -> H3Clip {
        H3Clip {
            frames: self.latent_frames(),
            latents: self.latents(),
            sound: self.sound_latents(),
        }
    }

    /// Latents of sound by channel, 40 a second, rounded half to even.
    pub fn sound_latents(&self) -> usize {
        let latents = self.seconds() * f64::from(SOUND_LATENTS_PER_SECOND);
        latents.round_ties_even() as usize
    }
}

/// The next number of frames that the video VAE makes: 17 n + 5.
pub fn frames_up(frames: usize) -> usize {
    let chunks = frames.saturating_sub(CHUNK_LATENTS).div_ceil(CHUNK_FRAMES);
    chunks * CHUNK_FRAMES + CHUNK_LATENTS
}

/// The frames of a clip of so many that are read: 17 n + 5, at least 22, but no more than there are.
pub fn frames_down(frames: usize) -> usize {
    let chunks = frames.saturating_sub(CHUNK_LATENTS) / CHUNK_FRAMES;
    (chunks.max(1) * CHUNK_FRAMES + CHUNK_LATENTS).min(frames)
}

/// Frames of latents of so many frames: 5 n + 2 of 17 n + 5. Of a last chunk that is not whole, its last frame is shown again.
pub fn latent_frames(frames: usize) -> usize {
    match frames {
        0 | 1 => frames,
        _ => frames.div_ceil(CHUNK_FRAMES) * CHUNK_LATENTS - 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canvases_are_the_references() {
        // Height and width by `resolve_canvas_size` of diffusers.
        let rule = CanvasRule::default();
        for ((width, height), canvas) in [
            ((16, 9), (768, 1344)),
            ((9, 16), (1344, 768)),
            ((1, 1), (768, 768)),
            ((4, 3), (768, 1024)),
            ((21, 9), (672, 1536)),
            ((4, 1), (512, 2016)),
        ] {
            let found = rule.canvas(Size::new(height, width)).unwrap();
            assert_eq!((found.height, found.width), canvas, "{width}:{height}");
        }
        assert!(rule.canvas(Size::new(1, 5)).is_err());
        assert!(rule.canvas(Size::new(0, 5)).is_err());
    }

    #[test]
    fn frames_and_latents_are_the_references() {
        // Frames, latent frames and latents of sound by the functions of diffusers.
        for (asked, frames, latents, sound) in [
            (1, 5, 2, 8),
            (5, 5, 2, 8),
            (6, 22, 7, 37),
            (22, 22, 7, 37),
            (56, 56, 17, 93),
            (120, 124, 37, 207),
            (346, 362, 107, 603),
        ] {
            let (extent, changes) = Extent::nearest((64, 32), asked).unwrap();
            assert_eq!(
                (
                    extent.frames,
                    extent.latent_frames(),
                    extent.sound_latents()
                ),
                (frames, latents, sound)
            );
            let is_changed = changes
                .iter()
                .any(|change| matches!(change, Adjustment::Frames { .. }));
            assert_eq!(is_changed, asked != frames, "{asked}");
        }
        assert_eq!([16, 22, 38, 39].map(frames_down), [16, 22, 22, 39]);
        assert_eq!([1, 16, 22, 39].map(latent_frames), [1, 2, 7, 12]);
    }

    #[test]
    fn steep_sizes_are_made_and_said() {
        for (asked, is_said) in [
            ((2000, 32), true),
            ((32, 160), true),
            ((128, 32), false),
            ((64, 256), false),
        ] {
            let (extent, changes) = Extent::nearest(asked, 124).unwrap();
            assert_eq!(
                extent.size,
                Size::new(aligned(asked.1 as f64), aligned(asked.0 as f64))
            );
            let told = changes
                .iter()
                .find(|change| matches!(change, Adjustment::Aspect { .. }));
            assert_eq!(told.is_some(), is_said, "{asked:?}");
        }
    }

    #[test]
    fn sides_go_to_the_nearest_multiple_half_to_even() {
        for (asked, given) in [(48, 64), (80, 64), (1, 32), (768, 768), (1000, 992)] {
            let (extent, changes) = Extent::nearest((asked, 64), 124).unwrap();
            assert_eq!(extent.size, Size::new(64, given));
            let is_size = |change: &&Adjustment| matches!(change, Adjustment::Size { .. });
            let told = changes.iter().any(|change| is_size(&change));
            assert_eq!(told, asked != given);
        }
        assert!(Extent::nearest((0, 64), 124).is_err());
        assert!(Extent::nearest((64, 64), 0).is_err());
    }
}
