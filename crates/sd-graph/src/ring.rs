//! Deciding which weights stay in memory and where the others pass through it.
//!
//! Plain arithmetic. Segments run in a known order, again and again. What stays is a prefix of that order: of things used
//! in a circle any rule that looks at the past evicts what is needed next, a fixed set does not. The rest is laid out in
//! a ring of bytes, each segment's weights at a place that never changes, so that graphs can point there for ever.

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
        let all: Vec<Split> = (0..=segments.len())
            .map(|prefix| Split::at(segments, prefix))
            .collect();
        let fits = |split: &&Split, depth: usize| {
            let ring = split.ring(depth);
            let few = depth < DEPTH || budget.is_none_or(|budget| ring <= budget / SHARE);
            few && ring <= largest
                && budget.is_none_or(|budget| split.resident.saturating_add(ring) <= budget)
        };
        let everything = all.last().filter(|split| fits(split, 1));
        let chosen = everything.map(|split| (split, 1)).or_else(|| {
            (1..=DEPTH).rev().find_map(|depth| {
                let split = all.iter().rev().find(|split| fits(split, depth))?;
                Some((split, depth))
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
    prefix: usize,
    resident: u64,
    /// Bytes that pass through the ring for each segment; none for those of the prefix.
    needs: Vec<u64>,
}

impl Split {
    fn at(segments: &[Vec<(usize, u64)>], prefix: usize) -> Split {
        let stays: BTreeMap<usize, u64> = segments[..prefix].iter().flatten().copied().collect();
        let need = |segment: &Vec<(usize, u64)>| {
            let passes = segment
                .iter()
                .filter(|(param, _)| !stays.contains_key(param));
            passes.map(|(_, bytes)| bytes).sum()
        };
        Split {
            prefix,
            resident: stays.values().sum(),
            needs: segments.iter().map(need).collect(),
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
        for &(param, size) in segments[..self.prefix].iter().flatten() {
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
