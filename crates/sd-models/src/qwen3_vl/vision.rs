//! The tower that looks at pictures.

use sd_graph::{Graph, Pairing, Param, Role, Scope, Tensor};

use super::{Pictures, VisionConfig};
use crate::nn::{LayerNorm, Linear};
use crate::rope::{Rotation, Size, merged_order, qwen3_vl_vision};

/// Added to the variance in norms; no configuration says otherwise.
const EPS: f32 = 1e-6;

/// The vision tower of Qwen3-VL: from patches of a picture to what its language model is given.
#[derive(Debug)]
pub struct VisionTower {
    config: VisionConfig,
    /// A convolution over patches that do not overlap: a product.
    patch_embed: Linear,
    pos_embed: Param,
    blocks: Vec<Block>,
    merger: Merger,
    deepstack_merger_list: Vec<Merger>,
}

#[derive(Debug)]
struct Block {
    norm1: LayerNorm,
    attn: Attention,
    norm2: LayerNorm,
    linear_fc1: Linear,
    linear_fc2: Linear,
}

#[derive(Debug)]
struct Attention {
    qkv: Linear,
    proj: Linear,
    heads: usize,
    head_dim: usize,
}

/// Makes one token of a square of patches.
#[derive(Debug)]
struct Merger {
    norm: LayerNorm,
    linear_fc1: Linear,
    linear_fc2: Linear,
    merged: usize,
    /// Whether the norm is over the patches of a square together.
    norms_merged: bool,
}

impl VisionTower {
    /// Declares the parameters of the tower of a `Qwen3VLForConditionalGeneration` at the root of its checkpoint. The
    /// language model is known but not needed here.
    pub fn new(root: &Scope<'_>, config: &VisionConfig) -> VisionTower {
        root.ignore("lm_head");
        root.ignore("model.language_model");
        let scope = root.sub("model.visual");
        let hidden = config.hidden_size;
        let kernel = [
            hidden,
            config.in_channels,
            config.temporal_patch_size,
            config.patch_size,
            config.patch_size,
        ];
        let mergers = scope.sub("deepstack_merger_list");
        VisionTower {
            config: config.clone(),
            patch_embed: Linear::of_kernel(&scope.sub("patch_embed.proj"), &kernel),
            pos_embed: scope.sub("pos_embed").param(
                "weight",
                [config.num_position_embeddings, hidden],
                Role::Table,
            ),
            blocks: (0..config.depth)
                .map(|index| Block::new(&scope.sub("blocks").sub(index), config))
                .collect(),
            merger: Merger::new(&scope.sub("merger"), config, false),
            deepstack_merger_list: (0..config.deepstack_visual_indexes.len())
                .map(|index| Merger::new(&mergers.sub(index), config, true))
                .collect(),
        }
    }

    /// The sizes it was made with.
    pub fn config(&self) -> &VisionConfig {
        &self.config
    }

    /// What the language model is given of a picture of `size` patches, whose sides are multiples of the merged squares':
    /// embeddings and deepstack features, a token for each square, row by row. `patches [patches, values]` are in the order
    /// of the squares ([`ImageProcessor::patches`](super::ImageProcessor::patches)).
    pub fn forward<'g>(&self, g: Graph<'g>, size: Size, patches: Tensor<'g>) -> Pictures<'g> {
        let config = &self.config;
        let positions = self.positions(g, size);
        let mut x = (self.patch_embed.forward(patches) + positions).cut("vision prelude");
        let (merge, theta) = (config.spatial_merge_size, f64::from(config.rope_theta()));
        let rope = qwen3_vl_vision(size, merge, config.head_dim(), theta);
        let rope = Rotation::new(g, &rope, Pairing::Halves);
        let mut deepstack = Vec::new();
        for (index, block) in self.blocks.iter().enumerate() {
            let group = format!("vision block {index}");
            x = block.forward(x, &rope).cut(&group);
            let mut taken = config.deepstack_visual_indexes.iter();
            if let Some(merger) = taken
                .position(|&taken| taken == index)
                .and_then(|index| self.deepstack_merger_list.get(index))
            {
                deepstack.push(merger.forward(x).cut(&group));
            }
        }
        Pictures {
            embeddings: self.merger.forward(x),
            deepstack,
        }
    }

    /// The table of positions stretched over the picture, corner to corner, between four of its rows for each patch.
    fn positions<'g>(&self, g: Graph<'g>, size: Size) -> Tensor<'g> {
        let side = self.config.positions_by_side();
        let order = merged_order(size, self.config.spatial_merge_size);
        let patches = order.len();
        let table = g.param(&self.pos_embed);
        let corner = |down: usize, along: usize| {
            let taps = order.iter().map(|&[row, column]| {
                let (row, row_weight) = tap(row, size.height, side, down);
                let (column, column_weight) = tap(column, size.width, side, along);
                ((row * side + column) as i32, row_weight * column_weight)
            });
            let (rows, weights): (Vec<i32>, Vec<f32>) = taps.unzip();
            let rows = table.rows(g.constant(&rows, [patches]));
            rows * g.constant(&weights, [patches, 1])
        };
        corner(0, 0) + corner(0, 1) + corner(1, 0) + corner(1, 1)
    }
}

/// The position before (0) or behind (1) where patch `index` of `patches` lies among `side`, and how much it counts.
fn tap(index: usize, patches: usize, side: usize, behind: usize) -> (usize, f32) {
    let at = (index * (side - 1)) as f32 / patches.saturating_sub(1).max(1) as f32;
    let before = at.floor();
    let share = at - before;
    let weight = if behind == 0 { 1.0 - share } else { share };
    ((before as usize + behind).min(side - 1), weight)
}

impl Block {
    fn new(scope: &Scope<'_>, config: &VisionConfig) -> Block {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let mlp = scope.sub("mlp");
        Block {
            norm1: LayerNorm::new(&scope.sub("norm1"), hidden, EPS),
            attn: Attention::new(&scope.sub("attn"), config),
            norm2: LayerNorm::new(&scope.sub("norm2"), hidden, EPS),
            linear_fc1: Linear::new(&mlp.sub("linear_fc1"), hidden, inner, true),
            linear_fc2: Linear::new(&mlp.sub("linear_fc2"), inner, hidden, true),
        }
    }

    fn forward<'g>(&self, x: Tensor<'g>, rope: &Rotation<'g>) -> Tensor<'g> {
        let x = x + self.attn.forward(self.norm1.forward(x), rope);
        let fed = self.linear_fc1.forward(self.norm2.forward(x)).gelu_tanh();
        x + self.linear_fc2.forward(fed)
    }
}

impl Attention {
    fn new(scope: &Scope<'_>, config: &VisionConfig) -> Attention {
        let hidden = config.hidden_size;
        Attention {
            qkv: Linear::new(&scope.sub("qkv"), hidden, hidden.saturating_mul(3), true),
            proj: Linear::new(&scope.sub("proj"), hidden, hidden, true),
            heads: config.num_heads,
            head_dim: config.head_dim(),
        }
    }

    /// Every patch sees every other.
    fn forward<'g>(&self, x: Tensor<'g>, rope: &Rotation<'g>) -> Tensor<'g> {
        let patches = x.dim(0);
        let [q, k, v] = self
            .qkv
            .forward(x)
            .chunk(1)
            .map(|x| x.reshape([patches, self.heads, self.head_dim]));
        let (q, k) = (rope.turn(q).transpose(0, 1), rope.turn(k).transpose(0, 1));
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        let mixed = q.attention(k, v.transpose(0, 1), None, scale);
        self.proj
            .forward(mixed.reshape([patches, self.heads * self.head_dim]))
    }
}

impl Merger {
    fn new(scope: &Scope<'_>, config: &VisionConfig, norms_merged: bool) -> Merger {
        let merged = config.merged_size();
        let normed = match norms_merged {
            true => merged,
            false => config.hidden_size,
        };
        let out = config.out_hidden_size;
        Merger {
            norm: LayerNorm::new(&scope.sub("norm"), normed, EPS),
            linear_fc1: Linear::new(&scope.sub("linear_fc1"), merged, merged, true),
            linear_fc2: Linear::new(&scope.sub("linear_fc2"), merged, out, true),
            merged,
            norms_merged,
        }
    }

    fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let squares = x.dim(0) * x.dim(1) / self.merged;
        let merged = |x: Tensor<'g>| x.reshape([squares, self.merged]);
        let x = match self.norms_merged {
            true => self.norm.forward(merged(x)),
            false => merged(self.norm.forward(x)),
        };
        self.linear_fc2
            .forward(self.linear_fc1.forward(x).gelu_erf())
    }
}

#[cfg(test)]
mod tests {
    use super::tap;

    #[test]
    fn positions_stretch_from_corner_to_corner() {
        assert_eq!([tap(0, 6, 8, 0), tap(0, 6, 8, 1)], [(0, 1.0), (1, 0.0)]);
        assert_eq!([tap(5, 6, 8, 0), tap(5, 6, 8, 1)], [(7, 1.0), (7, 0.0)]);
        let [(before, a), (behind, b)] = [tap(1, 6, 8, 0), tap(1, 6, 8, 1)];
        assert_eq!((before, behind), (1, 2));
        assert!((a - 0.6).abs() < 1e-6 && (b - 0.4).abs() < 1e-6);
        // More patches than positions, and a single one.
        assert_eq!(tap(3, 15, 8, 0), (1, 0.5));
        assert_eq!(tap(0, 1, 1, 1), (0, 0.0));
    }
}
