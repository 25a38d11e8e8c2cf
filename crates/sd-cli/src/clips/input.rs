//! Where the pictures of a clip come from.

use std::path::Path;

use sd_models::wan_vae::picture_files;
use sd_models::{AnimationReader, FrameRate, Image, Sound};

use super::ffmpeg::{VideoReader, is_video, read_sound};
use crate::error::Error;

/// The pictures of a file or folder as they come.
pub(crate) struct Input {
    /// How many there are, where that is known before all have come.
    pub(crate) count: Option<usize>,
    pub(crate) frame_rate: Option<FrameRate>,
    pub(crate) pictures: Box<dyn Iterator<Item = Result<Image, Error>>>,
}

impl Input {
    /// Opens a PNG, animated or not, a folder of PNGs, or a video, of which at most so many seconds are read.
    pub(crate) fn open(path: &Path, ffmpeg: &Path, seconds: Option<f64>) -> Result<Input, Error> {
        if is_video(path) && !path.is_dir() {
            if !path.is_file() {
                return Err(Error::Model(sd_models::Error::Missing {
                    path: path.to_owned(),
                    what: "video file",
                }));
            }
            let video = VideoReader::open(ffmpeg, path, seconds)?;
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

/// Name of the sound in a folder of pictures.
pub(crate) const SOUND: &str = "sound.wav";

/// The sound to the pictures of a clip: that of a video; the file `sound.wav` of a folder; beside an animation the WAV file of its name.
/// None where there is none.
pub(crate) fn sound_of(path: &Path, ffmpeg: &Path) -> Result<Option<Sound>, Error> {
    let beside = match path.is_dir() {
        true => path.join(SOUND),
        false if is_video(path) => return read_sound(ffmpeg, path),
        false => path.with_extension("wav"),
    };
    match beside.is_file() {
        true => Ok(Some(wav(&beside)?)),
        false => Ok(None),
    }
}

/// What a WAV file has, which is something.
fn wav(path: &Path) -> Result<Sound, Error> {
    let sound = Sound::open(path)?;
    match sound.samples() {
        0 => Err(Error::Model(sd_models::Error::Sound {
            path: path.to_owned(),
            reason: "it has no samples".to_owned(),
        })),
        _ => Ok(sound),
    }
}

/// The sound of a file: a WAV file, or through ffmpeg whatever that reads.
pub(crate) fn sound(path: &Path, ffmpeg: &Path) -> Result<Sound, Error> {
    let is_wav = path
        .extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case("wav"));
    if is_wav || !path.is_file() {
        return wav(path);
    }
    read_sound(ffmpeg, path)?.ok_or_else(|| {
        Error::Model(sd_models::Error::Sound {
            path: path.to_owned(),
            reason: "there is none in it".to_owned(),
        })
    })
}
