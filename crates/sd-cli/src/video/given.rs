//! What a clip is made from beside the prompt, read from files.

use std::path::Path;

use sd_models::minimax_h3::{FRAME_RATE, Reference, USUAL_FRAMES, frames_up};
use sd_models::{Error as ModelError, Image, VideoRequest};

use crate::args::Video;
use crate::clips::{Input, sound, sound_of};
use crate::error::Error;

/// Adds keyframes and references to a request, in the order of the options' help.
pub(super) fn read(arguments: &Video, mut request: VideoRequest) -> Result<VideoRequest, Error> {
    let given = &arguments.given;
    if let Some(path) = &given.first_frame {
        request = request.first_frame(Image::open(path)?);
    }
    if let Some(path) = &given.last_frame {
        request = request.last_frame(Image::open(path)?);
    }
    for path in &given.ref_image {
        request = request.reference(Reference::Picture(Image::open(path)?));
    }
    for path in &given.ref_video {
        request = request.reference(clip(path, arguments)?);
    }
    for path in &given.ref_audio {
        request = request.reference(Reference::Sound(sound(path, &arguments.ffmpeg)?));
    }
    Ok(request)
}

/// As much of a clip as the model looks at, which is no more than it makes.
fn clip(path: &Path, arguments: &Video) -> Result<Reference, Error> {
    let frames = frames_up(arguments.frames.unwrap_or(USUAL_FRAMES));
    let seconds = frames as f64 / f64::from(FRAME_RATE) + 1.0;
    let input = Input::open(path, &arguments.ffmpeg, Some(seconds))?;
    // Pictures without a rate are taken to be the model's.
    let frame_rate = match input.frame_rate {
        Some(rate) => rate,
        None => super::frame_rate(),
    };
    let (numerator, denominator) = frame_rate.parts();
    let most = (seconds * f64::from(numerator) / f64::from(denominator)).ceil() as usize;
    let frames: Vec<Image> = input.pictures.take(most).collect::<Result<_, _>>()?;
    if frames.is_empty() {
        return Err(Error::Model(ModelError::Missing {
            path: path.to_owned(),
            what: "pictures",
        }));
    }
    Ok(Reference::Clip {
        frames,
        frame_rate,
        sound: sound_of(path, &arguments.ffmpeg)?,
    })
}
