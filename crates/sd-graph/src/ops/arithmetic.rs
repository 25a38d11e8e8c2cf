//! Element-wise operations and normalisations.

use std::ops::{Add, Div, Mul, Neg, Sub};
use std::panic::Location;

use sd_backend::DType;

use super::expect;
use crate::graph::Tensor;
use crate::op::{Binary, Norm, Op, Unary};
use crate::shape;

impl<'g> Tensor<'g> {
    #[track_caller]
    fn binary(self, name: &'static str, op: Binary, other: Tensor<'g>) -> Tensor<'g> {
        let location = Location::caller();
        // ggml repeats only its second operand; sums and products do not mind the order.
        let commutes = matches!(op, Binary::Add | Binary::Mul);
        let swap = commutes && shape::broadcast(self.shape(), other.shape()).is_err();
        let (a, b) = if swap && shape::broadcast(other.shape(), self.shape()).is_ok() {
            (other, self)
        } else {
            (self, other)
        };
        let rule = expect(a, "the first operand", DType::F32)
            .and_then(|()| expect(b, "the second operand", DType::F32))
            .and_then(|()| shape::broadcast(a.shape(), b.shape()));
        self.graph()
            .record(name, Op::Binary(op), &[a, b], DType::F32, rule, location)
    }

    #[track_caller]
    fn unary(self, name: &'static str, op: Unary) -> Tensor<'g> {
        let rule = expect(self, "the operand", DType::F32).map(|()| self.shape());
        self.graph().record(
            name,
            Op::Unary(op),
            &[self],
            DType::F32,
            rule,
            Location::caller(),
        )
    }

    #[track_caller]
    fn norm(self, name: &'static str, kind: Norm, eps: f32) -> Tensor<'g> {
        let rule = expect(self, "the operand", DType::F32).and_then(|()| {
            if eps >= 0.0 {
                Ok(self.shape())
            } else {
                Err(format!("eps is {eps}, not a number from 0 up").into())
            }
        });
        self.graph().record(
            name,
            Op::Norm { kind, eps },
            &[self],
            DType::F32,
            rule,
            Location::caller(),
        )
    }

    /// `x * scale + offset` with plain numbers.
    #[track_caller]
    pub fn affine(self, scale: f32, offset: f32) -> Tensor<'g> {
        let rule = expect(self, "the operand", DType::F32).map(|()| self.shape());
        self.graph().record(
            "affine",
            Op::Affine { scale, offset },
            &[self],
            DType::F32,
            rule,
            Location::caller(),
        )
    }

    /// `x * sigmoid(x)`.
    #[track_caller]
    pub fn silu(self) -> Tensor<'g> {
        self.unary("silu", Unary::Silu)
    }

    /// The tanh approximation of GELU.
    #[track_caller]
    pub fn gelu_tanh(self) -> Tensor<'g> {
        self.unary("gelu_tanh", Unary::GeluTanh)
    }

    /// GELU by the error function.
    #[track_caller]
    pub fn gelu_erf(self) -> Tensor<'g> {
        self.unary("gelu_erf", Unary::GeluErf)
    }

    /// Hyperbolic tangent.
    #[track_caller]
    pub fn tanh(self) -> Tensor<'g> {
        self.unary("tanh", Unary::Tanh)
    }

    /// `1 / (1 + exp(-x))`.
    #[track_caller]
    pub fn sigmoid(self) -> Tensor<'g> {
        self.unary("sigmoid", Unary::Sigmoid)
    }

    /// Sine of radians.
    #[track_caller]
    pub fn sin(self) -> Tensor<'g> {
        self.unary("sin", Unary::Sin)
    }

    /// `e` to the power of `x`.
    #[track_caller]
    pub fn exp(self) -> Tensor<'g> {
        self.unary("exp", Unary::Exp)
    }

    /// `x * x`.
    #[track_caller]
    pub fn square(self) -> Tensor<'g> {
        self.unary("square", Unary::Square)
    }

    /// LayerNorm without weights over the innermost dimension: `(x - mean) / sqrt(variance + eps)`.
    #[track_caller]
    pub fn layer_norm(self, eps: f32) -> Tensor<'g> {
        self.norm("layer_norm", Norm::Layer, eps)
    }

    /// RMSNorm without weights over the innermost dimension: `x / sqrt(mean(x^2) + eps)`.
    #[track_caller]
    pub fn rms_norm(self, eps: f32) -> Tensor<'g> {
        self.norm("rms_norm", Norm::Rms, eps)
    }

    /// `x / max(|x|, eps)` over the innermost dimension.
    #[track_caller]
    pub fn l2_norm(self, eps: f32) -> Tensor<'g> {
        self.norm("l2_norm", Norm::L2, eps)
    }
}

macro_rules! operator {
    ($trait:ident, $method:ident, $name:literal, $op:expr) => {
        impl<'g> $trait for Tensor<'g> {
            type Output = Tensor<'g>;

            #[track_caller]
            fn $method(self, other: Tensor<'g>) -> Tensor<'g> {
                self.binary($name, $op, other)
            }
        }
    };
}

operator!(Add, add, "sum", Binary::Add);
operator!(Sub, sub, "difference", Binary::Sub);
operator!(Mul, mul, "product", Binary::Mul);
operator!(Div, div, "quotient", Binary::Div);

impl<'g> Add<f32> for Tensor<'g> {
    type Output = Tensor<'g>;

    #[track_caller]
    fn add(self, offset: f32) -> Tensor<'g> {
        self.affine(1.0, offset)
    }
}

impl<'g> Mul<f32> for Tensor<'g> {
    type Output = Tensor<'g>;

    #[track_caller]
    fn mul(self, scale: f32) -> Tensor<'g> {
        self.affine(scale, 0.0)
    }
}

impl<'g> Neg for Tensor<'g> {
    type Output = Tensor<'g>;

    #[track_caller]
    fn neg(self) -> Tensor<'g> {
        self.affine(-1.0, 0.0)
    }
}
