//! How fast each pair of channels turns, and along which axis.

use super::embedding::{Embedding, Precision, TooLarge};
use super::sequence::Sequence;

/// The turning of one pair of channels: `omega` radians for each unit of a token's position on `axis`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Frequency {
    /// Which of a token's positions it follows.
    pub axis: usize,
    /// Radians by unit of position.
    pub omega: f64,
}

/// The frequencies `theta^(-2i / dim)` of one axis that turns `dim` channels, `dim / 2` pairs, fastest first.
///
/// In single precision the power is rounded once and then divided into one: what PyTorch's vectorised power gives in all
/// but one of the 436 frequencies of the families here, and there it is one unit of the last place away.
pub(crate) fn omegas(dim: usize, theta: f64, precision: Precision) -> impl Iterator<Item = f64> {
    (0..dim / 2).map(move |pair| match precision {
        Precision::Single => {
            let exponent = (2 * pair) as f32 / dim as f32;
            f64::from(1.0 / theta.powf(f64::from(exponent)) as f32)
        }
        Precision::SingleAngle | Precision::Double => {
            1.0 / theta.powf((2 * pair) as f64 / dim as f64)
        }
    })
}

/// Axes one behind the other: axis `a` turns `dims[a] / 2` pairs of channels by `thetas[a]^(-2i / dims[a])`.
pub fn axes<const AXES: usize>(
    dims: [usize; AXES],
    thetas: [f64; AXES],
    precision: Precision,
) -> Vec<Frequency> {
    dims.iter()
        .zip(thetas)
        .enumerate()
        .flat_map(|(axis, (&dim, theta))| {
            omegas(dim, theta, precision).map(move |omega| Frequency { axis, omega })
        })
        .collect()
}

/// One list of `head_dim / 2` frequencies shared by three axes in turns (interleaved m-rope): pair `k` follows axis
/// `k mod 3` as long as `k` is below three times that axis's section, and axis 0 otherwise.
///
/// Source: [`Ideogram4MRoPE`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/transformer_ideogram4.py#L50).
pub fn interleaved_axes(
    head_dim: usize,
    theta: f64,
    sections: [usize; 3],
    precision: Precision,
) -> Vec<Frequency> {
    omegas(head_dim, theta, precision)
        .enumerate()
        .map(|(pair, omega)| {
            let axis = pair % 3;
            let followed = pair < sections[axis].saturating_mul(3);
            Frequency {
                axis: if followed { axis } else { 0 },
                omega,
            }
        })
        .collect()
}

/// The base that lets an axis of `dim` channels reach `ratio` times as far as it was trained for (NTK-aware scaling):
/// the slowest pair is slowed by `ratio`, the fastest not at all. An axis of two channels or fewer has no slower pair
/// and keeps its base.
pub fn ntk_theta(theta: f64, dim: usize, ratio: f64) -> f64 {
    if dim <= 2 {
        return theta;
    }
    theta * ratio.powf(dim as f64 / (dim - 2) as f64)
}

/// Tokens `0 .. tokens` on one axis that turns `dim` channels: text of models that place it apart from their pictures
/// (MiniT2I, PiD), and language models whose text turns all axes alike (Qwen3-VL).
///
/// # Errors
/// [`TooLarge`].
pub fn one_axis(
    tokens: usize,
    dim: usize,
    theta: f64,
    precision: Precision,
) -> Result<Embedding, TooLarge> {
    let mut sequence = Sequence::new();
    sequence.tokens(tokens, |index| [index as f32]);
    sequence.embed(axes([dim], [theta], precision), precision, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_fall_geometrically_and_axes_follow_each_other() {
        let list = axes([4, 2], [10_000.0; 2], Precision::Double);
        let expected =
            [(0, 1.0), (0, 0.01), (1, 1.0)].map(|(axis, omega)| Frequency { axis, omega });
        assert_eq!(list, expected);
    }

    #[test]
    fn sections_say_how_long_axes_take_turns() {
        let list = interleaved_axes(256, 5e6, [24, 20, 20], Precision::Double);
        let of = |axis| {
            list.iter()
                .filter(|frequency| frequency.axis == axis)
                .count()
        };
        assert_eq!((of(0), of(1), of(2)), (88, 20, 20));
        let first: Vec<usize> = list
            .iter()
            .take(6)
            .map(|frequency| frequency.axis)
            .collect();
        assert_eq!(first, [0, 1, 2, 0, 1, 2]);
        assert!(list[60..].iter().all(|frequency| frequency.axis == 0));
    }

    #[test]
    fn a_wider_reach_slows_the_slowest_pair_by_the_ratio() {
        let slowest = |theta| omegas(42, theta, Precision::Double).last().unwrap();
        let ratio = slowest(1e4) / slowest(ntk_theta(1e4, 42, 4.0));
        assert!((ratio - 4.0).abs() < 1e-12, "{ratio}");
        assert_eq!(ntk_theta(1e4, 2, 4.0), 1e4);
    }
}
