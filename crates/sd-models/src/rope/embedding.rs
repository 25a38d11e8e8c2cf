//! What an embedding holds, and how its values are computed.

use std::collections::HashMap;
use std::ops::Range;

use rayon::prelude::*;

use super::circular::Circular;
use super::frequency::Frequency;

/// Most turned pairs of one embedding, batch included: 4 GiB of values. A picture of 16384 x 16384 pixels in
/// Qwen-Image 2.1 takes a quarter.
pub(crate) const MOST_PAIRS: usize = 1 << 28;

/// A run of tokens within one item of a batch that forms a picture, or equal frames one behind the other.
#[derive(Debug, Clone, PartialEq)]
pub struct Region {
    /// Its tokens, counted from the item's first.
    pub tokens: Range<usize>,
    /// After how many units of position its rows repeat; not above zero where they never do.
    pub height_period: f32,
    /// After how many units of position its columns repeat; not above zero where they never do.
    pub width_period: f32,
    /// The axis that counts rows.
    pub height_axis: usize,
    /// The axis that counts columns.
    pub width_axis: usize,
}

/// Which tokens of one item of a batch form pictures. All others (text, padding, semantic tokens) are counted only.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PositionLayout {
    /// Pictures in the order of their tokens.
    pub regions: Vec<Region>,
    /// All tokens of an item.
    pub tokens: usize,
}

/// How the rotations lie in [`Embedding::values`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ValueLayout {
    /// `[batch * tokens, pairs, 2, 2]`: for each pair `cos, -sin, sin, cos`, a rotation matrix row by row.
    Matrix,
    /// `[2, batch * tokens, 2 * pairs]`: all cosines, then all sines, the angle of pair `i` in the channels `2i` and
    /// `2i + 1`. ERNIE-Image multiplies these with halves, so that the two channels it turns together carry different
    /// angles; its weights were trained that way.
    Split,
}

/// What angles are computed in. Positions are exact in single precision in all families but for the fractions that the
/// reference rounds to it as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Frequencies, angles, cosines and sines in single precision.
    Single,
    /// Frequencies and products in double precision, the angle rounded to single before its cosine is taken.
    SingleAngle,
    /// Everything in double precision, cosines and sines rounded at the end.
    Double,
}

impl Precision {
    /// Cosine and sine at `position` units of `omega`.
    pub(crate) fn turn(self, position: f32, omega: f64) -> [f32; 2] {
        let angle = match self {
            Precision::Single => position * omega as f32,
            Precision::SingleAngle => (f64::from(position) * omega) as f32,
            Precision::Double => {
                let (sin, cos) = (f64::from(position) * omega).sin_cos();
                return [cos as f32, sin as f32];
            }
        };
        let (sin, cos) = angle.sin_cos();
        [cos, sin]
    }
}

/// A sequence is beyond what an embedding can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a rotary embedding of more than {MOST_PAIRS} turned pairs of channels was asked for")]
pub struct TooLarge;

/// Rotations for the tokens of a sequence, and where they came from.
#[derive(Debug, Clone, PartialEq)]
pub struct Embedding {
    pub(crate) values: Vec<f32>,
    pub(crate) positions: Vec<f32>,
    pub(crate) axes: usize,
    pub(crate) layout: PositionLayout,
    pub(crate) frequencies: Vec<Frequency>,
    pub(crate) value_layout: ValueLayout,
    pub(crate) batch: usize,
    pub(crate) precision: Precision,
    /// Axes along which pictures turn by harmonics of their own rather than by the list.
    pub(crate) wrapped: Circular,
}

impl Embedding {
    /// The rotations in the order of [`Embedding::value_layout`]: four numbers for each token and pair.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Where each token lies, `[batch, tokens, axes]`.
    pub fn positions(&self) -> &[f32] {
        &self.positions
    }

    /// Axes that positions count on.
    pub fn axes(&self) -> usize {
        self.axes
    }

    /// Which tokens of an item form pictures.
    pub fn layout(&self) -> &PositionLayout {
        &self.layout
    }

    /// Tokens of one item of the batch.
    pub fn tokens(&self) -> usize {
        self.layout.tokens
    }

    /// Frequency and axis of each pair of channels that is turned, in the order of the pairs.
    pub fn frequencies(&self) -> &[Frequency] {
        &self.frequencies
    }

    /// Pairs of channels that are turned.
    pub fn pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// How the values lie.
    pub fn value_layout(&self) -> ValueLayout {
        self.value_layout
    }

    /// Items of the batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Cosine and sine of `pair` at `token`, counted over the whole batch.
    pub fn rotation(&self, token: usize, pair: usize) -> Option<[f32; 2]> {
        if pair >= self.pairs() || token >= self.batch * self.tokens() {
            return None;
        }
        let at = token * self.pairs() + pair;
        let (cos, sin) = match self.value_layout {
            ValueLayout::Matrix => (4 * at, 4 * at + 2),
            ValueLayout::Split => (2 * at, self.values.len() / 2 + 2 * at),
        };
        Some([*self.values.get(cos)?, *self.values.get(sin)?])
    }

    /// The same without the first `tokens` of each item.
    pub fn behind(mut self, tokens: usize) -> Embedding {
        let all = self.tokens();
        let first = tokens.min(all);
        let behind = |values: &[f32], width: usize| -> Vec<f32> {
            let items = values.chunks_exact((all * width).max(1));
            items
                .flat_map(|item| &item[first * width..])
                .copied()
                .collect()
        };
        self.positions = behind(&self.positions, self.axes);
        self.values = match self.value_layout {
            ValueLayout::Matrix => behind(&self.values, 4 * self.pairs()),
            // Cosines of all items, then sines of all.
            ValueLayout::Split => behind(&self.values, 2 * self.pairs()),
        };
        self.layout.tokens = all - first;
        for region in &mut self.layout.regions {
            let place = |token: usize| token.saturating_sub(first);
            region.tokens = place(region.tokens.start)..place(region.tokens.end);
        }
        self.layout
            .regions
            .retain(|region| !region.tokens.is_empty());
        self
    }

    /// Computes the values of `positions [batch, tokens, axes]`.
    pub(crate) fn compute(
        positions: Vec<f32>,
        axes: usize,
        layout: PositionLayout,
        frequencies: Vec<Frequency>,
        value_layout: ValueLayout,
        precision: Precision,
        batch: usize,
    ) -> Embedding {
        let tokens = batch * layout.tokens;
        let mut embedding = Embedding {
            values: vec![0.0; tokens * frequencies.len() * 4],
            positions,
            axes,
            layout,
            frequencies,
            value_layout,
            batch,
            precision,
            wrapped: Circular::NONE,
        };
        for axis in 0..axes {
            let turns = Turns::new(&embedding, axis, 0..tokens, |position, omega| {
                precision.turn(position, omega)
            });
            turns.write(&mut embedding, 0);
        }
        embedding
    }
}

/// The rotations along one axis for a run of tokens. Tokens of a grid share their positions, so each distinct one is
/// computed once.
pub(crate) struct Turns {
    /// Pairs that follow the axis.
    pairs: Vec<usize>,
    /// For each token, its row of `table`.
    rows: Vec<u32>,
    /// Cosine and sine, `[distinct positions, pairs]`.
    table: Vec<[f32; 2]>,
}

impl Turns {
    /// Rotations of `tokens` (counted over the whole batch) on `axis`, where `turn` takes position and frequency.
    pub(crate) fn new(
        embedding: &Embedding,
        axis: usize,
        tokens: Range<usize>,
        turn: impl Fn(f32, f64) -> [f32; 2] + Sync,
    ) -> Turns {
        let pairs: Vec<usize> = (0..embedding.pairs())
            .filter(|&pair| embedding.frequencies[pair].axis == axis)
            .collect();
        let mut distinct = Vec::new();
        let mut known = HashMap::new();
        let rows = embedding.positions[tokens.start * embedding.axes..tokens.end * embedding.axes]
            .iter()
            .skip(axis)
            .step_by(embedding.axes.max(1))
            .map(|&position| {
                *known.entry(position.to_bits()).or_insert_with(|| {
                    distinct.push(position);
                    distinct.len() as u32 - 1
                })
            })
            .collect();
        let table = distinct
            .par_iter()
            .flat_map_iter(|&position| {
                let turn = &turn;
                pairs
                    .iter()
                    .map(move |&pair| turn(position, embedding.frequencies[pair].omega))
            })
            .collect();
        Turns { pairs, rows, table }
    }

    /// Puts the rotations into the embedding's values, for tokens from `first` on.
    pub(crate) fn write(&self, embedding: &mut Embedding, first: usize) {
        if self.pairs.is_empty() {
            return;
        }
        let width = self.pairs.len();
        let row = |row: u32| &self.table[row as usize * width..(row as usize + 1) * width];
        let all = embedding.pairs();
        match embedding.value_layout {
            ValueLayout::Matrix => embedding.values[first * all * 4..]
                .par_chunks_exact_mut(all * 4)
                .zip(&self.rows)
                .with_min_len(64)
                .for_each(|(values, &token)| {
                    for (&pair, &[cos, sin]) in self.pairs.iter().zip(row(token)) {
                        values[pair * 4..pair * 4 + 4].copy_from_slice(&[cos, -sin, sin, cos]);
                    }
                }),
            ValueLayout::Split => {
                let half = embedding.values.len() / 2;
                let (cosines, sines) = embedding.values.split_at_mut(half);
                cosines[first * all * 2..]
                    .par_chunks_exact_mut(all * 2)
                    .zip(sines[first * all * 2..].par_chunks_exact_mut(all * 2))
                    .zip(&self.rows)
                    .with_min_len(64)
                    .for_each(|((cosines, sines), &token)| {
                        for (&pair, &[cos, sin]) in self.pairs.iter().zip(row(token)) {
                            cosines[pair * 2..pair * 2 + 2].fill(cos);
                            sines[pair * 2..pair * 2 + 2].fill(sin);
                        }
                    });
            }
        }
    }
}
