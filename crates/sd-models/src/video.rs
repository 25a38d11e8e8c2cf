//! Pictures one after the other, and the sound to them.

use crate::frame_rate::FrameRate;
use crate::image::Image;
use crate::sound::Sound;

/// A clip: pictures of one size, how many of them there are in a second, and what is heard meanwhile.
#[derive(Debug, Clone, PartialEq)]
pub struct Video {
    /// The pictures, all of one size.
    pub frames: Vec<Image>,
    /// Pictures a second.
    pub frame_rate: FrameRate,
    /// What is heard, from the first picture on; it may end before the pictures do, or after them.
    pub sound: Option<Sound>,
}
