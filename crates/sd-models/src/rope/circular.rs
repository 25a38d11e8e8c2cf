//! Pictures whose right edge continues at the left, and whose lower edge at the upper.

use std::f64::consts::TAU;

use super::embedding::{Embedding, Region, Turns};

/// Which sides of a picture join.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Circular {
    /// The right edge continues at the left.
    pub x: bool,
    /// The lower edge continues at the upper.
    pub y: bool,
}

impl Circular {
    /// No sides join.
    pub const NONE: Circular = Circular { x: false, y: false };
    /// Left and right join.
    pub const X: Circular = Circular { x: true, y: false };
    /// Top and bottom join.
    pub const Y: Circular = Circular { x: false, y: true };
    /// All sides join: a texture that tiles the plane.
    pub const XY: Circular = Circular { x: true, y: true };

    /// Whether any sides join.
    pub fn any(self) -> bool {
        self.x || self.y
    }
}

impl std::fmt::Display for Circular {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match (self.x, self.y) {
            (false, false) => "none",
            (true, false) => "x",
            (false, true) => "y",
            (true, true) => "xy",
        })
    }
}

/// The frequency nearest to `omega` that makes a whole number of turns in `period` units, halves away from zero; none at
/// all where `omega` makes less than half a turn.
pub(crate) fn harmonic(omega: f64, period: f64) -> f64 {
    (omega * period / TAU).round()
}

impl Region {
    /// After how many units of position on `axis` this picture repeats, if it does.
    pub(crate) fn period(&self, axis: usize, circular: Circular) -> Option<f64> {
        // A frequency counts as vertical where both axes are the same.
        let period = if circular.y && axis == self.height_axis {
            self.height_period
        } else if circular.x && axis == self.width_axis {
            self.width_period
        } else {
            return None;
        };
        (period > 0.0).then_some(f64::from(period))
    }
}

impl Embedding {
    /// Makes every picture of this embedding periodic along the given axes, each with its own size.
    ///
    /// Each frequency of a wrapped axis becomes the nearest one that makes a whole number of turns per period, so that
    /// a token and its copy one period on are turned alike; positions, and so the phase at each of them, stay where they
    /// are. Text, padding and other axes keep their values to the last bit, as do regions whose period is not above
    /// zero. Without any axis nothing is computed.
    ///
    /// Angles are computed in double precision in every family: the rounded frequencies are the reference's no longer.
    #[must_use]
    pub fn circular(mut self, circular: Circular) -> Embedding {
        if !circular.any() {
            return self;
        }
        self.wrapped.x |= circular.x;
        self.wrapped.y |= circular.y;
        for region in self.layout.regions.clone() {
            for axis in 0..self.axes {
                let Some(period) = region.period(axis, circular) else {
                    continue;
                };
                for item in 0..self.batch {
                    let first = item * self.layout.tokens + region.tokens.start;
                    let tokens = first..first + region.tokens.len();
                    let turns = Turns::new(&self, axis, tokens, |position, omega| {
                        // Whole turns are taken off before the sine sees them: exact for whole positions however far out.
                        let turns = f64::from(position) * harmonic(omega, period) / period;
                        let (sin, cos) = (turns.fract() * TAU).sin_cos();
                        [cos as f32, sin as f32]
                    });
                    turns.write(&mut self, first);
                }
            }
        }
        self
    }
}
