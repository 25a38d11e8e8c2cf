//! From a picture to the patches that the vision tower reads.

use std::path::Path;

use serde::Deserialize;

use super::VisionConfig;
use crate::config::{check, read_json};
use crate::error::Result;
use crate::rope::{Size, merged_order};

/// The steepest sides of a picture that the reference takes: 200 to 1.
const STEEPEST: usize = 200;

/// How pictures are made ready for the vision tower.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageProcessor {
    /// Pixels along a side of a patch.
    patch: usize,
    /// Patches along a side of the square that becomes one token.
    merge: usize,
    /// How often a picture is shown.
    frames: usize,
    fewest: usize,
    most: usize,
    mean: [f32; 3],
    std: [f32; 3],
    rescale: f64,
}

#[derive(Debug, Deserialize)]
struct Nested {
    image_processor: Option<Settings>,
    video_processor: Option<Settings>,
}

/// What of `preprocessor_config.json` bears on pictures.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Settings {
    size: Limits,
    min_pixels: Option<usize>,
    max_pixels: Option<usize>,
    image_mean: [f32; 3],
    image_std: [f32; 3],
    rescale_factor: f64,
}

/// Fewest and most pixels of a picture, not sides, whatever their names say.
#[derive(Debug, Deserialize)]
struct Limits {
    shortest_edge: usize,
    longest_edge: usize,
}

impl Default for Settings {
    /// Those of the published models.
    fn default() -> Settings {
        Settings {
            size: Limits {
                shortest_edge: 256 * 256,
                longest_edge: 4096 * 4096,
            },
            min_pixels: None,
            max_pixels: None,
            image_mean: [0.5; 3],
            image_std: [0.5; 3],
            rescale_factor: 1.0 / 255.0,
        }
    }
}

impl ImageProcessor {
    /// Reads `preprocessor_config.json` in `folder`, or `processor_config.json`, where newer programs write the same; where
    /// there is none, the published models' settings hold.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) or [`Error::Config`](crate::Error::Config).
    pub fn read(folder: &Path, config: &VisionConfig) -> Result<ImageProcessor> {
        let (own, joint) = (
            folder.join("preprocessor_config.json"),
            folder.join("processor_config.json"),
        );
        let (path, settings) = if own.is_file() {
            (own.clone(), read_json::<Settings>(&own)?)
        } else if joint.is_file() {
            let settings = read_json::<Nested>(&joint)?.image_processor;
            (joint, settings.unwrap_or_default())
        } else {
            (own, Settings::default())
        };
        ImageProcessor::new(&path, settings, config)
    }

    /// With the `settings` that stand in the file `path`.
    fn new(path: &Path, settings: Settings, config: &VisionConfig) -> Result<ImageProcessor> {
        let fewest = settings.min_pixels.unwrap_or(settings.size.shortest_edge);
        let most = settings.max_pixels.unwrap_or(settings.size.longest_edge);
        check(
            path,
            &[
                ("shortest_edge is at most longest_edge", fewest <= most),
                (
                    "image_std > 0",
                    settings.image_std.iter().all(|&std| std > 0.0),
                ),
                (
                    "rescale_factor > 0",
                    settings.rescale_factor > 0.0 && settings.rescale_factor.is_finite(),
                ),
            ],
        )?;
        Ok(ImageProcessor {
            patch: config.patch_size,
            merge: config.spatial_merge_size,
            frames: config.temporal_patch_size,
            fewest,
            most,
            mean: settings.image_mean,
            std: settings.image_std,
            rescale: settings.rescale_factor,
        })
    }

    /// The size in pixels that the reference would give a picture: sides rounded to whole tokens, half to even, and then
    /// changed together until there are neither too few pixels nor too many. Nothing for sides of more than 200 to 1.
    pub fn fitting(&self, size: Size) -> Option<Size> {
        let Size { height, width } = size;
        let (longer, shorter) = (height.max(width), height.min(width));
        if shorter == 0 || longer > shorter.saturating_mul(STEEPEST) {
            return None;
        }
        let factor = (self.patch * self.merge) as f64;
        let by = |round: fn(f64) -> f64, scale: f64| {
            let side = |side: usize| (round(side as f64 * scale / factor) * factor) as usize;
            Size::new(side(height), side(width))
        };
        let area = (height * width) as f64;
        let rounded = by(f64::round_ties_even, 1.0);
        let pixels = rounded.height.saturating_mul(rounded.width);
        Some(if pixels > self.most {
            let least = self.patch * self.merge;
            let Size { height, width } = by(f64::floor, (self.most as f64 / area).sqrt());
            Size::new(height.max(least), width.max(least))
        } else if pixels < self.fewest {
            by(f64::ceil, (self.fewest as f64 / area).sqrt())
        } else {
            rounded
        })
    }

    /// Whether the reference reads a picture of this size as it is.
    pub fn takes(&self, size: Size) -> bool {
        self.fitting(size) == Some(size)
    }

    /// Fewest and most pixels of a picture.
    pub fn pixels(&self) -> (usize, usize) {
        (self.fewest, self.most)
    }

    /// Patches of a picture of `size` pixels.
    pub fn grid(&self, size: Size) -> Size {
        size.whole_patches(self.patch)
    }

    /// Patches `[patches, channels * frames * patch * patch]` of the red, green and blue planes `[3, height, width]` of a
    /// picture of `size` pixels, whose sides are whole tokens, in the order of the squares that become tokens.
    pub fn patches(&self, planes: &[u8], size: Size) -> Vec<f32> {
        self.patches_of(&[planes], size)
    }

    /// As [`ImageProcessor::patches`] for as many pictures as a patch has frames; the last is repeated where there are fewer.
    fn patches_of(&self, pictures: &[&[u8]], size: Size) -> Vec<f32> {
        let side = self.patch;
        let area = (size.height * size.width).max(1);
        let frames: Vec<&[u8]> = (0..self.frames)
            .filter_map(|frame| pictures.get(frame).or(pictures.last()).copied())
            .collect();
        let order = merged_order(self.grid(size), self.merge);
        let shades: Vec<[f32; 256]> = (0..3).map(|channel| self.shades(channel)).collect();
        let mut patches = Vec::with_capacity(order.len() * 3 * self.frames * side * side);
        for [row, column] in order {
            for (channel, shades) in shades.iter().enumerate() {
                let planes = frames.iter();
                let planes = planes.filter_map(|frame| frame.chunks_exact(area).nth(channel));
                for plane in planes {
                    for line in plane.chunks_exact(size.width).skip(row * side).take(side) {
                        let pixels = line.iter().skip(column * side).take(side);
                        patches.extend(pixels.map(|&byte| shades[usize::from(byte)]));
                    }
                }
            }
        }
        patches
    }

    /// What each byte of a channel becomes.
    fn shades(&self, channel: usize) -> [f32; 256] {
        std::array::from_fn(|byte| {
            let value = (byte as f64 * self.rescale) as f32;
            (value - self.mean[channel]) / self.std[channel]
        })
    }
}

/// How clips are made ready for the vision tower: frames that a patch joins are read together, each group by itself.
#[derive(Debug, Clone, PartialEq)]
pub struct VideoProcessor(ImageProcessor);

impl VideoProcessor {
    /// Reads `video_preprocessor_config.json` in `folder`, or what `processor_config.json` says of clips; where there is
    /// neither, the published models' settings hold.
    ///
    /// # Errors
    /// As for [`ImageProcessor::read`].
    pub fn read(folder: &Path, config: &VisionConfig) -> Result<VideoProcessor> {
        let (own, joint) = (
            folder.join("video_preprocessor_config.json"),
            folder.join("processor_config.json"),
        );
        let published = || Settings {
            size: Limits {
                shortest_edge: 64 * 64,
                longest_edge: 24 * 1024 * 1024,
            },
            ..Settings::default()
        };
        let (path, settings) = if own.is_file() {
            (own.clone(), read_json::<Settings>(&own)?)
        } else if joint.is_file() {
            let settings = read_json::<Nested>(&joint)?.video_processor;
            (joint, settings.unwrap_or_else(published))
        } else {
            (own, published())
        };
        Ok(VideoProcessor(ImageProcessor::new(
            &path, settings, config,
        )?))
    }

    /// Frames that a patch joins.
    pub fn frames(&self) -> usize {
        self.0.frames
    }

    /// The size in pixels that the reference would give `frames` pictures of a clip, whose pixels count together. Nothing for
    /// fewer frames than a patch joins, and for sides of more than 200 to 1.
    pub fn fitting(&self, frames: usize, size: Size) -> Option<Size> {
        let (joined, least) = (self.0.frames, self.0.patch * self.0.merge);
        let Size { height, width } = size;
        let (longer, shorter) = (height.max(width), height.min(width));
        if frames < joined || shorter == 0 || longer > shorter.saturating_mul(STEEPEST) {
            return None;
        }
        let factor = least as f64;
        let (mut height, mut width) = (height as f64, width as f64);
        if height < factor || width < factor {
            let scale = (factor / height).max(factor / width);
            (height, width) = ((height * scale).floor(), (width * scale).floor());
        }
        let sides = |scaled: &dyn Fn(f64) -> f64| {
            let side = |side: f64| (scaled(side) * factor) as usize;
            Size::new(side(height), side(width))
        };
        let pairs = (frames as f64 / joined as f64).round_ties_even() as usize * joined;
        let rounded = sides(&|side| (side / factor).round_ties_even());
        let pixels = pairs
            .saturating_mul(rounded.height)
            .saturating_mul(rounded.width);
        let volume = frames as f64 * height * width;
        Some(if pixels > self.0.most {
            let beta = (volume / self.0.most as f64).sqrt();
            let Size { height, width } = sides(&|side| (side / beta / factor).floor());
            Size::new(height.max(least), width.max(least))
        } else if pixels < self.0.fewest {
            let beta = (self.0.fewest as f64 / volume).sqrt();
            sides(&|side| (side * beta / factor).ceil())
        } else {
            rounded
        })
    }

    /// Patches of a picture of `size` pixels.
    pub fn grid(&self, size: Size) -> Size {
        self.0.grid(size)
    }

    /// As [`ImageProcessor::patches`] for the pictures of one group; where there are fewer than a patch joins, the last is
    /// repeated.
    pub fn patches(&self, pictures: &[&[u8]], size: Size) -> Vec<f32> {
        self.0.patches_of(pictures, size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn published() -> ImageProcessor {
        let settings = Settings::default();
        ImageProcessor {
            patch: 16,
            merge: 2,
            frames: 2,
            fewest: settings.size.shortest_edge,
            most: settings.size.longest_edge,
            mean: settings.image_mean,
            std: settings.image_std,
            rescale: settings.rescale_factor,
        }
    }

    #[test]
    fn sizes_are_the_references() {
        // What `smart_resize` of transformers gives for (height, width) with factor 32.
        let processor = published();
        for (size, fitting) in [
            ((1024, 1024), Some((1024, 1024))),
            ((1000, 1040), Some((992, 1024))),
            ((1008, 1072), Some((1024, 1088))),
            ((128, 128), Some((256, 256))),
            ((61, 97), Some((224, 352))),
            ((5000, 9000), Some((3040, 5472))),
            ((20, 3999), Some((32, 4000))),
            ((20, 4001), None),
            ((0, 10), None),
        ] {
            let found = processor.fitting(Size::new(size.0, size.1));
            assert_eq!(
                found,
                fitting.map(|(height, width)| Size::new(height, width)),
                "{size:?}"
            );
        }
        assert!(processor.takes(Size::new(1024, 1024)) && !processor.takes(Size::new(128, 128)));
    }
}
