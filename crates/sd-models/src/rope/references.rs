//! Where reference pictures lie beside the target.

use super::sequence::Size;

/// How reference pictures are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReferenceMode {
    /// All have the same index; each is laid beside the ones before it, where the sheet is shorter.
    Fixed,
    /// Each has an index one higher than the one before it.
    Increase,
    /// Each has an index one lower than the one before it, the first one lower than the start.
    Decrease,
}

/// One reference picture's place.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Placed {
    /// Latents of the picture.
    pub latents: Size,
    /// Position on axis 0.
    pub index: f32,
    /// First row, beyond the family's own start.
    pub row: f32,
    /// First column, beyond the family's own start.
    pub column: f32,
    /// Whether a family that centres its pictures centres this one.
    pub centred: bool,
}

/// Places `references` one after the other. Indices count from `start` and are multiplied by `scale` and cut to whole
/// numbers; the offsets of [`ReferenceMode::Fixed`] count latents, not tokens, which is how models were trained.
///
/// Source: stable-diffusion.cpp,
/// [`gen_refs_ids`](https://github.com/leejet/stable-diffusion.cpp/blob/97d2990807fe6d558e395f8764198d7c7e7b411c/src/model/common/rope.hpp#L350).
pub(crate) fn place(
    references: &[Size],
    mode: ReferenceMode,
    start: i32,
    scale: f32,
) -> impl Iterator<Item = Placed> {
    let mut index = start;
    let mut sheet = Size::new(0, 0);
    references.iter().map(move |&latents| {
        let (mut row, mut column) = (0, 0);
        match mode {
            ReferenceMode::Fixed => {
                let height = latents.height.saturating_add(sheet.height);
                if height > latents.width.saturating_add(sheet.width) {
                    column = sheet.width;
                } else {
                    row = sheet.height;
                }
            }
            ReferenceMode::Decrease => index = index.saturating_sub(1),
            ReferenceMode::Increase => {}
        }
        let placed = Placed {
            latents,
            index: (index as f32 * scale).trunc(),
            row: row as f32,
            column: column as f32,
            centred: mode != ReferenceMode::Fixed,
        };
        if mode == ReferenceMode::Increase {
            index = index.saturating_add(1);
        }
        sheet.height = sheet.height.max(latents.height.saturating_add(row));
        sheet.width = sheet.width.max(latents.width.saturating_add(column));
        placed
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_pictures_fill_a_sheet_and_others_count() {
        let sizes = [Size::new(4, 2), Size::new(2, 6), Size::new(8, 2)];
        let places = |mode, start, scale| -> Vec<[f32; 3]> {
            place(&sizes, mode, start, scale)
                .map(|placed| [placed.index, placed.row, placed.column])
                .collect()
        };
        assert_eq!(
            places(ReferenceMode::Fixed, 1, 1.0),
            [[1.0, 0.0, 0.0], [1.0, 4.0, 0.0], [1.0, 0.0, 6.0]]
        );
        assert_eq!(
            places(ReferenceMode::Increase, 1, 10.0),
            [[10.0, 0.0, 0.0], [20.0, 0.0, 0.0], [30.0, 0.0, 0.0]]
        );
        assert_eq!(
            places(ReferenceMode::Decrease, 0, 1.0),
            [[-1.0, 0.0, 0.0], [-2.0, 0.0, 0.0], [-3.0, 0.0, 0.0]]
        );
    }
}
