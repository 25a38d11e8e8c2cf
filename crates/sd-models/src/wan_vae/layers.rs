//! Layers of encoder and decoder, over frames `[t, channels, height, width]`.

use sd_backend::DType;
use sd_graph::{FrameConv, Graph, Param, Role, Scope, Tensor};

use super::chunk::{Chunk, Kept, Place};
use crate::nn::Conv2d;
use crate::rope::Circular;

/// How deep kernels are in time: three frames, but one in a VAE for pictures alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    One,
    Three,
}

/// A convolution over space and time that looks back two frames, 3 by 3 by 3; in a VAE for pictures 3 by 3.
#[derive(Debug)]
pub(crate) enum CausalConv {
    Flat(Conv2d),
    Deep(TimeConv),
}

/// A convolution with a kernel three frames deep.
#[derive(Debug)]
pub(crate) struct TimeConv {
    weight: Param,
    bias: Param,
    output: usize,
    /// Height and width of the kernel.
    side: usize,
    /// Whether the clip's first chunk passes it by, so that it begins with the second.
    late: bool,
    /// Frames to one of the result.
    stride: usize,
}

impl CausalConv {
    /// Declares `weight [out, in, 3, 3, 3]`, or `[out, in, 3, 3]`, and `bias [out]` at `scope`.
    pub(crate) fn new(scope: &Scope<'_>, input: usize, output: usize, depth: Depth) -> CausalConv {
        match depth {
            Depth::One => CausalConv::Flat(Conv2d::new(scope, input, output, 3)),
            Depth::Three => CausalConv::Deep(TimeConv::new(scope, input, output, 3)),
        }
    }

    pub(crate) fn forward<'g>(&self, x: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        match self {
            CausalConv::Flat(conv) => conv.forward(x, chunk.circular),
            CausalConv::Deep(conv) => conv.forward(x, chunk),
        }
    }
}

impl TimeConv {
    /// Declares `weight [out, in, 3, side, side]` and `bias [out]` at `scope`.
    pub(crate) fn new(scope: &Scope<'_>, input: usize, output: usize, side: usize) -> TimeConv {
        let stored = [output, input, 3, side, side];
        let in_memory = [output.saturating_mul(input), 3, side * side];
        TimeConv {
            weight: scope.param_as("weight", stored, in_memory, Role::Kernel),
            bias: scope.param("bias", [output], Role::Vector),
            output,
            side,
            late: false,
            stride: 1,
        }
    }

    /// One that begins with the second chunk and sees nothing of the first.
    pub(crate) fn late(mut self) -> TimeConv {
        self.late = true;
        self
    }

    /// One that halves time; the first chunk passes it by but is looked back at.
    pub(crate) fn halving(mut self) -> TimeConv {
        self.stride = 2;
        self
    }

    /// What it keeps: frames that it looks back at beyond the first that go into a result.
    fn kept(&self, g: Graph<'_>) -> Kept {
        Kept {
            most: 3 - self.stride,
            in_half: g.param(&self.weight).dtype() == DType::F16,
        }
    }

    pub(crate) fn forward<'g>(&self, x: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        let g = x.graph();
        let kept = self.kept(g);
        let most = kept.most;
        let past = match chunk.place {
            Place::First => 0,
            Place::Second if self.late => 0,
            Place::Second => 1,
            Place::Later => most,
        };
        let name = self.weight.name();
        let frames = chunk.recall(name, x, past, kept);
        if self.late && past == 0 && frames.dim(0) < most {
            // The chunk to come looks back beyond the beginning.
            chunk.keep(name, (x * 0.0).concat(frames, 0), kept);
        } else {
            chunk.keep(name, frames, kept);
        }

        let around = self.side / 2;
        let share = |joins: bool| if joins { around } else { 0 };
        let Circular {
            x: columns,
            y: rows,
        } = chunk.circular;
        let (zeros, wrapped) = if around > 0 && chunk.circular.any() {
            let wrapped = frames.pad_circular(share(rows), share(columns));
            ([share(!rows), share(!columns)], wrapped)
        } else {
            ([around; 2], frames)
        };
        let conv = FrameConv {
            side: [self.side; 2],
            padding: zeros,
            past,
            stride: self.stride,
            spatial_stride: 1,
        };
        wrapped.conv3d_causal(g.param(&self.weight), conv)
            + g.param(&self.bias).reshape([self.output, 1, 1])
    }

    /// Lets the first chunk pass by, to be looked back at.
    pub(crate) fn pass_by<'g>(&self, x: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        if !self.late {
            chunk.keep(self.weight.name(), x, self.kept(x.graph()));
        }
        x
    }
}

/// Each pixel's channels brought to length `sqrt(channels)`, times a weight.
#[derive(Debug)]
pub(crate) struct ChannelNorm {
    gamma: Param,
    channels: usize,
}

impl ChannelNorm {
    pub(crate) fn new(scope: &Scope<'_>, channels: usize) -> ChannelNorm {
        ChannelNorm {
            gamma: scope.param("gamma", [channels], Role::Vector),
            channels,
        }
    }

    /// Channels go innermost for the norm and stay there: `[n, c, h, w] -> [n, h, w, c]`.
    fn channels_last<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        // The reference divides by the length, or by 1e-12 where it is shorter: far below what a pixel has.
        let eps = 1e-24 / self.channels.max(1) as f32;
        x.permute([0, 2, 3, 1]).rms_norm(eps) * x.graph().param(&self.gamma)
    }

    fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        self.channels_last(x).permute([0, 3, 1, 2])
    }

    pub(crate) fn forward_silu<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        self.channels_last(x).silu().permute([0, 3, 1, 2])
    }
}

/// Two convolutions and a shortcut.
#[derive(Debug)]
pub(crate) struct ResidualBlock {
    norm1: ChannelNorm,
    conv1: CausalConv,
    norm2: ChannelNorm,
    conv2: CausalConv,
    conv_shortcut: Option<Conv2d>,
}

impl ResidualBlock {
    pub(crate) fn new(
        scope: &Scope<'_>,
        input: usize,
        output: usize,
        depth: Depth,
    ) -> ResidualBlock {
        ResidualBlock {
            norm1: ChannelNorm::new(&scope.sub("norm1"), input),
            conv1: CausalConv::new(&scope.sub("conv1"), input, output, depth),
            norm2: ChannelNorm::new(&scope.sub("norm2"), output),
            conv2: CausalConv::new(&scope.sub("conv2"), output, output, depth),
            conv_shortcut: (input != output)
                .then(|| Conv2d::new(&scope.sub("conv_shortcut"), input, output, 1)),
        }
    }

    pub(crate) fn forward<'g>(&self, x: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        let shortcut = self
            .conv_shortcut
            .as_ref()
            .map_or(x, |conv| conv.forward(x, chunk.circular));
        let x = self.conv1.forward(self.norm1.forward_silu(x), chunk);
        let x = self.conv2.forward(self.norm2.forward_silu(x), chunk);
        x + shortcut
    }
}

/// What lies between encoder's or decoder's levels and the latents: a block, attention within each frame, a block.
#[derive(Debug)]
pub(crate) struct MidBlock {
    resnets: [ResidualBlock; 2],
    attention: AttentionBlock,
}

impl MidBlock {
    pub(crate) fn new(scope: &Scope<'_>, channels: usize, depth: Depth) -> MidBlock {
        MidBlock {
            resnets: [0, 1].map(|index| {
                ResidualBlock::new(&scope.sub("resnets").sub(index), channels, channels, depth)
            }),
            attention: AttentionBlock::new(&scope.sub("attentions.0"), channels),
        }
    }

    pub(crate) fn forward<'g>(&self, x: Tensor<'g>, chunk: &Chunk<'_>) -> Tensor<'g> {
        let x = self.resnets[0].forward(x, chunk);
        let x = self.attention.forward(x, chunk.circular);
        self.resnets[1].forward(x, chunk)
    }
}

#[derive(Debug)]
struct AttentionBlock {
    norm: ChannelNorm,
    to_qkv: Conv2d,
    proj: Conv2d,
}

impl AttentionBlock {
    fn new(scope: &Scope<'_>, channels: usize) -> AttentionBlock {
        let to_qkv = scope.sub("to_qkv");
        AttentionBlock {
            norm: ChannelNorm::new(&scope.sub("norm"), channels),
            to_qkv: Conv2d::new(&to_qkv, channels, channels.saturating_mul(3), 1),
            proj: Conv2d::new(&scope.sub("proj"), channels, channels, 1),
        }
    }

    /// One head over all pixels of a frame. Frames do not see each other: they take the place of heads.
    fn forward<'g>(&self, x: Tensor<'g>, circular: Circular) -> Tensor<'g> {
        let (frames, channels, height, width) = (x.dim(0), x.dim(1), x.dim(2), x.dim(3));
        let pixels = height * width;
        let qkv = self
            .to_qkv
            .forward(self.norm.forward(x), circular)
            .reshape([frames, 3, channels, pixels]);
        let [q, k, v] = qkv
            .chunk(1)
            .map(|part| part.reshape([frames, channels, pixels]).transpose(1, 2));
        let mixed = q.attention(k, v, None, 1.0 / (channels as f32).sqrt());
        let mixed = mixed
            .permute([1, 2, 0])
            .reshape([frames, channels, height, width]);
        self.proj.forward(mixed, circular) + x
    }
}
