//! Activations at twice the rate.
//!
//! What an activation adds above half the rate would fold back into what can be heard. So the signal is brought to twice the rate by
//! a low-pass filter of 12 taps, bent, and brought back by the same filter.
//!
//! Both ways are products: a block of time with its neighbours' ends, times a matrix that has the filter along its diagonals. A
//! convolution of each channel by itself would multiply as few numbers as the filter has, and every device is slow at that. A processor
//! has an operation that does all of it a run of moments at a time.

use std::f64::consts::PI;

use sd_graph::{Graph, Scope, Tensor};

use super::layers::{SnakeBeta, Way};

/// Taps of the filter.
const TAPS: usize = 12;

/// Most moments of a block: rows are then 48 and 96 numbers, whole vectors of which hardly any is multiplied by zero.
const BLOCK: usize = 40;

/// [`SnakeBeta`] at twice the rate.
#[derive(Debug)]
pub(super) struct Activation {
    act: SnakeBeta,
}

impl Activation {
    pub(super) fn new(scope: &Scope<'_>, channels: usize) -> Activation {
        // The filters are in the files, and the same everywhere.
        scope.ignore("upsample.filter");
        scope.ignore("downsample.lowpass.filter");
        Activation {
            act: SnakeBeta::new(&scope.sub("act"), channels),
        }
    }

    /// `rates` are those for signals as long as `x`.
    pub(super) fn forward<'g>(&self, x: Tensor<'g>, rates: &Rates<'g>) -> Tensor<'g> {
        let (up, down) = match rates {
            Rates::Matrices { up, down } => (up, down),
            Rates::Taps(taps) => return self.act.forward_doubled(x, *taps),
        };
        let [n, channels, time] = [0, 1, 2].map(|axis| x.dim(axis));
        let double = up.forward(x.reshape([n * channels, time]));
        let bent = self.act.forward(double.reshape([n, channels, 2 * time]));
        let single = down.forward(bent.reshape([n * channels, 2 * time]));
        single.reshape([n, channels, time])
    }
}

/// To twice the rate and back.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rates<'g> {
    /// By products.
    Matrices {
        up: Resampling<'g>,
        down: Resampling<'g>,
    },
    /// By an operation that takes the filter itself.
    Taps(Tensor<'g>),
}

impl<'g> Rates<'g> {
    /// Those for signals of `time` moments.
    pub(super) fn new(g: Graph<'g>, time: usize, way: Way) -> Rates<'g> {
        let filter = filter();
        if way == Way::Processor {
            return Rates::Taps(g.constant(&filter.map(|tap| tap as f32), [TAPS]));
        }
        let tap = |index: isize| {
            let tap = usize::try_from(index).ok().and_then(|tap| filter.get(tap));
            tap.map_or(0.0, |&tap| tap as f32)
        };
        let block = block_of(time);
        Rates::Matrices {
            // Moment `o` of twice as many is twice the sum of moments `s` times tap `o + 5 - 2 s`.
            up: Resampling::new(g, (block, 2 * block), 3, |to, from| {
                2.0 * tap(to + 5 - 2 * from)
            }),
            // Moment `q` is the sum of the twice as many moments `s` times tap `s - 2 q + 5`.
            down: Resampling::new(g, (2 * block, block), 5, |to, from| tap(from - 2 * to + 5)),
        }
    }
}

/// Blocks of a signal times a matrix.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resampling<'g> {
    /// `[moments of a block of the result, block + behind + before]`.
    matrix: Tensor<'g>,
    block: usize,
    before: usize,
    behind: usize,
}

impl<'g> Resampling<'g> {
    /// From blocks of `from` moments, and `reach` more to each side, to blocks of `to`: `weight` is what a moment of the result has of
    /// one of the signal, both counted from the beginning of their blocks.
    fn new(
        g: Graph<'g>,
        (from, to): (usize, usize),
        reach: usize,
        weight: impl Fn(isize, isize) -> f32,
    ) -> Resampling<'g> {
        // Rows of whole vectors are multiplied faster; what is too much is multiplied by zero.
        let row = from + 2 * reach;
        let more = row.next_multiple_of(16) - row;
        let before = if reach + more <= from {
            reach + more
        } else {
            reach
        };
        let row = before + from + reach;
        let weights: Vec<f32> = (0..to * row)
            .map(|at| {
                // What is before the block stands last.
                let (result, place) = ((at / row) as isize, at % row);
                let is_before = place >= from + reach;
                let wrap = if is_before { row as isize } else { 0 };
                weight(result, place as isize - wrap)
            })
            .collect();
        Resampling {
            matrix: g.constant(&weights, [to, row]),
            block: from,
            before,
            behind: reach,
        }
    }

    /// `[n, t]` to `[n, t * to / from]`. Before the signal there is its first moment over and over, behind it its last.
    fn forward(&self, x: Tensor<'g>) -> Tensor<'g> {
        let (n, block) = (x.dim(0), self.block);
        let blocks = x.dim(1) / block;
        let x = x.reshape([n, blocks, block]);
        let repeated = |at: usize, moment: usize, count: usize| {
            let one = x.slice(1, at, 1).slice(2, moment, 1);
            one.upscale_nearest_by([1, count])
        };
        let mut before = repeated(0, 0, self.before);
        let mut behind = repeated(blocks - 1, block - 1, self.behind);
        if blocks > 1 {
            let ends = x.slice(2, block - self.before, self.before);
            before = before.concat(ends.slice(1, 0, blocks - 1), 1);
            let begins = x.slice(2, 0, self.behind).slice(1, 1, blocks - 1);
            behind = begins.concat(behind, 1);
        }
        // Both ends on one side: the signal itself is then copied once.
        let row = block + self.behind + self.before;
        let rows = x.concat(behind.concat(before, 2), 2);
        let all = rows
            .reshape([n * blocks, row])
            .matmul_transposed(self.matrix);
        all.reshape([n, blocks * self.matrix.dim(0)])
    }
}

/// Moments of a block for signals of `time`: as many as divide it and reach as far as the filter, or all. Multiples of four if there are
/// any: products with other matrices are several times as slow on processors.
fn block_of(time: usize) -> usize {
    let fits = |block: &usize| time.is_multiple_of(*block);
    let fours = (8..=BLOCK).rev().step_by(4).find(fits);
    let any = || (5..=BLOCK).rev().find(fits);
    fours.or_else(any).unwrap_or(time)
}

/// A sinc that passes half of the band, under a Kaiser window.
fn filter() -> [f64; TAPS] {
    let half = (TAPS / 2) as f64;
    // 51 dB are taken away of what is 0.3 of the band above the half.
    let attenuation = 2.285 * (half - 1.0) * PI * 4.0 * 0.3 + 7.95;
    let beta = 0.1102 * (attenuation - 8.7);
    let taps: [f64; TAPS] = std::array::from_fn(|tap| {
        let place = 2.0 * tap as f64 / (TAPS - 1) as f64 - 1.0;
        let window = bessel(beta * (1.0 - place * place).max(0.0).sqrt()) / bessel(beta);
        let angle = 0.5 * PI * (tap as f64 - half + 0.5);
        window * angle.sin() / angle
    });
    let sum: f64 = taps.iter().sum();
    taps.map(|tap| tap / sum)
}

/// The modified Bessel function of the first kind, of order 0, by its series.
fn bessel(x: f64) -> f64 {
    let (mut term, mut sum) = (1.0, 1.0);
    for k in 1..64 {
        term *= (x / 2.0 / f64::from(k)).powi(2);
        sum += term;
    }
    sum
}

/// Whether `stored` is the filter that all activations are computed with.
pub(super) fn is_filter(stored: &[f32]) -> bool {
    let near = |(stored, tap): (&f32, &f64)| (f64::from(*stored) - tap).abs() < 1e-4;
    stored.len() == TAPS && stored.iter().zip(&filter()).all(near)
}
