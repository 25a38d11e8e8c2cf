//! Long signals piece by piece.

use std::ops::Range;

/// A signal, cut into pieces that are all as long, so that one graph computes them. Each reaches beyond what is kept of it as far as
/// that depends on: what is kept is what the whole signal would give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pieces {
    total: usize,
    reach: usize,
    /// How long each is, what it reaches beyond included.
    pub(super) length: usize,
}

/// One piece: where it begins, and what of the whole is kept of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) start: usize,
    pub(super) kept: Range<usize>,
}

impl Pieces {
    /// Of a signal of `total`, about `kept` at a time, each of which depends on `reach` to both sides.
    pub(super) fn new(total: usize, kept: usize, reach: usize) -> Pieces {
        Pieces {
            total,
            reach,
            length: total.min(kept.max(1) + 2 * reach),
        }
    }

    pub(super) fn iter(self) -> impl Iterator<Item = Piece> {
        let mut done = 0;
        std::iter::from_fn(move || {
            if done == self.total {
                return None;
            }
            let start = done
                .saturating_sub(self.reach)
                .min(self.total - self.length);
            let end = start + self.length;
            let kept = done..if end == self.total {
                end
            } else {
                end - self.reach
            };
            done = kept.end;
            Some(Piece { start, kept })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_all_there_is_and_see_as_far_as_they_must() {
        for (total, kept, reach) in [
            (1, 4, 3),
            (10, 4, 3),
            (11, 4, 3),
            (100, 1, 7),
            (5, 5, 0),
            (0, 1, 1),
        ] {
            let pieces = Pieces::new(total, kept, reach);
            let mut done = 0;
            for Piece { start, kept } in pieces.iter() {
                let end = start + pieces.length;
                assert_eq!(kept.start, done);
                assert!(!kept.is_empty() && end <= total);
                assert!(start == 0 || kept.start - start >= reach);
                assert!(end == total || end - kept.end >= reach);
                done = kept.end;
            }
            assert_eq!(done, total);
        }
    }
}
