//! Operations on pictures `[n, channels, height, width]`.

use std::panic::Location;

use sd_backend::DType;

use super::expect;
use crate::convolution::Convolution;
use crate::graph::Tensor;
use crate::op::Op;
use crate::shape::{self, Shape};

impl<'g> Tensor<'g> {
    /// Convolution with a kernel `[out, in, kh, kw]` in F32 or F16, zeros around.
    #[track_caller]
    pub fn conv2d(self, kernel: Tensor<'g>, stride: usize, padding: usize) -> Tensor<'g> {
        self.conv2d_padded(kernel, stride, [padding, padding])
    }

    /// Convolution as [`Tensor::conv2d`], with `padding` rows of zeros above and below and columns left and right.
    #[track_caller]
    pub fn conv2d_padded(
        self,
        kernel: Tensor<'g>,
        stride: usize,
        padding: [usize; 2],
    ) -> Tensor<'g> {
        self.record_conv2d(kernel, stride, padding, 1, None)
    }

    /// As [`Tensor::conv2d_padded`], computed in this way, to measure it. A device without an operation of its own takes
    /// [`Convolution::Patches`] in any case.
    #[track_caller]
    pub fn conv2d_by(
        self,
        kernel: Tensor<'g>,
        stride: usize,
        padding: [usize; 2],
        by: Convolution,
    ) -> Tensor<'g> {
        self.record_conv2d(kernel, stride, padding, 1, Some(by))
    }

    #[track_caller]
    pub(super) fn record_conv2d(
        self,
        kernel: Tensor<'g>,
        stride: usize,
        padding: [usize; 2],
        dilation: usize,
        by: Option<Convolution>,
    ) -> Tensor<'g> {
        let rule = expect(self, "the picture", DType::F32).and_then(|()| {
            if !matches!(kernel.dtype(), DType::F32 | DType::F16) {
                return Err(format!("a kernel cannot be {}", kernel.dtype()).into());
            }
            let small = |value: usize| i32::try_from(value).is_ok();
            if !small(stride) || !small(dilation) || !padding.into_iter().all(small) {
                return Err("stride, padding or dilation is beyond all pictures".into());
            }
            shape::conv2d(self.shape(), kernel.shape(), stride, padding, dilation)
        });
        let op = Op::Conv2d {
            stride,
            padding,
            dilation,
            by,
        };
        self.graph().record(
            "conv2d",
            op,
            &[self, kernel],
            DType::F32,
            rule,
            Location::caller(),
        )
    }

    /// Each pixel repeated `factor` times in both directions.
    #[track_caller]
    pub fn upscale_nearest(self, factor: usize) -> Tensor<'g> {
        self.upscale_nearest_by([factor, factor])
    }

    /// Each pixel repeated downwards and to the right, by factors of their own.
    #[track_caller]
    pub fn upscale_nearest_by(self, [down, right]: [usize; 2]) -> Tensor<'g> {
        let rule = expect(self, "the picture", DType::F32)
            .and_then(|()| shape::upscale(self.shape(), [down, right]));
        self.graph().record(
            "upscale_nearest",
            Op::UpscaleNearest,
            &[self],
            DType::F32,
            rule,
            Location::caller(),
        )
    }

    /// Squares of `factor` by `factor` pixels as channels: `[n, c, h, w] -> [n, c * factor^2, h / factor, w / factor]`, a
    /// channel's rows of pixels outside its columns.
    #[track_caller]
    pub fn pixel_unshuffle(self, factor: usize) -> Tensor<'g> {
        let &[n, c, h, w] = self.shape().dims() else {
            return self.refuse("pixel_unshuffle", "squares are of pictures [n, c, h, w]");
        };
        if factor == 0 || !h.is_multiple_of(factor) || !w.is_multiple_of(factor) {
            let reason = format!("squares of {factor} do not fill {h}x{w}");
            return self.refuse("pixel_unshuffle", &reason);
        }
        let (h, w, squares) = (h / factor, w / factor, factor * factor);
        self.reshape([n * c * h, factor, w, factor])
            .permute([0, 1, 3, 2])
            .reshape([n * c, h, squares, w])
            .permute([0, 2, 1, 3])
            .reshape([n, c * squares, h, w])
    }

    /// Channels as squares of `factor` by `factor` pixels: the inverse of [`Tensor::pixel_unshuffle`].
    #[track_caller]
    pub fn pixel_shuffle(self, factor: usize) -> Tensor<'g> {
        let &[n, channels, h, w] = self.shape().dims() else {
            return self.refuse("pixel_shuffle", "squares are of pictures [n, c, h, w]");
        };
        let squares = factor.saturating_mul(factor);
        if squares == 0 || !channels.is_multiple_of(squares) {
            let reason = format!("{channels} channels are no squares of {factor}");
            return self.refuse("pixel_shuffle", &reason);
        }
        let c = channels / squares;
        self.reshape([n * c, squares, h, w])
            .permute([0, 2, 1, 3])
            .reshape([n * c * h, factor, factor, w])
            .permute([0, 1, 3, 2])
            .reshape([n, c, h * factor, w * factor])
    }

    #[track_caller]
    pub(super) fn refuse(self, operation: &'static str, reason: &str) -> Tensor<'g> {
        let rule = Err(reason.to_owned().into());
        self.graph().record(
            operation,
            Op::Reshape,
            &[self],
            DType::F32,
            rule,
            Location::caller(),
        )
    }

    /// Continues the two innermost dimensions at their other side, by `rows` above and below and `columns` left and right.
    #[track_caller]
    pub fn pad_circular(self, rows: usize, columns: usize) -> Tensor<'g> {
        let rule = expect(self, "the picture", DType::F32)
            .and_then(|()| shape::pad_circular(self.shape(), rows, columns));
        let op = Op::PadCircular { rows, columns };
        self.graph().record(
            "pad_circular",
            op,
            &[self],
            DType::F32,
            rule,
            Location::caller(),
        )
    }

    /// Continues the dimension `axis` as in a mirror that stands on its first and last element, which are not repeated:
    /// `before` elements before it and `after` behind it.
    #[track_caller]
    pub fn pad_reflect(self, axis: usize, before: usize, after: usize) -> Tensor<'g> {
        let rank = self.shape().rank();
        if axis >= rank {
            let reason = format!("there is no dimension {axis} of {rank}");
            return self.refuse("pad_reflect", &reason);
        }
        let side = self.dim(axis);
        if before.max(after) >= side {
            let reason = format!(
                "{side} elements cannot be reflected by {before} before and {after} behind them"
            );
            return self.refuse("pad_reflect", &reason);
        }
        let one = |at: usize| self.slice(axis, at, 1);
        let joined = |parts: &mut dyn Iterator<Item = Tensor<'g>>| {
            parts.reduce(|joined, part| joined.concat(part, axis))
        };
        let head = joined(&mut (1..=before).rev().map(one));
        let tail = joined(&mut (1..=after).map(|back| one(side - 1 - back)));
        let headed = head.map_or(self, |head| head.concat(self, axis));
        tail.map_or(headed, |tail| headed.concat(tail, axis))
    }

    /// Zeros behind the last `rows` and `columns` of the two innermost dimensions.
    #[track_caller]
    pub fn pad_end(self, rows: usize, columns: usize) -> Tensor<'g> {
        let rule = expect(self, "the picture", DType::F32).and_then(|()| {
            if i32::try_from(rows).is_err() || i32::try_from(columns).is_err() {
                return Err("padding is beyond all pictures".into());
            }
            let mut dims = self.shape().dims().to_vec();
            let [.., height, width] = dims.as_mut_slice() else {
                return Err("padding takes two dimensions".into());
            };
            *height = height.saturating_add(rows);
            *width = width.saturating_add(columns);
            Shape::new(&dims)
        });
        let op = Op::PadEnd { rows, columns };
        self.graph()
            .record("pad_end", op, &[self], DType::F32, rule, Location::caller())
    }
}
