//! Where decoded pictures go.

use std::path::{Path, PathBuf};

use sd_models::wan_vae::Clip;
use sd_models::{AnimationWriter, AviWriter, Error as ModelError, FrameRate, Image, Sound};

use super::ffmpeg::{VideoWriter, is_video};
use super::input::SOUND;
use crate::error::Error;

/// One picture, an animation, a video, or a folder of numbered pictures; what is heard is in a video with them, and else in a WAV file.
/// Begun with the first frame.
pub(crate) struct Output {
    path: PathBuf,
    ffmpeg: PathBuf,
    frames: usize,
    rate: FrameRate,
    sound: Option<Sound>,
    kind: Kind,
    begun: Option<Begun>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Picture,
    Animation,
    /// What needs no other program.
    Avi,
    Video,
    Folder,
}

enum Begun {
    Picture,
    Animation(AnimationWriter),
    Avi(AviWriter),
    Video(VideoWriter),
    Folder(Numbered),
}

/// A new folder of numbered pictures, which is taken away again unless it is finished.
struct Numbered {
    folder: PathBuf,
    written: usize,
    is_finished: bool,
}

impl Numbered {
    fn file(&self, number: usize) -> PathBuf {
        self.folder.join(format!("{number:05}.png"))
    }
}

impl Drop for Numbered {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        // Only what was written here; the folder stays if somebody put something else into it.
        for number in 1..=self.written {
            let _ = std::fs::remove_file(self.file(number));
        }
        let _ = std::fs::remove_file(self.folder.join(SOUND));
        let _ = std::fs::remove_dir(&self.folder);
    }
}

impl Output {
    /// For so many frames, as the ending of `path` says.
    pub(crate) fn new(
        path: &Path,
        frames: usize,
        rate: FrameRate,
        ffmpeg: &Path,
    ) -> Result<Output, Error> {
        let ending = path.extension().and_then(|ending| ending.to_str());
        let is = |known: &str| ending.is_some_and(|ending| ending.eq_ignore_ascii_case(known));
        let kind = if is("avi") {
            Kind::Avi
        } else if is_video(path) {
            Kind::Video
        } else if is("png") || is("apng") {
            match frames {
                1 => Kind::Picture,
                _ => Kind::Animation,
            }
        } else {
            Kind::Folder
        };
        let refused = |reason: &str| {
            Err(Error::Model(ModelError::Write {
                path: path.to_owned(),
                reason: reason.to_owned(),
            }))
        };
        match kind {
            Kind::Folder if path.exists() => return refused("it is there already"),
            Kind::Folder => {}
            _ if path.is_dir() => return refused("it is a folder"),
            _ => {}
        }
        Ok(Output {
            path: path.to_owned(),
            ffmpeg: ffmpeg.to_owned(),
            frames,
            rate,
            sound: None,
            kind,
            begun: None,
        })
    }

    /// Adds what is heard from the first frame on, which ends with the last. To be said before the first.
    pub(crate) fn sound(mut self, sound: Sound) -> Output {
        let (numerator, denominator) = self.rate.parts();
        let seconds = self.frames as f64 * f64::from(denominator) / f64::from(numerator);
        let samples = (seconds * f64::from(sound.rate())).ceil() as usize;
        self.sound = Some(sound.truncated(samples));
        self
    }

    /// Where what is heard is, if that is a file of its own.
    pub(crate) fn sound_file(&self) -> Option<PathBuf> {
        let file = match self.kind {
            Kind::Picture | Kind::Animation => self.path.with_extension("wav"),
            Kind::Folder => self.path.join(SOUND),
            Kind::Avi | Kind::Video => return None,
        };
        self.sound.is_some().then_some(file)
    }

    /// Writes the next frames.
    pub(crate) fn write(&mut self, clip: &Clip) -> Result<(), Error> {
        let area = clip.height * clip.width;
        for planes in clip.each_frame() {
            let mut planes = planes.to_vec();
            // A picture without alpha is opaque.
            planes.resize(planes.len().max(4 * area), 1.0);
            let image =
                Image::from_planes(&planes, clip.width, clip.height).ok_or(ModelError::Clip {
                    what: "channels",
                    found: clip.channels,
                    wanted: 4,
                })?;
            self.push(&image, clip.channels)?;
        }
        Ok(())
    }

    /// Writes the next frame, of which so many channels count.
    pub(crate) fn push(&mut self, image: &Image, channels: usize) -> Result<(), Error> {
        let begun = match &mut self.begun {
            Some(begun) => begun,
            None => {
                let begun = self.begin(image, channels)?;
                self.begun.insert(begun)
            }
        };
        match begun {
            Begun::Picture => image.save(&self.path)?,
            Begun::Animation(writer) => writer.push(image)?,
            Begun::Avi(writer) => writer.push(image)?,
            Begun::Video(writer) => writer.push(image)?,
            Begun::Folder(numbered) => {
                numbered.written += 1;
                image.save(numbered.file(numbered.written))?;
            }
        }
        Ok(())
    }

    fn begin(&self, image: &Image, channels: usize) -> Result<Begun, Error> {
        let size = (image.width(), image.height());
        Ok(match self.kind {
            Kind::Picture => Begun::Picture,
            Kind::Animation => Begun::Animation(AnimationWriter::create(
                &self.path,
                size,
                self.frames,
                self.rate,
            )?),
            Kind::Avi | Kind::Video => {
                if channels > 3 {
                    tracing::warn!("a video has no alpha: a folder or an animated PNG keeps it");
                }
                let (path, sound) = (&self.path, self.sound.as_ref());
                match self.kind {
                    Kind::Avi => Begun::Avi(AviWriter::create(path, size, self.rate, sound)?),
                    _ => {
                        let program = &self.ffmpeg;
                        Begun::Video(VideoWriter::create(program, path, size, self.rate, sound)?)
                    }
                }
            }
            Kind::Folder => {
                std::fs::create_dir(&self.path).map_err(|source| ModelError::Io {
                    path: self.path.clone(),
                    source,
                })?;
                Begun::Folder(Numbered {
                    folder: self.path.clone(),
                    written: 0,
                    is_finished: false,
                })
            }
        })
    }

    /// Ends the file, and writes what is heard where that is one of its own.
    pub(crate) fn finish(self) -> Result<(), Error> {
        if let (Some(sound), Some(file)) = (&self.sound, self.sound_file()) {
            sound.save(file)?;
        }
        match self.begun {
            Some(Begun::Animation(writer)) => Ok(writer.finish()?),
            Some(Begun::Avi(writer)) => Ok(writer.finish()?),
            Some(Begun::Video(writer)) => writer.finish(),
            Some(Begun::Folder(mut numbered)) => {
                numbered.is_finished = true;
                Ok(())
            }
            Some(Begun::Picture) | None => Ok(()),
        }
    }
}
