//! The decoder that reads text.

use half::f16;
use sd_graph::{Graph, Pairing, Param, Role, Scope, Tensor};

use super::TextConfig;
use crate::nn::{Linear, RmsNorm};
use crate::rope::{Precision, Rotation, one_axis};

/// The language model of Qwen3-VL without its final norm and head.
#[derive(Debug)]
pub struct TextModel {
    config: TextConfig,
    embed_tokens: Param,
    layers: Vec<DecoderLayer>,
}

#[derive(Debug)]
struct DecoderLayer {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

#[derive(Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

#[derive(Debug)]
struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl TextModel {
    /// Declares the parameters of a `Qwen3VLForConditionalGeneration` at the root of its checkpoint. Final norm, head
    /// and vision tower are known but not needed here.
    pub fn new(root: &Scope<'_>, config: &TextConfig) -> TextModel {
        root.ignore("lm_head");
        root.ignore("model.visual");
        let scope = root.sub("model.language_model");
        scope.ignore("norm");
        TextModel {
            config: config.clone(),
            embed_tokens: scope.sub("embed_tokens").param(
                "weight",
                [config.vocab_size, config.hidden_size],
                Role::Table,
            ),
            layers: (0..config.num_hidden_layers)
                .map(|index| DecoderLayer::new(&scope.sub("layers").sub(index), config))
                .collect(),
        }
    }

    /// The sizes it was made with.
    pub fn config(&self) -> &TextConfig {
        &self.config
    }

    /// Hidden states `[tokens, hidden]` behind the last layer, before the final norm, of a text given by its token
    /// numbers `[tokens]`. Text alone turns all three rotary axes alike, so the position is the token's number.
    pub fn forward<'g>(&self, g: Graph<'g>, token_ids: Tensor<'g>) -> Tensor<'g> {
        let tokens = token_ids.dim(0);
        let (head_dim, theta) = (self.config.head_dim(), self.config.rope_theta());
        let rope = one_axis(tokens, head_dim, f64::from(theta), Precision::Single);
        let rope = Rotation::new(g, &rope, Pairing::Halves);
        let mask = g.constant(&causal_mask(tokens), [tokens, tokens]);

        let mut x = g.param(&self.embed_tokens).rows(token_ids).cut("embed");
        for (index, layer) in self.layers.iter().enumerate() {
            x = layer.forward(x, &rope, mask).cut(&format!("layer {index}"));
        }
        x
    }
}

impl DecoderLayer {
    fn new(scope: &Scope<'_>, config: &TextConfig) -> DecoderLayer {
        let norm = |name| RmsNorm::new(&scope.sub(name), config.hidden_size, config.rms_norm_eps);
        DecoderLayer {
            input_layernorm: norm("input_layernorm"),
            self_attn: Attention::new(&scope.sub("self_attn"), config),
            post_attention_layernorm: norm("post_attention_layernorm"),
            mlp: Mlp::new(&scope.sub("mlp"), config),
        }
    }

    fn forward<'g>(&self, x: Tensor<'g>, rope: &Rotation<'g>, mask: Tensor<'g>) -> Tensor<'g> {
        let x = x + self
            .self_attn
            .forward(self.input_layernorm.forward(x), rope, mask);
        x + self.mlp.forward(self.post_attention_layernorm.forward(x))
    }
}

impl Attention {
    fn new(scope: &Scope<'_>, config: &TextConfig) -> Attention {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim());
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let linear = |name, input, output| {
            Linear::new(&scope.sub(name), input, output, config.attention_bias)
        };
        Attention {
            q_proj: linear("q_proj", hidden, heads * head_dim),
            k_proj: linear("k_proj", hidden, kv_heads * head_dim),
            v_proj: linear("v_proj", hidden, kv_heads * head_dim),
            o_proj: linear("o_proj", heads * head_dim, hidden),
            q_norm: RmsNorm::new(&scope.sub("q_norm"), head_dim, config.rms_norm_eps),
            k_norm: RmsNorm::new(&scope.sub("k_norm"), head_dim, config.rms_norm_eps),
            heads,
            kv_heads,
            head_dim,
        }
    }

    fn forward<'g>(&self, x: Tensor<'g>, rope: &Rotation<'g>, mask: Tensor<'g>) -> Tensor<'g> {
        let tokens = x.dim(0);
        let q = self
            .q_proj
            .forward(x)
            .reshape([tokens, self.heads, self.head_dim]);
        let k = self
            .k_proj
            .forward(x)
            .reshape([tokens, self.kv_heads, self.head_dim]);
        let v = self
            .v_proj
            .forward(x)
            .reshape([tokens, self.kv_heads, self.head_dim]);

        let q = rope.turn(self.q_norm.forward(q)).transpose(0, 1);
        let k = rope.turn(self.k_norm.forward(k)).transpose(0, 1);

        let scale = 1.0 / (self.head_dim as f32).sqrt();
        let mixed = q.attention(k, v.transpose(0, 1), Some(mask), scale);
        self.o_proj
            .forward(mixed.reshape([tokens, self.heads * self.head_dim]))
    }
}

impl Mlp {
    fn new(scope: &Scope<'_>, config: &TextConfig) -> Mlp {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Mlp {
            gate_proj: Linear::new(&scope.sub("gate_proj"), hidden, inner, false),
            up_proj: Linear::new(&scope.sub("up_proj"), hidden, inner, false),
            down_proj: Linear::new(&scope.sub("down_proj"), inner, hidden, false),
        }
    }

    fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        self.down_proj
            .forward(self.gate_proj.forward(x).silu() * self.up_proj.forward(x))
    }
}

/// A token sees itself and what comes before it.
fn causal_mask(tokens: usize) -> Vec<f16> {
    (0..tokens)
        .flat_map(|query| {
            (0..tokens).map(move |key| {
                if key <= query {
                    f16::ZERO
                } else {
                    f16::NEG_INFINITY
                }
            })
        })
        .collect()
}
