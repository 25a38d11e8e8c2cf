//! Resizing pictures to the reference's own numbers: its pictures go through Pillow, which computes in whole numbers.

use image::RgbaImage;

/// Bits behind the point of a weight, as Pillow has them: eight bits of a channel and two for sums go on top.
const FRACTION_BITS: u32 = 32 - 8 - 2;

/// How pixels are weighed by their distance.
#[derive(Debug, Clone, Copy)]
struct Filter {
    /// Pixels on each side that count, where pixels do not become fewer.
    support: f64,
    weight: fn(f64) -> f64,
}

/// The Lanczos filter of three lobes.
const LANCZOS: Filter = Filter {
    support: 3.0,
    weight: |x| {
        let sinc = |x: f64| {
            let x = x * std::f64::consts::PI;
            if x == 0.0 { 1.0 } else { x.sin() / x }
        };
        if (-3.0..3.0).contains(&x) {
            sinc(x) * sinc(x / 3.0)
        } else {
            0.0
        }
    },
};

/// The cubic filter with a slope of -1/2 at its first zero.
const BICUBIC: Filter = Filter {
    support: 2.0,
    weight: |x| {
        const A: f64 = -0.5;
        let x = x.abs();
        if x < 1.0 {
            ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
        } else if x < 2.0 {
            (((x - 5.0) * x + 8.0) * x - 4.0) * A
        } else {
            0.0
        }
    },
};

/// A picture resized by the Lanczos filter of three lobes. Colours count by their alpha, so that what cannot be seen does
/// not bleed into what can; with the same size it is the picture itself.
pub(crate) fn lanczos(picture: &RgbaImage, width: u32, height: u32) -> RgbaImage {
    resized(picture, (width, height), LANCZOS)
}

/// As [`lanczos`], by the cubic filter.
pub(crate) fn bicubic(picture: &RgbaImage, width: u32, height: u32) -> RgbaImage {
    resized(picture, (width, height), BICUBIC)
}

/// A picture as it looks on white paper.
pub(crate) fn opaque(picture: &RgbaImage) -> RgbaImage {
    let mut picture = picture.clone();
    for pixel in picture.pixels_mut() {
        let [r, g, b, alpha] = pixel.0;
        let [r, g, b] = [r, g, b].map(|channel| over_white(channel, alpha));
        pixel.0 = [r, g, b, 255];
    }
    picture
}

fn resized(picture: &RgbaImage, (width, height): (u32, u32), filter: Filter) -> RgbaImage {
    if picture.dimensions() == (width, height) {
        return picture.clone();
    }
    if picture.is_empty() {
        return RgbaImage::new(width, height);
    }
    let pixels: Vec<[u8; 4]> = picture
        .pixels()
        .map(|pixel| premultiplied(pixel.0))
        .collect();
    let (columns, rows) = (picture.width() as usize, picture.height() as usize);
    let (width, height) = (width as usize, height as usize);
    let pixels = match is_shortened_first((columns, rows), (width, height)) {
        true => widened(
            shortened(pixels, columns, (rows, height), filter),
            (columns, width),
            filter,
        ),
        false => shortened(
            widened(pixels, (columns, width), filter),
            width,
            (rows, height),
            filter,
        ),
    };
    let mut resized = RgbaImage::new(width as u32, height as u32);
    for (to, from) in resized.pixels_mut().zip(pixels) {
        to.0 = straight(from);
    }
    resized
}

/// Whether Pillow changes the number of rows before that of columns, which rounds other numbers: as of version 13, where many rows
/// go and few columns do. Found by trying sizes.
fn is_shortened_first((columns, rows): (usize, usize), (width, height): (usize, usize)) -> bool {
    let gone = |from: usize, to: usize| from as i64 - to as i64;
    gone(rows, height) > 0 && gone(rows, height) > 2 * gone(columns, width)
}

/// Each row of `from` pixels as one of `to`.
fn widened(pixels: Vec<[u8; 4]>, (from, to): (usize, usize), filter: Filter) -> Vec<[u8; 4]> {
    if from == to {
        return pixels;
    }
    let taps = taps(from, to, filter);
    pixels
        .chunks_exact(from.max(1))
        .flat_map(|line| taps.iter().map(|tap| tap.apply(|index| line[index])))
        .collect()
}

/// Each column of `from` pixels as one of `to`, in rows of `width`.
fn shortened(
    pixels: Vec<[u8; 4]>,
    width: usize,
    (from, to): (usize, usize),
    filter: Filter,
) -> Vec<[u8; 4]> {
    if from == to {
        return pixels;
    }
    let column = |x: usize| {
        let pixels = &pixels;
        move |y: usize| pixels[y * width + x]
    };
    taps(from, to, filter)
        .iter()
        .flat_map(|tap| (0..width).map(move |x| (tap, x)))
        .map(|(tap, x)| tap.apply(column(x)))
        .collect()
}

/// Red, green and blue of a picture as it looks on white paper, `[3, height, width]` one behind the other.
pub(crate) fn on_white(picture: &RgbaImage) -> Vec<u8> {
    (0..3)
        .flat_map(|channel| picture.pixels().map(move |pixel| (channel, pixel.0)))
        .map(|(channel, pixel)| over_white(pixel[channel], pixel[3]))
        .collect()
}

fn over_white(channel: u8, alpha: u8) -> u8 {
    let alpha = u32::from(alpha);
    by_255(u32::from(channel) * alpha + 255 * (255 - alpha))
}

/// `n / 255`, rounded, for products of two bytes.
fn by_255(n: u32) -> u8 {
    let n = n + 128;
    // At most 255 where `n` was at most 255 * 255.
    (((n >> 8) + n) >> 8) as u8
}

fn premultiplied([r, g, b, alpha]: [u8; 4]) -> [u8; 4] {
    let [r, g, b] = [r, g, b].map(|channel| by_255(u32::from(channel) * u32::from(alpha)));
    [r, g, b, alpha]
}

fn straight([r, g, b, alpha]: [u8; 4]) -> [u8; 4] {
    if matches!(alpha, 0 | 255) {
        return [r, g, b, alpha];
    }
    let [r, g, b] = [r, g, b].map(|channel| {
        let colour = 255 * u32::from(channel) / u32::from(alpha);
        u8::try_from(colour).unwrap_or(u8::MAX)
    });
    [r, g, b, alpha]
}

/// What one pixel of the result is made of: pixels from `first` on, and how much of each.
#[derive(Debug, Clone, PartialEq)]
struct Tap {
    first: usize,
    weights: Vec<i64>,
}

impl Tap {
    fn apply(&self, pixel: impl Fn(usize) -> [u8; 4]) -> [u8; 4] {
        let half = 1_i64 << (FRACTION_BITS - 1);
        let mut sums = [half; 4];
        for (index, weight) in self.weights.iter().enumerate() {
            for (sum, channel) in sums.iter_mut().zip(pixel(self.first + index)) {
                *sum += weight * i64::from(channel);
            }
        }
        sums.map(|sum| (sum >> FRACTION_BITS).clamp(0, 255) as u8)
    }
}

/// What each of `to` pixels is made of where there are `from`.
fn taps(from: usize, to: usize, filter: Filter) -> Vec<Tap> {
    let scale = from as f64 / to as f64;
    // Where pixels become fewer, the filter is as wide as those that become one.
    let width = scale.max(1.0);
    let support = filter.support * width;
    (0..to)
        .map(|index| {
            let centre = (index as f64 + 0.5) * scale;
            let first = (centre - support + 0.5).max(0.0) as usize;
            let end = ((centre + support + 0.5) as usize).min(from);
            let weights: Vec<f64> = (first..end)
                .map(|pixel| (filter.weight)((pixel as f64 - centre + 0.5) * (1.0 / width)))
                .collect();
            let sum: f64 = weights.iter().sum();
            let whole = |weight: &f64| {
                let weight = if sum == 0.0 { *weight } else { weight / sum };
                (weight * f64::from(1_u32 << FRACTION_BITS)).round() as i64
            };
            Tap {
                first,
                weights: weights.iter().map(whole).collect(),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_colour_stays_and_what_is_hidden_does_not_bleed() {
        let red = RgbaImage::from_pixel(7, 5, image::Rgba([200, 10, 30, 255]));
        let resized = lanczos(&red, 64, 32);
        assert!(resized.pixels().all(|pixel| pixel.0 == [200, 10, 30, 255]));
        // Green that nobody sees beside red that everybody does.
        let mut half = red.clone();
        for pixel in half.enumerate_pixels_mut().filter(|(x, ..)| *x > 3) {
            pixel.2.0 = [0, 255, 0, 0];
        }
        let resized = lanczos(&half, 64, 32);
        assert!(
            resized
                .pixels()
                .all(|pixel| pixel.0[1] <= 12 || pixel.0[3] == 0)
        );
        assert_eq!(lanczos(&half, 7, 5), half);
    }

    #[test]
    fn rows_come_first_where_pillow_has_them_first() {
        // Of sizes as (columns, rows) to (width, height), by comparing Pillow 13.0.0 with itself in two steps.
        for (from, to, is_first) in [
            ((40, 60), (64, 32), true),
            ((75, 50), (64, 32), false),
            ((72, 50), (64, 32), true),
            ((73, 50), (64, 32), false),
            ((8, 20), (64, 32), false),
            ((300, 600), (299, 599), false),
        ] {
            assert_eq!(is_shortened_first(from, to), is_first, "{from:?} {to:?}");
        }
    }

    #[test]
    fn white_paper_shows_where_nothing_is() {
        let picture = |pixel| RgbaImage::from_pixel(1, 1, image::Rgba(pixel));
        assert_eq!(on_white(&picture([9, 8, 7, 0])), [255, 255, 255]);
        assert_eq!(on_white(&picture([9, 8, 7, 255])), [9, 8, 7]);
        assert_eq!(on_white(&picture([0, 100, 255, 128])), [127, 177, 255]);
    }
}
