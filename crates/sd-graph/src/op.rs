//! The operations a graph is made of.

use crate::convolution::Convolution;

/// One operation; operands and result shape are kept beside it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Op {
    /// Set before each run.
    Input,
    /// Number of a value kept with the plan.
    Constant(usize),
    /// Number of a model's parameter.
    Param(usize),
    /// Number of an entry of a runner's cache that is read.
    Cached(usize),
    /// Element by element, the second operand repeated.
    Binary(Binary),
    /// `x * scale + offset`.
    Affine { scale: f32, offset: f32 },
    /// Element by element.
    Unary(Unary),
    /// Over the innermost dimension.
    Norm { kind: Norm, eps: f32 },
    /// `x w^T`.
    MatMul,
    /// Softmax over the innermost dimension of `x * scale + mask`.
    Softmax { scale: f32 },
    /// `softmax(q k^T * scale + mask) v`, tokens before heads in the result.
    Attention { scale: f32 },
    /// The same elements in order under another shape.
    Reshape,
    /// Dimensions in another order: a view.
    Permute { axes: Vec<usize> },
    /// Part of one dimension, every `step`-th element of it: a view.
    Slice {
        axis: usize,
        start: usize,
        step: usize,
    },
    /// Two tensors one behind the other.
    Concat { axis: usize },
    /// Rows of a matrix by number.
    Rows,
    /// Two-dimensional convolution with zeros around: rows above and below, columns left and right.
    Conv2d {
        stride: usize,
        padding: [usize; 2],
        /// From one element of the kernel to the next.
        dilation: usize,
        /// The way that it is computed, if it is not to be chosen.
        by: Option<Convolution>,
    },
    /// Each pixel repeated.
    UpscaleNearest,
    /// Zeros behind the last row and column.
    PadEnd { rows: usize, columns: usize },
    /// The other side's rows and columns around the two innermost dimensions.
    PadCircular { rows: usize, columns: usize },
    /// Pairs of channels turned by a token's position.
    TurnPairs {
        pairing: Pairing,
        first: usize,
        pairs: usize,
    },
    /// `x + share sin(alpha x)^2` for each channel, at twice the rate if taps of a filter are a fourth operand. Processors only.
    Snake,
    /// Another element type.
    Cast,
}

impl Op {
    /// Whether its value is there before anything is computed.
    pub(crate) fn is_leaf(&self) -> bool {
        matches!(
            self,
            Op::Input | Op::Constant(_) | Op::Param(_) | Op::Cached(_)
        )
    }

    /// Whether it shows its operand's memory in another way, and costs nothing.
    pub(crate) fn is_view(&self) -> bool {
        matches!(self, Op::Reshape | Op::Permute { .. } | Op::Slice { .. })
    }

    /// Whether its work grows faster than its result.
    pub(crate) fn is_product(&self) -> bool {
        matches!(self, Op::MatMul | Op::Attention { .. } | Op::Conv2d { .. })
    }
}

/// Which channels are turned together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// Channels side by side, `(2i, 2i + 1)`.
    Neighbours,
    /// Channels half of the turned ones apart, `(i, i + pairs)`.
    Halves,
}

/// Operations on two tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
}

/// Operations on one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unary {
    Silu,
    GeluTanh,
    GeluErf,
    Tanh,
    Sigmoid,
    Sin,
    Square,
    Exp,
}

/// Normalisations of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Norm {
    /// Mean 0, variance 1.
    Layer,
    /// Mean square 1.
    Rms,
    /// Euclidean length 1; `eps` is the least length.
    L2,
}
