//! Sound: samples of one or several channels, and WAV files of them.

use std::f64::consts::{FRAC_1_SQRT_2, PI};
use std::fmt;
use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::ops::RangeInclusive;
use std::path::Path;

use hound::{SampleFormat, WavReader, WavSpec, WavWriter};

use crate::error::{Error, Result};
use crate::image::{make_readable, part_file};

/// Samples a second that a sound may have.
pub const RATES: RangeInclusive<u32> = 1_000..=768_000;

/// Most bytes of samples that are read of a file: more than two hours of 32 kHz stereo.
const LARGEST: u64 = 1 << 31;

/// How many zeros of the sinc a resampled sample reaches to each side, and which part of the lower of the two bands is kept:
/// what the model's authors resample with (`torchaudio.transforms.Resample` as it comes).
const ZEROS: f64 = 6.0;
const ROLLOFF: f64 = 0.99;

/// Samples of one or several channels, all as long, from -1 to 1.
#[derive(Clone, PartialEq)]
pub struct Sound {
    rate: u32,
    channels: Vec<Vec<f32>>,
}

impl fmt::Debug for Sound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sound")
            .field("rate", &self.rate)
            .field("channels", &self.channels.len())
            .field("samples", &self.samples())
            .finish()
    }
}

impl Sound {
    /// A sound of `rate` samples a second. `None` without channels, with channels of different lengths, or with a rate that
    /// is not one of [`RATES`].
    pub fn new(rate: u32, channels: Vec<Vec<f32>>) -> Option<Sound> {
        let samples = channels.first()?.len();
        let fits = RATES.contains(&rate) && channels.iter().all(|each| each.len() == samples);
        fits.then_some(Sound { rate, channels })
    }

    /// Samples a second.
    pub fn rate(&self) -> u32 {
        self.rate
    }

    /// The samples of each channel.
    pub fn channels(&self) -> &[Vec<f32>] {
        &self.channels
    }

    /// Samples of one channel.
    pub fn samples(&self) -> usize {
        self.channels.first().map_or(0, Vec::len)
    }

    /// How long it lasts.
    pub fn seconds(&self) -> f64 {
        self.samples() as f64 / f64::from(self.rate)
    }

    /// The sound with at most so many samples of each channel.
    pub fn truncated(mut self, samples: usize) -> Sound {
        self.channels
            .iter_mut()
            .for_each(|each| each.truncate(samples));
        self
    }

    /// The sound in two channels. One channel is doubled. Three to eight channels are taken to be the loudspeakers that WAV
    /// files usually have for so many and mixed as ITU-R BS.775 says: the centre and those beside and behind at 0.71 of those in
    /// front, without the low-frequency channel, and all scaled so that nothing exceeds the loudest. Of more channels both sides get
    /// the mean.
    pub fn stereo(&self) -> Sound {
        let channels = match &self.channels[..] {
            [one] => vec![one.clone(), one.clone()],
            [_, _] => self.channels.clone(),
            many => {
                let weights = mix(many.len());
                let side = |of: fn(&(f64, f64)) -> f64| {
                    let total: f64 = weights.iter().map(of).sum();
                    let mut mixed = vec![0.0; self.samples()];
                    for (samples, weight) in many.iter().zip(weights.iter().map(of)) {
                        for (sum, sample) in mixed.iter_mut().zip(samples) {
                            *sum += f64::from(*sample) * weight / total;
                        }
                    }
                    mixed.into_iter().map(|sum| sum as f32).collect()
                };
                vec![side(|&(left, _)| left), side(|&(_, right)| right)]
            }
        };
        Sound {
            rate: self.rate,
            channels,
        }
    }

    /// The sound with `rate` samples a second; `None` if that is not one of [`RATES`]. Each sample is a sum of its neighbours by a
    /// sinc of six zeros to each side under a Hann window, cut off at 0.99 of the lower of both bands: what the reference of
    /// MiniMax H3 does with the sounds that it is given.
    pub fn resampled(&self, rate: u32) -> Option<Sound> {
        if rate == self.rate {
            return Some(self.clone());
        }
        RATES.contains(&rate).then(|| Sound {
            rate,
            channels: (self.channels.iter())
                .map(|samples| resample(samples, self.rate, rate))
                .collect(),
        })
    }

    /// Reads a WAV file: whole numbers of 8, 16, 24 or 32 bits, or floating point of 32, of any number of channels.
    ///
    /// # Errors
    /// [`Error::Sound`] with the path and the reason.
    pub fn open(path: impl AsRef<Path>) -> Result<Sound> {
        let path = path.as_ref();
        Sound::read(path).map_err(|reason| Error::Sound {
            path: path.to_owned(),
            reason,
        })
    }

    fn read(path: &Path) -> std::result::Result<Sound, String> {
        let file = File::open(path).map_err(|error| error.to_string())?;
        let mut reader = WavReader::new(BufReader::new(file)).map_err(reason)?;
        let spec = reader.spec();
        if !RATES.contains(&spec.sample_rate) {
            return Err(format!(
                "it has {} samples a second; from {} to {} are possible",
                spec.sample_rate,
                RATES.start(),
                RATES.end()
            ));
        }
        if u64::from(reader.len()) * 4 > LARGEST {
            return Err("it is longer than any sound".to_owned());
        }
        let mut channels = vec![Vec::new(); usize::from(spec.channels)];
        let samples: Box<dyn Iterator<Item = hound::Result<f32>>> = match spec.sample_format {
            SampleFormat::Float => Box::new(reader.samples::<f32>()),
            SampleFormat::Int => {
                let scale = 0.5_f64.powi(i32::from(spec.bits_per_sample) - 1);
                let samples = reader.samples::<i32>();
                Box::new(samples.map(move |sample| Ok((f64::from(sample?) * scale) as f32)))
            }
        };
        for (place, sample) in samples.enumerate() {
            let sample = sample.map_err(reason)?;
            if !sample.is_finite() {
                return Err(format!("its sample {place} is no finite number"));
            }
            let channel = place % usize::from(spec.channels);
            channels[channel].push(sample);
        }
        Sound::new(spec.sample_rate, channels).ok_or("its channels differ in length".to_owned())
    }

    /// Writes a WAV file of 16-bit whole numbers, which every player knows. What is beyond -1 to 1 is cut. It is written under
    /// another name in the same folder and renamed.
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
        let spec = WavSpec {
            channels: u16::try_from(self.channels.len()).map_err(|_| "too many channels")?,
            sample_rate: self.rate,
            bits_per_sample: 16,
            sample_format: SampleFormat::Int,
        };
        let mut file = part_file(path)?;
        let mut writer =
            WavWriter::new(BufWriter::new(file.as_file_mut()), spec).map_err(reason)?;
        for sample in self.interleaved() {
            writer.write_sample(sample).map_err(reason)?;
        }
        writer.finalize().map_err(reason)?;
        make_readable(file.as_file()).map_err(|error| error.to_string())?;
        file.persist(path)
            .map_err(|error| error.error.to_string())?;
        Ok(())
    }

    /// The samples as 16-bit whole numbers, all channels of one moment side by side.
    pub fn interleaved(&self) -> impl Iterator<Item = i16> {
        (0..self.samples()).flat_map(|moment| {
            (self.channels.iter())
                .map(move |each| (f64::from(each[moment]) * 32768.0).round() as i16)
        })
    }
}

fn reason(error: hound::Error) -> String {
    error.to_string()
}

/// What each of so many channels is to the left and to the right.
fn mix(channels: usize) -> Vec<(f64, f64)> {
    let [left, right] = [(1.0, 0.0), (0.0, 1.0)];
    let [beside_left, beside_right] = [(FRAC_1_SQRT_2, 0.0), (0.0, FRAC_1_SQRT_2)];
    let centre = (FRAC_1_SQRT_2, FRAC_1_SQRT_2);
    let behind = (0.5, 0.5);
    let low = (0.0, 0.0);
    match channels {
        3 => vec![left, right, centre],
        4 => vec![left, right, beside_left, beside_right],
        5 => vec![left, right, centre, beside_left, beside_right],
        6 => vec![left, right, centre, low, beside_left, beside_right],
        7 => vec![left, right, centre, low, behind, beside_left, beside_right],
        8 => vec![
            left,
            right,
            centre,
            low,
            beside_left,
            beside_right,
            beside_left,
            beside_right,
        ],
        many => vec![(1.0, 1.0); many],
    }
}

/// `samples` of `from` a second as of `to` a second.
fn resample(samples: &[f32], from: u32, to: u32) -> Vec<f32> {
    let common = greatest_common_divisor(from, to);
    // In the time of `from * to` moments, all sums are exact.
    let [from, to] = [from / common, to / common].map(|rate| rate as usize);
    let band = from.min(to) as f64 * ROLLOFF / (from * to) as f64;
    // Moments to the outermost zero of the window.
    let reach = ZEROS / band;
    let mut resampled = vec![0.0; (samples.len() * to).div_ceil(from)];
    // Samples that are `to` apart lie alike between those that there are.
    for phase in 0..to.min(resampled.len()) {
        let centre = (phase * from) as f64;
        let first = ((centre - reach) / to as f64).ceil() as isize;
        let last = ((centre + reach) / to as f64).floor() as isize;
        let weights: Vec<f64> = (first..=last)
            .map(|place| weight((place as f64 * to as f64 - centre) * band) * band * to as f64)
            .collect();
        for (turn, sum) in resampled[phase..].iter_mut().step_by(to).enumerate() {
            let first = (turn * from) as isize + first;
            let skipped = (-first).max(0) as usize;
            let used = weights.iter().skip(skipped);
            let neighbours = samples.iter().skip(first.max(0) as usize);
            *sum = used
                .zip(neighbours)
                .map(|(weight, sample)| weight * f64::from(*sample))
                .sum::<f64>() as f32;
        }
    }
    resampled
}

/// A sinc under a Hann window that ends at its sixth zero.
fn weight(time: f64) -> f64 {
    let window = (time.clamp(-ZEROS, ZEROS) * PI / ZEROS / 2.0).cos().powi(2);
    match time * PI {
        0.0 => window,
        angle => window * angle.sin() / angle,
    }
}

fn greatest_common_divisor(a: u32, b: u32) -> u32 {
    match b {
        0 => a,
        _ => greatest_common_divisor(b, a % b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tone(rate: u32, hertz: f64, samples: usize) -> Vec<f32> {
        (0..samples)
            .map(|place| (place as f64 * hertz / f64::from(rate) * 2.0 * PI).sin() as f32 * 0.5)
            .collect()
    }

    #[test]
    fn a_tone_stays_itself_at_another_rate_and_what_the_rate_cannot_hold_goes() {
        for (from, to) in [
            (44_100, 32_000),
            (48_000, 32_000),
            (22_050, 32_000),
            (8_000, 32_000),
        ] {
            let sound = Sound::new(from, vec![tone(from, 440.0, from as usize / 4)]).unwrap();
            let there = sound.resampled(to).unwrap();
            assert_eq!(
                there.samples(),
                (sound.samples() * to as usize).div_ceil(from as usize)
            );
            let expected = tone(to, 440.0, there.samples());
            let inner = 100..there.samples() - 100;
            let worst = (there.channels()[0][inner.clone()].iter())
                .zip(&expected[inner])
                .map(|(is, should)| (is - should).abs())
                .fold(0.0, f32::max);
            // The ripple of a window of six zeros.
            assert!(worst < 2e-3, "{from} to {to}: {worst}");
        }
        let above = Sound::new(48_000, vec![tone(48_000, 20_000.0, 12_000)]).unwrap();
        let above = above.resampled(32_000).unwrap();
        let rest = (above.channels()[0][100..7900].iter())
            .fold(0.0, |most: f32, sample| most.max(sample.abs()));
        // 45 dB below, as a window of six zeros has it.
        assert!(rest < 3e-3, "{rest}");
        let sound = Sound::new(32_000, vec![tone(32_000, 440.0, 5)]).unwrap();
        assert_eq!(sound.resampled(32_000).unwrap(), sound);
        assert_eq!(sound.resampled(10), None);
    }

    #[test]
    fn channels_become_two() {
        let sound = |channels: &[f32]| {
            Sound::new(8_000, channels.iter().map(|&each| vec![each]).collect()).unwrap()
        };
        let sides = |channels: &[f32]| {
            let stereo = sound(channels).stereo();
            stereo
                .channels()
                .iter()
                .map(|each| each[0])
                .collect::<Vec<_>>()
        };
        assert_eq!(sides(&[0.5]), [0.5, 0.5]);
        assert_eq!(sides(&[0.5, -0.25]), [0.5, -0.25]);
        // As loud on all sides is as loud in two; the low channel does not count.
        for count in [3, 4, 5, 6, 7, 8, 11] {
            let mut channels = vec![0.5; count];
            if (6..=8).contains(&count) {
                channels[3] = 1.0;
            }
            for side in sides(&channels) {
                assert!((side - 0.5).abs() < 1e-6, "{count}: {side}");
            }
        }
        // Front left, and behind right.
        assert_eq!(sides(&[0.6, 0.0, 0.0, 0.9, 0.0, 0.0])[1], 0.0);
        assert!(sides(&[0.0, 0.0, 0.0, 0.0, 0.0, 0.6])[1] > 0.1);
        assert_eq!(Sound::new(8_000, vec![vec![0.0], vec![]]), None);
        assert_eq!(Sound::new(8_000, vec![]), None);
        assert_eq!(Sound::new(1, vec![vec![]]), None);
    }

    #[test]
    fn files_of_every_kind_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sound.wav");
        let values = [0.0, 0.5, -1.0, 0.25, -0.125, 0.75];
        for (bits, format) in [
            (8, SampleFormat::Int),
            (16, SampleFormat::Int),
            (24, SampleFormat::Int),
            (32, SampleFormat::Int),
            (32, SampleFormat::Float),
        ] {
            let spec = WavSpec {
                channels: 2,
                sample_rate: 32_000,
                bits_per_sample: bits,
                sample_format: format,
            };
            let mut writer = WavWriter::create(&path, spec).unwrap();
            for value in values {
                match format {
                    SampleFormat::Float => writer.write_sample(value as f32).unwrap(),
                    SampleFormat::Int => writer
                        .write_sample((value * 2.0_f64.powi(i32::from(bits) - 1)) as i32)
                        .unwrap(),
                }
            }
            writer.finalize().unwrap();
            let sound = Sound::open(&path).unwrap();
            let expected = [vec![0.0, -1.0, -0.125], vec![0.5, 0.25, 0.75]];
            assert_eq!(sound.channels(), expected, "{bits} {format:?}");
        }
        let sound = Sound::open(&path).unwrap();
        sound.save(&path).unwrap();
        assert_eq!(Sound::open(&path).unwrap(), sound);
        let loud = Sound::new(32_000, vec![vec![1.0, -7.0, f32::NAN]]).unwrap();
        assert_eq!(loud.interleaved().collect::<Vec<_>>(), [32767, -32768, 0]);
    }

    #[test]
    fn files_that_are_no_sound_say_why() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sound.wav");
        let sound = Sound::new(32_000, vec![vec![0.5; 100]; 2]).unwrap();
        sound.save(&path).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            let text = Sound::open(&path).unwrap_err().to_string();
            assert!(text.contains("cannot be read as sound"), "{text}");
        }
        for byte in 0..44 {
            let mut broken = whole.clone();
            broken[byte] ^= 0xff;
            std::fs::write(&path, &broken).unwrap();
            // Whatever it says: not a panic, and never channels that differ.
            if let Ok(sound) = Sound::open(&path) {
                assert!(
                    sound
                        .channels()
                        .iter()
                        .all(|each| each.len() == sound.samples())
                );
            }
        }
        let text = Sound::open(folder.path().join("none.wav")).unwrap_err();
        assert!(text.to_string().contains("none.wav"), "{text}");
    }
}
