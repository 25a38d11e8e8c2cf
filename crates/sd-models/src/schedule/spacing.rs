//! Levels between a first and a last one.

/// `steps` numbers from 0 to 1, both included; 0 alone if there is one.
fn ramp(steps: usize) -> impl Iterator<Item = f64> {
    let last = steps.saturating_sub(1).max(1) as f64;
    (0..steps).map(move |step| step as f64 / last)
}

/// Evenly spaced in the seventh root: Karras and others, Elucidating the Design Space of Diffusion-Based Generative Models
/// (2022), equation 5.
pub(super) fn karras(first: f64, last: f64, steps: usize) -> Vec<f64> {
    const RHO: f64 = 7.0;
    let (top, bottom) = (first.powf(RHO.recip()), last.powf(RHO.recip()));
    ramp(steps)
        .map(|at| (top + at * (bottom - top)).powf(RHO))
        .collect()
}

/// Evenly spaced in the logarithm.
pub(super) fn exponential(first: f64, last: f64, steps: usize) -> Vec<f64> {
    let (top, bottom) = (first.ln(), last.ln());
    ramp(steps)
        .map(|at| (top + at * (bottom - top)).exp())
        .collect()
}

/// Quantiles of the beta distribution: Lee and others, Beta Sampling is All You Need (2024).
pub(super) fn beta(first: f64, last: f64, steps: usize) -> Vec<f64> {
    ramp(steps)
        .map(|at| last + beta_quantile(1.0 - at) * (first - last))
        .collect()
}

/// Both parameters of the beta distribution.
const SHAPE: f64 = 0.6;

/// Below which number the beta distribution has the share `p`. It is symmetric, so only its lower half is searched.
fn beta_quantile(p: f64) -> f64 {
    if p > 0.5 {
        return 1.0 - beta_quantile(1.0 - p);
    }
    let wanted = 2.0 * p * incomplete_beta(0.5);
    let (mut low, mut high) = (0.0, 0.5);
    // Halving a number from 0 to 1 so often leaves nothing of it.
    for _ in 0..64 {
        let middle = 0.5 * (low + high);
        if incomplete_beta(middle) < wanted {
            low = middle;
        } else {
            high = middle;
        }
    }
    0.5 * (low + high)
}

/// The integral of `(t (1 - t))^(SHAPE - 1)` from 0 to `x`, which is at most one half: `(1 - t)^(SHAPE - 1)` as a series in
/// `t`, each term less than half the one before.
fn incomplete_beta(x: f64) -> f64 {
    let (mut term, mut sum) = (1.0, 0.0);
    for n in 0..64 {
        let n = f64::from(n);
        sum += term / (SHAPE + n);
        term *= (1.0 - SHAPE + n) / (n + 1.0) * x;
    }
    x.powf(SHAPE) * sum
}
