//! Operations on frames `[t, channels, height, width]`.

use std::panic::Location;

use super::expect;
use crate::graph::Tensor;
use crate::op::Op;
use crate::shape::{Reason, Shape};

use sd_backend::DType;

/// How a kernel lies over frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameConv {
    /// Height and width of the kernel.
    pub side: [usize; 2],
    /// Rows of zeros above and below, columns of zeros left and right.
    pub padding: [usize; 2],
    /// How many frames at the beginning are only looked back at.
    pub past: usize,
    /// Frames to one of the result; it is as late as the last of them.
    pub stride: usize,
    /// Pixels to one of the result, downwards and to the right; it begins where the first of them does.
    pub spatial_stride: usize,
}

/// `[channels of the result, channels, depth, frames of the result]` of a causal convolution.
fn sizes(x: Shape, kernel: Shape, conv: FrameConv) -> Result<[usize; 4], Reason> {
    let &[frames, input, _, _] = x.dims() else {
        return Err("a causal convolution takes frames [t, in, h, w]".into());
    };
    let &[pairs, depth, area] = kernel.dims() else {
        return Err("its kernel is [out * in, depth, height * width]".into());
    };
    let [height, width] = conv.side;
    if height.checked_mul(width) != Some(area) {
        return Err(format!("a kernel of {height}x{width} does not have {area} elements").into());
    }
    if !pairs.is_multiple_of(input) {
        return Err(format!("{input} channels do not fit a kernel of {pairs} planes").into());
    }
    let Some(new) = frames.checked_sub(conv.past).filter(|&new| new > 0) else {
        return Err(format!("no frames are left of {frames} behind {}", conv.past).into());
    };
    if conv.stride == 0 || !new.is_multiple_of(conv.stride) {
        return Err(format!("{new} frames are no whole steps of {}", conv.stride).into());
    }
    Ok([pairs / input, input, depth, new / conv.stride])
}

impl<'g> Tensor<'g> {
    /// Convolution over space and time that sees no later frames: `self [past + t, in, h, w]` with a kernel
    /// `[out, in, depth, kh, kw]`, which is given as `[out * in, depth, kh * kw]` in F32 or F16, to
    /// `[t / stride, out, h', w']`. Before the first frame there is nothing; nothing is computed with it.
    ///
    /// It is the sum over the kernel's depth of convolutions of pictures (see ADR 13).
    #[track_caller]
    pub fn conv3d_causal(self, kernel: Tensor<'g>, conv: FrameConv) -> Tensor<'g> {
        let location = Location::caller();
        let sizes = expect(self, "frames", DType::F32)
            .and_then(|()| sizes(self.shape(), kernel.shape(), conv));
        let [output, input, depth, count] = match sizes {
            Ok(sizes) => sizes,
            Err(reason) => {
                let (op, sources) = (Op::Reshape, [self, kernel]);
                return self.graph().record(
                    "conv3d_causal",
                    op,
                    &sources,
                    DType::F32,
                    Err(reason),
                    location,
                );
            }
        };
        let mut sum: Option<Tensor<'g>> = None;
        // From the frame itself backwards; that tap sees something everywhere.
        for back in 0..depth {
            // The first result looks back from here.
            let first = conv.past + conv.stride - 1;
            let blind = back.saturating_sub(first).div_ceil(conv.stride);
            if blind >= count {
                break;
            }
            let start = first + blind * conv.stride - back;
            let seen = if count == self.dim(0) && blind == 0 {
                self
            } else {
                self.slice_by(0, start, conv.stride, count - blind)
            };
            let tap = kernel.slice(1, depth - 1 - back, 1);
            let tap = tap.reshape([output, input, conv.side[0], conv.side[1]]);
            let part = seen.conv2d_padded(tap, conv.spatial_stride, conv.padding);
            sum = Some(match sum {
                None => part,
                Some(sum) if blind == 0 => sum + part,
                Some(sum) => {
                    let later = sum.slice(0, blind, count - blind) + part;
                    sum.slice(0, 0, blind).concat(later, 0)
                }
            });
        }
        sum.unwrap_or(self)
    }
}
