//! What a picture looks like while its steps are taken.

use crate::canvas::Canvas;
use crate::noise;

/// How latents are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum PreviewBy {
    /// A linear map from the channels of a latent to one pixel: next to no time, and a small picture without detail. The map is
    /// fitted to the checkpoint's own decoder when it is first needed, which takes about a fifth of the time in which a
    /// picture of 1024x1024 is decoded.
    #[default]
    Linear,
    /// The decoder: the picture in full size, and its time and memory for every preview.
    Decoder,
}

/// Latents that the map is fitted to: squares of this side, of blocks of equal latents, each with another.
const SIDE: usize = 8;

/// Squares by the side of their blocks. Large blocks show a latent's colour, small ones what its neighbours add; each side
/// has its share, and together there are more latents than a decoder has channels.
const BLOCKS: [usize; 12] = [4, 4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2];

/// Colours of a pixel.
const COLOURS: usize = 4;

/// A linear map from latents to red, green, blue and alpha from -1 to 1, with a constant.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LinearMap {
    /// `[channels + 1, 4]`; the last row is the constant.
    rows: Vec<[f32; COLOURS]>,
}

/// Where the map is fitted: a canvas for the decoder.
pub(crate) fn canvas() -> Canvas {
    Canvas::from((SIDE, SIDE))
}

/// Latents `[tokens, channels]` of [`canvas`] to fit the map to, one square after the other; always the same.
pub(crate) fn squares(channels: usize) -> impl Iterator<Item = Vec<f32>> {
    BLOCKS.into_iter().enumerate().map(move |(seed, block)| {
        let blocks = SIDE / block;
        let values = noise::normal(seed as u64, blocks * blocks * channels);
        let token = |(row, column): (usize, usize)| {
            let start = (row / block * blocks + column / block) * channels;
            values[start..start + channels].to_vec()
        };
        (0..SIDE)
            .flat_map(|row| (0..SIDE).map(move |column| (row, column)))
            .flat_map(token)
            .collect()
    })
}

/// Gathers what a decoder makes of latents, for the map of least squares.
#[derive(Debug)]
pub(crate) struct Fitting {
    channels: usize,
    /// Sums of products of latents with each other, `[channels + 1, channels + 1]`, and with colours, `[channels + 1, 4]`.
    latents: Vec<f64>,
    colours: Vec<[f64; COLOURS]>,
    count: usize,
}

impl Fitting {
    pub(crate) fn new(channels: usize) -> Fitting {
        let rows = channels + 1;
        Fitting {
            channels,
            latents: vec![0.0; rows * rows],
            colours: vec![[0.0; COLOURS]; rows],
            count: 0,
        }
    }

    /// Adds latents `[tokens, channels]` of [`canvas`] and their picture `[4, height, width]`, whose pixels are averaged for
    /// each latent.
    pub(crate) fn add(&mut self, latents: &[f32], picture: &[f32]) {
        let rows = self.channels + 1;
        let scale = (picture.len() / COLOURS).isqrt() / SIDE;
        let width = SIDE * scale;
        for (token, latent) in latents.chunks_exact(self.channels).enumerate() {
            let (top, left) = (token / SIDE * scale, token % SIDE * scale);
            let mut colour = [0.0; COLOURS];
            for (colour, plane) in colour.iter_mut().zip(picture.chunks_exact(width * width)) {
                let lines = plane.chunks_exact(width).skip(top).take(scale);
                let pixels = lines.flat_map(|line| &line[left..left + scale]);
                let sum: f64 = pixels.map(|&pixel| f64::from(pixel)).sum();
                *colour = sum / (scale * scale) as f64;
            }
            let latent: Vec<f64> = latent
                .iter()
                .map(|&value| value.into())
                .chain([1.0])
                .collect();
            for (row, value) in latent.iter().enumerate() {
                for (sum, other) in self.latents[row * rows..][..rows].iter_mut().zip(&latent) {
                    *sum += value * other;
                }
                for (sum, colour) in self.colours[row].iter_mut().zip(colour) {
                    *sum += value * colour;
                }
            }
            self.count += 1;
        }
    }

    /// The map; none if nothing was added or no number came of it.
    pub(crate) fn finish(mut self) -> Option<LinearMap> {
        let rows = self.channels + 1;
        // Latents that hardly differ would make weights of any size.
        let ridge = 1e-3 * self.count as f64;
        for row in 0..rows {
            self.latents[row * rows + row] += ridge;
        }
        // Elimination without pivots: the matrix is symmetric and positive.
        for pivot in 0..rows {
            let divisor = self.latents[pivot * rows + pivot];
            for row in (0..rows).filter(|&row| row != pivot) {
                let factor = self.latents[row * rows + pivot] / divisor;
                for column in pivot..rows {
                    self.latents[row * rows + column] -=
                        factor * self.latents[pivot * rows + column];
                }
                for colour in 0..COLOURS {
                    self.colours[row][colour] -= factor * self.colours[pivot][colour];
                }
            }
        }
        let rows: Vec<[f32; COLOURS]> = self
            .colours
            .iter()
            .enumerate()
            .map(|(row, sums)| sums.map(|sum| (sum / self.latents[row * rows + row]) as f32))
            .collect();
        let is_finite = rows.iter().flatten().all(|weight| weight.is_finite());
        (self.count > 0 && is_finite).then_some(LinearMap { rows })
    }
}

impl LinearMap {
    /// One pixel for each of latents `[tokens, channels]`: planes `[4, tokens]` from -1 to 1.
    pub(crate) fn planes(&self, latents: &[f32]) -> Vec<f32> {
        let Some((constant, weights)) = self.rows.split_last() else {
            return Vec::new();
        };
        (0..COLOURS)
            .flat_map(|colour| {
                let tokens = latents.chunks_exact(weights.len());
                tokens.map(move |latent| {
                    let products = latent.iter().zip(weights);
                    let sum: f32 = products.map(|(value, row)| value * row[colour]).sum();
                    (sum + constant[colour]).clamp(-1.0, 1.0)
                })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decoder_that_is_a_map_is_found() {
        let channels = 5;
        let weight = |channel: usize, colour: usize| {
            0.1 * (channel as f32 + 1.0)
                * if (channel + colour).is_multiple_of(2) {
                    1.0
                } else {
                    -1.0
                }
        };
        let colour_of = |latent: &[f32], colour: usize| {
            let products = latent.iter().enumerate();
            let sum: f32 = products
                .map(|(channel, value)| weight(channel, colour) * value)
                .sum();
            sum + 0.2 * colour as f32
        };
        let mut fitting = Fitting::new(channels);
        let scale = 3;
        for latents in squares(channels) {
            assert_eq!(latents.len(), SIDE * SIDE * channels);
            let mut picture = Vec::new();
            for colour in 0..COLOURS {
                for y in 0..SIDE * scale {
                    for x in 0..SIDE * scale {
                        let token = y / scale * SIDE + x / scale;
                        // What averages to nothing within a latent.
                        let dither = [0.5, -0.5, 0.0][x % scale];
                        picture.push(
                            colour_of(&latents[token * channels..][..channels], colour) + dither,
                        );
                    }
                }
            }
            fitting.add(&latents, &picture);
        }
        let map = fitting.finish().unwrap();
        let latents = [0.1, -0.2, 0.3, 0.2, -0.1, 0.3, 0.1, -0.3, 0.0, 0.1];
        let planes = map.planes(&latents);
        for (index, &found) in planes.iter().enumerate() {
            let (colour, token) = (index / 2, index % 2);
            let wanted = colour_of(&latents[token * channels..][..channels], colour);
            // The ridge holds weights back by a thousandth.
            assert!((found - wanted).abs() <= 2e-3, "{index}: {found} {wanted}");
        }
        assert_eq!(Fitting::new(3).finish(), None);
    }
}
