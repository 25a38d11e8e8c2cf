//! Clips in and out of files: pictures one after the other, and the sound to them.

mod ffmpeg;
mod input;
mod output;

pub(crate) use ffmpeg::check_writable;
pub(crate) use input::{Input, sound, sound_of};
pub(crate) use output::Output;
