//! Deciding which weights stay in memory and where the others pass through it.
//!
//! Plain arithmetic. Segments run in a known order, again and again. What stays is a fixed set: of things used in a circle
//! any rule that looks at the past evicts what is needed next. The set is spread evenly over the order, so that weights are
//! on their way all the time, also while segments compute that need none. The rest is laid out in a ring of bytes, each
//! segment's weights at a place that never changes, so that graphs can point there for ever.

use std::collections::BTreeMap;
use std::ops::Range;

/// Segments whose weights should find room in the ring at once, if that leaves enough for what stays.
const DEPTH: usize = 3;

/// What a ring this large may take of all that is granted: one part in so many.
const SHARE: u64 = 3;

/// Where weights go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ring {
    /// Numbers of the parameters that stay, in the order of first use, with their bytes.
    pub stays: Vec<(usize, u64)>,
    /// For each segment its parameters that pass through, with their bytes.
    pub passes: Vec<Vec<(usize, u64)>>,
    /// For each segment the bytes of the ring that its parameters lie in.
    pub ranges: Vec<Range<u64>>,
    /// Bytes of the ring.
    pub bytes: u64,
}

impl Ring {
    /// Lays out the parameters of `segments`, given by number and bytes, in at most `budget` bytes, of which the ring may
    /// have `largest`.
    ///
    /// # Errors
    /// The least bytes that would do.
    pub(crate) fn lay_out(
        segments: &[Vec<(usize, u64)>],
        budget: Option<u64>,
        largest: u64,
    ) -> Result<Ring, u64> {
        let all = Split::all(segments, largest);
        let fits = |split: &&Split, depth: usize| {
            let ring = split.ring(depth);
            let few = depth < DEPTH || budget.is_none_or(|budget| ring <= budget / SHARE);
            few && ring <= largest
                && budget.is_none_or(|budget| split.resident.saturating_add(ring) <= budget)
        };
        let everything = all.last().filter(|split| fits(split, 1));
        let chosen = everything.map(|split| (split, 1)).or_else(|| {
            (1..=DEPTH).rev().find_map(|depth| {
                let fitting = all.iter().filter(|split| fits(split, depth));
                Some((fitting.max_by_key(|split| split.resident)?, depth))
            })
        });
        let Some((split, depth)) = chosen else {
            let possible = all.iter().filter(|split| split.ring(1) <= largest);
            let least = possible.map(|split| split.resident.saturating_add(split.ring(1)));
            return Err(least.min().unwrap_or(u64::MAX));
        };
        // What is left over makes the ring longer.
        let passing: u64 = split.needs.iter().sum();
        let room = budget.map_or(passing, |budget| budget.saturating_sub(split.resident));
        let bytes = room.min(passing).min(largest).max(split.ring(depth));
        Ok(split.lay_out(segments, bytes))
    }
}

/// Segments in two parts: those whose weights stay, and the others.
struct Split {
    /// For each segment whether its weights stay.
    stays: Vec<bool>,
    resident: u64,
    /// Bytes that pass through the ring for each segment; none for those that stay.
    needs: Vec<u64>,
}

impl Split {
    /// From the one where as little stays as can, in a ring of at most `largest` bytes, to the one where everything does.
    fn all(segments: &[Vec<(usize, u64)>], largest: u64) -> Vec<Split> {
        let bytes = |segment: &Vec<(usize, u64)>| segment.iter().map(|(_, bytes)| bytes).sum();
        let may_pass = |segment: &Vec<(usize, u64)>| (1..=largest).contains(&bytes(segment));
        let passing = segments.iter().filter(|segment| may_pass(segment)).count();
        (0..=passing)
            .map(|stay| {
                let mut found = 0;
                let stays = segments.iter().map(|segment| {
                    if !may_pass(segment) {
                        return true;
                    }
                    found += 1;
                    found * stay / passing > (found - 1) * stay / passing
                });
                Split::of(segments, stays.collect())
            })
            .collect()
    }

    fn of(segments: &[Vec<(usize, u64)>], stays: Vec<bool>) -> Split {
        let staying = segments.iter().zip(&stays).filter(|(_, stays)| **stays);
        let params: BTreeMap<usize, u64> = staying.flat_map(|(s, _)| s).copied().collect();
        let need = |segment: &Vec<(usize, u64)>| {
            let passes = segment
                .iter()
                .filter(|(param, _)| !params.contains_key(param));
            passes.map(|(_, bytes)| bytes).sum()
        };
        Split {
            resident: params.values().sum(),
            needs: segments.iter().map(need).collect(),
            stays,
        }
    }

    /// Bytes in which any `depth` segments one behind the other find room, the last being followed by the first.
    fn ring(&self, depth: usize) -> u64 {
        let passing: Vec<u64> = self
            .needs
            .iter()
            .copied()
            .filter(|&need| need > 0)
            .collect();
        let depth = depth.min(passing.len());
        (0..passing.len())
            .map(|first| {
                let window = passing.iter().cycle().skip(first).take(depth);
                window.sum()
            })
            .max()
            .unwrap_or(0)
    }

    fn lay_out(&self, segments: &[Vec<(usize, u64)>], bytes: u64) -> Ring {
        let mut stays: Vec<(usize, u64)> = Vec::new();
        let staying = segments
            .iter()
            .zip(&self.stays)
            .filter(|(_, stays)| **stays);
        for &(param, size) in staying.flat_map(|(segment, _)| segment) {
            if stays.iter().all(|&(found, _)| found != param) {
                stays.push((param, size));
            }
        }
        let resident: BTreeMap<usize, u64> = stays.iter().copied().collect();
        let mut cursor = 0;
        let (mut passes, mut ranges) = (Vec::new(), Vec::new());
        for (segment, &need) in segments.iter().zip(&self.needs) {
            let passing = segment.iter().copied();
            passes.push(
                passing
                    .filter(|(param, _)| !resident.contains_key(param))
                    .collect(),
            );
            if cursor + need > bytes {
                cursor = 0;
            }
            ranges.push(cursor..cursor + need);
            cursor += need;
        }
        Ring {
            stays,
            passes,
            ranges,
            bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of 10 bytes each between a large and a small segment, the last of which uses a parameter of the first.
    fn segments() -> Vec<Vec<(usize, u64)>> {
        let mut segments = vec![vec![(0, 20), (1, 5)]];
        segments.extend((0..6).map(|block| vec![(10 + block, 4), (20 + block, 6)]));
        segments.push(vec![(1, 5), (2, 3)]);
        segments
    }

    #[test]
    fn whatever_the_budget_every_segment_finds_its_weights_within_it() {
        let segments = segments();
        let all = 20 + 5 + 60 + 3;
        for budget in 0..=all + 10 {
            match Ring::lay_out(&segments, Some(budget), u64::MAX) {
                Err(least) => assert!(budget < least, "{budget}"),
                Ok(ring) => {
                    let resident: u64 = ring.stays.iter().map(|(_, bytes)| bytes).sum();
                    assert!(resident + ring.bytes <= budget, "{budget}: {ring:?}");
                    for ((segment, passes), range) in
                        segments.iter().zip(&ring.passes).zip(&ring.ranges)
                    {
                        assert!(range.end <= ring.bytes);
                        let passing: u64 = passes.iter().map(|(_, bytes)| bytes).sum();
                        assert_eq!(range.end - range.start, passing);
                        for param in segment {
                            assert!(passes.contains(param) != ring.stays.contains(param));
                        }
                    }
                    assert_eq!(ring.bytes == 0, budget >= all, "{budget}");
                }
            }
        }
        // The first segment alone passes through 25 bytes, and everything else does too.
        assert_eq!(Ring::lay_out(&segments, Some(0), u64::MAX), Err(25));
        let free = Ring::lay_out(&segments, None, u64::MAX).unwrap();
        assert_eq!((free.bytes, free.stays.len()), (0, 15));
    }

    #[test]
    fn what_stays_is_spread_evenly() {
        let segments: Vec<_> = (0..12).map(|n| vec![(n, 10)]).collect();
        let ring = Ring::lay_out(&segments, Some(80), u64::MAX).unwrap();
        let passing: Vec<usize> = (0..12).filter(|&n| !ring.passes[n].is_empty()).collect();
        assert_eq!(passing.len(), 6);
        assert!(passing.windows(2).all(|pair| pair[1] - pair[0] == 2));
    }

    #[test]
    fn a_ring_is_no_larger_than_a_buffer_can_be() {
        let ring = Ring::lay_out(&segments(), Some(60), 12).unwrap();
        assert!(ring.bytes <= 12);
        // The first segment cannot pass through so small a ring, so it stays.
        assert!(ring.stays.contains(&(0, 20)));
        assert_eq!(Ring::lay_out(&segments(), Some(60), 9), Err(88));
    }

    #[test]
    fn segments_without_weights_of_their_own_take_nothing() {
        let segments = [vec![(0, 8)], vec![], vec![(0, 8)]];
        let ring = Ring::lay_out(&segments, Some(8), u64::MAX).unwrap();
        assert_eq!((ring.stays.len(), ring.bytes), (1, 0));
        assert_eq!(Ring::lay_out(&segments, Some(7), u64::MAX), Err(8));
    }
}
