//! From the text encoder's hidden states to rows of the transformer: the same at every step of a run.

use sd_graph::{Scope, Tensor};

use super::config::TransformerConfig;
use super::layers::{Attention, FeedForward};
use crate::nn::{Linear, RmsNorm};

/// Projects text and refines it by itself: plain blocks without positions or modulation.
#[derive(Debug)]
pub(super) struct TokenRefiner {
    context_embedder: Linear,
    blocks: Vec<RefinerBlock>,
    final_norm: RmsNorm,
}

#[derive(Debug)]
struct RefinerBlock {
    norm1: RmsNorm,
    attn: Attention,
    norm2: RmsNorm,
    ff: FeedForward,
}

impl TokenRefiner {
    /// Declares `context_embedder` and `token_refiner` at `scope`.
    pub(super) fn new(scope: &Scope<'_>, config: &TransformerConfig) -> TokenRefiner {
        let refiner = scope.sub("token_refiner");
        let blocks = refiner.sub("refiner_blocks");
        let final_norm = refiner.sub("final_norm");
        TokenRefiner {
            context_embedder: Linear::new(
                &scope.sub("context_embedder"),
                config.text_dim,
                config.hidden_size,
                true,
            ),
            blocks: (0..config.num_refiner_layers)
                .map(|index| RefinerBlock::new(&blocks.sub(index), config))
                .collect(),
            final_norm: RmsNorm::new(&final_norm, config.hidden_size, config.final_norm_eps),
        }
    }

    /// Of hidden states `[text rows, text_dim]`: `[text rows, hidden_size]`.
    pub(super) fn forward<'g>(&self, text: Tensor<'g>) -> Tensor<'g> {
        let mut x = self
            .context_embedder
            .forward(text)
            .cut("minimax_h3.condition_proj");
        for (index, block) in self.blocks.iter().enumerate() {
            x = block
                .forward(x)
                .cut(&format!("minimax_h3.token_refiner.blocks.{index}"));
        }
        self.final_norm.forward(x)
    }
}

impl RefinerBlock {
    fn new(scope: &Scope<'_>, config: &TransformerConfig) -> RefinerBlock {
        let norm = |name| RmsNorm::new(&scope.sub(name), config.hidden_size, config.norm_eps);
        RefinerBlock {
            norm1: norm("norm1"),
            attn: Attention::new(&scope.sub("attn"), config),
            norm2: norm("norm2"),
            ff: FeedForward::new(&scope.sub("ff"), config),
        }
    }

    fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let x = x + self.attn.forward(self.norm1.forward(x), None);
        x + self.ff.forward(self.norm2.forward(x))
    }
}
