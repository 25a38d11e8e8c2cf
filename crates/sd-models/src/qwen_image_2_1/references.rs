//! Pictures that a prompt refers to.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::SIZE_MULTIPLE;
use super::layout::Segment;
use crate::error::{Error, Result};
use crate::image::Image;
use crate::qwen3_vl::{ImageProcessor, Seen};
use crate::rope::{Part, Size};

/// Most pictures that a prompt refers to.
pub const MOST_REFERENCES: usize = 4;

/// Sides of the square whose area reference pictures are scaled to. The largest is that of the largest pictures that the
/// model was trained with.
pub const RESOLUTIONS: RangeInclusive<usize> = SIZE_MULTIPLE..=2048;

/// Reference pictures as a model has read them: what its vision tower saw, and their latents.
///
/// Made by [`Pipeline::read_references`](crate::Pipeline::read_references), once for any number of prompts. Clones share
/// them. They are in the host's memory, four bytes a number, as long as anyone holds them: conditions made with them do.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct References(pub(super) Arc<Vec<Reference>>);

/// One picture as a model has read it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reference {
    /// Pixels that it was scaled to.
    pub size: Size,
    /// Normalised latents `[pixels, channels]`.
    pub latents: Vec<f32>,
    /// What stands in its place in the prompt.
    pub seen: Seen,
}

impl References {
    /// No pictures: a prompt that makes one from nothing.
    pub fn none() -> References {
        References::default()
    }

    pub(crate) fn new(references: Vec<Reference>) -> References {
        References(Arc::new(references))
    }

    /// Number of pictures.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Width and height in pixels that each picture was scaled to.
    pub fn sizes(&self) -> impl ExactSizeIterator<Item = (usize, usize)> {
        self.0
            .iter()
            .map(|reference| (reference.size.width, reference.size.height))
    }

    /// Normalised latents `[pixels, channels]` of a picture, row by row.
    pub fn latents(&self, index: usize) -> Option<&[f32]> {
        Some(&self.0.get(index)?.latents)
    }

    /// Bytes of the host's memory that they take.
    pub fn bytes(&self) -> u64 {
        let numbers = self
            .0
            .iter()
            .map(|reference| reference.latents.len() + reference.seen.numbers());
        numbers.sum::<usize>() as u64 * 4
    }

    /// Rows and columns of tokens of each picture: two by two latents of 16 by 16 pixels make one.
    pub(crate) fn tokens(&self) -> Vec<Size> {
        let sizes = self.0.iter();
        sizes.map(|reference| tokens_of(reference.size)).collect()
    }

    /// Whether they are the same handle, or both nothing.
    pub(crate) fn is(&self, other: &References) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || (self.is_empty() && other.is_empty())
    }
}

/// Tokens of a picture of so many pixels.
fn tokens_of(pixels: Size) -> Size {
    pixels.whole_patches(SIZE_MULTIPLE)
}

/// The prefix of the joint sequence: a prompt in tokens without its system message, pictures in latents.
pub(crate) fn segments(parts: &[Part], system_tokens: usize) -> Vec<Segment> {
    let mut system = system_tokens;
    parts
        .iter()
        .map(|part| match *part {
            Part::Text(tokens) => {
                let dropped = system.min(tokens);
                system -= dropped;
                Segment::Text(tokens - dropped)
            }
            Part::Picture(Size { height, width }) => Segment::Image {
                height: 2 * height,
                width: 2 * width,
            },
        })
        .collect()
}

/// The other way: what the text encoder reads for a prefix.
pub(crate) fn parts(segments: &[Segment], system_tokens: usize) -> Vec<Part> {
    let parts = segments.iter().map(|segment| match *segment {
        Segment::Text(tokens) => Part::Text(tokens),
        Segment::Image { height, width } => Part::Picture(Size::new(height / 2, width / 2)),
    });
    let mut parts: Vec<Part> = parts.collect();
    match parts.first_mut() {
        Some(Part::Text(tokens)) => *tokens += system_tokens,
        _ => parts.insert(0, Part::Text(system_tokens)),
    }
    parts
}

/// The prefix of a prompt that is not there yet: pictures of `sizes` pixels in their template, then `tokens` of text.
pub(crate) fn segments_for(tokens: usize, sizes: &[Size]) -> Vec<Segment> {
    /// About what the template says of a picture.
    const NAME: usize = 8;
    let pictures = sizes.iter().flat_map(|&size| {
        let latents = tokens_of(size);
        let picture = Segment::Image {
            height: 2 * latents.height,
            width: 2 * latents.width,
        };
        [Segment::Text(NAME), picture]
    });
    pictures.chain([Segment::Text(tokens.max(1))]).collect()
}

/// The sizes in pixels that references of (width, height) are scaled to, all to the area of a square of `area` pixels or
/// nearly: sides are whole tokens, rounded half to even as the reference does.
///
/// # Errors
/// [`Error::TooManyReferences`]; [`Error::Reference`] for a picture without pixels, or one that is too steep, too small or too
/// large for the vision tower when it is scaled.
pub(crate) fn reference_sizes(
    pictures: &[(u32, u32)],
    area: usize,
    processor: &ImageProcessor,
) -> Result<Vec<Size>> {
    if pictures.len() > MOST_REFERENCES {
        return Err(Error::TooManyReferences(pictures.len()));
    }
    let size = |(index, &(width, height)): (usize, &(u32, u32))| {
        let refuse = |reason: String| Error::Reference {
            number: index + 1,
            width,
            height,
            reason,
        };
        if width == 0 || height == 0 {
            return Err(refuse("it has no pixels".to_owned()));
        }
        let size = scaled(f64::from(width) / f64::from(height), area);
        let Size { width, height } = size;
        if size.height == 0 || size.width == 0 || processor.fitting(size).is_none() {
            return Err(refuse(
                "it is too long for its width: the longer side is at most 200 times the shorter, and the shorter at least 16 \
                 pixels when it is scaled"
                    .to_owned(),
            ));
        }
        if !processor.takes(size) {
            let (fewest, most) = processor.pixels();
            return Err(refuse(format!(
                "scaled to {width}x{height}, it is not what the vision tower reads, which takes from {fewest} to {most} \
                 pixels; choose another size for references"
            )));
        }
        Ok(size)
    };
    pictures.iter().enumerate().map(size).collect()
}

/// A picture whose width is `ratio` times its height with `area` pixels, sides rounded to whole tokens.
fn scaled(ratio: f64, area: usize) -> Size {
    let width = (area as f64 * ratio).sqrt();
    let height = width / ratio;
    let whole = |side: f64| {
        let multiple = SIZE_MULTIPLE as f64;
        ((side / multiple).round_ties_even() * multiple) as usize
    };
    Size::new(whole(height), whole(width))
}

/// Widths and heights of pictures.
pub(crate) fn dimensions(images: &[Image]) -> Vec<(u32, u32)> {
    let sizes = images.iter();
    sizes.map(|image| (image.width(), image.height())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_keep_their_aspect_and_get_the_area() {
        // What `calculate_dimensions` of diffusers gives.
        for ((width, height), side, (w, h)) in [
            ((128, 128), 128, (128, 128)),
            ((97, 61), 128, (160, 96)),
            ((61, 97), 128, (96, 160)),
            ((1920, 1080), 1024, (1376, 768)),
            ((1, 1), 1024, (1024, 1024)),
            ((3000, 2000), 1024, (1248, 832)),
            ((1000, 5), 1024, (14496, 64)),
        ] {
            let size = scaled(f64::from(width) / f64::from(height), side * side);
            assert_eq!((size.width, size.height), (w, h), "{width}x{height}");
        }
    }

    #[test]
    fn a_prefix_is_a_prompt_without_its_system_message() {
        let picture = Part::Picture(Size::new(2, 3));
        let prompt = [Part::Text(17), picture, Part::Text(4)];
        let prefix = segments(&prompt, 12);
        assert_eq!(prefix[0], Segment::Text(5));
        assert_eq!(
            prefix.iter().map(|part| part.tokens()).sum::<usize>(),
            5 + 24 + 4
        );
        assert_eq!(parts(&prefix, 12), prompt);
    }
}
