//! The decoder that reads text.

use half::f16;
use sd_graph::{Graph, Pairing, Param, Role, Scope, Tensor};

use super::TextConfig;
use crate::nn::{Linear, RmsNorm};
use crate::rope::{Part, Precision, Rotation, Size, one_axis, qwen3_vl};

/// What the vision tower made of the pictures in a text, those of all pictures one behind the other.
#[derive(Debug, Clone)]
pub struct Pictures<'g> {
    /// What stands in the place of the tokens' embeddings, `[picture tokens, hidden]`.
    pub embeddings: Tensor<'g>,
    /// What is added behind the first layers, one after the other, `[picture tokens, hidden]` each.
    pub deepstack: Vec<Tensor<'g>>,
}

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
        TextModel::truncated(root, config, usize::MAX)
    }

    /// As [`TextModel::new`] with the first so many `layers`, or all if there are no more. Those beyond are known but not
    /// needed, where a file has them.
    pub fn truncated(root: &Scope<'_>, config: &TextConfig, layers: usize) -> TextModel {
        root.ignore("lm_head");
        root.ignore("model.visual");
        let scope = root.sub("model.language_model");
        scope.ignore("norm");
        let mut config = config.clone();
        config.num_hidden_layers = config.num_hidden_layers.min(layers);
        let all = scope.sub("layers");
        let is_there = |index: &usize| all.sub(index).sub("self_attn.q_norm").has("weight");
        for index in (config.num_hidden_layers..).take_while(is_there) {
            all.ignore(&index.to_string());
        }
        TextModel {
            embed_tokens: scope.sub("embed_tokens").param(
                "weight",
                [config.vocab_size, config.hidden_size],
                Role::Table,
            ),
            layers: (0..config.num_hidden_layers)
                .map(|index| DecoderLayer::new(&all.sub(index), &config))
                .collect(),
            config,
        }
    }

    /// The sizes it was made with; as many layers as are computed.
    pub fn config(&self) -> &TextConfig {
        &self.config
    }

    /// Hidden states `[tokens, hidden]` behind the last layer, before the final norm, of a text given by its token
    /// numbers `[tokens]`. Text alone turns all three rotary axes alike, so the position is the token's number.
    pub fn forward<'g>(&self, g: Graph<'g>, token_ids: Tensor<'g>) -> Tensor<'g> {
        let (head_dim, theta) = (self.config.head_dim(), self.config.rope_theta());
        let rope = one_axis(
            token_ids.dim(0),
            head_dim,
            f64::from(theta),
            Precision::Single,
        );
        let rope = Rotation::new(g, &rope, Pairing::Halves);
        let x = g.param(&self.embed_tokens).rows(token_ids);
        self.layers(x, &rope, |_, x| x)
    }

    /// As [`TextModel::forward`] for text and pictures in the order of `parts`, a picture's size being what is left of its
    /// patches when they are merged. `token_ids` are the text's alone, and there is some. A token sees what comes before
    /// it, a picture's tokens too.
    pub fn forward_with_pictures<'g>(
        &self,
        g: Graph<'g>,
        parts: &[Part],
        token_ids: Tensor<'g>,
        pictures: &Pictures<'g>,
    ) -> Tensor<'g> {
        let (head_dim, theta) = (self.config.head_dim(), self.config.rope_theta());
        let sections = self.config.rope_sections();
        let rope = qwen3_vl(parts.iter().copied(), head_dim, f64::from(theta), sections);
        let rope = Rotation::new(g, &rope, Pairing::Halves);
        let text = g.param(&self.embed_tokens).rows(token_ids);
        let x = join(parts, |range| match range {
            Range::Text { start, tokens } => text.slice(0, start, tokens),
            Range::Picture { start, tokens } => pictures.embeddings.slice(0, start, tokens),
        });
        let x = x.unwrap_or(text);
        self.layers(x, &rope, |index, x| {
            let Some(features) = pictures.deepstack.get(index) else {
                return x;
            };
            let mut at = 0;
            let added = join(parts, |range| match range {
                Range::Text { tokens, .. } => {
                    at += tokens;
                    x.slice(0, at - tokens, tokens)
                }
                Range::Picture { start, tokens } => {
                    at += tokens;
                    x.slice(0, at - tokens, tokens) + features.slice(0, start, tokens)
                }
            });
            added.unwrap_or(x)
        })
    }

    /// The layers one after the other, and what is done `behind` each.
    fn layers<'g>(
        &self,
        x: Tensor<'g>,
        rope: &Rotation<'g>,
        behind: impl Fn(usize, Tensor<'g>) -> Tensor<'g>,
    ) -> Tensor<'g> {
        let tokens = x.dim(0);
        let mask = x.graph().constant(&causal_mask(tokens), [tokens, tokens]);
        let mut x = x.cut("embed");
        for (index, layer) in self.layers.iter().enumerate() {
            let y = layer.forward(x, rope, mask);
            x = behind(index, y).cut(&format!("layer {index}"));
        }
        x
    }
}

/// Tokens of a part, counted among those of its kind.
#[derive(Debug, Clone, Copy)]
enum Range {
    Text { start: usize, tokens: usize },
    Picture { start: usize, tokens: usize },
}

/// What `piece` gives for each part, one behind the other.
fn join<'g>(parts: &[Part], piece: impl FnMut(Range) -> Tensor<'g>) -> Option<Tensor<'g>> {
    let (mut text, mut pictures) = (0, 0);
    let ranges = parts.iter().filter_map(|part| {
        let (next, tokens) = match *part {
            Part::Text(tokens) => (&mut text, tokens),
            Part::Picture(Size { height, width }) => (&mut pictures, height * width),
        };
        let start = *next;
        *next += tokens;
        (tokens > 0).then_some(match part {
            Part::Text(_) => Range::Text { start, tokens },
            Part::Picture(_) => Range::Picture { start, tokens },
        })
    });
    ranges
        .map(piece)
        .reduce(|joint, part| joint.concat(part, 0))
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
