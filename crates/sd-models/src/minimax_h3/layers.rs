//! Attention and feed-forward, alike in the refiner and the blocks.

use sd_backend::DType;
use sd_graph::{Scope, Tensor};

use super::config::TransformerConfig;
use crate::nn::{Linear, RmsNorm};
use crate::rope::Rotation;

/// By how much numbers are made smaller where they pass through products in half precision, a power of two: it costs no digit.
const HEADROOM: f32 = 128.0;

/// Attention of all rows to all rows. The heads together are wider than the stream.
#[derive(Debug)]
pub(super) struct Attention {
    to_q: Linear,
    to_k: Linear,
    to_v: Linear,
    to_out: Linear,
    norm_q: RmsNorm,
    norm_k: RmsNorm,
    heads: usize,
    head_dim: usize,
}

impl Attention {
    pub(super) fn new(scope: &Scope<'_>, config: &TransformerConfig) -> Attention {
        let (dim, inner, head) = (
            config.hidden_size,
            config.inner_dim(),
            config.attention_head_dim,
        );
        let linear = |name, input, output| Linear::new(&scope.sub(name), input, output, false);
        let norm = |name| RmsNorm::new(&scope.sub(name), head, config.qk_norm_eps);
        Attention {
            to_q: linear("to_q", dim, inner),
            to_k: linear("to_k", dim, inner),
            to_v: linear("to_v", dim, inner),
            to_out: linear("to_out.0", inner, dim),
            norm_q: norm("norm_q"),
            norm_k: norm("norm_k"),
            heads: config.num_attention_heads,
            head_dim: head,
        }
    }

    /// Of `x [rows, dim]`, with queries and keys turned by `rope` if there is one.
    pub(super) fn forward<'g>(&self, x: Tensor<'g>, rope: Option<&Rotation<'g>>) -> Tensor<'g> {
        let rows = x.dim(0);
        let split = |x: Tensor<'g>| x.reshape([rows, self.heads, self.head_dim]);
        let turn = |x: Tensor<'g>| rope.map_or(x, |rope| rope.turn(x));
        let q = turn(self.norm_q.forward(split(self.to_q.forward(x))));
        let k = turn(self.norm_k.forward(split(self.to_k.forward(x))));
        let v = split(self.to_v.forward(x));
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        let [q, k, v] = [q, k, v].map(|x| x.transpose(0, 1));
        let mixed = q.attention(k, v, None, scale);
        self.to_out
            .forward(mixed.reshape([rows, self.heads * self.head_dim]))
    }
}

/// A gated feed-forward: `out(value(x) * silu(gate(x)))`. The reference has gate and value as one matrix, `net.0.proj`.
#[derive(Debug)]
pub(super) struct FeedForward {
    gate: Linear,
    value: Linear,
    out: Linear,
}

impl FeedForward {
    pub(super) fn new(scope: &Scope<'_>, config: &TransformerConfig) -> FeedForward {
        let (dim, inner) = (config.hidden_size, config.ffn_dim);
        FeedForward {
            gate: Linear::new(&scope.sub("gate"), dim, inner, false),
            value: Linear::new(&scope.sub("value"), dim, inner, false),
            out: Linear::new(&scope.sub("net.2"), inner, dim, false),
        }
    }

    /// Of `x [rows, dim]`. What is between the products grows beyond what half precision holds (65504), so where weights are such
    /// that devices multiply in it, everything but the gate is kept smaller on the way.
    pub(super) fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        if !self.may_overflow() {
            // In this order, so that nothing comes between the two steps that devices do as one.
            return self
                .out
                .forward(self.value.forward(x) * self.gate.forward(x).silu());
        }
        let x = x * (1.0 / HEADROOM);
        let gate = (self.gate.forward(x) * HEADROOM).silu();
        self.out.forward(self.value.forward(x) * gate) * HEADROOM
    }

    /// Whether a device may multiply by one of the weights in F16: F16 itself, and blocks, which are expanded to it.
    fn may_overflow(&self) -> bool {
        let layers = [&self.gate, &self.value, &self.out];
        let types = layers.map(Linear::weight_type);
        let has_range = |dtype: &DType| matches!(dtype, DType::F32 | DType::BF16);
        !types.iter().all(has_range)
    }
}
