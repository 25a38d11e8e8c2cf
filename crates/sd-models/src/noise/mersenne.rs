//! Noise as PyTorch makes it on a processor.
//!
//! So a seed gives the picture that the reference pipelines give. Sources:
//! [`normal_fill`](https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cpu/DistributionTemplates.h) and
//! [`normal_distribution`](https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/core/DistributionsHelper.h).
//! PyTorch's vector units approximate logarithm, sine and cosine in their own way: values agree to about 3e-6.

use std::f32::consts::TAU;

use rand_mt::Mt;

/// `count` normally distributed numbers from `seed`. Like PyTorch, only the seed's lower 32 bits matter.
pub fn normal(seed: u64, count: usize) -> Vec<f32> {
    Mersenne::new(seed).normal(count)
}

/// A generator that is drawn from several times.
#[derive(Debug, Clone)]
pub(super) struct Mersenne {
    engine: Mt,
    /// The second number of a pair of which a short vector took one.
    left: Option<f64>,
}

impl Mersenne {
    pub(super) fn new(seed: u64) -> Mersenne {
        Mersenne {
            engine: Mt::new(seed as u32),
            left: None,
        }
    }

    pub(super) fn normal(&mut self, count: usize) -> Vec<f32> {
        if count >= BLOCK {
            blocks(&mut self.engine, count)
        } else {
            (0..count).map(|_| self.next_of_pair() as f32).collect()
        }
    }

    /// Short vectors are drawn in double precision, two numbers at a time.
    fn next_of_pair(&mut self) -> f64 {
        if let Some(left) = self.left.take() {
            return left;
        }
        let mut uniform = || {
            let high = u64::from(self.engine.next_u32());
            let bits = high << 32 | u64::from(self.engine.next_u32());
            (bits & ((1 << 53) - 1)) as f64 * (1.0 / (1_u64 << 53) as f64)
        };
        let angle = std::f64::consts::TAU * uniform();
        let radius = (-2.0 * (-uniform()).ln_1p()).sqrt();
        self.left = Some(radius * angle.sin());
        radius * angle.cos()
    }
}

/// Numbers are made in blocks of this many: the first half are radii's sources, the second half angles.
const BLOCK: usize = 16;

fn blocks(engine: &mut Mt, count: usize) -> Vec<f32> {
    let mut uniform = || (engine.next_u32() & ((1 << 24) - 1)) as f32 * (1.0 / (1 << 24) as f32);
    let mut values: Vec<f32> = (0..count).map(|_| uniform()).collect();
    for block in values.as_chunks_mut::<BLOCK>().0 {
        box_muller(block);
    }
    if !count.is_multiple_of(BLOCK) {
        // A last incomplete block is drawn anew, together with the end of the one before it.
        let mut last = [0.0; BLOCK];
        last.fill_with(uniform);
        box_muller(&mut last);
        values[count - BLOCK..].copy_from_slice(&last);
    }
    values
}

fn box_muller(block: &mut [f32; BLOCK]) {
    let (radii, angles) = block.split_at_mut(BLOCK / 2);
    for (a, b) in radii.iter_mut().zip(angles) {
        let radius = (-2.0 * (1.0 - *a).ln()).sqrt();
        let angle = TAU * *b;
        (*a, *b) = (radius * angle.cos(), radius * angle.sin());
    }
}
