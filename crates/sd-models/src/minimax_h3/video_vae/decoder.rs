//! From latents to frames.

use sd_graph::{Graph, Pairing, Param, Role, Scope, Tensor};

use super::config::Config;
use crate::nn::{LayerNorm, Linear, RmsNorm};
use crate::rope::{Embedding, Precision, Rotation, Sequence, Size, TooLarge, axes};

/// Groups of tensors that a graph is cut into.
const GROUP: &str = "minimax_h3_vae.decoder";

/// The decoder: a transformer over all latents of a piece of a clip, each of which becomes a block of pixels.
#[derive(Debug)]
pub struct Decoder {
    post_quant_conv: Linear,
    proj_in: Linear,
    register_tokens: Param,
    blocks: Vec<Block>,
    norm_out: LayerNorm,
    proj_out: Linear,
    /// Channels of a token.
    dim: usize,
    /// Channels of a head that are turned, and the base of their frequencies.
    rope: (usize, f64),
    /// Tokens behind those of latents: registers, and one of zeros.
    extra: usize,
}

#[derive(Debug)]
struct Block {
    norm1: RmsNorm,
    attn: Attention,
    scale1: Param,
    norm2: RmsNorm,
    ff: FeedForward,
    scale2: Param,
}

#[derive(Debug)]
struct Attention {
    projections: Projections,
    to_out: Linear,
    heads: usize,
    head_dim: usize,
    eps: f32,
}

/// How a file has the projections to queries, keys and values.
#[derive(Debug)]
enum Projections {
    Apart([Linear; 3]),
    /// In one tensor, in which each head has its queries, keys and values in turn.
    ByHead(Linear),
}

#[derive(Debug)]
struct FeedForward {
    value: Linear,
    gate: Linear,
    out: Linear,
}

impl Decoder {
    /// Declares the decoder's parameters at the root of the VAE's checkpoint. The encoder is known but not needed here.
    pub fn new(root: &Scope<'_>, config: &Config) -> Decoder {
        for name in ["encoder", "quant_conv", "latents_mean", "latents_std"] {
            root.ignore(name);
        }
        // What was put in the place of latents while the model was trained.
        root.ignore("decoder.mask_token");
        let scope = root.sub("decoder");
        let (latent, dim) = (config.latent_channels, config.decoder_dim());
        let registers = config.decoder_num_register_tokens;
        let blocks = scope.sub("transformer_blocks");
        let block = config.pixels_per_latent();
        Decoder {
            post_quant_conv: Linear::of_kernel(
                &root.sub("post_quant_conv"),
                &[latent, latent, 1, 1, 1],
            ),
            proj_in: Linear::new(&scope.sub("proj_in"), latent, dim, true),
            register_tokens: scope.param_as(
                "register_tokens",
                [1, registers, dim],
                [registers, dim],
                Role::Vector,
            ),
            blocks: (0..config.decoder_num_layers)
                .map(|index| Block::new(&blocks.sub(index), config))
                .collect(),
            norm_out: LayerNorm::new(&scope.sub("norm_out"), dim, config.decoder_norm_eps),
            proj_out: Linear::new(&scope.sub("proj_out"), dim, block, true),
            dim,
            rope: (config.rope_dim(), config.decoder_rope_theta),
            extra: registers + 1,
        }
    }

    /// The pixels `[frames * height * width, values]` of latents `[frames * height * width, channels]` that have their means
    /// and deviations back: of each latent a block of all channels, frames, rows and columns, outermost first.
    pub fn forward<'g>(&self, z: Tensor<'g>, frames: usize, size: Size) -> Tensor<'g> {
        let g = z.graph();
        let x = self.proj_in.forward(self.post_quant_conv.forward(z));
        let zeros = g.constant(&vec![0.0_f32; self.dim], [1, self.dim]);
        let registers = g.param(&self.register_tokens);
        let mut x = x.concat(registers, 0).concat(zeros, 0);
        x = x.cut(&format!("{GROUP}.proj_in"));
        let rope = Rotation::new(g, &self.positions(frames, size), Pairing::Halves);
        for (index, block) in self.blocks.iter().enumerate() {
            x = block.forward(x, &rope);
            x = x.cut(&format!("{GROUP}.blocks.{index}"));
        }
        let x = x.slice(0, 0, z.dim(0));
        self.proj_out.forward(self.norm_out.forward(x))
    }

    /// How latents turn: each axis of the piece that is decoded goes once around, whatever its length; the first latent lies
    /// half a step from its beginning. The tokens behind them do not turn.
    fn positions(&self, frames: usize, size: Size) -> Result<Embedding, TooLarge> {
        let along = |index: usize, side: usize| {
            let place = 2.0 * ((index as f32 + 0.5) / side as f32) - 1.0;
            std::f32::consts::TAU * place
        };
        let mut sequence = Sequence::<3>::new();
        sequence.frames(frames, size, (0.0, 0.0), |frame, row, column| {
            [
                along(frame, frames),
                along(row, size.height),
                along(column, size.width),
            ]
        });
        sequence.tokens(self.extra, |_| [0.0; 3]);
        let (dim, theta) = self.rope;
        let frequencies = axes([dim / 3; 3], [theta; 3], Precision::Single);
        sequence.embed(frequencies, Precision::Single, 1)
    }

    /// A graph of [`Decoder::forward`] with the input `latents` and the output `pixels`.
    pub(super) fn record(
        &self,
        g: Graph<'_>,
        channels: usize,
        [frames, height, width]: [usize; 3],
    ) {
        let z = g.input::<f32>("latents", [frames * height * width, channels]);
        g.output("pixels", self.forward(z, frames, Size::new(height, width)));
    }
}

impl Block {
    fn new(scope: &Scope<'_>, config: &Config) -> Block {
        let (dim, eps) = (config.decoder_dim(), config.decoder_norm_eps);
        Block {
            norm1: RmsNorm::new(&scope.sub("norm1"), dim, eps),
            attn: Attention::new(&scope.sub("attn"), config),
            scale1: scope.param("scale1", [dim], Role::Vector),
            norm2: RmsNorm::new(&scope.sub("norm2"), dim, eps),
            ff: FeedForward::new(&scope.sub("ff"), dim, dim * config.decoder_ffn_mult),
            scale2: scope.param("scale2", [dim], Role::Vector),
        }
    }

    fn forward<'g>(&self, x: Tensor<'g>, rope: &Rotation<'g>) -> Tensor<'g> {
        let g = x.graph();
        let x = x + self.attn.forward(self.norm1.forward(x), rope) * g.param(&self.scale1);
        x + self.ff.forward(self.norm2.forward(x)) * g.param(&self.scale2)
    }
}

impl Attention {
    fn new(scope: &Scope<'_>, config: &Config) -> Attention {
        let dim = config.decoder_dim();
        let linear = |name: &str, output: usize| Linear::new(&scope.sub(name), dim, output, true);
        let projections = match scope.has("to_qkv.weight") {
            true => Projections::ByHead(linear("to_qkv", 3 * dim)),
            false => Projections::Apart(["to_q", "to_k", "to_v"].map(|name| linear(name, dim))),
        };
        Attention {
            projections,
            to_out: linear("to_out.0", dim),
            heads: config.decoder_num_attention_heads,
            head_dim: config.decoder_attention_head_dim,
            eps: config.decoder_norm_eps,
        }
    }

    /// Every token sees every other.
    fn forward<'g>(&self, x: Tensor<'g>, rope: &Rotation<'g>) -> Tensor<'g> {
        let (tokens, heads, head_dim) = (x.dim(0), self.heads, self.head_dim);
        let [q, k, v] = match &self.projections {
            Projections::Apart(parts) => parts
                .each_ref()
                .map(|part| part.forward(x).reshape([tokens, heads, head_dim])),
            Projections::ByHead(qkv) => {
                let qkv = qkv.forward(x).reshape([tokens, heads, 3 * head_dim]);
                qkv.chunk(2)
            }
        };
        let [q, k] = [q, k].map(|x| rope.turn(x.rms_norm(self.eps)).transpose(0, 1));
        let scale = 1.0 / (head_dim as f32).sqrt();
        let mixed = q.attention(k, v.transpose(0, 1), None, scale);
        self.to_out
            .forward(mixed.reshape([tokens, heads * head_dim]))
    }
}

impl FeedForward {
    fn new(scope: &Scope<'_>, dim: usize, inner: usize) -> FeedForward {
        FeedForward {
            value: Linear::new(&scope.sub("value"), dim, inner, true),
            gate: Linear::new(&scope.sub("gate"), dim, inner, true),
            out: Linear::new(&scope.sub("net.2"), inner, dim, true),
        }
    }

    fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let gated = self.value.forward(x) * self.gate.forward(x).silu();
        self.out.forward(gated)
    }
}
