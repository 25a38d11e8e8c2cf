//! Where the pictures of a clip come from.

use std::path::Path;

use sd_models::wan_vae::picture_files;
use sd_models::{AnimationReader, FrameRate, Image};

use super::ffmpeg::{VideoReader, is_video};
use crate::error::Error;

/// The pictures of a file or folder as they come.
pub(super) struct Input {
    /// How many there are, where that is known before all have come.
    pub(super) count: Option<usize>,
    pub(super) frame_rate: Option<FrameRate>,
    pub(super) pictures: Box<dyn Iterator<Item = Result<Image, Error>>>,
}

impl Input {
    /// Opens a PNG, animated or not, a folder of PNGs, or a video.
    pub(super) fn open(path: &Path, ffmpeg: &Path) -> Result<Input, Error> {
        if is_video(path) && !path.is_dir() {
            if !path.is_file() {
                return Err(Error::Model(sd_models::Error::Missing {
                    path: path.to_owned(),
                    what: "video file",
                }));
            }
            let video = VideoReader::open(ffmpeg, path)?;
            return Ok(Input {
                count: None,
                frame_rate: Some(video.frame_rate()),
                pictures: Box::new(video),
            });
        }
        if path.is_dir() {
            let files = picture_files(path)?;
            return Ok(Input {
                count: Some(files.len()),
                frame_rate: None,
                pictures: Box::new(files.into_iter().map(|file| Ok(Image::open(file)?))),
            });
        }
        let animation = AnimationReader::open(path)?;
        Ok(Input {
            count: Some(animation.frames()),
            frame_rate: animation.frame_rate(),
            pictures: Box::new(animation.map(|image| Ok(image?))),
        })
    }
}
