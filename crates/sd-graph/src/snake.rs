//! Periodic activations on a processor, each in one pass over the signal. One of the places of this crate with `unsafe` in it.
//!
//! In ggml's operations a snake at twice the rate is two products with matrices that hold hardly anything but zeros, copies around
//! them, and five passes over twice the signal. Here a run of moments stays in the first cache from the first filter to the last.

use sd_ggml_sys as sys;

/// Taps of the filter that brings a signal to twice its rate and back.
pub(crate) const TAPS: usize = 12;

/// Moments of a run.
const RUN: usize = 256;

/// Moments that a filter reaches beyond a run to each side; moments that are bent for a run, and those that are read for them.
const REACH: usize = 3;
const BENT: usize = RUN + 2 * REACH;
const READ: usize = BENT + 2 * REACH;

/// `x + share sin(alpha x)^2` over signals of one channel each, `time` moments long; through `taps` at twice the rate, where there are some.
struct Signals<'a> {
    x: &'a [f32],
    y: &'a mut [f32],
    alpha: f32,
    share: f32,
    taps: Option<&'a [f32; TAPS]>,
}

/// What ggml calls: signals `[n, channels, time]`, `alpha` and `share` `[channels]` and, if there is a fourth source, the taps.
///
/// # Safety
/// `node` is a tensor that `Tensor::snake` recorded, on a processor: it and its sources are contiguous, in single precision, in memory of
/// the processor, and none lies in another.
pub(crate) unsafe extern "C" fn compute(
    node: *mut sys::ggml_tensor,
    thread: i32,
    threads: i32,
    _: *mut std::ffi::c_void,
) {
    // SAFETY: as the caller promises; each thread makes slices of results that are its own alone.
    unsafe {
        let node = &*node;
        let [time, channels, n, _] = node.ne.map(|side| side as usize);
        let source = |at: usize| (*node.src[at]).data.cast::<f32>();
        let (x, alpha, share) = (source(0), source(1), source(2));
        let taps = (!node.src[3].is_null()).then(|| &*source(3).cast::<[f32; TAPS]>());
        let (thread, threads) = (thread as usize, threads as usize);
        let rows = n * channels;
        for row in rows * thread / threads..rows * (thread + 1) / threads {
            let channel = row % channels;
            let y = node.data.cast::<f32>().add(row * time);
            run(Signals {
                x: std::slice::from_raw_parts(x.add(row * time), time),
                y: std::slice::from_raw_parts_mut(y, time),
                alpha: *alpha.add(channel),
                share: *share.add(channel),
                taps,
            });
        }
    }
}

/// Chooses the widest vectors that the processor has.
fn run(signals: Signals<'_>) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { run_avx2(signals) };
    }
    signals.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2(signals: Signals<'_>) {
    signals.run();
}

impl Signals<'_> {
    #[inline(always)]
    fn run(self) {
        let (alpha, share) = (self.alpha, self.share);
        let Some(taps) = self.taps else {
            for (x, y) in self.x.chunks(RUN).zip(self.y.chunks_mut(RUN)) {
                bend(x, y, alpha, share);
            }
            return;
        };
        let last = self.x.len() - 1;
        let (mut read, mut single) = ([0.0; READ], [0.0; BENT]);
        let (mut even, mut odd, mut made) = ([0.0; BENT], [0.0; BENT], [0.0; RUN]);
        for (index, y) in self.y.chunks_mut(RUN).enumerate() {
            let start = index * RUN;
            // Before the signal there is its first moment over and over, behind it its last.
            let before = (2 * REACH).saturating_sub(start);
            let from = (start + before) - 2 * REACH;
            let there = (READ - before).min(self.x.len() - from);
            read[..before].fill(self.x[0]);
            read[before..before + there].copy_from_slice(&self.x[from..from + there]);
            read[before + there..].fill(self.x[last]);
            // Moment `o` of twice as many is twice the sum of moments `s` times tap `o + 5 - 2 s`.
            filter(&read, [11, 9, 7, 5, 3, 1], 0, taps, &mut single);
            bend(&single, &mut even, alpha, share);
            filter(&read, [10, 8, 6, 4, 2, 0], 1, taps, &mut single);
            bend(&single, &mut odd, alpha, share);
            // The same at twice the rate.
            let before = REACH.saturating_sub(start);
            let (first, end) = (even[before], (last + REACH + 1 - start).min(BENT));
            let behind = odd[end - 1];
            for bent in [&mut even, &mut odd] {
                bent[..before].fill(first);
                bent[end..].fill(behind);
            }
            // Moment `q` is the sum of the twice as many moments `s` times tap `s - 2 q + 5`.
            for (at, made) in made.iter_mut().enumerate() {
                let mut sum = 0.0;
                for tap in 0..TAPS / 2 {
                    sum += even[at + 1 + tap] * taps[2 * tap + 1] + odd[at + tap] * taps[2 * tap];
                }
                *made = sum;
            }
            y.copy_from_slice(&made[..y.len()]);
        }
    }
}

/// Twice the sum of six moments from `first` on, times taps.
#[inline(always)]
fn filter(
    read: &[f32; READ],
    which: [usize; TAPS / 2],
    first: usize,
    taps: &[f32; TAPS],
    to: &mut [f32; BENT],
) {
    let taps = which.map(|tap| 2.0 * taps[tap]);
    for (at, to) in to.iter_mut().enumerate() {
        let mut sum = 0.0;
        for (tap, weight) in taps.iter().enumerate() {
            sum += read[at + first + tap] * weight;
        }
        *to = sum;
    }
}

/// `x + share sin(alpha x)^2`.
#[inline(always)]
fn bend(x: &[f32], y: &mut [f32], alpha: f32, share: f32) {
    // Where a multiple of pi cannot be taken away exactly.
    let far = |x: &f32| u32::from((alpha * x).abs().to_bits() > FAR.to_bits());
    if x.iter().fold(0, |any, x| any | far(x)) > 0 {
        for (x, y) in x.iter().zip(y) {
            *y = x + share * (alpha * x).sin().powi(2);
        }
        return;
    }
    for (x, y) in x.iter().zip(y) {
        let sine = sine_up_to_sign(alpha * x);
        *y = x + share * (sine * sine);
    }
}

/// Up to where multiples of pi in three parts are exact. What is no number is beyond it.
const FAR: f32 = 8192.0;

/// The sine of `angle`, or the same with the other sign: what is nearest of the multiples of pi is taken away in three parts, each of
/// which has so few digits that its multiples are exact; what is left is at most pi / 2, for which the series is right to half a digit.
#[inline(always)]
fn sine_up_to_sign(angle: f32) -> f32 {
    /// Added and taken away, it leaves whole numbers.
    const WHOLE: f32 = 12_582_912.0;
    const PI: [f32; 3] = [3.140_625, 9.675_026e-4, 1.509_957_9e-7];
    let count = (angle * std::f32::consts::FRAC_1_PI + WHOLE) - WHOLE;
    let left = ((angle - count * PI[0]) - count * PI[1]) - count * PI[2];
    let square = left * left;
    let mut series = 1.0 / 6_227_020_800.0;
    for term in [
        -1.0 / 39_916_800.0,
        1.0 / 362_880.0,
        -1.0 / 5_040.0,
        1.0 / 120.0,
        -1.0 / 6.0,
    ] {
        series = series * square + term;
    }
    left + left * square * series
}
