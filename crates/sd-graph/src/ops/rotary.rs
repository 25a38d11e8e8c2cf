//! Turning pairs of channels by a token's position.

use std::panic::Location;

use sd_backend::DType;

use super::expect;
use crate::graph::Tensor;
use crate::op::{Op, Pairing};
use crate::shape;

impl<'g> Tensor<'g> {
    /// Turns `pairs` pairs of channels of `self [tokens, heads, channels]`, those from channel `first` on: pair `i` at
    /// token `t` by `positions[t] / divisors[i]` radians. Other channels stay as they are.
    ///
    /// `positions` are whole numbers `[tokens]`. `divisors [channels / 2]` has an entry for each pair that is turned and
    /// anything but zero behind them; infinity is no turn. Angles are computed in single precision.
    #[track_caller]
    pub fn turn_pairs(
        self,
        positions: Tensor<'g>,
        divisors: Tensor<'g>,
        pairing: Pairing,
        first: usize,
        pairs: usize,
    ) -> Tensor<'g> {
        let rule = expect(self, "the operand", DType::F32)
            .and_then(|()| expect(positions, "positions", DType::I32))
            .and_then(|()| expect(divisors, "divisors", DType::F32))
            .and_then(|()| {
                let (positions, divisors) = (positions.shape(), divisors.shape());
                shape::turn_pairs(self.shape(), positions, divisors, first, pairs)
            });
        let op = Op::TurnPairs {
            pairing,
            first,
            pairs,
        };
        self.graph().record(
            "turn_pairs",
            op,
            &[self, positions, divisors],
            DType::F32,
            rule,
            Location::caller(),
        )
    }
}
