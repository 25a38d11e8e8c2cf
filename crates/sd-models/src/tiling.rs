//! Large pictures piece by piece: where pieces lie, and how they are put together.

/// Share of a tile that it has in common with its neighbour, at least: a quarter.
const OVERLAP: usize = 4;

/// Latents along a side of the smallest squares that are chosen. A caller may ask for smaller ones.
pub(crate) const SMALLEST: usize = 8;

/// Squares in which a picture may be worked on whose longer side has `longest` latents, the largest first: those of which
/// two lie along that side, three, four, six and so on.
pub(crate) fn squares(longest: usize) -> impl Iterator<Item = usize> {
    let counts = (0..usize::BITS).flat_map(|power| [2_usize << power, 3 << power]);
    // So long that `count` of them, of which neighbours have a quarter in common, cover the side.
    counts
        .map(move |count| (OVERLAP * longest).div_ceil((OVERLAP - 1) * count + 1))
        .take_while(|&tile| tile > SMALLEST)
        .chain([SMALLEST])
        .filter(move |&tile| tile < longest)
}

/// Squares half as large as `tile`, or as all of a picture; none if those would be too small.
pub(crate) fn halved(tile: Option<usize>, longest: usize) -> Option<usize> {
    let tile = tile.unwrap_or(longest);
    (tile > SMALLEST).then(|| tile.div_ceil(2).max(SMALLEST))
}

/// Tiles of equal length along one side of a picture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tiles {
    /// Length of the side.
    side: usize,
    /// Length of each tile.
    pub(crate) length: usize,
    /// Where each begins. Of a side that joins, a tile may go on at the beginning.
    pub(crate) starts: Vec<usize>,
    /// Whether the side joins, and its tiles overlap across the join.
    joins: bool,
    /// Over how many elements neighbours are blended.
    ramp: usize,
}

impl Tiles {
    /// Covers `side` with tiles of `length`, neighbours overlapping by a quarter or more. A tile as long as the side, or
    /// none, is the whole side.
    pub(crate) fn new(side: usize, length: Option<usize>, joins: bool) -> Tiles {
        let length = length.unwrap_or(side).max(2);
        if length >= side {
            return Tiles {
                side,
                length: side,
                starts: vec![0],
                joins: false,
                ramp: 0,
            };
        }
        let ramp = (length / OVERLAP).max(1);
        let step = length - ramp;
        let starts = if joins {
            // One tile more than without a join: the last overlaps the first.
            let count = side.div_ceil(step);
            (0..count).map(|index| index * side / count).collect()
        } else {
            let room = side - length;
            let gaps = room.div_ceil(step);
            (0..=gaps).map(|index| index * room / gaps).collect()
        };
        Tiles {
            side,
            length,
            starts,
            joins,
            ramp,
        }
    }

    /// Length of the side.
    pub(crate) fn side(&self) -> usize {
        self.side
    }

    /// Whether one tile is all.
    pub(crate) fn is_whole(&self) -> bool {
        self.length == self.side
    }

    /// The elements that the tile from `start` covers, in order.
    pub(crate) fn elements(&self, start: usize) -> impl Iterator<Item = usize> + '_ {
        (start..start + self.length).map(|index| index % self.side)
    }

    /// The same tiles of a side `scale` times as long.
    pub(crate) fn scaled(&self, scale: usize) -> Tiles {
        Tiles {
            side: self.side * scale,
            length: self.length * scale,
            starts: self.starts.iter().map(|start| start * scale).collect(),
            joins: self.joins,
            ramp: self.ramp * scale,
        }
    }

    /// How much each element of the tile from `start` counts: fully inside, less towards a neighbour, and hardly at all where
    /// the tile ends, since there it saw nothing beyond. Ends of a side that does not join count fully.
    fn weights(&self, start: usize) -> Vec<f32> {
        let rises = self.joins || start > 0;
        let falls = self.joins || start + self.length < self.side;
        (0..self.length)
            .map(|index| {
                let from = |distance: usize| (distance as f32 + 0.5) / self.ramp.max(1) as f32;
                let left = if rises { from(index) } else { 1.0 };
                let right = if falls {
                    from(self.length - 1 - index)
                } else {
                    1.0
                };
                let share = left.min(right).min(1.0);
                share * share * (3.0 - 2.0 * share)
            })
            .collect()
    }
}

/// A picture `[channels, rows, columns]` that is put together from tiles.
#[derive(Debug)]
pub(crate) struct Mosaic {
    rows: Tiles,
    columns: Tiles,
    /// Sums of weighted tiles.
    sums: Vec<f32>,
    /// Sums of weights `[rows, columns]`.
    weights: Vec<f32>,
}

impl Mosaic {
    /// An empty picture of `channels`.
    pub(crate) fn new(channels: usize, rows: Tiles, columns: Tiles) -> Mosaic {
        let pixels = rows.side * columns.side;
        Mosaic {
            rows,
            columns,
            sums: vec![0.0; channels * pixels],
            weights: vec![0.0; pixels],
        }
    }

    /// Lays the tile `[channels, rows, columns]` from `(row, column)` on.
    pub(crate) fn add(&mut self, (row, column): (usize, usize), tile: &[f32]) {
        let (down, along) = (self.rows.weights(row), self.columns.weights(column));
        let width = self.columns.side;
        let pixels = self.weights.len();
        let area = self.rows.length * self.columns.length;
        for (y, (target_y, down)) in self.rows.elements(row).zip(&down).enumerate() {
            for (x, (target_x, along)) in self.columns.elements(column).zip(&along).enumerate() {
                let (at, weight) = (target_y * width + target_x, down * along);
                self.weights[at] += weight;
                let source = y * self.columns.length + x;
                let sums = self.sums.iter_mut().skip(at).step_by(pixels);
                for (sum, value) in sums.zip(tile.iter().skip(source).step_by(area)) {
                    *sum += value * weight;
                }
            }
        }
    }

    /// The picture.
    pub(crate) fn finish(mut self) -> Vec<f32> {
        for plane in self.sums.chunks_exact_mut(self.weights.len().max(1)) {
            for (sum, weight) in plane.iter_mut().zip(&self.weights) {
                *sum /= weight;
            }
        }
        self.sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_a_side_and_overlap_by_a_quarter() {
        for side in 1..40 {
            for length in 1..45 {
                for joins in [false, true] {
                    let tiles = Tiles::new(side, Some(length), joins);
                    let mut covered = vec![0; side];
                    for &start in &tiles.starts {
                        assert!(joins || start + tiles.length <= side);
                        tiles.elements(start).for_each(|at| covered[at] += 1);
                    }
                    assert!(covered.iter().all(|&times| times > 0), "{tiles:?}");
                    if tiles.is_whole() {
                        assert_eq!(tiles.starts, [0]);
                        continue;
                    }
                    assert!(tiles.length == length.max(2) && tiles.length < side);
                    let next = tiles.starts.iter().skip(1).copied();
                    let next = next.chain(joins.then_some(side));
                    for (start, next) in tiles.starts.iter().zip(next) {
                        let overlap = start + tiles.length - next;
                        assert!(overlap >= (tiles.length / OVERLAP).max(1), "{tiles:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn squares_become_smaller_down_to_the_smallest() {
        let of = |longest| squares(longest).collect::<Vec<_>>();
        assert!(of(SMALLEST).is_empty());
        assert_eq!(of(9), [8]);
        assert_eq!(of(64), [37, 26, 20, 14, 11, 8]);
        for longest in 9..600 {
            let squares = of(longest);
            assert!(squares.is_sorted_by(|a, b| a > b), "{squares:?}");
            for (tile, count) in squares.iter().zip([2, 3, 4, 6, 8, 12, 16, 24]) {
                let tiles = Tiles::new(longest, Some(*tile), false).starts.len();
                assert!(
                    tiles <= count || *tile == SMALLEST,
                    "{longest} {tile}: {tiles}"
                );
            }
        }
        assert_eq!(halved(None, 64), Some(32));
        assert_eq!(halved(Some(15), 64), Some(8));
        assert_eq!(halved(Some(8), 64), None);
        assert_eq!(halved(None, 8), None);
    }

    #[test]
    fn a_picture_cut_into_tiles_comes_back() {
        for (joins, tile) in [(false, 3), (true, 3), (true, 5), (false, 9)] {
            let (rows, columns) = (
                Tiles::new(7, Some(tile), joins),
                Tiles::new(8, Some(4), joins),
            );
            let value = |channel: usize, y: usize, x: usize| (channel * 100 + y * 10 + x) as f32;
            let mut mosaic = Mosaic::new(2, rows.clone(), columns.clone());
            for &row in &rows.starts {
                for &column in &columns.starts {
                    let tile: Vec<f32> = (0..2)
                        .flat_map(|channel| rows.elements(row).map(move |y| (channel, y)))
                        .flat_map(|(channel, y)| {
                            columns.elements(column).map(move |x| value(channel, y, x))
                        })
                        .collect();
                    mosaic.add((row, column), &tile);
                }
            }
            let picture = mosaic.finish();
            for (at, is) in picture.iter().enumerate() {
                let should = value(at / 56, at % 56 / 8, at % 8);
                assert!((is - should).abs() < 1e-4, "{at}: {is}, not {should}");
            }
        }
    }

    #[test]
    fn neighbours_fade_into_each_other_and_ends_do_not() {
        let tiles = Tiles::new(6, Some(4), false).scaled(2);
        assert_eq!((tiles.starts.clone(), tiles.ramp), (vec![0, 4], 2));
        assert_eq!(
            tiles.weights(0),
            [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.84375, 0.15625]
        );
        assert_eq!(
            tiles.weights(4),
            [0.15625, 0.84375, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
        );
        let around = Tiles::new(6, Some(4), true).scaled(2);
        assert_eq!(
            around.weights(0),
            [0.15625, 0.84375, 1.0, 1.0, 1.0, 1.0, 0.84375, 0.15625]
        );
    }
}
