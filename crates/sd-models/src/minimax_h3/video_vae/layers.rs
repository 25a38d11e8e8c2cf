//! Layers of the encoder, over frames `[t, channels, height, width]`.

use sd_backend::DType;
use sd_graph::{FrameConv, Param, Role, Scope, Tensor};

use super::config::{Config, Level};
use crate::wan_vae::{Chunk, Kept, Place};

/// What a convolution sees beyond the sides of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edges {
    /// Nothing: the kernel has one pixel.
    None,
    /// One pixel all around, as in a mirror.
    Around,
    /// One pixel below and to the right, as in a mirror.
    Behind,
}

/// A convolution over space and time that sees no later frames, and zeros before a clip's first.
#[derive(Debug)]
pub(super) struct CausalConv {
    weight: Param,
    bias: Param,
    output: usize,
    /// Frames that the kernel sees.
    depth: usize,
    side: usize,
    /// Frames to one of the result.
    stride: usize,
    spatial_stride: usize,
    edges: Edges,
}

impl CausalConv {
    fn declared(
        scope: &Scope<'_>,
        [input, output]: [usize; 2],
        [depth, side]: [usize; 2],
        edges: Edges,
    ) -> CausalConv {
        let stored = [output, input, depth, side, side];
        let in_memory = [output.saturating_mul(input), depth, side * side];
        CausalConv {
            weight: scope.param_as("weight", stored, in_memory, Role::Kernel),
            bias: scope.param("bias", [output], Role::Vector),
            output,
            depth,
            side,
            stride: 1,
            spatial_stride: 1,
            edges,
        }
    }

    /// Declares `weight [out, in, 3, 3, 3]` and `bias [out]` at `scope`; frames keep their size.
    pub(super) fn new(scope: &Scope<'_>, input: usize, output: usize) -> CausalConv {
        CausalConv::declared(scope, [input, output], [3, 3], Edges::Around)
    }

    /// Declares `weight [out, in, 1, 1, 1]` and `bias [out]` at `scope`.
    pub(super) fn pointwise(scope: &Scope<'_>, input: usize, output: usize) -> CausalConv {
        CausalConv::declared(scope, [input, output], [1, 1], Edges::None)
    }

    /// Declares `weight [channels, channels, 3, 3, 3]` and `bias [channels]` at `scope`; space and perhaps time become shorter.
    fn shortening(scope: &Scope<'_>, level: Level) -> CausalConv {
        let channels = [level.output; 2];
        CausalConv {
            stride: level.temporal,
            spatial_stride: level.spatial,
            ..CausalConv::declared(scope, channels, [3, 3], Edges::Behind)
        }
    }

    pub(super) fn forward<'g>(&self, x: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        let g = x.graph();
        let name = self.weight.name();
        let kept = Kept {
            most: self.depth - self.stride.min(self.depth),
            in_half: g.param(&self.weight).dtype() == DType::F16,
        };
        // The first chunk is a single frame, whatever the stride.
        let (past, stride) = match chunk.place {
            Place::First => (0, 1),
            Place::Second | Place::Later => (kept.most, self.stride),
        };
        let frames = chunk.recall(name, x, past, kept);
        match (kept.most, past) {
            (0, _) => {}
            // The next chunk looks back beyond the beginning.
            (2, 0) => chunk.keep(name, (x * 0.0).concat(frames, 0), kept),
            _ => chunk.keep(name, frames, kept),
        }
        let seen = match self.edges {
            Edges::None => frames,
            Edges::Around => frames.pad_reflect(2, 1, 1).pad_reflect(3, 1, 1),
            Edges::Behind => frames.pad_reflect(2, 0, 1).pad_reflect(3, 0, 1),
        };
        let conv = FrameConv {
            side: [self.side; 2],
            padding: [0, 0],
            past,
            stride,
            spatial_stride: self.spatial_stride,
        };
        seen.conv3d_causal(g.param(&self.weight), conv)
            + g.param(&self.bias).reshape([self.output, 1, 1])
    }
}

/// Groups of channels of each frame brought to mean 0 and deviation 1, times a weight, plus a bias.
#[derive(Debug)]
pub(super) struct GroupNorm {
    weight: Param,
    bias: Param,
    channels: usize,
    groups: usize,
    eps: f32,
}

impl GroupNorm {
    /// Declares `weight [channels]` and `bias [channels]` at `scope`.
    pub(super) fn new(scope: &Scope<'_>, channels: usize, config: &Config) -> GroupNorm {
        GroupNorm {
            weight: scope.param("weight", [channels], Role::Vector),
            bias: scope.param("bias", [channels], Role::Vector),
            channels,
            groups: config.norm_num_groups,
            eps: config.norm_eps,
        }
    }

    pub(super) fn forward_silu<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let g = x.graph();
        let (frames, channels, height, width) = (x.dim(0), x.dim(1), x.dim(2), x.dim(3));
        let group = channels / self.groups * height * width;
        let normed = x
            .reshape([frames, self.groups, group])
            .layer_norm(self.eps)
            .reshape([frames, channels, height, width]);
        let each = |param: &Param| g.param(param).reshape([self.channels, 1, 1]);
        (normed * each(&self.weight) + each(&self.bias)).silu()
    }
}

/// Two convolutions and a shortcut.
#[derive(Debug)]
struct ResidualBlock {
    norm1: GroupNorm,
    conv1: CausalConv,
    norm2: GroupNorm,
    conv2: CausalConv,
    conv_shortcut: Option<CausalConv>,
}

impl ResidualBlock {
    fn new(scope: &Scope<'_>, [input, output]: [usize; 2], config: &Config) -> ResidualBlock {
        let shortcut = || CausalConv::pointwise(&scope.sub("conv_shortcut"), input, output);
        ResidualBlock {
            norm1: GroupNorm::new(&scope.sub("norm1"), input, config),
            conv1: CausalConv::new(&scope.sub("conv1"), input, output),
            norm2: GroupNorm::new(&scope.sub("norm2"), output, config),
            conv2: CausalConv::new(&scope.sub("conv2"), output, output),
            conv_shortcut: (input != output).then(shortcut),
        }
    }

    fn forward<'g>(&self, x: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        let shortcut = self.conv_shortcut.as_ref();
        let shortcut = shortcut.map_or(x, |conv| conv.forward(x, chunk));
        let x = self.conv1.forward(self.norm1.forward_silu(x), chunk);
        let x = self.conv2.forward(self.norm2.forward_silu(x), chunk);
        shortcut + x
    }
}

/// A level: residual blocks, and perhaps a convolution that leaves out pixels and frames.
#[derive(Debug)]
pub(super) struct DownBlock {
    resnets: Vec<ResidualBlock>,
    downsampler: Option<CausalConv>,
}

impl DownBlock {
    pub(super) fn new(scope: &Scope<'_>, level: Level, config: &Config) -> DownBlock {
        let resnets = (0..config.layers_per_block).map(|index| {
            let input = if index == 0 {
                level.input
            } else {
                level.output
            };
            let scope = scope.sub("resnets").sub(index);
            ResidualBlock::new(&scope, [input, level.output], config)
        });
        let conv = scope.sub("downsamplers.0.conv");
        let shortens = level.spatial * level.temporal > 1;
        DownBlock {
            resnets: resnets.collect(),
            downsampler: shortens.then(|| CausalConv::shortening(&conv, level)),
        }
    }

    pub(super) fn forward<'g>(&self, x: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        let blocks = self.resnets.iter();
        let x = blocks.fold(x, |x, resnet| resnet.forward(x, chunk));
        match &self.downsampler {
            Some(downsampler) => downsampler.forward(x, chunk),
            None => x,
        }
    }
}
