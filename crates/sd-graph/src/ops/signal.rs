//! Operations on signals `[n, channels, time]`.

use std::panic::Location;

use sd_backend::DType;

use super::expect;
use crate::graph::Tensor;
use crate::op::Op;
use crate::shape;

/// How a kernel lies over a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv1d {
    /// Moments from one of the result to the next.
    pub stride: usize,
    /// Zeros before and behind the signal.
    pub padding: usize,
    /// Moments from one element of the kernel to the next.
    pub dilation: usize,
}

impl Default for Conv1d {
    /// Every moment, no zeros, a kernel without gaps.
    fn default() -> Conv1d {
        Conv1d {
            stride: 1,
            padding: 0,
            dilation: 1,
        }
    }
}

impl<'g> Tensor<'g> {
    /// Convolution of a signal `[n, in, t]` with a kernel `[out, in, k]` in F32 or F16: `[n, out, t']`. It is one of pictures
    /// that are a single row high.
    #[track_caller]
    pub fn conv1d(self, kernel: Tensor<'g>, conv: Conv1d) -> Tensor<'g> {
        let (&[n, input, time], &[output, depth, size]) =
            (self.shape().dims(), kernel.shape().dims())
        else {
            let reason = "a convolution of signals takes [n, in, t] and a kernel [out, in, k]";
            return self.refuse("conv1d", reason);
        };
        let row = self.reshape([n, input, 1, time]).record_conv2d(
            kernel.reshape([output, depth, 1, size]),
            conv.stride,
            [0, conv.padding],
            conv.dilation,
            None,
        );
        row.reshape([n, output, row.dim(3)])
    }

    /// `x + share sin(alpha x)^2` for a signal `[n, channels, time]`, with `alpha` and `share` `[channels]`, in one pass. With `taps [12]`
    /// the signal is brought to twice its rate before and back behind: each moment of twice as many is twice a sum of six times every other tap,
    /// and each that comes out a sum of twelve of these. Outside the signal there is its first moment and its last, and the same of
    /// twice as many.
    ///
    /// Processors of this machine alone have it; a plan for another device is refused as unsupported.
    #[track_caller]
    pub fn snake(
        self,
        alpha: Tensor<'g>,
        share: Tensor<'g>,
        taps: Option<Tensor<'g>>,
    ) -> Tensor<'g> {
        let mut sources = vec![self, alpha, share];
        sources.extend(taps);
        let rule = (sources.iter())
            .try_for_each(|source| expect(*source, "operands", DType::F32))
            .and_then(|()| {
                let taps = taps.map(|taps| taps.shape());
                shape::snake(self.shape(), alpha.shape(), share.shape(), taps)
            });
        let location = Location::caller();
        self.graph()
            .record("snake", Op::Snake, &sources, DType::F32, rule, location)
    }
}
