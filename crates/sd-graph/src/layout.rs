//! Where in shared memory tensors lie that live for a part of a graph's time.

use std::cmp::Reverse;

/// The bytes that a tensor, and those that are computed in its place, take from one operation to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    /// The first operation that needs them.
    pub first: usize,
    /// The last.
    pub last: usize,
    pub bytes: usize,
}

/// What lies in one place, over time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tenant {
    parts: Vec<Part>,
}

impl Tenant {
    /// Adds a part.
    pub(crate) fn push(&mut self, part: Part) {
        match self.parts.last_mut() {
            Some(last) if last.bytes == part.bytes && part.first <= last.last + 1 => {
                last.last = last.last.max(part.last);
            }
            _ => self.parts.push(part),
        }
    }

    /// The most bytes at any time.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = self.parts.iter().map(|part| part.bytes);
        bytes.max().unwrap_or(0)
    }
}

/// Gives each tenant an offset such that no two share memory at the same time, and says how many bytes that takes in all.
/// Sizes are multiples of the alignment. Memory comes in blocks of `block` bytes, and a tenant lies within one.
///
/// The largest are placed first, each as low as it can be: the problem is NP-hard, and this comes to the least possible for
/// nearly all networks (Pisarchyk and Lee, arXiv:2001.03288, "greedy by size").
pub(crate) fn place(tenants: &[Tenant], block: usize) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..tenants.len()).collect();
    order.sort_by_key(|&index| Reverse(tenants[index].bytes()));
    let mut offsets: Vec<usize> = vec![0; tenants.len()];
    let mut placed: Vec<usize> = Vec::with_capacity(tenants.len());
    let mut total = 0;
    let mut taken: Vec<(usize, usize)> = Vec::new();
    for index in order {
        let tenant = &tenants[index];
        taken.clear();
        for &other in &placed {
            let at = offsets[other];
            for mine in tenant.parts.iter().filter(|part| part.bytes > 0) {
                let theirs = tenants[other].parts.iter();
                let met = theirs.filter(|part| part.first <= mine.last && mine.first <= part.last);
                // Offsets in between would lay `mine` over `part`.
                taken.extend(
                    met.filter(|part| part.bytes > 0)
                        .map(|part| ((at + 1).saturating_sub(mine.bytes), at + part.bytes)),
                );
            }
        }
        taken.sort_unstable();
        let bytes = tenant.bytes();
        let offset = lowest(&taken, bytes, block);
        offsets[index] = offset;
        total = total.max(offset + bytes);
        placed.push(index);
    }
    (offsets, total)
}

/// The lowest offset that lies in none of the sorted ranges `taken`, and whose bytes lie within one block.
fn lowest(taken: &[(usize, usize)], bytes: usize, block: usize) -> usize {
    let within = |offset: usize| {
        let begin = offset / block * block;
        if bytes > 0 && offset + bytes > begin + block {
            begin + block
        } else {
            offset
        }
    };
    let mut offset = within(0);
    for &(begin, end) in taken {
        if begin > offset {
            break;
        }
        if end > offset {
            offset = within(end);
        }
    }
    offset
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers from a fixed seed.
    fn numbers() -> impl FnMut(usize) -> usize {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        move |below| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below as u64) as usize
        }
    }

    #[test]
    fn nobody_shares_memory_at_the_same_time() {
        let mut number = numbers();
        for round in 0..200 {
            let block = if round % 2 == 0 {
                usize::MAX / 2
            } else {
                64 * 40
            };
            let tenants: Vec<Tenant> = (0..40)
                .map(|_| {
                    let mut tenant = Tenant::default();
                    let mut first = number(60);
                    for _ in 0..=number(3) {
                        let last = first + number(12);
                        tenant.push(Part {
                            first,
                            last,
                            bytes: 64 * number(40),
                        });
                        first = last;
                    }
                    tenant
                })
                .collect();
            let (offsets, total) = place(&tenants, block);
            for (index, one) in tenants.iter().enumerate() {
                let at = offsets[index];
                assert!(at + one.bytes() <= total && at % 64 == 0);
                assert!(one.bytes() == 0 || at / block == (at + one.bytes() - 1) / block);
                for (other, two) in tenants.iter().enumerate().take(index) {
                    let there = offsets[other];
                    for a in &one.parts {
                        for b in &two.parts {
                            let meet = a.first <= b.last && b.first <= a.last;
                            let overlap = at < there + b.bytes && there < at + a.bytes;
                            assert!(!(meet && overlap && a.bytes > 0 && b.bytes > 0));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn growing_tensors_do_not_leave_holes() {
        // Each of a chain is twice as large as the one before: an allocator that goes by time alone finds no room for the
        // next among what it gave back, and needs more than the two largest.
        let tenants: Vec<Tenant> = (0..8)
            .map(|index| {
                let mut tenant = Tenant::default();
                tenant.push(Part {
                    first: index,
                    last: index + 1,
                    bytes: 64 << index,
                });
                tenant
            })
            .collect();
        let (_, total) = place(&tenants, usize::MAX / 2);
        assert_eq!(total, (64 << 7) + (64 << 6));
    }
}
