//! Turning channels in a graph.

use sd_graph::{Graph, Pairing, Tensor};

use super::embedding::{Embedding, Precision, TooLarge, ValueLayout};

/// A rotary embedding inside a graph, and which channels it turns together.
#[derive(Debug, Clone)]
pub struct Rotation<'g> {
    turning: Turning<'g>,
    pairing: Pairing,
    pairs: usize,
}

#[derive(Debug, Clone)]
enum Turning<'g> {
    /// Cosines and sines `[tokens, 1, pairs]`.
    Pairs { cos: Tensor<'g>, sin: Tensor<'g> },
    /// Cosines and sines `[tokens, 1, channels]`: [`ValueLayout::Split`].
    Channels { cos: Tensor<'g>, sin: Tensor<'g> },
    /// Positions and divisors, for ggml to turn by itself, axis by axis.
    Axes(Vec<Axis<'g>>),
}

/// A run of pairs that follow one axis.
#[derive(Debug, Clone, Copy)]
struct Axis<'g> {
    first_pair: usize,
    pairs: usize,
    /// Of each token.
    positions: Tensor<'g>,
    /// Units of position by radian, for each pair.
    divisors: Tensor<'g>,
}

impl<'g> Rotation<'g> {
    /// `embedding` in a graph, ready to turn `[batch * tokens, heads, channels]`. An embedding that was too large is a
    /// mistake of the graph, so that a forward pass needs no error handling.
    ///
    /// ggml turns by itself where that gives the same numbers: with the angles of [`Precision::Single`], whole positions
    /// and the same frequencies for all tokens, and halves that follow one axis. Otherwise, and so wherever a picture
    /// wraps, tables are used.
    #[track_caller]
    pub fn new(
        g: Graph<'g>,
        embedding: &Result<Embedding, TooLarge>,
        pairing: Pairing,
    ) -> Rotation<'g> {
        match embedding {
            Ok(embedding) => match axes(g, embedding, pairing) {
                Some(axes) => Rotation {
                    turning: Turning::Axes(axes),
                    pairing,
                    pairs: embedding.pairs(),
                },
                None => Rotation::with_tables(g, embedding, pairing),
            },
            Err(error) => {
                let nothing = g.mistake("rotary embedding", &error.to_string());
                let (cos, sin) = (nothing, nothing);
                Rotation {
                    turning: Turning::Pairs { cos, sin },
                    pairing,
                    pairs: 0,
                }
            }
        }
    }

    /// `embedding` in a graph, as tables whatever it is.
    #[track_caller]
    pub fn with_tables(g: Graph<'g>, embedding: &Embedding, pairing: Pairing) -> Rotation<'g> {
        let values = embedding.values();
        let pairs = embedding.pairs();
        let tokens = embedding.batch() * embedding.tokens();
        let turning = match embedding.value_layout() {
            ValueLayout::Matrix => {
                let table = |at: usize| {
                    let column: Vec<f32> = values.iter().skip(at).step_by(4).copied().collect();
                    g.constant(&column, [tokens, 1, pairs])
                };
                Turning::Pairs {
                    cos: table(0),
                    sin: table(2),
                }
            }
            ValueLayout::Split => {
                let (cos, sin) = values.split_at(values.len() / 2);
                Turning::Channels {
                    cos: g.constant(cos, [tokens, 1, 2 * pairs]),
                    sin: g.constant(sin, [tokens, 1, 2 * pairs]),
                }
            }
        };
        Rotation {
            turning,
            pairing,
            pairs,
        }
    }

    /// Turns the first channels of `x [tokens, heads, channels]`, as many as the embedding has, and leaves the others.
    #[track_caller]
    pub fn turn(&self, x: Tensor<'g>) -> Tensor<'g> {
        let (turned, channels) = (2 * self.pairs, x.dim(2));
        if turned >= channels {
            return self.turn_all(x);
        }
        let rest = x.slice(2, turned, channels - turned);
        self.turn_all(x.slice(2, 0, turned)).concat(rest, 2)
    }

    #[track_caller]
    fn turn_all(&self, x: Tensor<'g>) -> Tensor<'g> {
        match (&self.turning, self.pairing) {
            (Turning::Axes(axes), pairing) => axes.iter().fold(x, |x, axis| {
                let first = 2 * axis.first_pair;
                x.turn_pairs(axis.positions, axis.divisors, pairing, first, axis.pairs)
            }),
            (&Turning::Pairs { cos, sin }, Pairing::Neighbours) => {
                let (tokens, heads) = (x.dim(0), x.dim(1));
                let [even, odd] = x
                    .reshape([tokens, heads, self.pairs, 2])
                    .chunk(3)
                    .map(|half| half.reshape([tokens, heads, self.pairs]));
                let column = [tokens, heads, self.pairs, 1];
                let [even, odd] = points(even, odd, cos, sin).map(|half| half.reshape(column));
                even.concat(odd, 3).reshape([tokens, heads, 2 * self.pairs])
            }
            (&Turning::Pairs { cos, sin }, Pairing::Halves) => {
                let [first, second] = x.chunk(2);
                let [first, second] = points(first, second, cos, sin);
                first.concat(second, 2)
            }
            // The cosine that multiplies a channel is the channel's own, and so is the sine of its partner.
            (&Turning::Channels { cos, sin }, pairing) => {
                let partner = match pairing {
                    Pairing::Halves => {
                        let [first, second] = x.chunk(2);
                        (-second).concat(first, 2)
                    }
                    Pairing::Neighbours => {
                        let (tokens, heads) = (x.dim(0), x.dim(1));
                        let [even, odd] = x.reshape([tokens, heads, self.pairs, 2]).chunk(3);
                        (-odd)
                            .concat(even, 3)
                            .reshape([tokens, heads, 2 * self.pairs])
                    }
                };
                x * cos + partner * sin
            }
        }
    }
}

/// Turns points `(a, b)` by angles given by their cosines and sines.
#[track_caller]
fn points<'g>(a: Tensor<'g>, b: Tensor<'g>, cos: Tensor<'g>, sin: Tensor<'g>) -> [Tensor<'g>; 2] {
    [a * cos - b * sin, a * sin + b * cos]
}

/// The runs of pairs that follow one axis each, if ggml can turn them with the embedding's own numbers.
fn axes<'g>(g: Graph<'g>, embedding: &Embedding, pairing: Pairing) -> Option<Vec<Axis<'g>>> {
    let tokens = embedding.batch * embedding.tokens();
    let runs = || embedding.frequencies.chunk_by(|a, b| a.axis == b.axis);
    // Interleaved axes fall into a run for each pair; tables are cheaper than so many turns. Halves of one run are not
    // halves of a head.
    let most_runs = match pairing {
        Pairing::Neighbours => embedding.axes,
        Pairing::Halves => 1,
    };
    let fits = embedding.precision == Precision::Single
        && embedding.value_layout == ValueLayout::Matrix
        && !embedding.wrapped
        && tokens > 0
        && (1..=most_runs).contains(&runs().count());
    if !fits {
        return None;
    }
    let positions: Vec<i32> = embedding
        .positions
        .iter()
        .map(|&position| whole(position))
        .collect::<Option<_>>()?;
    let mut first_pair = 0;
    let axis = |run: &[super::Frequency]| {
        let along: Vec<i32> = positions
            .iter()
            .skip(run.first().map_or(0, |pair| pair.axis))
            .step_by(embedding.axes)
            .copied()
            .collect();
        let mut divisors: Vec<f32> = run.iter().map(|pair| 1.0 / pair.omega as f32).collect();
        // ggml reads one for each pair of a head.
        divisors.resize(embedding.pairs(), 1.0);
        let axis = Axis {
            first_pair,
            pairs: run.len(),
            positions: g.constant(&along, [tokens]),
            divisors: g.constant(&divisors, [embedding.pairs()]),
        };
        first_pair += run.len();
        axis
    };
    Some(runs().map(axis).collect())
}

/// A position as a whole number, if it is one and the rounding of a divisor does not show there.
fn whole(position: f32) -> Option<i32> {
    const FAR: f32 = 4096.0;
    (position.fract() == 0.0 && position.abs() <= FAR).then_some(position as i32)
}
