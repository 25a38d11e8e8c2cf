//! Operations that move or select elements.

use std::panic::Location;

use sd_backend::DType;

use super::expect;
use crate::graph::Tensor;
use crate::op::Op;
use crate::shape::{self, Reason};

/// Views and copies work on unquantised types only: a block must not be torn.
fn plain(tensor: Tensor<'_>) -> Result<(), Reason> {
    if tensor.dtype().is_quantized() {
        Err(format!("blocks of {} cannot be rearranged", tensor.dtype()).into())
    } else {
        Ok(())
    }
}

impl<'g> Tensor<'g> {
    /// The same elements, in the same order, under another shape.
    #[track_caller]
    pub fn reshape(self, to: impl AsRef<[usize]>) -> Tensor<'g> {
        let rule = plain(self).and_then(|()| shape::reshape(self.shape(), to.as_ref()));
        self.graph().record(
            "reshape",
            Op::Reshape,
            &[self],
            self.dtype(),
            rule,
            Location::caller(),
        )
    }

    /// Dimension `i` of the result is dimension `axes[i]`.
    #[track_caller]
    pub fn permute(self, axes: impl AsRef<[usize]>) -> Tensor<'g> {
        let axes = axes.as_ref();
        let rule = plain(self).and_then(|()| shape::permute(self.shape(), axes));
        let op = Op::Permute {
            axes: axes.to_vec(),
        };
        self.graph().record(
            "permute",
            op,
            &[self],
            self.dtype(),
            rule,
            Location::caller(),
        )
    }

    /// Swaps two dimensions.
    #[track_caller]
    pub fn transpose(self, a: usize, b: usize) -> Tensor<'g> {
        let mut axes: Vec<usize> = (0..self.shape().rank()).collect();
        let rule = if a < axes.len() && b < axes.len() {
            axes.swap(a, b);
            plain(self).and_then(|()| shape::permute(self.shape(), &axes))
        } else {
            Err(format!("there are no dimensions {a} and {b}").into())
        };
        self.graph().record(
            "transpose",
            Op::Permute { axes },
            &[self],
            self.dtype(),
            rule,
            Location::caller(),
        )
    }

    /// Elements `start .. start + len` of dimension `axis`.
    #[track_caller]
    pub fn slice(self, axis: usize, start: usize, len: usize) -> Tensor<'g> {
        self.slice_by(axis, start, 1, len)
    }

    /// `len` elements of dimension `axis`, from `start` on every `step`-th. The innermost dimension has none left out.
    #[track_caller]
    pub fn slice_by(self, axis: usize, start: usize, step: usize, len: usize) -> Tensor<'g> {
        let rule = plain(self).and_then(|()| shape::slice_by(self.shape(), axis, start, step, len));
        self.graph().record(
            "slice",
            Op::Slice { axis, start, step },
            &[self],
            self.dtype(),
            rule,
            Location::caller(),
        )
    }

    /// Cuts dimension `axis` into `N` equal parts.
    #[track_caller]
    pub fn chunk<const N: usize>(self, axis: usize) -> [Tensor<'g>; N] {
        let size = self.dim(axis);
        let len = size / N.max(1);
        if len * N != size {
            let rule = Err(format!("{size} elements cannot be cut into {N} equal parts").into());
            let op = Op::Slice {
                axis,
                start: 0,
                step: 1,
            };
            let failed =
                self.graph()
                    .record("chunk", op, &[self], self.dtype(), rule, Location::caller());
            return [failed; N];
        }
        let location = Location::caller();
        std::array::from_fn(|part| {
            let rule = plain(self).and_then(|()| shape::slice(self.shape(), axis, part * len, len));
            let op = Op::Slice {
                axis,
                start: part * len,
                step: 1,
            };
            self.graph()
                .record("chunk", op, &[self], self.dtype(), rule, location)
        })
    }

    /// This tensor and `other` one behind the other along `axis`.
    #[track_caller]
    pub fn concat(self, other: Tensor<'g>, axis: usize) -> Tensor<'g> {
        let rule = plain(self)
            .and_then(|()| expect(other, "the second part", self.dtype()))
            .and_then(|()| shape::concat(self.shape(), other.shape(), axis));
        self.graph().record(
            "concat",
            Op::Concat { axis },
            &[self, other],
            self.dtype(),
            rule,
            Location::caller(),
        )
    }

    /// Rows of this matrix `[n, width]` by numbers `[count]` in I32: `[count, width]` in F32. The matrix may be
    /// quantised.
    ///
    /// The numbers are data that a graph cannot check: the plan does when they are set (see [`crate::Plan::set`]).
    #[track_caller]
    pub fn rows(self, index: Tensor<'g>) -> Tensor<'g> {
        let rule = expect(index, "row numbers", DType::I32).and_then(|()| {
            self.graph().limit_index(index, self.dim(0))?;
            let dtype = self.dtype();
            if matches!(dtype, DType::F32 | DType::F16 | DType::BF16) || dtype.is_quantized() {
                shape::rows(self.shape(), index.shape())
            } else {
                Err(format!("rows of {dtype} cannot be taken").into())
            }
        });
        self.graph().record(
            "rows",
            Op::Rows,
            &[self, index],
            DType::F32,
            rule,
            Location::caller(),
        )
    }

    /// The same values in another unquantised floating-point type. Blocks of Q8_0 become F32.
    #[track_caller]
    pub fn cast(self, dtype: DType) -> Tensor<'g> {
        let known = |dtype: DType| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        let is_unpacked = (self.dtype(), dtype) == (DType::Q8_0, DType::F32);
        let rule = if is_unpacked || (known(self.dtype()) && known(dtype)) {
            Ok(self.shape())
        } else {
            Err(format!("{} cannot become {dtype}", self.dtype()).into())
        };
        self.graph()
            .record("cast", Op::Cast, &[self], dtype, rule, Location::caller())
    }
}
