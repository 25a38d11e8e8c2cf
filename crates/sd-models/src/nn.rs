//! Layers that several models share, named as the field names them.

use sd_backend::DType;
use sd_graph::{LowRank, Param, Role, Scope, Tensor};

use crate::rope::Circular;

/// `y = x W^T + b`, `x [.., in] -> [.., out]`. One layer serves every weight type, since the type comes from the file.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Param,
    bias: Option<Param>,
    low_rank: Vec<LowRank>,
}

impl Linear {
    /// Declares `weight [out, in]` and, where `bias` says so, `bias [out]` at `scope`, and what LoRAs add to it.
    pub fn new(scope: &Scope<'_>, input: usize, output: usize, bias: bool) -> Linear {
        Linear {
            weight: scope.param("weight", [output, input], Role::Matrix),
            bias: bias.then(|| scope.param("bias", [output], Role::Vector)),
            low_rank: scope.low_rank("weight", [output, input]),
        }
    }

    /// The type that its weight has in memory.
    pub fn weight_type(&self) -> DType {
        self.weight.dtype()
    }

    /// Declares a convolution whose kernel covers its whole input, `weight [out, ..]` and `bias [out]` at `scope`, as a
    /// product.
    pub fn of_kernel(scope: &Scope<'_>, kernel: &[usize]) -> Linear {
        let (output, input) = kernel.split_first().unwrap_or((&0, &[]));
        let input = input.iter().copied().fold(1, usize::saturating_mul);
        Linear {
            weight: scope.param_as("weight", kernel, [*output, input], Role::Matrix),
            bias: Some(scope.param("bias", [*output], Role::Vector)),
            low_rank: Vec::new(),
        }
    }

    /// Applies the layer.
    #[track_caller]
    pub fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let g = x.graph();
        let mut y = x.matmul_transposed(g.param(&self.weight));
        for LowRank { down, up, scale } in &self.low_rank {
            // Few channels in between: that is where scaling costs least.
            let narrow = x.matmul_transposed(g.param(down)) * *scale;
            y = y + narrow.matmul_transposed(g.param(up));
        }
        match &self.bias {
            Some(bias) => y + g.param(bias),
            None => y,
        }
    }
}

/// RMSNorm with a weight over the innermost dimension: `x / sqrt(mean(x^2) + eps) * weight`.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Param,
    eps: f32,
}

impl RmsNorm {
    /// Declares `weight [dim]` at `scope`.
    pub fn new(scope: &Scope<'_>, dim: usize, eps: f32) -> RmsNorm {
        RmsNorm {
            weight: scope.param("weight", [dim], Role::Vector),
            eps,
        }
    }

    /// Applies the norm.
    #[track_caller]
    pub fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        self.scale(self.unscaled(x))
    }

    /// The norm without its weight.
    #[track_caller]
    pub fn unscaled<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        x.rms_norm(self.eps)
    }

    /// `x` times the weight.
    #[track_caller]
    pub fn scale<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        x * x.graph().param(&self.weight)
    }

    /// Applies the norm with a weight that the checkpoint stores less one.
    #[track_caller]
    pub fn forward_zero_centred<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        x.rms_norm(self.eps) * (x.graph().param(&self.weight) + 1.0)
    }
}

/// LayerNorm with a weight and a bias over the innermost dimension: `(x - mean) / sqrt(variance + eps) * weight + bias`.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Param,
    bias: Param,
    eps: f32,
}

impl LayerNorm {
    /// Declares `weight [dim]` and `bias [dim]` at `scope`.
    pub fn new(scope: &Scope<'_>, dim: usize, eps: f32) -> LayerNorm {
        LayerNorm {
            weight: scope.param("weight", [dim], Role::Vector),
            bias: scope.param("bias", [dim], Role::Vector),
            eps,
        }
    }

    /// Applies the norm.
    #[track_caller]
    pub fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let g = x.graph();
        x.layer_norm(self.eps) * g.param(&self.weight) + g.param(&self.bias)
    }
}

/// Convolution over `[n, in, h, w]` with a bias, and zeros or the other side's pixels around.
#[derive(Debug, Clone)]
pub struct Conv2d {
    weight: Param,
    bias: Param,
    channels: usize,
    padding: usize,
}

impl Conv2d {
    /// Declares `weight [out, in, kernel, kernel]` and `bias [out]` at `scope`; the padding keeps the size.
    pub fn new(scope: &Scope<'_>, input: usize, output: usize, kernel: usize) -> Conv2d {
        Conv2d {
            weight: scope.param("weight", [output, input, kernel, kernel], Role::Kernel),
            bias: scope.param("bias", [output], Role::Vector),
            channels: output,
            padding: kernel / 2,
        }
    }

    /// Applies the layer, continuing `x` at its other side along the axes that `circular` names and with zeros elsewhere.
    #[track_caller]
    pub fn forward<'g>(&self, x: Tensor<'g>, circular: Circular) -> Tensor<'g> {
        let g = x.graph();
        let (zeros, wrapped) = if self.padding == 0 || !circular.any() {
            ([self.padding; 2], x)
        } else {
            let share = |wraps: bool| if wraps { self.padding } else { 0 };
            let wrapped = x.pad_circular(share(circular.y), share(circular.x));
            ([share(!circular.y), share(!circular.x)], wrapped)
        };
        wrapped.conv2d_padded(g.param(&self.weight), 1, zeros)
            + g.param(&self.bias).reshape([self.channels, 1, 1])
    }

    /// Applies the layer to every other pixel, beginning with the first; beyond the last row and column are zeros, or the
    /// first ones along the axes that `circular` names.
    #[track_caller]
    pub fn forward_halving<'g>(&self, x: Tensor<'g>, circular: Circular) -> Tensor<'g> {
        let g = x.graph();
        let zeros = |wraps: bool| if wraps { 0 } else { self.padding };
        let mut padded = x;
        for (axis, wraps) in [(2, circular.y), (3, circular.x)] {
            if wraps && self.padding > 0 {
                padded = padded.concat(padded.slice(axis, 0, self.padding), axis);
            }
        }
        if !(circular.x && circular.y) {
            padded = padded.pad_end(zeros(circular.y), zeros(circular.x));
        }
        padded.conv2d(g.param(&self.weight), 2, 0)
            + g.param(&self.bias).reshape([self.channels, 1, 1])
    }
}
