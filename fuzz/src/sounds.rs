//! Sound of other programs: whatever is in a WAV file, it is sound or an error says why not.

use std::fs;
use std::path::Path;

use sd_models::Sound;

/// Reads `bytes`, put into a file in `folder`, as sound; short sound is mixed, resampled and written too.
pub fn sound(folder: &Path, bytes: &[u8]) {
    let path = folder.join("sound.wav");
    fs::write(&path, bytes).expect("the folder can be written to");
    match Sound::open(&path) {
        Ok(sound) => {
            let samples = sound.samples();
            assert!(sound.channels().iter().all(|each| each.len() == samples));
            let most = samples * sound.channels().len();
            assert!(
                most <= bytes.len(),
                "{most} samples of {} bytes",
                bytes.len()
            );
            if samples <= 1 << 12 {
                let stereo = sound.stereo();
                assert_eq!((stereo.channels().len(), stereo.samples()), (2, samples));
                let other = stereo.resampled(32_000).expect("a rate that can be had");
                other.save(&path).expect("what was read can be written");
                let again = Sound::open(&path).expect("what was written can be read");
                assert_eq!((again.rate(), again.samples()), (32_000, other.samples()));
            }
        }
        Err(error) => {
            let text = error.to_string();
            assert!(
                text.len() < bytes.len() + 4096,
                "an error that nobody reads: {text}"
            );
        }
    }
}
