//! The denoising transformer.

use std::path::Path;

use sd_backend::DType;
use sd_graph::{CacheEntry, Graph, Pairing, Scope, Shape, Tensor};
use serde::Deserialize;

use super::layout::{AttentionRun, Layout, Segment};
use super::prefix::{Prefix, names};
use crate::config::{check, read_json};
use crate::error::Result;
use crate::nn::{Linear, RmsNorm};
use crate::rope::Rotation;

/// Channels of the sinusoidal timestep embedding.
const TIMESTEP_CHANNELS: usize = 256;

/// `transformer/config.json`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct TransformerConfig {
    /// Side of a square of latents that makes one token.
    patch_size: usize,
    /// Latent channels going in.
    pub in_channels: usize,
    /// Latent channels coming out; as many as go in if none are given.
    #[serde(default)]
    out_channels: Option<usize>,
    /// Blocks.
    pub num_layers: usize,
    /// Channels of a head.
    pub attention_head_dim: usize,
    /// Heads.
    pub num_attention_heads: usize,
    /// Channels of the text encoder's hidden states.
    pub context_in_dim: usize,
    /// Width of the feed-forward by the model's width.
    pub mlp_ratio: usize,
    /// Channels of a head that each of frame, height and width turns.
    pub axes_dims_rope: [usize; 3],
    /// Added to the variance in norms.
    pub eps: f32,
    /// Whether text and reference pictures are modulated as at timestep 0.
    pub causal_condition: bool,
}

impl TransformerConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) or [`Error::Config`](crate::Error::Config).
    pub fn read(path: &Path) -> Result<TransformerConfig> {
        TransformerConfig::checked(read_json(path)?, path)
    }

    /// Refuses what makes no sense, of the file `path`.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config).
    pub(crate) fn checked(config: TransformerConfig, path: &Path) -> Result<TransformerConfig> {
        check(
            path,
            &[
                ("patch_size = 1", config.patch_size == 1),
                ("in_channels > 0", config.in_channels > 0),
                ("out_channels > 0", config.out_channels() > 0),
                ("attention_head_dim > 0", config.attention_head_dim > 0),
                ("num_attention_heads > 0", config.num_attention_heads > 0),
                ("context_in_dim > 0", config.context_in_dim > 0),
                ("mlp_ratio > 0", config.mlp_ratio > 0),
                (
                    "axes_dims_rope are even",
                    config.axes_dims_rope.iter().all(|dim| dim % 2 == 0),
                ),
                (
                    "axes_dims_rope add up to attention_head_dim",
                    config
                        .axes_dims_rope
                        .iter()
                        .try_fold(0_usize, |sum, &dim| sum.checked_add(dim))
                        == Some(config.attention_head_dim),
                ),
                ("eps >= 0", config.eps >= 0.0),
            ],
        )?;
        Ok(config)
    }

    /// Latent channels coming out.
    pub fn out_channels(&self) -> usize {
        self.out_channels.unwrap_or(self.in_channels)
    }

    /// Width of the residual stream.
    pub fn inner_dim(&self) -> usize {
        self.num_attention_heads
            .saturating_mul(self.attention_head_dim)
    }
}

/// The single-stream block-causal transformer: no biases, no shifts, one modulation shared by all blocks.
#[derive(Debug)]
pub struct Transformer {
    config: TransformerConfig,
    timestep_linear_1: Linear,
    timestep_linear_2: Linear,
    txt_in: TextProjection,
    img_in: Linear,
    modulation: Linear,
    transformer_blocks: Vec<Block>,
    norm_out: Linear,
    proj_out: Linear,
}

#[derive(Debug)]
struct TextProjection {
    text_norm: RmsNorm,
    in_layer: Linear,
    out_layer: Linear,
}

#[derive(Debug)]
struct Block {
    attn: Attention,
    img_mlp: SwiGlu,
    eps: f32,
}

#[derive(Debug)]
struct Attention {
    to_q: Linear,
    to_k: Linear,
    to_v: Linear,
    to_out: Linear,
    norm_q: RmsNorm,
    norm_k: RmsNorm,
    heads: usize,
    head_dim: usize,
}

#[derive(Debug)]
struct SwiGlu {
    gate_layer: Linear,
    proj: Linear,
    out: Linear,
}

/// What each token's normalised state is multiplied by before attention and feed-forward, and how much of their
/// results it takes, `[tokens, dim]` each, or `[1, dim]` if it is the same for all.
#[derive(Clone, Copy)]
struct Modulation<'g> {
    scale_attn: Tensor<'g>,
    gate_attn: Tensor<'g>,
    scale_mlp: Tensor<'g>,
    gate_mlp: Tensor<'g>,
}

/// The layout's attention runs with their masks in a graph, and what becomes of keys and values of the prefix.
struct Runs<'g> {
    runs: Vec<(AttentionRun, Option<Tensor<'g>>)>,
    prefix: Prefix,
    prefix_tokens: usize,
}

impl<'g> Runs<'g> {
    fn new(g: Graph<'g>, layout: &Layout, prefix: Prefix) -> Runs<'g> {
        let prefix_tokens = layout.prefix_tokens();
        let mut runs = layout.attention_runs();
        if let Prefix::Read(_) = prefix {
            // The target's alone, whose first token is now the first of all queries.
            runs.retain(|run| run.start >= prefix_tokens);
            for run in &mut runs {
                run.start -= prefix_tokens;
            }
        }
        let with_mask = |mut run: AttentionRun| {
            let mask = run
                .mask
                .take()
                .map(|mask| g.constant(&mask, [run.tokens, run.keys]));
            (run, mask)
        };
        Runs {
            runs: runs.into_iter().map(with_mask).collect(),
            prefix,
            prefix_tokens,
        }
    }

    /// Keys and values `[tokens, heads, channels]` of all tokens, where those of the prefix may come from the cache, or go
    /// there. They are stored within their block, so that nothing is kept for it where graphs are cut.
    fn with_prefix(&self, block: usize, own: [Tensor<'g>; 2]) -> [Tensor<'g>; 2] {
        let mut names = names(block).into_iter();
        own.map(|own| {
            let (g, name) = (own.graph(), names.next().unwrap_or_default());
            match self.prefix {
                Prefix::Compute => own,
                Prefix::Store(dtype) => {
                    g.store(&name, own.slice(0, 0, self.prefix_tokens), dtype);
                    own
                }
                Prefix::Read(dtype) => {
                    let shape = [self.prefix_tokens, own.dim(1), own.dim(2)];
                    let before = g.cached(&name, shape, dtype);
                    let before = match dtype {
                        DType::F32 => before,
                        _ => before.cast(DType::F32),
                    };
                    before.concat(own, 0)
                }
            }
        })
    }

    /// Block-causal attention of `[heads, tokens, channels]`, run by run: `[tokens, heads, channels]`.
    fn attention(&self, q: Tensor<'g>, k: Tensor<'g>, v: Tensor<'g>, scale: f32) -> Tensor<'g> {
        let parts = self.runs.iter().map(|(run, mask)| {
            let (keys, values) = (k.slice(1, 0, run.keys), v.slice(1, 0, run.keys));
            q.slice(1, run.start, run.tokens)
                .attention(keys, values, *mask, scale)
        });
        parts
            .reduce(|joint, part| joint.concat(part, 0))
            .unwrap_or(q)
    }
}

impl Transformer {
    /// Declares the parameters of a `QwenImage21Transformer2DModel`.
    pub fn new(scope: &Scope<'_>, config: &TransformerConfig) -> Transformer {
        let dim = config.inner_dim();
        let linear =
            |name: &str, input, output| Linear::new(&scope.sub(name), input, output, false);
        Transformer {
            config: config.clone(),
            timestep_linear_1: linear(
                "time_text_embed.timestep_embedder.linear_1",
                TIMESTEP_CHANNELS,
                dim,
            ),
            timestep_linear_2: linear("time_text_embed.timestep_embedder.linear_2", dim, dim),
            txt_in: TextProjection::new(&scope.sub("txt_in"), config),
            img_in: linear("img_in", config.in_channels, dim),
            modulation: linear("modulation.1", dim, dim.saturating_mul(4)),
            transformer_blocks: (0..config.num_layers)
                .map(|index| Block::new(&scope.sub("transformer_blocks").sub(index), config))
                .collect(),
            norm_out: linear("norm_out.linear", dim, dim),
            proj_out: linear("proj_out", dim, config.out_channels()),
        }
    }

    /// The sizes it was made with.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// Changes whether text and reference pictures are modulated as at timestep 0 (the configuration says so); no weight
    /// depends on it.
    pub fn set_causal_condition(&mut self, causal_condition: bool) {
        self.config.causal_condition = causal_condition;
    }

    /// Whether keys and values of the prefix of this layout are the same at every step: not if it is modulated by the
    /// sampled timestep, or there is none.
    pub fn has_fixed_prefix(&self, layout: &Layout) -> bool {
        self.config.causal_condition && layout.prefix_tokens() > 0
    }

    /// What [`Transformer::forward_with`] stores for a prefix of so many tokens.
    pub fn prefix_entries(&self, tokens: usize, dtype: DType) -> Vec<CacheEntry> {
        let config = &self.config;
        let shape = [
            tokens,
            config.num_attention_heads,
            config.attention_head_dim,
        ];
        let Ok(shape) = Shape::new(&shape) else {
            return Vec::new();
        };
        let entry = |name| CacheEntry { name, shape, dtype };
        (0..config.num_layers).flat_map(names).map(entry).collect()
    }

    /// The predicted velocity of the target, `[target tokens, channels]`.
    ///
    /// - `latents [image tokens, channels]`: reference pictures in order, the target last;
    /// - `text [text tokens, context]`: the text encoder's hidden states, image slots left out;
    /// - `timestep [2, 256]`: [`timestep_embedding`] of the sampled timestep and of 0.
    pub fn forward<'g>(
        &self,
        g: Graph<'g>,
        layout: &Layout,
        latents: Tensor<'g>,
        text: Tensor<'g>,
        timestep: Tensor<'g>,
    ) -> Tensor<'g> {
        self.forward_with(g, layout, latents, Some(text), timestep, Prefix::Compute)
    }

    /// As [`Transformer::forward`], storing keys and values of the prefix in the run's cache or reading them there. When
    /// they are read, `latents` are the target's alone and there is no text.
    pub fn forward_with<'g>(
        &self,
        g: Graph<'g>,
        layout: &Layout,
        latents: Tensor<'g>,
        text: Option<Tensor<'g>>,
        timestep: Tensor<'g>,
        prefix: Prefix,
    ) -> Tensor<'g> {
        let prefix = match self.has_fixed_prefix(layout) {
            true => prefix,
            false => Prefix::Compute,
        };
        let is_read = matches!(prefix, Prefix::Read(_));
        let images = self.img_in.forward(latents);
        let x = match text {
            Some(text) if !is_read => interleave(layout, self.txt_in.forward(text), images),
            _ => images,
        };
        let mut x = x.cut("prelude");

        let temb = self
            .timestep_linear_2
            .forward(self.timestep_linear_1.forward(timestep).silu())
            .silu();
        let modulation = self.modulation.forward(temb).cut("prelude");
        let [scale_attn, gate_attn, scale_mlp, gate_mlp] = modulation.chunk(1);
        let rows = match self.config.causal_condition {
            true => layout.timestep_rows(),
            false => vec![0; layout.tokens()],
        };
        let rows = (!is_read).then(|| g.constant(&rows, [layout.tokens()]));
        // The target alone takes the sampled timestep as a whole.
        let each = |by_timestep: Tensor<'g>| match rows {
            Some(rows) => by_timestep.rows(rows),
            None => by_timestep.slice(0, 0, 1),
        };
        let modulation = Modulation {
            scale_attn: each(scale_attn + 1.0),
            gate_attn: each(gate_attn.tanh()),
            scale_mlp: each(scale_mlp + 1.0),
            gate_mlp: each(gate_mlp.tanh()),
        };

        let first = if is_read { layout.prefix_tokens() } else { 0 };
        let rope = layout.rotary_embedding(self.config.axes_dims_rope);
        let rope = rope.map(|rope| rope.behind(first));
        let rope = Rotation::new(g, &rope, Pairing::Neighbours);
        let runs = Runs::new(g, layout, prefix);
        for (index, block) in self.transformer_blocks.iter().enumerate() {
            x = block
                .forward(index, x, &modulation, &rope, &runs)
                .cut(&format!("block {index}"));
        }

        let target = x.slice(0, layout.prefix_tokens() - first, layout.target_tokens());
        let scale = self.norm_out.forward(temb.slice(0, 0, 1)) + 1.0;
        self.proj_out
            .forward(target.layer_norm(self.config.eps) * scale)
    }
}

/// Puts text and pictures into the order of the layout.
fn interleave<'g>(layout: &Layout, text: Tensor<'g>, images: Tensor<'g>) -> Tensor<'g> {
    let (mut next_text, mut next_image) = (0, 0);
    let mut joint: Option<Tensor<'g>> = None;
    for segment in layout.segments() {
        let (source, next) = match segment {
            Segment::Text(_) => (text, &mut next_text),
            Segment::Image { .. } => (images, &mut next_image),
        };
        if segment.tokens() == 0 {
            continue;
        }
        let part = source.slice(0, *next, segment.tokens());
        *next += segment.tokens();
        joint = Some(joint.map_or(part, |joint| joint.concat(part, 0)));
    }
    joint.unwrap_or(images)
}

impl TextProjection {
    fn new(scope: &Scope<'_>, config: &TransformerConfig) -> TextProjection {
        let dim = config.inner_dim();
        TextProjection {
            text_norm: RmsNorm::new(&scope.sub("text_norm"), config.context_in_dim, config.eps),
            in_layer: Linear::new(&scope.sub("in_layer"), config.context_in_dim, dim, false),
            out_layer: Linear::new(&scope.sub("out_layer"), dim, dim, false),
        }
    }

    fn forward<'g>(&self, text: Tensor<'g>) -> Tensor<'g> {
        let x = self.text_norm.forward_zero_centred(text);
        self.out_layer.forward(self.in_layer.forward(x).gelu_tanh())
    }
}

impl Block {
    fn new(scope: &Scope<'_>, config: &TransformerConfig) -> Block {
        Block {
            attn: Attention::new(&scope.sub("attn"), config),
            img_mlp: SwiGlu::new(&scope.sub("img_mlp"), config),
            eps: config.eps,
        }
    }

    fn forward<'g>(
        &self,
        index: usize,
        x: Tensor<'g>,
        modulation: &Modulation<'g>,
        rope: &Rotation<'g>,
        runs: &Runs<'g>,
    ) -> Tensor<'g> {
        let seen = x.layer_norm(self.eps) * modulation.scale_attn;
        let attended = self.attn.forward(index, seen, rope, runs);
        let x = x + attended * modulation.gate_attn;
        let fed = self
            .img_mlp
            .forward(x.layer_norm(self.eps) * modulation.scale_mlp);
        x + fed * modulation.gate_mlp
    }
}

impl Attention {
    fn new(scope: &Scope<'_>, config: &TransformerConfig) -> Attention {
        let (dim, head_dim) = (config.inner_dim(), config.attention_head_dim);
        let linear = |name| Linear::new(&scope.sub(name), dim, dim, false);
        Attention {
            to_q: linear("to_q"),
            to_k: linear("to_k"),
            to_v: linear("to_v"),
            to_out: linear("to_out.0"),
            norm_q: RmsNorm::new(&scope.sub("norm_q"), head_dim, config.eps),
            norm_k: RmsNorm::new(&scope.sub("norm_k"), head_dim, config.eps),
            heads: config.num_attention_heads,
            head_dim,
        }
    }

    fn forward<'g>(
        &self,
        block: usize,
        x: Tensor<'g>,
        rope: &Rotation<'g>,
        runs: &Runs<'g>,
    ) -> Tensor<'g> {
        let tokens = x.dim(0);
        let split = |x: Tensor<'g>| x.reshape([tokens, self.heads, self.head_dim]);
        let q = rope.turn(self.norm_q.forward(split(self.to_q.forward(x))));
        let k = rope.turn(self.norm_k.forward(split(self.to_k.forward(x))));
        let v = split(self.to_v.forward(x));
        let [k, v] = runs.with_prefix(block, [k, v]);

        let scale = 1.0 / (self.head_dim as f32).sqrt();
        let mixed = runs.attention(
            q.transpose(0, 1),
            k.transpose(0, 1),
            v.transpose(0, 1),
            scale,
        );
        self.to_out
            .forward(mixed.reshape([tokens, self.heads * self.head_dim]))
    }
}

impl SwiGlu {
    fn new(scope: &Scope<'_>, config: &TransformerConfig) -> SwiGlu {
        let (dim, inner) = (
            config.inner_dim(),
            config.inner_dim().saturating_mul(config.mlp_ratio),
        );
        SwiGlu {
            gate_layer: Linear::new(&scope.sub("gate_layer"), dim, inner, false),
            proj: Linear::new(&scope.sub("proj"), dim, inner, false),
            out: Linear::new(&scope.sub("out"), inner, dim, false),
        }
    }

    fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        // In this order, so that nothing comes between the two steps that devices do as one.
        self.out
            .forward(self.proj.forward(x) * self.gate_layer.forward(x).silu())
    }
}

/// The sinusoidal embedding of a timestep from 0 to 1, 256 channels: cosines first, then sines, of
/// `1000 * timestep * 10000^(-i / 128)`.
pub fn timestep_embedding(timestep: f32) -> [f32; TIMESTEP_CHANNELS] {
    const HALF: usize = TIMESTEP_CHANNELS / 2;
    let mut embedding = [0.0; TIMESTEP_CHANNELS];
    for index in 0..HALF {
        let frequency = (-(10_000.0_f32.ln()) * index as f32 / HALF as f32).exp();
        let angle = 1000.0 * timestep * frequency;
        embedding[index] = angle.cos();
        embedding[HALF + index] = angle.sin();
    }
    embedding
}
