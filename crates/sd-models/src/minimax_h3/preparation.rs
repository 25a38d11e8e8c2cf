//! What a run computes once: rows of text, and the modulations of all steps. 14 of the published 33 billion parameters serve nothing
//! else, and are not needed while steps are computed.

use sd_backend::DType;
use sd_graph::{CacheEntry, Graph, Plan, Scope, Shape, Tensor};

use super::config::TransformerConfig;
use super::refiner::TokenRefiner;
use super::time::TimeEmbedder;
use crate::error::Result;
use crate::nn::Linear;

/// The token refiner, the time embedder, and the layers that make the modulations of all blocks from what that gives.
#[derive(Debug)]
pub struct Preparation {
    config: TransformerConfig,
    refiner: TokenRefiner,
    time_embedder: TimeEmbedder,
    blocks: Vec<Linear>,
    out: Linear,
}

/// How rows are modulated at several times.
#[derive(Debug, Clone)]
pub struct Modulations<'g> {
    /// Of each block, `[times, 18 * hidden_size]`: for video, text and sound shift, scale and gate of attention, then of the
    /// feed-forward.
    pub(super) blocks: Vec<Tensor<'g>>,
    /// Behind the last block, `[times, 2 * hidden_size]`: shift and scale.
    pub(super) out: Tensor<'g>,
}

/// Under which name rows of text are kept.
const TEXT: &str = "text";

/// Under which name the modulations of a block are kept, or those behind the last of `blocks`.
fn name(block: usize, blocks: usize) -> String {
    match block < blocks {
        true => format!("block {block}.modulations"),
        false => "modulations behind all blocks".to_owned(),
    }
}

impl Preparation {
    /// Declares `context_embedder`, `token_refiner`, the time embedder or its table, and all `adaln_proj`.
    pub fn new(scope: &Scope<'_>, config: &TransformerConfig) -> Preparation {
        // A table's layers are small, and in single precision.
        let modulations = match config.time_table {
            Some(_) => scope.in_single_precision(),
            None => scope.clone(),
        };
        let linear = |scope: Scope<'_>, output| {
            Linear::new(&scope.sub("linear"), config.time_embed_dim, output, true)
        };
        let blocks = modulations.sub("transformer_blocks");
        Preparation {
            config: config.clone(),
            refiner: TokenRefiner::new(scope, config),
            time_embedder: TimeEmbedder::new(scope, config),
            blocks: (0..config.num_layers)
                .map(|block| blocks.sub(block).sub("adaln_proj"))
                .map(|block| linear(block, config.modulation_dim()))
                .collect(),
            out: linear(
                modulations.sub("norm_out"),
                config.hidden_size.saturating_mul(2),
            ),
        }
    }

    /// Rows `[text rows, hidden_size]` of the text encoder's hidden states `[text rows, text_dim]`.
    pub fn text<'g>(&self, hidden: Tensor<'g>) -> Tensor<'g> {
        self.refiner.forward(hidden)
    }

    /// Modulations at `times` times, which [`Preparation::set_times`] gives.
    pub fn modulations<'g>(&self, g: Graph<'g>, times: usize) -> Modulations<'g> {
        let times = self
            .time_embedder
            .forward(g, times)
            .cut("minimax_h3.time_embedder");
        Modulations {
            blocks: (self.blocks.iter())
                .map(|linear| linear.forward(times))
                .collect(),
            out: self.out.forward(times),
        }
    }

    /// Gives the plan of a graph with [`Preparation::modulations`] its times, from 0 to 1.
    ///
    /// # Errors
    /// The engine's, for a plan of another graph.
    pub fn set_times(&self, plan: &mut Plan, times: &[f32]) -> Result<()> {
        self.time_embedder.set(plan, times)
    }

    /// Computes everything and stores it in the cache of the run.
    pub(super) fn store(&self, g: Graph<'_>, text_rows: usize, times: usize) {
        let hidden = g.input::<f32>(TEXT, [text_rows, self.config.text_dim]);
        g.store(TEXT, self.text(hidden), DType::F32);
        let made = self.modulations(g, times);
        let blocks = made.blocks.len();
        for (block, modulations) in made.blocks.into_iter().chain([made.out]).enumerate() {
            let name = name(block, blocks);
            // A segment for each, so that their weights can pass through a little memory.
            g.store(
                &name,
                modulations.cut(&format!("minimax_h3.{name}")),
                DType::F32,
            );
        }
    }

    /// What [`Preparation::store`] stores.
    pub(super) fn entries(&self, text_rows: usize, times: usize) -> Vec<CacheEntry> {
        let blocks = self.blocks.len();
        let hidden = self.config.hidden_size;
        let of_block = |block: usize| (name(block, blocks), [times, self.config.modulation_dim()]);
        let entries = (0..blocks).map(of_block).chain([
            (TEXT.to_owned(), [text_rows, hidden]),
            (name(blocks, blocks), [times, hidden.saturating_mul(2)]),
        ]);
        let entry = |(name, shape): (String, [usize; 2])| {
            let shape = Shape::new(&shape).ok()?;
            let dtype = DType::F32;
            Some(CacheEntry { name, shape, dtype })
        };
        entries.filter_map(entry).collect()
    }
}

/// Rows of text in the cache of the run.
pub(super) fn kept_text<'g>(
    g: Graph<'g>,
    config: &TransformerConfig,
    text_rows: usize,
) -> Tensor<'g> {
    g.cached(TEXT, [text_rows, config.hidden_size], DType::F32)
}

/// Modulations in the cache of the run, which has them for `times` times, at those of them that `rows` counts.
pub(super) fn kept_modulations<'g>(
    g: Graph<'g>,
    config: &TransformerConfig,
    times: usize,
    rows: Tensor<'g>,
) -> Modulations<'g> {
    let blocks = config.num_layers;
    let cached = |block: usize, width: usize| {
        let all = g.cached(&name(block, blocks), [times, width], DType::F32);
        all.rows(rows)
    };
    Modulations {
        blocks: (0..blocks)
            .map(|block| cached(block, config.modulation_dim()))
            .collect(),
        out: cached(blocks, config.hidden_size.saturating_mul(2)),
    }
}
