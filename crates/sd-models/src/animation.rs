//! Animated PNGs: pictures of one size, one after the other, without loss and with alpha.

use std::fmt;
use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};

use image::RgbaImage;
use png::{BlendOp, DisposeOp};

use crate::error::{Error, Result};
use crate::frame_rate::FrameRate;
use crate::image::{Image, make_readable, part_file, rgba, with_transformations};

/// The pictures of a PNG as they come: one, or those of an animation, each as a viewer shows it.
pub struct AnimationReader {
    path: PathBuf,
    reader: png::Reader<BufReader<File>>,
    frames: usize,
    /// Frames that are left in the file, those that are not shown included.
    left: usize,
    /// What is shown.
    shown: RgbaImage,
    rate: Option<FrameRate>,
}

impl fmt::Debug for AnimationReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnimationReader")
            .field("path", &self.path)
            .field("frames", &self.frames)
            .finish_non_exhaustive()
    }
}

impl AnimationReader {
    /// Opens a PNG of any kind.
    ///
    /// # Errors
    /// [`Error::Picture`] with the path and the reason.
    pub fn open(path: impl AsRef<Path>) -> Result<AnimationReader> {
        let path = path.as_ref();
        AnimationReader::begin(path).map_err(|reason| Error::Picture {
            path: path.to_owned(),
            reason,
        })
    }

    fn begin(path: &Path) -> std::result::Result<AnimationReader, String> {
        let file = File::open(path).map_err(|error| error.to_string())?;
        let decoder = with_transformations(png::Decoder::new(BufReader::new(file)));
        let reader = decoder.read_info().map_err(|error| error.to_string())?;
        let info = reader.info();
        let frames = info
            .animation_control
            .map_or(1, |control| control.num_frames);
        // A picture before the animation is for viewers that know none.
        let is_before = info.animation_control.is_some() && info.frame_control.is_none();
        let rate = info.frame_control.and_then(|control| {
            // A denominator of 0 means hundredths of a second.
            let per_second = match control.delay_den {
                0 => 100,
                other => u32::from(other),
            };
            FrameRate::new(per_second, u32::from(control.delay_num))
        });
        let shown = RgbaImage::new(info.width, info.height);
        Ok(AnimationReader {
            path: path.to_owned(),
            frames: frames as usize,
            left: frames as usize + usize::from(is_before),
            shown,
            rate,
            reader,
        })
    }

    /// Number of pictures.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Pictures a second, after the first one's delay; none for a single picture, or where there is no delay.
    pub fn frame_rate(&self) -> Option<FrameRate> {
        self.rate.filter(|_| self.frames > 1)
    }

    /// The next picture, if there is one that is shown.
    fn advance(&mut self) -> std::result::Result<Option<Image>, String> {
        while self.left > 0 {
            self.left -= 1;
            let (frame, pixels) = rgba(&mut self.reader)?;
            let control = self.reader.info().frame_control;
            if self.reader.info().animation_control.is_none() {
                let pixels = RgbaImage::from_raw(frame.width, frame.height, pixels);
                let pixels = pixels.ok_or("it has fewer pixels than it says")?;
                return Ok(Some(Image::from(pixels)));
            }
            let Some(control) = control else { continue };
            let fits = |offset: u32, side: u32, of: u32| {
                offset.checked_add(side).is_some_and(|end| end <= of)
            };
            if !fits(control.x_offset, frame.width, self.shown.width())
                || !fits(control.y_offset, frame.height, self.shown.height())
            {
                return Err("a frame lies outside the picture".to_owned());
            }
            let before = (control.dispose_op == DisposeOp::Previous).then(|| self.shown.clone());
            let places = || (0..frame.height).flat_map(|y| (0..frame.width).map(move |x| (x, y)));
            for ((x, y), &new) in places().zip(pixels.as_chunks::<4>().0) {
                let pixel = self
                    .shown
                    .get_pixel_mut(control.x_offset + x, control.y_offset + y);
                pixel.0 = match control.blend_op {
                    BlendOp::Source => new,
                    BlendOp::Over => over(new, pixel.0),
                };
            }
            let image = Image::from(self.shown.clone());
            match control.dispose_op {
                DisposeOp::None => {}
                DisposeOp::Background => {
                    for (x, y) in places() {
                        let (x, y) = (control.x_offset + x, control.y_offset + y);
                        self.shown.get_pixel_mut(x, y).0 = [0; 4];
                    }
                }
                DisposeOp::Previous => self.shown = before.unwrap_or_default(),
            }
            return Ok(Some(image));
        }
        Ok(None)
    }
}

/// `new` laid over `old`, neither premultiplied.
fn over(new: [u8; 4], old: [u8; 4]) -> [u8; 4] {
    let share = f32::from(new[3]) / 255.0;
    let rest = f32::from(old[3]) / 255.0 * (1.0 - share);
    let alpha = share + rest;
    if alpha == 0.0 {
        return [0; 4];
    }
    let mut mixed = [0; 4];
    for (channel, value) in mixed.iter_mut().enumerate().take(3) {
        let sum = f32::from(new[channel]) * share + f32::from(old[channel]) * rest;
        *value = (sum / alpha).round_ties_even() as u8;
    }
    mixed[3] = (alpha * 255.0).round_ties_even() as u8;
    mixed
}

impl Iterator for AnimationReader {
    type Item = Result<Image>;

    fn next(&mut self) -> Option<Result<Image>> {
        let outcome = self.advance().map_err(|reason| Error::Picture {
            path: self.path.clone(),
            reason,
        });
        if outcome.is_err() {
            self.left = 0;
        }
        outcome.transpose()
    }
}

/// An animated PNG that is being written: under another name until it is finished.
pub struct AnimationWriter {
    path: PathBuf,
    size: (u32, u32),
    /// Pictures that are to come.
    left: usize,
    writer: Option<png::Writer<BufWriter<File>>>,
    file: tempfile::TempPath,
}

impl fmt::Debug for AnimationWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnimationWriter")
            .field("path", &self.path)
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

impl AnimationWriter {
    /// Begins an animation of `frames` pictures of this width and height that is shown again and again.
    ///
    /// # Errors
    /// [`Error::Write`] with the path and the reason.
    pub fn create(
        path: impl AsRef<Path>,
        size: (u32, u32),
        frames: usize,
        rate: FrameRate,
    ) -> Result<AnimationWriter> {
        let path = path.as_ref();
        AnimationWriter::begin(path, size, frames, rate).map_err(|reason| Error::Write {
            path: path.to_owned(),
            reason,
        })
    }

    fn begin(
        path: &Path,
        size: (u32, u32),
        frames: usize,
        rate: FrameRate,
    ) -> std::result::Result<AnimationWriter, String> {
        let (file, file_path) = part_file(path)?.into_parts();
        let encoding = |error: png::EncodingError| error.to_string();
        let mut encoder = png::Encoder::new(BufWriter::new(file), size.0, size.1);
        encoder.set_color(png::ColorType::Rgba);
        encoder.set_depth(png::BitDepth::Eight);
        let count = u32::try_from(frames).map_err(|error| error.to_string())?;
        encoder.set_animated(count, 0).map_err(encoding)?;
        let (numerator, denominator) = rate.delay();
        encoder
            .set_frame_delay(numerator, denominator)
            .map_err(encoding)?;
        Ok(AnimationWriter {
            path: path.to_owned(),
            size,
            left: frames,
            writer: Some(encoder.write_header().map_err(encoding)?),
            file: file_path,
        })
    }

    /// Writes the next picture.
    ///
    /// # Errors
    /// [`Error::Write`], also for a picture of another size or one too many.
    pub fn push(&mut self, image: &Image) -> Result<()> {
        let outcome = match (&mut self.writer, self.left.checked_sub(1)) {
            _ if (image.width(), image.height()) != self.size => {
                Err("its pictures have different sizes".to_owned())
            }
            (Some(writer), Some(left)) => {
                self.left = left;
                let pixels = image.pixels().as_raw();
                writer
                    .write_image_data(pixels)
                    .map_err(|error| error.to_string())
            }
            _ => Err("it has more pictures than were announced".to_owned()),
        };
        outcome.map_err(|reason| self.error(reason))
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// [`Error::Write`], also where pictures are missing; nothing stays then.
    pub fn finish(mut self) -> Result<()> {
        if self.left > 0 {
            let reason = format!("{} of its pictures are missing", self.left);
            return Err(self.error(reason));
        }
        let finished = self.writer.take().map(png::Writer::finish).transpose();
        finished.map_err(|error| self.error(error.to_string()))?;
        let make = |path: &Path| make_readable(&File::open(path)?);
        make(&self.file).map_err(|error| self.error(error.to_string()))?;
        let path = self.path.clone();
        self.file.persist(&path).map_err(|error| Error::Write {
            path: path.clone(),
            reason: error.error.to_string(),
        })
    }

    fn error(&self, reason: String) -> Error {
        Error::Write {
            path: self.path.clone(),
            reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(shade: u8) -> Image {
        let pixel = |x: u32, y: u32| image::Rgba([shade, x as u8, y as u8, 200 + shade]);
        Image::from(RgbaImage::from_fn(3, 2, pixel))
    }

    #[test]
    fn what_was_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("clip.png");
        let rate = FrameRate::new(30000, 1001).unwrap();
        let mut writer = AnimationWriter::create(&path, (3, 2), 4, rate).unwrap();
        for shade in 0..4 {
            writer.push(&picture(shade)).unwrap();
        }
        assert!(!path.exists());
        let text = writer.push(&picture(5)).unwrap_err().to_string();
        assert!(text.contains("more pictures than were announced"), "{text}");
        writer.finish().unwrap();
        let reader = AnimationReader::open(&path).unwrap();
        assert_eq!((reader.frames(), reader.frame_rate()), (4, Some(rate)));
        let read: Vec<Image> = reader.map(Result::unwrap).collect();
        assert_eq!(read, [0, 1, 2, 3].map(picture));

        // A single picture is an animation of one.
        picture(7).save(&path).unwrap();
        let reader = AnimationReader::open(&path).unwrap();
        assert_eq!((reader.frames(), reader.frame_rate()), (1, None));
        assert_eq!(reader.map(Result::unwrap).collect::<Vec<_>>(), [picture(7)]);
    }

    #[test]
    fn half_an_animation_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("clip.png");
        let rate = FrameRate::new(16, 1).unwrap();
        let mut writer = AnimationWriter::create(&path, (3, 2), 2, rate).unwrap();
        writer.push(&picture(0)).unwrap();
        let text = writer.finish().unwrap_err().to_string();
        assert!(text.contains("1 of its pictures are missing"), "{text}");
        let mut writer = AnimationWriter::create(&path, (2, 2), 1, rate).unwrap();
        let text = writer.push(&picture(0)).unwrap_err().to_string();
        assert!(text.contains("different sizes"), "{text}");
        drop(writer);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let missing = folder.path().join("no/clip.png");
        assert!(AnimationWriter::create(missing, (3, 2), 2, rate).is_err());
    }

    /// Frames smaller than the picture, laid over what is shown, which is cleared or restored behind them; and a picture
    /// before the animation, which is not part of it.
    #[test]
    fn frames_are_shown_as_viewers_show_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("clip.png");
        let mut encoder = png::Encoder::new(File::create(&path).unwrap(), 2, 1);
        encoder.set_color(png::ColorType::Rgba);
        encoder.set_animated(4, 0).unwrap();
        encoder.set_sep_def_img(true).unwrap();
        let mut writer = encoder.write_header().unwrap();
        let [red, green, half] = [[255, 0, 0, 255], [0, 255, 0, 255], [0, 0, 255, 128]];
        writer.write_image_data(&[9; 8]).unwrap();
        writer.write_image_data(&[red, green].concat()).unwrap();
        for (dispose, x) in [
            (DisposeOp::Previous, 0),
            (DisposeOp::Background, 1),
            (DisposeOp::None, 0),
        ] {
            writer.set_frame_dimension(1, 1).unwrap();
            writer.set_frame_position(x, 0).unwrap();
            writer.set_dispose_op(dispose).unwrap();
            writer.set_blend_op(BlendOp::Over).unwrap();
            writer.write_image_data(&half).unwrap();
        }
        writer.finish().unwrap();
        let shown: Vec<Vec<u8>> = AnimationReader::open(&path)
            .unwrap()
            .map(|image| image.unwrap().pixels().as_raw().clone())
            .collect();
        let mixed = |below: [u8; 4]| over(half, below);
        assert_eq!(mixed(red), [127, 0, 128, 255]);
        assert_eq!(
            shown,
            [
                [red, green].concat(),
                [mixed(red), green].concat(),
                [red, mixed(green)].concat(),
                [mixed(red), [0; 4]].concat(),
            ]
        );
    }
}
