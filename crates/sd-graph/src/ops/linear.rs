//! Products, softmax and attention.

use std::panic::Location;

use sd_backend::DType;

use super::expect;
use crate::graph::Tensor;
use crate::op::Op;
use crate::shape;

impl<'g> Tensor<'g> {
    /// `x [.., m, k]` times the transpose of `w [.., n, k]`: `[.., m, n]`, as a linear layer stores its weight.
    /// `w` may have any element type, quantised ones included; sums are kept in F32.
    #[track_caller]
    pub fn matmul_transposed(self, w: Tensor<'g>) -> Tensor<'g> {
        let rule = expect(self, "the first factor", DType::F32).and_then(|()| {
            let dtype = w.dtype();
            if matches!(dtype, DType::F32 | DType::F16 | DType::BF16) || dtype.is_quantized() {
                shape::matmul_transposed(self.shape(), w.shape())
            } else {
                Err(format!("a factor cannot be {dtype}").into())
            }
        });
        self.graph().record(
            "matmul_transposed",
            Op::MatMul,
            &[self, w],
            DType::F32,
            rule,
            Location::caller(),
        )
    }

    /// Softmax of `x * scale` over the innermost dimension.
    #[track_caller]
    pub fn softmax(self, scale: f32) -> Tensor<'g> {
        let rule = expect(self, "the operand", DType::F32).map(|()| self.shape());
        self.graph().record(
            "softmax",
            Op::Softmax { scale },
            &[self],
            DType::F32,
            rule,
            Location::caller(),
        )
    }

    /// Scaled dot-product attention of these queries `[heads, m, d]` over keys `[kv_heads, n, d]` and values
    /// `[kv_heads, n, e]`, with a mask `[m, n]` in F16 that is added to the scores. Gives `[m, heads, e]`.
    ///
    /// Several heads may share one head of keys and values.
    #[track_caller]
    pub fn attention(
        self,
        keys: Tensor<'g>,
        values: Tensor<'g>,
        mask: Option<Tensor<'g>>,
        scale: f32,
    ) -> Tensor<'g> {
        let mut sources = vec![self, keys, values];
        sources.extend(mask);
        let rule = expect(self, "queries", DType::F32)
            .and_then(|()| expect(keys, "keys", DType::F32))
            .and_then(|()| expect(values, "values", DType::F32))
            .and_then(|()| mask.map_or(Ok(()), |mask| expect(mask, "the mask", DType::F16)))
            .and_then(|()| {
                shape::attention(
                    self.shape(),
                    keys.shape(),
                    values.shape(),
                    mask.map(|mask| mask.shape()),
                )
            });
        self.graph().record(
            "attention",
            Op::Attention { scale },
            &sources,
            DType::F32,
            rule,
            Location::caller(),
        )
    }
}
