//! Rotary position embeddings: angles on the host, rotation in the graph.
//!
//! An embedding is a table of cosines and sines, `[tokens, channels / 2]` each, one pair per pair of channels that is
//! rotated together. Which channels make a pair differs between models: neighbours `(2i, 2i + 1)` or halves
//! `(i, i + channels / 2)`.

use sd_graph::{Graph, Tensor};

/// Cosines and sines for a sequence of tokens, `[tokens, pairs]` each, row by row.
#[derive(Debug, Clone, PartialEq)]
pub struct RotaryEmbedding {
    tokens: usize,
    pairs: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RotaryEmbedding {
    /// The embedding of tokens at `positions` (one number per token and axis), where axis `a` turns `axes_dim[a] / 2`
    /// pairs of channels by `position * theta^(-2i / axes_dim[a])`, the axes' pairs one behind the other.
    ///
    /// Angles are computed in single precision, as the reference does.
    pub fn new<const AXES: usize>(
        positions: &[[i32; AXES]],
        axes_dim: [usize; AXES],
        theta: f32,
    ) -> RotaryEmbedding {
        let frequencies: Vec<(usize, f32)> = axes_dim
            .iter()
            .enumerate()
            .flat_map(|(axis, &dim)| {
                (0..dim / 2)
                    .map(move |pair| (axis, 1.0 / theta.powf((2 * pair) as f32 / dim as f32)))
            })
            .collect();
        let pairs = frequencies.len();
        let mut cos = Vec::with_capacity(positions.len() * pairs);
        let mut sin = Vec::with_capacity(positions.len() * pairs);
        for position in positions {
            for &(axis, frequency) in &frequencies {
                let angle = position[axis] as f32 * frequency;
                cos.push(angle.cos());
                sin.push(angle.sin());
            }
        }
        RotaryEmbedding {
            tokens: positions.len(),
            pairs,
            cos,
            sin,
        }
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Pairs of channels that are turned.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// Cosines, `[tokens, pairs]`.
    pub fn cos(&self) -> &[f32] {
        &self.cos
    }

    /// Sines, `[tokens, pairs]`.
    pub fn sin(&self) -> &[f32] {
        &self.sin
    }

    /// The tables as constants of a graph, ready to turn `[tokens, heads, channels]`.
    pub fn in_graph<'g>(&self, g: Graph<'g>) -> Rotation<'g> {
        let shape = [self.tokens, 1, self.pairs];
        Rotation {
            cos: g.constant(&self.cos, shape),
            sin: g.constant(&self.sin, shape),
            pairs: self.pairs,
        }
    }
}

/// A rotary embedding inside a graph.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'g> {
    cos: Tensor<'g>,
    sin: Tensor<'g>,
    pairs: usize,
}

impl<'g> Rotation<'g> {
    /// Turns neighbouring channels `(2i, 2i + 1)` of `x [tokens, heads, channels]`.
    #[track_caller]
    pub fn neighbours(&self, x: Tensor<'g>) -> Tensor<'g> {
        let (tokens, heads) = (x.dim(0), x.dim(1));
        let [even, odd] = x.reshape([tokens, heads, self.pairs, 2]).chunk(3);
        let (even, odd) = (
            even.reshape([tokens, heads, self.pairs]),
            odd.reshape([tokens, heads, self.pairs]),
        );
        let (even, odd) = self.turn(even, odd);
        let shape = [tokens, heads, self.pairs, 1];
        even.reshape(shape)
            .concat(odd.reshape(shape), 3)
            .reshape([tokens, heads, 2 * self.pairs])
    }

    /// Turns channels that lie half a head apart, `(i, i + channels / 2)`, of `x [tokens, heads, channels]`.
    #[track_caller]
    pub fn halves(&self, x: Tensor<'g>) -> Tensor<'g> {
        let [first, second] = x.chunk(2);
        let (first, second) = self.turn(first, second);
        first.concat(second, 2)
    }

    /// Turns points `(a, b)` by the embedding's angles.
    #[track_caller]
    fn turn(&self, a: Tensor<'g>, b: Tensor<'g>) -> (Tensor<'g>, Tensor<'g>) {
        (a * self.cos - b * self.sin, a * self.sin + b * self.cos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn angles_fall_geometrically_and_axes_follow_each_other() {
        let embedding = RotaryEmbedding::new(&[[0, 0], [2, -3]], [4, 2], 10000.0);
        assert_eq!((embedding.tokens(), embedding.pairs()), (2, 3));
        assert_eq!(embedding.cos()[..3], [1.0; 3]);
        assert_eq!(embedding.sin()[..3], [0.0; 3]);
        for (angle, index) in [(2.0_f32, 0), (0.02, 1), (-3.0, 2)] {
            assert!((embedding.cos()[3 + index] - angle.cos()).abs() < 1e-6);
            assert!((embedding.sin()[3 + index] - angle.sin()).abs() < 1e-6);
        }
    }
}
