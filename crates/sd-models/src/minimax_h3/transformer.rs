//! The denoising transformer.

use sd_graph::{Graph, Pairing, Scope, Tensor};

use super::config::TransformerConfig;
use super::layers::{Attention, FeedForward};
use super::layout::{Layout, Tag};
use super::preparation::Modulations;
use crate::nn::{Linear, RmsNorm};
use crate::rope::Rotation;

/// One stream of packed rows: text, pictures, sound and video see each other in every block, and each row is modulated by what it
/// is and how noisy it is. What makes rows of text and modulations is [`Preparation`](super::Preparation).
#[derive(Debug)]
pub struct Transformer {
    config: TransformerConfig,
    proj_in: Linear,
    audio_proj_in: Linear,
    blocks: Vec<Block>,
    norm_out: RmsNorm,
    proj_out: Linear,
    audio_proj_out: Linear,
}

#[derive(Debug)]
struct Block {
    norm1: RmsNorm,
    attn: Attention,
    norm2: RmsNorm,
    ff: FeedForward,
}

/// What goes into a call.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'g> {
    /// Of text, `[text rows, hidden_size]`, as [`Preparation::text`](super::Preparation::text) gives them.
    pub text: Tensor<'g>,
    /// Of sound, `[sound rows, audio_in_channels]`, those of conditions first; none if there are none.
    pub sound: Option<Tensor<'g>>,
    /// Of video, `[video rows, in_channels * 4]`, those of conditions first.
    pub video: Tensor<'g>,
}

/// What comes out: how to go from noise to the clip.
#[derive(Debug, Clone, Copy)]
pub struct Velocities<'g> {
    /// Of the sound that is made, `[rows, audio_in_channels]`.
    pub sound: Option<Tensor<'g>>,
    /// Of the video that is made, `[rows, in_channels * 4]`.
    pub video: Tensor<'g>,
}

impl Transformer {
    /// Declares those parameters of a `MiniMaxH3Transformer3DModel` that every step needs. The projections in and out are in single
    /// precision unless a rule names them or a file has them quantised, as the authors have them.
    pub fn new(scope: &Scope<'_>, config: &TransformerConfig) -> Transformer {
        // The frequencies of positions, which some files have and the configuration says.
        scope.ignore("rope");
        let dim = config.hidden_size;
        let own = scope.in_single_precision();
        let linear = |name: &str, input, output| Linear::new(&own.sub(name), input, output, true);
        let blocks = scope.sub("transformer_blocks");
        let norm_out = scope.sub("norm_out.norm");
        Transformer {
            config: config.clone(),
            proj_in: linear("proj_in", config.video_channels(), dim),
            audio_proj_in: linear("audio_proj_in", config.audio_in_channels, dim),
            blocks: (0..config.num_layers)
                .map(|index| Block::new(&blocks.sub(index), config))
                .collect(),
            norm_out: RmsNorm::new(&norm_out, dim, config.final_norm_eps),
            proj_out: linear("proj_out", dim, config.video_channels()),
            audio_proj_out: linear("audio_proj_out", dim, config.audio_in_channels),
        }
    }

    /// The sizes it was made with.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// The predicted velocities of what is made, with modulations at the [times](Layout::times) of the layout's rows.
    pub fn forward<'g>(
        &self,
        g: Graph<'g>,
        layout: &Layout,
        rows: Rows<'g>,
        modulations: &Modulations<'g>,
    ) -> Velocities<'g> {
        let video = self.proj_in.forward(rows.video);
        let sound = rows.sound.map(|sound| self.audio_proj_in.forward(sound));
        let mut x = pack(layout, rows.text, sound, video).cut("minimax_h3.prelude");

        let of_rows = g.constant(&layout.modulation_rows(), [layout.rows()]);
        let rope = layout.rotary_embedding(self.config.rope());
        let rope = Rotation::new(g, &rope, Pairing::Halves);
        for (index, (block, table)) in self.blocks.iter().zip(&modulations.blocks).enumerate() {
            x = block
                .forward(x, *table, of_rows, &rope)
                .cut(&format!("minimax_h3.blocks.{index}"));
        }

        let [shift, scale] = modulations.out.chunk(1);
        let made = |rows: usize, behind: usize, time: usize, head: &Linear| {
            let first = layout.rows() - behind - rows;
            let x = self.norm_out.forward(x.slice(0, first, rows));
            head.forward(x * (scale.slice(0, time, 1) + 1.0) + shift.slice(0, time, 1))
        };
        let (sound, video) = (layout.target_sound_rows(), layout.target_video_rows());
        Velocities {
            sound: (sound > 0).then(|| made(sound, video, 1, &self.audio_proj_out)),
            video: made(video, 0, 0, &self.proj_out),
        }
    }
}

/// Puts rows into the order of the layout.
fn pack<'g>(
    layout: &Layout,
    text: Tensor<'g>,
    sound: Option<Tensor<'g>>,
    video: Tensor<'g>,
) -> Tensor<'g> {
    let (mut next_sound, mut next_video) = (0, 0);
    let parts = layout.runs().into_iter().filter_map(|run| {
        let (source, next) = match run.tag {
            Tag::Text => return Some(text),
            Tag::Sound => (sound?, &mut next_sound),
            Tag::Video => (video, &mut next_video),
        };
        let first = std::mem::replace(next, *next + run.rows);
        Some(source.slice(0, first, run.rows))
    });
    // The longest comes last, so that all but once little is copied.
    parts
        .reduce(|joint, part| joint.concat(part, 0))
        .unwrap_or(text)
}

impl Block {
    fn new(scope: &Scope<'_>, config: &TransformerConfig) -> Block {
        let norm = |name| RmsNorm::new(&scope.sub(name), config.hidden_size, config.norm_eps);
        Block {
            norm1: norm("norm1"),
            attn: Attention::new(&scope.sub("attn"), config),
            norm2: norm("norm2"),
            ff: FeedForward::new(&scope.sub("ff"), config),
        }
    }

    /// Of `x [rows, dim]`, each modulated by that row of `table` that `of_rows` says, counted over times and modalities.
    fn forward<'g>(
        &self,
        x: Tensor<'g>,
        table: Tensor<'g>,
        of_rows: Tensor<'g>,
        rope: &Rotation<'g>,
    ) -> Tensor<'g> {
        // [times, modalities, 6, dim]: a row for each time and modality.
        let dim = x.dim(1);
        let table = table.reshape([table.shape().elements() / (6 * dim), 6 * dim]);
        let [
            shift_attn,
            scale_attn,
            gate_attn,
            shift_ff,
            scale_ff,
            gate_ff,
        ] = table.chunk(1);
        let each = |table: Tensor<'g>| table.rows(of_rows);
        // Scales are made whole in the small table, before they become one for each row.
        let modulated = |norm: &RmsNorm, x: Tensor<'g>, shift, scale: Tensor<'g>| {
            each(norm.scale(scale + 1.0)) * norm.unscaled(x) + each(shift)
        };

        let seen = modulated(&self.norm1, x, shift_attn, scale_attn);
        let x = x + self.attn.forward(seen, Some(rope)) * each(gate_attn);
        let seen = modulated(&self.norm2, x, shift_ff, scale_ff);
        x + self.ff.forward(seen) * each(gate_ff)
    }
}
