//! Noise as PyTorch makes it on a graphics card of NVIDIA.
//!
//! Sources: Salmon and others, Parallel Random Numbers: As Easy as 1, 2, 3 (2011) for the generator; NVIDIA's description of
//! [cuRAND's device functions](https://docs.nvidia.com/cuda/curand/device-api-overview.html) and PyTorch's
//! [layout of threads](https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cuda/DistributionTemplates.h) for
//! which number goes where. Cards approximate sine and cosine in their own way: values agree to about 1e-6.

use std::f32::consts::TAU;
use std::num::NonZeroU64;

/// Philox 4x32 with ten rounds: four random numbers for a counter and a key.
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let product = |a: u32, b: u32| {
        let product = u64::from(a) * u64::from(b);
        ((product >> 32) as u32, product as u32)
    };
    for round in 0..10 {
        if round > 0 {
            key = [
                key[0].wrapping_add(0x9E37_79B9),
                key[1].wrapping_add(0xBB67_AE85),
            ];
        }
        let (first_high, first_low) = product(0xD251_1F53, counter[0]);
        let (second_high, second_low) = product(0xCD9E_8D57, counter[2]);
        counter = [
            second_high ^ counter[1] ^ key[0],
            second_low,
            first_high ^ counter[3] ^ key[1],
            first_low,
        ];
    }
    counter
}

/// A generator that is drawn from several times.
#[derive(Debug, Clone)]
pub(super) struct Philox {
    seed: u64,
    threads: Option<NonZeroU64>,
    /// How often four numbers were taken from each thread's sequence.
    turns: u64,
}

impl Philox {
    pub(super) fn new(seed: u64, threads: Option<NonZeroU64>) -> Philox {
        Philox {
            seed,
            threads,
            turns: 0,
        }
    }

    /// Each thread has a sequence of its own, whose numbers come four at a time. The first numbers of all threads lie side
    /// by side, then the second ones, and so on. What is drawn later goes on behind the last four that any thread took.
    pub(super) fn normal(&mut self, count: usize) -> Vec<f32> {
        let threads = self.threads.map_or(count as u64, NonZeroU64::get).max(1);
        let numbers = normal((self.seed, self.turns), count, threads);
        let places = (count as u64).div_ceil(threads);
        self.turns = self.turns.wrapping_add(places.div_ceil(4));
        numbers
    }
}

/// `count` normally distributed numbers from `seed`, drawn by so many `threads` that took four numbers `turns` times before.
fn normal((seed, turns): (u64, u64), count: usize, threads: u64) -> Vec<f32> {
    let key = halves(seed);
    (0..count as u64)
        .map(|index| {
            let (place, thread) = (index / threads, index % threads);
            let (turn, sequence) = (halves(turns.wrapping_add(place / 4)), halves(thread));
            let [a, b, c, d] = philox([turn[0], turn[1], sequence[0], sequence[1]], key);
            let (radius, angle) = match place % 4 {
                0 | 1 => (a, b),
                _ => (c, d),
            };
            box_muller(radius, angle)[(place % 2) as usize]
        })
        .collect()
}

fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// Two normally distributed numbers from two uniformly distributed ones.
fn box_muller(x: u32, y: u32) -> [f32; 2] {
    const STEP: f32 = 1.0 / (1_u64 << 32) as f32;
    let middle = |number: u32, step: f32| (number as f32).mul_add(step, 0.5 * step);
    let radius = (-2.0 * middle(x, STEP).ln()).sqrt();
    let (sine, cosine) = middle(y, STEP * TAU).sin_cos();
    [radius * sine, radius * cosine]
}
