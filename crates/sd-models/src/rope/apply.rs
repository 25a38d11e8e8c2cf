//! Turning channels in a graph.

use sd_graph::{Graph, Tensor};

use super::embedding::{Embedding, TooLarge, ValueLayout};

/// A rotary embedding inside a graph: tables of cosines and sines.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'g> {
    cos: Tensor<'g>,
    sin: Tensor<'g>,
    pairs: usize,
}

impl<'g> Rotation<'g> {
    /// The tables of `embedding` as constants of a graph, ready to turn `[batch * tokens, heads, channels]`. An embedding
    /// that was too large is a mistake of the graph, so that a forward pass needs no error handling.
    #[track_caller]
    pub fn new(g: Graph<'g>, embedding: &Result<Embedding, TooLarge>) -> Rotation<'g> {
        let embedding = match embedding {
            Ok(embedding) => embedding,
            Err(error) => {
                let nothing = g.mistake("rotary embedding", &error.to_string());
                return Rotation {
                    cos: nothing,
                    sin: nothing,
                    pairs: 0,
                };
            }
        };
        let values = embedding.values();
        let pairs = embedding.pairs();
        let tokens = embedding.batch() * embedding.tokens();
        let (cos, sin, width): (Vec<f32>, Vec<f32>, usize) = match embedding.value_layout() {
            ValueLayout::Matrix => {
                let pick = |at: usize| values.iter().skip(at).step_by(4).copied().collect();
                (pick(0), pick(2), pairs)
            }
            ValueLayout::Split => {
                let (cos, sin) = values.split_at(values.len() / 2);
                (cos.to_vec(), sin.to_vec(), 2 * pairs)
            }
        };
        Rotation {
            cos: g.constant(&cos, [tokens, 1, width]),
            sin: g.constant(&sin, [tokens, 1, width]),
            pairs,
        }
    }

    /// Turns neighbouring channels `(2i, 2i + 1)` of `x [tokens, heads, channels]`. Channels beyond those that the
    /// embedding turns pass through.
    #[track_caller]
    pub fn neighbours(&self, x: Tensor<'g>) -> Tensor<'g> {
        self.partly(x, |x| {
            let (tokens, heads) = (x.dim(0), x.dim(1));
            let [even, odd] = x.reshape([tokens, heads, self.pairs, 2]).chunk(3);
            let (even, odd) = (
                even.reshape([tokens, heads, self.pairs]),
                odd.reshape([tokens, heads, self.pairs]),
            );
            let (even, odd) = self.turn(even, odd);
            let shape = [tokens, heads, self.pairs, 1];
            even.reshape(shape).concat(odd.reshape(shape), 3).reshape([
                tokens,
                heads,
                2 * self.pairs,
            ])
        })
    }

    /// Turns channels that lie half of the turned ones apart, `(i, i + pairs)`, of `x [tokens, heads, channels]`.
    /// Channels beyond those that the embedding turns pass through.
    #[track_caller]
    pub fn halves(&self, x: Tensor<'g>) -> Tensor<'g> {
        self.partly(x, |x| {
            let [first, second] = x.chunk(2);
            let (first, second) = self.turn(first, second);
            first.concat(second, 2)
        })
    }

    /// Turns halves of `x [tokens, heads, channels]` with an angle for each channel ([`ValueLayout::Split`]):
    /// `x cos + rotated sin`, where `rotated` is the second half negated, then the first.
    #[track_caller]
    pub fn split_halves(&self, x: Tensor<'g>) -> Tensor<'g> {
        self.partly(x, |x| {
            let [first, second] = x.chunk(2);
            x * self.cos + (-second).concat(first, 2) * self.sin
        })
    }

    /// Turns the first channels, as many as the embedding has, and leaves the others.
    #[track_caller]
    fn partly(&self, x: Tensor<'g>, turn: impl Fn(Tensor<'g>) -> Tensor<'g>) -> Tensor<'g> {
        let (turned, channels) = (2 * self.pairs, x.dim(2));
        if turned >= channels {
            return turn(x);
        }
        let rest = x.slice(2, turned, channels - turned);
        turn(x.slice(2, 0, turned)).concat(rest, 2)
    }

    /// Turns points `(a, b)` by the embedding's angles.
    #[track_caller]
    fn turn(&self, a: Tensor<'g>, b: Tensor<'g>) -> (Tensor<'g>, Tensor<'g>) {
        (a * self.cos - b * self.sin, a * self.sin + b * self.cos)
    }
}
