//! Where decoded pictures go.

use std::path::{Path, PathBuf};

use sd_models::wan_vae::Clip;
use sd_models::{AnimationWriter, Error as ModelError, FrameRate, Image};

use super::ffmpeg::{VideoWriter, is_video};
use crate::error::Error;

/// One picture, an animation, a video, or a folder of numbered pictures. Begun with the first frame.
pub(super) struct Output {
    path: PathBuf,
    ffmpeg: PathBuf,
    frames: usize,
    rate: FrameRate,
    kind: Kind,
    begun: Option<Begun>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Picture,
    Animation,
    Video,
    Folder,
}

enum Begun {
    Picture,
    Animation(AnimationWriter),
    Video(VideoWriter),
    Folder { written: usize },
}

impl Output {
    /// For so many frames, as the ending of `path` says.
    pub(super) fn new(
        path: &Path,
        frames: usize,
        rate: FrameRate,
        ffmpeg: &Path,
    ) -> Result<Output, Error> {
        let ending = path.extension().and_then(|ending| ending.to_str());
        let is = |known: &str| ending.is_some_and(|ending| ending.eq_ignore_ascii_case(known));
        let kind = if is_video(path) {
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
            kind,
            begun: None,
        })
    }

    /// Writes the next frames.
    pub(super) fn write(&mut self, clip: &Clip) -> Result<(), Error> {
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

    fn push(&mut self, image: &Image, channels: usize) -> Result<(), Error> {
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
            Begun::Video(writer) => writer.push(image)?,
            Begun::Folder { written } => {
                *written += 1;
                image.save(self.path.join(format!("{written:05}.png")))?;
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
            Kind::Video => {
                if channels > 3 {
                    tracing::warn!("a video has no alpha: a folder or an animated PNG keeps it");
                }
                let writer = VideoWriter::create(&self.ffmpeg, &self.path, size, self.rate)?;
                Begun::Video(writer)
            }
            Kind::Folder => {
                std::fs::create_dir(&self.path).map_err(|source| ModelError::Io {
                    path: self.path.clone(),
                    source,
                })?;
                Begun::Folder { written: 0 }
            }
        })
    }

    /// Ends the file.
    pub(super) fn finish(self) -> Result<(), Error> {
        match self.begun {
            Some(Begun::Animation(writer)) => Ok(writer.finish()?),
            Some(Begun::Video(writer)) => writer.finish(),
            Some(Begun::Picture | Begun::Folder { .. }) | None => Ok(()),
        }
    }
}
