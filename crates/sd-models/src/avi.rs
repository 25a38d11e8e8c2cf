//! Videos that every player knows and that need no other program: AVI files of JPEG pictures and plain samples.
//!
//! The format: Microsoft's [AVI RIFF File Reference](https://learn.microsoft.com/windows/win32/directshow/avi-riff-file-reference).

use std::fmt;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use image::ExtendedColorType;
use image::codecs::jpeg::JpegEncoder;

use crate::error::{Error, Result};
use crate::frame_rate::FrameRate;
use crate::image::{Image, make_readable, part_file};
use crate::sound::Sound;

/// Quality of the pictures, of 100: what is lost shows in no picture that moves.
const QUALITY: u8 = 92;

/// Bytes of a sample of one channel.
const SAMPLE: usize = 2;

/// Most bytes of a file: sizes in it have 32 bits, and some programs take them for signed.
const LARGEST: u64 = i32::MAX as u64;

/// Marks of the index and the header: there is one; every picture stands by itself; sound lies between the pictures.
const HAS_INDEX: u32 = 0x10;
const IS_INTERLEAVED: u32 = 0x100;
const IS_KEY_FRAME: u32 = 0x10;

/// Chunks of the two streams.
const PICTURE: &[u8; 4] = b"00dc";
const SAMPLES: &[u8; 4] = b"01wb";

/// A video file that is being written: under another name until it is finished.
pub struct AviWriter {
    path: PathBuf,
    file: BufWriter<tempfile::NamedTempFile>,
    size: (u32, u32),
    rate: FrameRate,
    sound: Option<Track>,
    /// For each chunk its kind, place and size.
    index: Vec<(&'static [u8; 4], u32, u32)>,
    frames: u32,
    largest_frame: u32,
    position: u64,
}

/// Samples of all channels, side by side, and how many bytes of them are written.
struct Track {
    channels: u16,
    rate: u32,
    bytes: Vec<u8>,
    written: usize,
}

impl fmt::Debug for AviWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AviWriter")
            .field("path", &self.path)
            .field("frames", &self.frames)
            .finish_non_exhaustive()
    }
}

/// The body of a chunk or list, in little-endian order.
#[derive(Default)]
struct Body(Vec<u8>);

impl Body {
    fn bytes(mut self, bytes: &[u8]) -> Body {
        self.0.extend_from_slice(bytes);
        self
    }

    fn u16s<const N: usize>(self, values: [u16; N]) -> Body {
        values
            .into_iter()
            .fold(self, |body, value| body.bytes(&value.to_le_bytes()))
    }

    fn u32s<const N: usize>(self, values: [u32; N]) -> Body {
        values
            .into_iter()
            .fold(self, |body, value| body.bytes(&value.to_le_bytes()))
    }

    /// A chunk within this one.
    fn chunk(self, name: &[u8; 4], body: Body) -> Body {
        let length = body.0.len() as u32;
        self.bytes(name).u32s([length]).bytes(&body.0)
    }

    fn list(self, name: &[u8; 4], body: Body) -> Body {
        let body = Body::default().bytes(name).bytes(&body.0);
        self.chunk(b"LIST", body)
    }
}

impl AviWriter {
    /// Begins a video of pictures of this width and height; `sound` begins with the first.
    ///
    /// # Errors
    /// [`Error::Write`] where there cannot be such a file.
    pub fn create(
        path: impl AsRef<Path>,
        size: (u32, u32),
        rate: FrameRate,
        sound: Option<&Sound>,
    ) -> Result<AviWriter> {
        let path = path.as_ref();
        let error = |reason: String| Error::Write {
            path: path.to_owned(),
            reason,
        };
        if [size.0, size.1]
            .iter()
            .any(|side| !(1..=0xffff).contains(side))
        {
            return Err(error(format!("its pictures are {}x{}", size.0, size.1)));
        }
        let track = |sound: &Sound| -> Result<Track> {
            Ok(Track {
                channels: u16::try_from(sound.channels().len())
                    .map_err(|_| error("it has too many channels".to_owned()))?,
                rate: sound.rate(),
                bytes: sound.interleaved().flat_map(i16::to_le_bytes).collect(),
                written: 0,
            })
        };
        let mut writer = AviWriter {
            path: path.to_owned(),
            file: BufWriter::new(part_file(path).map_err(error)?),
            size,
            rate,
            sound: sound.map(track).transpose()?,
            index: Vec::new(),
            frames: 0,
            largest_frame: 0,
            position: 0,
        };
        let header = writer.header(0, 0);
        writer.write(&header)?;
        Ok(writer)
    }

    /// Everything before the first chunk; `movie` are the bytes of all chunks, `index` those of the index.
    fn header(&self, movie: u32, index: u32) -> Vec<u8> {
        let (width, height) = self.size;
        let (numerator, denominator) = self.rate.parts();
        let micros = u64::from(denominator) * 1_000_000 / u64::from(numerator);
        let streams = 1 + u32::from(self.sound.is_some());
        let flags = HAS_INDEX
            | if self.sound.is_some() {
                IS_INTERLEAVED
            } else {
                0
            };
        let main = Body::default()
            .u32s([u32::try_from(micros).unwrap_or(u32::MAX), 0, 0, flags])
            .u32s([self.frames, 0, streams, self.largest_frame, width, height])
            .u32s([0; 4]);
        // Priority and language, then: initial frames; time as a fraction; start; length; buffer; quality; size of a sample.
        let video = Body::default()
            .bytes(b"vidsMJPG")
            .u32s([0, 0, 0, denominator, numerator, 0, self.frames])
            .u32s([self.largest_frame, u32::MAX, 0])
            .u16s([0, 0, width as u16, height as u16]);
        let picture = Body::default()
            .u32s([40, width, height])
            .u16s([1, 24])
            .bytes(b"MJPG")
            .u32s([width.saturating_mul(height).saturating_mul(3), 0, 0, 0, 0]);
        let mut headers = Body::default().chunk(b"avih", main).list(
            b"strl",
            Body::default()
                .chunk(b"strh", video)
                .chunk(b"strf", picture),
        );
        if let Some(track) = &self.sound {
            let block = u32::from(track.channels) * SAMPLE as u32;
            let bytes_a_second = track.rate.saturating_mul(block);
            let audio = Body::default()
                .bytes(b"auds\0\0\0\0")
                .u32s([0, 0, 0, block, bytes_a_second, 0])
                .u32s([
                    track.written as u32 / block,
                    bytes_a_second,
                    u32::MAX,
                    block,
                ])
                .u32s([0, 0]);
            let format = Body::default()
                .u16s([1, track.channels])
                .u32s([track.rate, bytes_a_second])
                .u16s([block as u16, 8 * SAMPLE as u16]);
            headers = headers.list(
                b"strl",
                Body::default().chunk(b"strh", audio).chunk(b"strf", format),
            );
        }
        let mut body = Body::default().bytes(b"AVI ").list(b"hdrl", headers);
        // The list goes on with the chunks.
        body = body
            .bytes(b"LIST")
            .u32s([movie.saturating_add(4)])
            .bytes(b"movi");
        let length = (body.0.len() as u32)
            .saturating_add(movie)
            .saturating_add(index);
        Body::default()
            .bytes(b"RIFF")
            .u32s([length])
            .bytes(&body.0)
            .0
    }

    /// Writes the next picture, and the sound to it. Colours are taken as they are, whatever their alpha.
    ///
    /// # Errors
    /// [`Error::Write`], also for a picture of another size, or where the file would be larger than 2 GB.
    pub fn push(&mut self, image: &Image) -> Result<()> {
        if (image.width(), image.height()) != self.size {
            return Err(self.error("its pictures have different sizes".to_owned()));
        }
        let pixels = image.pixels().as_raw().as_chunks::<4>().0;
        let colours: Vec<u8> = pixels.iter().flat_map(|&[r, g, b, _]| [r, g, b]).collect();
        let mut picture = Vec::new();
        JpegEncoder::new_with_quality(&mut picture, QUALITY)
            .encode(
                &colours,
                image.width(),
                image.height(),
                ExtendedColorType::Rgb8,
            )
            .map_err(|error| self.error(error.to_string()))?;
        self.frames += 1;
        self.largest_frame = self.largest_frame.max(picture.len() as u32);
        self.chunk(PICTURE, &picture)?;
        let (numerator, denominator) = self.rate.parts();
        let samples = self.sound.as_ref().map_or(0, |track| {
            u128::from(self.frames) * u128::from(denominator) * u128::from(track.rate)
                / u128::from(numerator)
        });
        self.sound_up_to(usize::try_from(samples).unwrap_or(usize::MAX))
    }

    /// Writes what is heard before so many samples of each channel are over.
    fn sound_up_to(&mut self, samples: usize) -> Result<()> {
        let Some(track) = &mut self.sound else {
            return Ok(());
        };
        let end = samples.saturating_mul(usize::from(track.channels) * SAMPLE);
        let end = end.clamp(track.written, track.bytes.len());
        let bytes = track.bytes[track.written..end].to_vec();
        track.written = end;
        match bytes.is_empty() {
            true => Ok(()),
            false => self.chunk(SAMPLES, &bytes),
        }
    }

    fn chunk(&mut self, name: &'static [u8; 4], body: &[u8]) -> Result<()> {
        // Each chunk has an entry of 16 bytes in the index.
        let index = (self.index.len() as u64 + 1) * 16;
        if self.position + body.len() as u64 + index + 64 > LARGEST {
            return Err(self.error("an AVI file cannot be larger than 2 GB".to_owned()));
        }
        let length = body.len() as u32;
        self.index.push((name, self.position as u32, length));
        self.write(&Body::default().bytes(name).u32s([length]).0)?;
        self.write(body)?;
        // Chunks begin at even places.
        match body.len() % 2 {
            0 => Ok(()),
            _ => self.write(&[0]),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.position += bytes.len() as u64;
        let outcome = self.file.write_all(bytes);
        outcome.map_err(|error| self.error(error.to_string()))
    }

    /// Writes the index and gives the file its name. What of the sound lasts longer than the pictures is left out.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn finish(mut self) -> Result<()> {
        let before = self.header(0, 0).len() as u64;
        let movie = (self.position - before) as u32;
        // Places are counted from the name of the list.
        let first = before as u32 - 4;
        let entries = self.index.iter().fold(Body::default(), |body, entry| {
            let &(name, place, length) = entry;
            body.bytes(name).u32s([IS_KEY_FRAME, place - first, length])
        });
        let index = Body::default().chunk(b"idx1", entries).0;
        self.write(&index)?;
        let header = self.header(movie, index.len() as u32);
        let AviWriter { path, file, .. } = self;
        let rest = move |path: &Path| -> std::result::Result<(), String> {
            let text = |error: std::io::Error| error.to_string();
            let mut file = file.into_inner().map_err(|error| error.to_string())?;
            file.seek(SeekFrom::Start(0)).map_err(text)?;
            file.write_all(&header).map_err(text)?;
            make_readable(file.as_file()).map_err(text)?;
            file.persist(path)
                .map_err(|error| error.error.to_string())?;
            Ok(())
        };
        let outcome = rest(&path);
        outcome.map_err(|reason| Error::Write { path, reason })
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
        Image::from_rgba(16, 8, [shade, 128, 255 - shade, 255].repeat(128)).unwrap()
    }

    /// Reads chunk by chunk what was written: sizes add up, and the index says where everything is.
    #[test]
    fn files_are_what_their_sizes_say() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("clip.avi");
        let rate = FrameRate::new(24, 1).unwrap();
        let tone: Vec<f32> = (0..32_000).map(|at| (at as f32 / 10.0).sin()).collect();
        let sound = Sound::new(32_000, vec![tone.clone(), tone]).unwrap();
        let mut writer = AviWriter::create(&path, (16, 8), rate, Some(&sound)).unwrap();
        for shade in [0, 100, 200] {
            writer.push(&picture(shade)).unwrap();
        }
        assert!(!path.exists());
        writer.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        assert_eq!((&bytes[..4], number(4)), (&b"RIFF"[..], bytes.len() - 8));
        let headers = number(16);
        let movie = 20 + headers;
        assert_eq!(&bytes[movie + 8..movie + 12], b"movi");
        let index = movie + 8 + number(movie + 4);
        assert_eq!(
            (&bytes[index..index + 4], number(index + 4)),
            (&b"idx1"[..], 6 * 16)
        );
        assert_eq!(bytes.len(), index + 8 + 6 * 16);
        let (mut pictures, mut samples) = (Vec::new(), Vec::new());
        for entry in (index + 8..bytes.len()).step_by(16) {
            let at = movie + 8 + number(entry + 8);
            assert_eq!(bytes[at..at + 4], bytes[entry..entry + 4]);
            assert_eq!(number(at + 4), number(entry + 12));
            let body = &bytes[at + 8..at + 8 + number(at + 4)];
            match &bytes[at..at + 4] {
                b"00dc" => pictures.push(body),
                _ => samples.extend_from_slice(body),
            }
        }
        // As long as the pictures: three 24ths of a second.
        let all: Vec<u8> = sound.interleaved().flat_map(i16::to_le_bytes).collect();
        assert_eq!(samples, all[..4000 * 4]);
        for (body, shade) in pictures.iter().zip([0, 100, 200]) {
            let path = folder.path().join("picture.jpg");
            std::fs::write(&path, body).unwrap();
            let read = Image::open(&path).unwrap();
            assert_eq!((read.width(), read.height()), (16, 8));
            let (is, should) = (read.pixels().as_raw(), picture(shade));
            let far = is.iter().zip(should.pixels().as_raw());
            assert!(far.into_iter().all(|(is, should)| is.abs_diff(*should) < 8));
        }
        // Without sound, and with pictures that do not fit.
        let mut writer = AviWriter::create(&path, (16, 8), rate, None).unwrap();
        writer.push(&picture(0)).unwrap();
        let other = Image::from_rgba(8, 8, vec![0; 256]).unwrap();
        let text = writer.push(&other).unwrap_err().to_string();
        assert!(text.contains("different sizes"), "{text}");
        writer.finish().unwrap();
        assert!(AviWriter::create(&path, (0, 8), rate, None).is_err());
    }
}
