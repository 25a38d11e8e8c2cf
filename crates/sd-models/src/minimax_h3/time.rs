//! How much noise there is, embedded.

use sd_graph::{Graph, Param, Plan, Role, Scope, Tensor};

use super::config::TransformerConfig;
use crate::error::Result;
use crate::nn::Linear;

/// From times to what all modulations are made of.
#[derive(Debug)]
pub(super) enum TimeEmbedder {
    /// Two layers over sines and cosines.
    Layers {
        linear_1: Linear,
        linear_2: Linear,
        channels: usize,
    },
    /// What they would give at evenly spaced times from 0 to 1, after its activation.
    Table { table: Param, rows: usize },
}

const SINUSOIDS: &str = "time sinusoids";
const ROWS: &str = "time rows";
const SHARES: &str = "time shares";

impl TimeEmbedder {
    /// Declares `time_embedder` or `adaln_t_table` at `scope`, in single precision.
    pub(super) fn new(scope: &Scope<'_>, config: &TransformerConfig) -> TimeEmbedder {
        let (hidden, dim) = (config.time_embed_hidden_dim, config.time_embed_dim);
        if let Some(rows) = config.time_table {
            let table = scope.param("adaln_t_table", [rows, dim], Role::Vector);
            return TimeEmbedder::Table { table, rows };
        }
        let scope = scope.sub("time_embedder").in_single_precision();
        TimeEmbedder::Layers {
            linear_1: Linear::new(&scope.sub("linear_1"), config.freq_dim, hidden, true),
            linear_2: Linear::new(&scope.sub("linear_2"), hidden, dim, true),
            channels: config.freq_dim,
        }
    }

    /// Of `count` times, which [`TimeEmbedder::set`] gives: `[count, time_embed_dim]`, ready for the layers of modulations.
    pub(super) fn forward<'g>(&self, g: Graph<'g>, count: usize) -> Tensor<'g> {
        match self {
            TimeEmbedder::Layers {
                linear_1,
                linear_2,
                channels,
            } => {
                let sinusoids = g.input::<f32>(SINUSOIDS, [count, *channels]);
                linear_2.forward(linear_1.forward(sinusoids).silu()).silu()
            }
            TimeEmbedder::Table { table, rows } => {
                let table = g.param(table);
                let below = g.input::<i32>(ROWS, [count]);
                let share = g.input::<f32>(SHARES, [count, 1]);
                let [low, high] =
                    [0, 1].map(|first| table.slice(0, first, rows.saturating_sub(1)).rows(below));
                low + (high - low) * share
            }
        }
    }

    /// Gives the plan of a graph with [`TimeEmbedder::forward`] its times, from 0 to 1.
    pub(super) fn set(&self, plan: &mut Plan, times: &[f32]) -> Result<()> {
        match self {
            TimeEmbedder::Layers { channels, .. } => {
                let sinusoids = times.iter().flat_map(|&time| sinusoids(time, *channels));
                let sinusoids: Vec<f32> = sinusoids.collect();
                plan.set(SINUSOIDS, &sinusoids)?;
            }
            TimeEmbedder::Table { rows, .. } => {
                let places = times.iter().map(|&time| place(time, *rows));
                let (below, shares): (Vec<i32>, Vec<f32>) = places.unzip();
                plan.set(ROWS, &below)?;
                plan.set(SHARES, &shares)?;
            }
        }
        Ok(())
    }
}

/// Cosines, then sines, of `time * 10000^(-2i / channels)`.
fn sinusoids(time: f32, channels: usize) -> impl Iterator<Item = f32> {
    let half = channels / 2;
    let angle = move |index: usize| {
        let exponent = -(10_000.0_f32.ln()) * index as f32 / half as f32;
        time * exponent.exp()
    };
    let cosines = (0..half).map(move |index| angle(index).cos());
    cosines.chain((0..half).map(move |index| angle(index).sin()))
}

/// The row of a table of `rows`, at least two, that is just below `time`, and how much of the way to the next it is.
fn place(time: f32, rows: usize) -> (i32, f32) {
    let at = time.clamp(0.0, 1.0) * rows.saturating_sub(1) as f32;
    let below = at.floor().min(rows.saturating_sub(2) as f32);
    (below as i32, at - below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_of_a_table_are_rows_of_it() {
        assert_eq!(place(0.0, 5), (0, 0.0));
        assert_eq!(place(0.375, 5), (1, 0.5));
        assert_eq!(place(1.0, 5), (3, 1.0));
        assert_eq!(place(7.0, 2), (0, 1.0));
        assert_eq!(place(-1.0, 2), (0, 0.0));
    }
}
