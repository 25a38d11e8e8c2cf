//! What narrows the encoder's channels to latents: attention of each latent over all before it.

use half::f16;
use sd_graph::{Graph, Param, Role, Scope, Tensor};

use super::config::Config;
use crate::nn::{LayerNorm, Linear};

/// Added to the variance in norms.
const EPS: f32 = 1e-5;

/// `pre_block` and `mean_proj`: from `[t, latent_dim]` to the mean of latents `[t, latent_channels]`.
#[derive(Debug)]
pub(super) struct Narrowing {
    norm1: LayerNorm,
    qkv: Linear,
    q_bias: Param,
    v_bias: Param,
    attn_proj: Linear,
    norm3: LayerNorm,
    proj: Linear,
    norm2: LayerNorm,
    mlp: Mlp,
    mean_proj: Linear,
    heads: usize,
    width: usize,
    output: usize,
}

#[derive(Debug)]
struct Mlp {
    norm: LayerNorm,
    w0: Linear,
    w1: Linear,
    w2: Linear,
}

impl Narrowing {
    pub(super) fn new(root: &Scope<'_>, config: &Config) -> Narrowing {
        let (width, output) = (config.latent_dim, config.latent_channels);
        let scope = root.sub("pre_block");
        let attn = scope.sub("attn");
        // A bias of zeros, kept with the others by the authors.
        attn.ignore("zero_k_bias");
        let mlp = scope.sub("mlp");
        let norm = |name: &str, width| LayerNorm::new(&scope.sub(name), width, EPS);
        let linear = |name: &str, input, output| Linear::new(&mlp.sub(name), input, output, true);
        Narrowing {
            norm1: norm("norm1", width),
            qkv: Linear::new(&attn.sub("qkv"), width, 3 * width, false),
            q_bias: attn.param("q_bias", [width], Role::Vector),
            v_bias: attn.param("v_bias", [width], Role::Vector),
            attn_proj: Linear::new(&attn.sub("proj"), output, output, true),
            norm3: norm("norm3", width),
            proj: Linear::new(&scope.sub("proj"), width, output, true),
            norm2: norm("norm2", output),
            mlp: Mlp {
                norm: LayerNorm::new(&mlp.sub("norm"), output, EPS),
                w0: linear("w0", output, 2 * output),
                w1: linear("w1", output, 2 * output),
                w2: linear("w2", 2 * output, output),
            },
            mean_proj: Linear::of_kernel(&root.sub("mean_proj"), &[output, output, 1]),
            heads: config.num_attention_heads,
            width,
            output,
        }
    }

    pub(super) fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let x = self.proj.forward(self.norm3.forward(x)) + self.attend(self.norm1.forward(x));
        let mlp = &self.mlp;
        let normed = mlp.norm.forward(self.norm2.forward(x));
        let gated = mlp.w0.forward(normed).gelu_tanh() * mlp.w1.forward(normed);
        self.mean_proj.forward(x + mlp.w2.forward(gated))
    }

    fn attend<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let g = x.graph();
        let time = x.dim(0);
        let (heads, dim) = (self.heads, self.width / self.heads);
        let [q, k, v] = self.qkv.forward(x).chunk(1);
        let [q, k, v] = [q + g.param(&self.q_bias), k, v + g.param(&self.v_bias)]
            .map(|part| part.reshape([time, heads, dim]).transpose(0, 1));
        let mask = g.constant(&causal(time), [time, time]);
        let mixed = q.attention(k, v, Some(mask), 1.0 / (dim as f32).sqrt());
        let mixed = mixed.reshape([time, self.width]);
        self.attn_proj
            .forward(mixed.matmul_transposed(self.means(g)))
    }

    /// Heads are averaged, and neighbours of what is left: `[output, width]`.
    fn means<'g>(&self, g: Graph<'g>) -> Tensor<'g> {
        let dim = self.width / self.heads;
        let pooled = dim / self.output;
        let share = 1.0 / (self.heads * pooled) as f32;
        let weights: Vec<f32> = (0..self.output * self.width)
            .map(|at| {
                let (to, from) = (at / self.width, at % self.width);
                if from % dim / pooled == to {
                    share
                } else {
                    0.0
                }
            })
            .collect();
        g.constant(&weights, [self.output, self.width])
    }
}

/// What is added to the scores of each for all: nothing for itself and those before it.
fn causal(time: usize) -> Vec<f16> {
    (0..time * time)
        .map(|at| match at % time > at / time {
            true => f16::NEG_INFINITY,
            false => f16::ZERO,
        })
        .collect()
}
