//! Turning channels in a graph.

use sd_graph::{Graph, Pairing, Tensor};

use super::circular::{Circular, harmonic};
use super::embedding::{Embedding, Precision, Region, TooLarge, ValueLayout};
use super::frequency::Frequency;

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
    /// For ggml to turn by itself, run by run of tokens.
    Runs(Vec<Run<'g>>),
}

/// Tokens that turn at the same frequencies.
#[derive(Debug, Clone)]
struct Run<'g> {
    tokens: usize,
    axes: Vec<Axis<'g>>,
}

/// Pairs beside each other that follow one axis.
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
    /// and pairs that lie in few runs by axis, or halves of one. Otherwise tables are used. Pictures that wrap are turned
    /// apart from what is between them, each by its own harmonics.
    #[track_caller]
    pub fn new(
        g: Graph<'g>,
        embedding: &Result<Embedding, TooLarge>,
        pairing: Pairing,
    ) -> Rotation<'g> {
        match embedding {
            Ok(embedding) => match runs(g, embedding, pairing) {
                Some(runs) => Rotation {
                    turning: Turning::Runs(runs),
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
            (Turning::Runs(runs), pairing) => {
                let turn = |run: &Run<'g>, x: Tensor<'g>| {
                    run.axes.iter().fold(x, |x, axis| {
                        let first = 2 * axis.first_pair;
                        x.turn_pairs(axis.positions, axis.divisors, pairing, first, axis.pairs)
                    })
                };
                if let [run] = runs.as_slice() {
                    return turn(run, x);
                }
                let mut start = 0;
                let parts = runs.iter().map(|run| {
                    let part = x.slice(0, start, run.tokens);
                    start += run.tokens;
                    turn(run, part)
                });
                parts
                    .reduce(|joint, part| joint.concat(part, 0))
                    .unwrap_or(x)
            }
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

/// How ggml turns the tokens of `embedding`, if it can with the embedding's own numbers.
fn runs<'g>(g: Graph<'g>, embedding: &Embedding, pairing: Pairing) -> Option<Vec<Run<'g>>> {
    // Interleaved axes fall into a group for each pair; tables are cheaper than so many turns. Halves of one group are not
    // halves of a head.
    let most_groups = match pairing {
        Pairing::Neighbours => embedding.axes,
        Pairing::Halves => 1,
    };
    let groups = embedding
        .frequencies
        .chunk_by(|a, b| a.axis == b.axis)
        .count();
    let fits = embedding.precision == Precision::Single
        && embedding.value_layout == ValueLayout::Matrix
        && embedding.batch * embedding.tokens() > 0
        && (1..=most_groups).contains(&groups);
    if !fits {
        return None;
    }
    let positions: Vec<i32> = embedding
        .positions
        .iter()
        .map(|&position| whole(position))
        .collect::<Option<_>>()?;
    let run = |positions: &[i32], frequencies: &[Frequency]| Run {
        tokens: positions.len() / embedding.axes,
        axes: axes(g, positions, embedding.axes, frequencies),
    };
    if embedding.wrapped == Circular::NONE {
        return Some(vec![run(&positions, &embedding.frequencies)]);
    }
    let mut runs = Vec::new();
    for item in positions.chunks_exact(embedding.tokens() * embedding.axes) {
        let mut next = 0;
        let mut upto = |end: usize, frequencies: &[Frequency]| {
            if end > next {
                runs.push(run(
                    &item[next * embedding.axes..end * embedding.axes],
                    frequencies,
                ));
                next = end;
            }
        };
        for region in &embedding.layout.regions {
            upto(region.tokens.start, &embedding.frequencies);
            upto(region.tokens.end, &harmonics(embedding, region));
        }
        upto(embedding.tokens(), &embedding.frequencies);
    }
    Some(runs)
}

/// The frequencies at which a picture turns.
fn harmonics(embedding: &Embedding, region: &Region) -> Vec<Frequency> {
    let wrap = |frequency: &Frequency| Frequency {
        axis: frequency.axis,
        omega: match region.period(frequency.axis, embedding.wrapped) {
            Some(period) => harmonic(frequency.omega, period) * std::f64::consts::TAU / period,
            None => frequency.omega,
        },
    };
    embedding.frequencies.iter().map(wrap).collect()
}

/// Tokens at `positions [tokens, axes]`, axis by axis of `frequencies`.
fn axes<'g>(
    g: Graph<'g>,
    positions: &[i32],
    axes: usize,
    frequencies: &[Frequency],
) -> Vec<Axis<'g>> {
    let mut first_pair = 0;
    let axis = |group: &[Frequency]| {
        let along: Vec<i32> = positions
            .iter()
            .skip(group.first().map_or(0, |pair| pair.axis))
            .step_by(axes)
            .copied()
            .collect();
        // No frequency is an infinite divisor, which turns nothing.
        let mut divisors: Vec<f32> = group.iter().map(|pair| 1.0 / pair.omega as f32).collect();
        // ggml reads one for each pair of a head.
        divisors.resize(frequencies.len(), 1.0);
        let axis = Axis {
            first_pair,
            pairs: group.len(),
            positions: g.constant(&along, [along.len()]),
            divisors: g.constant(&divisors, [frequencies.len()]),
        };
        first_pair += group.len();
        axis
    };
    frequencies
        .chunk_by(|a, b| a.axis == b.axis)
        .map(axis)
        .collect()
}

/// A position as a whole number, if it is one and the rounding of a divisor does not show there.
fn whole(position: f32) -> Option<i32> {
    const FAR: f32 = 4096.0;
    (position.fract() == 0.0 && position.abs() <= FAR).then_some(position as i32)
}
