//! Pictures: from a decoder's numbers to a file.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Seek};
use std::path::Path;

use image::codecs::{jpeg::JpegDecoder, webp::WebPDecoder};
use image::{DynamicImage, ImageDecoder, RgbaImage};

use crate::error::{Error, Result};

/// Most bytes of a picture that is read: those of the largest that can be made. A small file may promise any size.
const LARGEST: usize = 1 << 30;

/// A picture with straight (not premultiplied) alpha, and what it was made from.
#[derive(Debug, Clone, PartialEq)]
pub struct Image {
    pixels: RgbaImage,
    text: Vec<(String, String)>,
}

impl Image {
    /// A picture from planes red, green, blue and alpha with values from -1 to 1, `[4, height, width]`.
    /// Values between two shades are rounded to the nearer one (half to even), as the reference does.
    ///
    /// `None` if there are not `4 * width * height` values.
    pub fn from_planes(planes: &[f32], width: usize, height: usize) -> Option<Image> {
        let pixels = width.checked_mul(height)?;
        if planes.len() != pixels.checked_mul(4)? {
            return None;
        }
        let mut bytes = vec![0; planes.len()];
        for (channel, plane) in planes.chunks_exact(pixels.max(1)).enumerate() {
            for (pixel, value) in bytes.chunks_exact_mut(4).zip(plane) {
                pixel[channel] =
                    ((value * 0.5 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8;
            }
        }
        let pixels = RgbaImage::from_raw(
            u32::try_from(width).ok()?,
            u32::try_from(height).ok()?,
            bytes,
        )?;
        Some(Image {
            pixels,
            text: Vec::new(),
        })
    }

    /// A picture of pixels red, green, blue and alpha, row by row; `None` if they are not `width * height` of them.
    pub fn from_rgba(width: u32, height: u32, pixels: Vec<u8>) -> Option<Image> {
        RgbaImage::from_raw(width, height, pixels).map(Image::from)
    }

    /// Reads a PNG of any kind, a JPEG or a WebP, whatever the file is called. Pictures without alpha are opaque; of 16 bits
    /// the upper 8 remain; of an animation the first picture is read. Cameras' pictures are turned upright.
    ///
    /// # Errors
    /// [`Error::Picture`] with the path and the reason.
    pub fn open(path: impl AsRef<Path>) -> Result<Image> {
        let path = path.as_ref();
        Image::read(path).map_err(|reason| Error::Picture {
            path: path.to_owned(),
            reason,
        })
    }

    fn read(path: &Path) -> std::result::Result<Image, String> {
        let text = |error: image::ImageError| error.to_string();
        let file = File::open(path).map_err(|error| error.to_string())?;
        let mut file = BufReader::new(file);
        match file.fill_buf().map_err(|error| error.to_string())? {
            [0xff, 0xd8, ..] => upright(JpegDecoder::new(file).map_err(text)?),
            [
                b'R',
                b'I',
                b'F',
                b'F',
                _,
                _,
                _,
                _,
                b'W',
                b'E',
                b'B',
                b'P',
                ..,
            ] => upright(WebPDecoder::new(file).map_err(text)?),
            [0x89, b'P', b'N', b'G', ..] => Image::read_png(file),
            _ => Err("it is no PNG, JPEG or WebP".to_owned()),
        }
    }

    fn read_png(file: BufReader<File>) -> std::result::Result<Image, String> {
        let decoder = with_transformations(png::Decoder::new(file));
        let mut reader = decoder.read_info().map_err(|error| error.to_string())?;
        let (frame, pixels) = rgba(&mut reader)?;
        let pixels = RgbaImage::from_raw(frame.width, frame.height, pixels)
            .ok_or("it has fewer pixels than it says")?;
        Ok(Image::from(pixels))
    }

    /// The picture in another size, as reference pictures are scaled: by the Lanczos filter of three lobes, to the numbers of
    /// Pillow. Colours count by their alpha, so that what cannot be seen does not bleed into what can.
    pub fn resized(&self, width: u32, height: u32) -> Image {
        Image::from(crate::resample::lanczos(&self.pixels, width, height))
    }

    /// Planes red, green, blue and, if `channels` is 4, alpha, with values from -1 to 1: `[channels, height, width]`.
    pub fn to_planes(&self, channels: usize) -> Vec<f32> {
        (0..channels.min(4))
            .flat_map(|channel| self.pixels.pixels().map(move |pixel| pixel.0[channel]))
            .map(|byte| f32::from(byte) / 255.0 * 2.0 - 1.0)
            .collect()
    }

    /// Width in pixels.
    pub fn width(&self) -> u32 {
        self.pixels.width()
    }

    /// Height in pixels.
    pub fn height(&self) -> u32 {
        self.pixels.height()
    }

    /// The pixels, for everything the `image` crate can do.
    pub fn pixels(&self) -> &RgbaImage {
        &self.pixels
    }

    /// What is written beside the pixels: keywords and texts, such as the prompt and the seed.
    pub fn text(&self) -> &[(String, String)] {
        &self.text
    }

    /// Adds a text to be written beside the pixels. A PNG keyword has 1 to 79 Latin-1 characters.
    pub fn add_text(&mut self, keyword: impl Into<String>, text: impl Into<String>) {
        self.text.push((keyword.into(), text.into()));
    }

    /// Writes a PNG with the texts in its `iTXt` chunks. It is written under another name in the same folder and
    /// renamed, so that no half picture is ever seen under `path`.
    ///
    /// # Errors
    /// [`Error::Write`] with the path and the reason.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        self.write(path).map_err(|reason| Error::Write {
            path: path.to_owned(),
            reason,
        })
    }

    fn write(&self, path: &Path) -> std::result::Result<(), String> {
        let io = |error: std::io::Error| error.to_string();
        let encoding = |error: png::EncodingError| error.to_string();
        let mut file = part_file(path)?;
        {
            let mut encoder = png::Encoder::new(
                BufWriter::new(file.as_file_mut()),
                self.width(),
                self.height(),
            );
            encoder.set_color(png::ColorType::Rgba);
            encoder.set_depth(png::BitDepth::Eight);
            for (keyword, text) in &self.text {
                encoder
                    .add_itxt_chunk(keyword.clone(), text.clone())
                    .map_err(encoding)?;
            }
            let mut writer = encoder.write_header().map_err(encoding)?;
            writer
                .write_image_data(self.pixels.as_raw())
                .map_err(encoding)?;
            writer.finish().map_err(encoding)?;
        }
        make_readable(file.as_file()).map_err(io)?;
        file.persist(path)
            .map_err(|error| error.error.to_string())?;
        Ok(())
    }
}

impl From<RgbaImage> for Image {
    /// A picture without texts.
    fn from(pixels: RgbaImage) -> Image {
        Image {
            pixels,
            text: Vec::new(),
        }
    }
}

/// The picture of a decoder, turned as the file says that it was taken.
fn upright(mut decoder: impl ImageDecoder) -> std::result::Result<Image, String> {
    let text = |error: image::ImageError| error.to_string();
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > LARGEST as u64 / 4 {
        return Err("it is larger than any picture".to_owned());
    }
    let orientation = decoder.orientation().map_err(text)?;
    let mut picture = DynamicImage::from_decoder(decoder).map_err(text)?;
    picture.apply_orientation(orientation);
    Ok(Image::from(picture.into_rgba8()))
}

/// Has pixels of all kinds decoded to 8 bits a channel.
pub(crate) fn with_transformations<R: BufRead + Seek>(
    mut decoder: png::Decoder<R>,
) -> png::Decoder<R> {
    decoder.set_transformations(png::Transformations::EXPAND | png::Transformations::STRIP_16);
    decoder
}

/// The pixels of the next frame, red, green, blue and alpha. Those without alpha are opaque.
pub(crate) fn rgba<R: BufRead + Seek>(
    reader: &mut png::Reader<R>,
) -> std::result::Result<(png::OutputInfo, Vec<u8>), String> {
    let size = reader
        .output_buffer_size()
        .filter(|&bytes| bytes <= LARGEST)
        .ok_or("it is larger than any picture")?;
    let mut bytes = vec![0; size];
    let frame = reader
        .next_frame(&mut bytes)
        .map_err(|error| error.to_string())?;
    bytes.truncate(frame.buffer_size());
    let rgba = match frame.color_type {
        png::ColorType::Rgba => bytes,
        png::ColorType::Rgb => (bytes.as_chunks().0.iter())
            .flat_map(|&[r, g, b]| [r, g, b, 255])
            .collect(),
        png::ColorType::GrayscaleAlpha => (bytes.as_chunks().0.iter())
            .flat_map(|&[grey, alpha]| [grey, grey, grey, alpha])
            .collect(),
        png::ColorType::Grayscale => bytes
            .iter()
            .flat_map(|&grey| [grey, grey, grey, 255])
            .collect(),
        other => return Err(format!("pixels of kind {other:?}")),
    };
    Ok((frame, rgba))
}

/// A file beside `path` to be renamed to it, so that none is seen half written.
pub(crate) fn part_file(path: &Path) -> std::result::Result<tempfile::NamedTempFile, String> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if path.is_dir() {
        return Err("it is a folder".to_owned());
    }
    if !folder.is_dir() {
        return Err(format!("there is no folder {}", folder.display()));
    }
    tempfile::Builder::new()
        .prefix(".sd-")
        .suffix(".part")
        .tempfile_in(folder)
        .map_err(|error| error.to_string())
}

/// Temporary files belong to their owner alone; a picture is an ordinary file.
#[cfg(unix)]
pub(crate) fn make_readable(file: &std::fs::File) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
pub(crate) fn make_readable(_file: &std::fs::File) -> std::io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_become_pixels() {
        // One row of two pixels: planes of red, green, blue, alpha.
        let image =
            Image::from_planes(&[-1.0, 1.0, 0.0, 2.0, -3.0, f32::NAN, 1.0, 0.5], 2, 1).unwrap();
        assert_eq!(image.pixels().as_raw(), &[0, 128, 0, 255, 255, 255, 0, 191]);
        assert!(Image::from_planes(&[0.0; 7], 2, 1).is_none());
        assert!(Image::from_planes(&[], usize::MAX, 2).is_none());
    }

    #[test]
    fn a_file_holds_pixels_and_texts() {
        let folder = tempfile::tempdir().unwrap();
        let mut image = Image::from_planes(&[0.25; 4 * 6], 3, 2).unwrap();
        image.add_text("prompt", "ein Kreis 🔴");
        let path = folder.path().join("picture.png");
        image.save(&path).unwrap();
        let decoder =
            png::Decoder::new(std::io::BufReader::new(std::fs::File::open(&path).unwrap()));
        let mut reader = decoder.read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        assert_eq!(&pixels, image.pixels().as_raw());
        let chunk = &reader.info().utf8_text[0];
        assert_eq!(
            (chunk.keyword.as_str(), chunk.get_text().unwrap().as_str()),
            ("prompt", "ein Kreis 🔴")
        );
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_was_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("picture.png");
        let planes: Vec<f32> = (0..24).map(|byte| byte as f32 / 11.5 - 1.0).collect();
        let image = Image::from_planes(&planes, 3, 2).unwrap();
        image.save(&path).unwrap();
        let read = Image::open(&path).unwrap();
        assert_eq!(read, image);
        assert_eq!(Image::from_planes(&read.to_planes(4), 3, 2).unwrap(), image);
        assert_eq!(read.to_planes(3), read.to_planes(4)[..18]);

        // Of the kinds without alpha each pixel is opaque.
        for (kind, bytes, pixel) in [
            (png::ColorType::Rgb, vec![1, 2, 3], [1, 2, 3, 255]),
            (png::ColorType::Grayscale, vec![7], [7, 7, 7, 255]),
            (png::ColorType::GrayscaleAlpha, vec![7, 9], [7, 7, 7, 9]),
        ] {
            let mut encoder = png::Encoder::new(File::create(&path).unwrap(), 1, 1);
            encoder.set_color(kind);
            let mut writer = encoder.write_header().unwrap();
            writer.write_image_data(&bytes).unwrap();
            writer.finish().unwrap();
            assert_eq!(Image::open(&path).unwrap().pixels().as_raw(), &pixel);
        }
        std::fs::write(&path, b"no picture").unwrap();
        for path in [path.as_path(), folder.path(), &folder.path().join("none")] {
            let text = Image::open(path).unwrap_err().to_string();
            assert!(text.contains("cannot be read as a picture"), "{text}");
        }
    }

    /// A JPEG's bytes, with an orientation in its Exif data.
    fn jpeg(picture: &RgbaImage, orientation: u8) -> Vec<u8> {
        let mut plain = Vec::new();
        let encoder = image::codecs::jpeg::JpegEncoder::new_with_quality(&mut plain, 100);
        let rgb = DynamicImage::from(picture.clone()).into_rgb8();
        rgb.write_with_encoder(encoder).unwrap();
        // One entry, the orientation (0x112), a 16-bit number, behind the marker of the start.
        let exif = [
            b"Exif\0\0MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0",
            &[orientation, 0, 0, 0, 0, 0, 0][..],
        ]
        .concat();
        let length = [0, exif.len() as u8 + 2];
        [&plain[..2], &[0xff, 0xe1], &length, &exif, &plain[2..]].concat()
    }

    #[test]
    fn pictures_of_other_programs_are_read_whatever_they_are_called() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("picture.png");
        // Red at the left, blue at the right, half of it clear.
        let picture = RgbaImage::from_fn(32, 16, |x, _| match x {
            0..16 => image::Rgba([230, 20, 20, 255]),
            _ => image::Rgba([20, 20, 230, 128]),
        });
        let mut webp = Vec::new();
        let encoder = image::codecs::webp::WebPEncoder::new_lossless(&mut webp);
        picture.write_with_encoder(encoder).unwrap();
        std::fs::write(&path, &webp).unwrap();
        assert_eq!(Image::open(&path).unwrap().pixels(), &picture);

        let is_red = |image: &Image, x, y| image.pixels().get_pixel(x, y).0[0] > 128;
        for (orientation, size, red, blue) in [
            (1, (32, 16), (4, 8), (28, 8)),
            (3, (32, 16), (28, 8), (4, 8)),
            (6, (16, 32), (8, 4), (8, 28)),
        ] {
            std::fs::write(&path, jpeg(&picture, orientation)).unwrap();
            let image = Image::open(&path).unwrap();
            assert_eq!((image.width(), image.height()), size, "{orientation}");
            assert!(is_red(&image, red.0, red.1) && !is_red(&image, blue.0, blue.1));
            assert!(image.pixels().pixels().all(|pixel| pixel.0[3] == 255));
        }
        // Cut off anywhere, there is an error or a picture, never a panic.
        for bytes in [webp, jpeg(&picture, 6)] {
            for end in 0..bytes.len() {
                std::fs::write(&path, &bytes[..end]).unwrap();
                let _ = Image::open(&path);
            }
        }
        std::fs::write(&path, b"RIFF\0\0\0\0WAVE").unwrap();
        let text = Image::open(&path).unwrap_err().to_string();
        assert!(text.contains("no PNG, JPEG or WebP"), "{text}");
    }

    #[test]
    fn what_cannot_be_written_says_why_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let image = Image::from_planes(&[0.0; 4], 1, 1).unwrap();
        let text = image
            .save(folder.path().join("no/such/folder.png"))
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("folder.png") && text.contains("there is no folder"),
            "{text}"
        );
        let text = image.save(folder.path()).unwrap_err().to_string();
        assert!(text.contains("it is a folder"), "{text}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
