//! Building a sequence token by token: positions and pictures together, so that their counts cannot differ.

use super::embedding::{
    Embedding, MOST_PAIRS, PositionLayout, Precision, Region, TooLarge, ValueLayout,
};
use super::frequency::Frequency;

/// Rows and columns: of latents or of tokens, as is said where it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Size {
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

impl Size {
    /// `height` rows of `width`.
    pub fn new(height: usize, width: usize) -> Size {
        Size { height, width }
    }

    /// Tokens of latents that are cut into squares of `patch`, where a last one counts from half its side on.
    pub fn patches(self, patch: usize) -> Size {
        self.by_side(|side| side.saturating_add(patch / 2).checked_div(patch))
    }

    /// Tokens of latents that are padded until squares of `patch` fill them.
    pub fn padded_patches(self, patch: usize) -> Size {
        self.by_side(|side| (patch > 0).then(|| side.div_ceil(patch)))
    }

    /// Tokens of latents of which only whole squares of `patch` count.
    pub fn whole_patches(self, patch: usize) -> Size {
        self.by_side(|side| side.checked_div(patch))
    }

    fn by_side(self, tokens: impl Fn(usize) -> Option<usize>) -> Size {
        Size::new(
            tokens(self.height).unwrap_or(0),
            tokens(self.width).unwrap_or(0),
        )
    }

    /// The longer side.
    pub fn longer(self) -> usize {
        self.height.max(self.width)
    }
}

/// A sequence of text and pictures, in latents: what most families are asked about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Joint<'r> {
    /// Tokens of text.
    pub text: usize,
    /// Latents of the picture that is made.
    pub target: Size,
    /// Latents of each reference picture.
    pub references: &'r [Size],
    /// Items of the batch, alike in all of this.
    pub batch: usize,
}

impl<'r> Joint<'r> {
    /// `text` tokens and a picture of `target` latents.
    pub fn new(text: usize, target: Size) -> Joint<'r> {
        Joint {
            text,
            target,
            references: &[],
            batch: 1,
        }
    }

    /// With reference pictures of the given latents.
    pub fn references(mut self, references: &'r [Size]) -> Joint<'r> {
        self.references = references;
        self
    }

    /// For several items at once.
    pub fn batch(mut self, batch: usize) -> Joint<'r> {
        self.batch = batch;
        self
    }
}

/// Tokens of one item of a batch, their positions on `AXES` axes and the pictures among them.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence<const AXES: usize> {
    positions: Vec<[f32; AXES]>,
    layout: PositionLayout,
    /// Something did not fit; said once, when the embedding is made.
    too_large: bool,
}

impl<const AXES: usize> Default for Sequence<AXES> {
    fn default() -> Self {
        Sequence {
            positions: Vec::new(),
            layout: PositionLayout::default(),
            too_large: false,
        }
    }
}

impl<const AXES: usize> Sequence<AXES> {
    /// No tokens yet.
    pub fn new() -> Sequence<AXES> {
        Sequence::default()
    }

    /// Tokens so far.
    pub fn len(&self) -> usize {
        self.layout.tokens
    }

    /// Whether there are no tokens yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends `count` tokens that are no picture: text, padding, semantic tokens. `position` takes the number among
    /// them.
    pub fn tokens(&mut self, count: usize, position: impl Fn(usize) -> [f32; AXES]) {
        if self.reserve(Some(count)) {
            self.positions.extend((0..count).map(position));
        }
    }

    /// Appends tokens at the origin until their number is a multiple of `multiple` again, counted from `start`.
    pub fn pad(&mut self, start: usize, multiple: usize) {
        let count = self.len().saturating_sub(start);
        let padding = count.next_multiple_of(multiple.max(1)) - count;
        self.tokens(padding, |_| [0.0; AXES]);
    }

    /// Appends a picture, row by row, whose rows lie on axis 1 and columns on axis 2 one unit apart. `position` takes
    /// row and column.
    pub fn picture(&mut self, size: Size, position: impl Fn(usize, usize) -> [f32; AXES]) {
        self.frames(1, size, (1.0, 1.0), |_, row, column| position(row, column));
    }

    /// Appends `frames` pictures of equal size. `step` are the units of position between rows and between columns;
    /// `position` takes frame, row and column.
    pub fn frames(
        &mut self,
        frames: usize,
        size: Size,
        step: (f32, f32),
        position: impl Fn(usize, usize, usize) -> [f32; AXES],
    ) {
        let count = frames
            .checked_mul(size.height)
            .and_then(|rows| rows.checked_mul(size.width));
        let start = self.len();
        if !self.reserve(count) {
            return;
        }
        for frame in 0..frames {
            for row in 0..size.height {
                self.positions
                    .extend((0..size.width).map(|column| position(frame, row, column)));
            }
        }
        self.layout.regions.push(Region {
            tokens: start..self.len(),
            height_period: size.height as f32 * step.0,
            width_period: size.width as f32 * step.1,
            height_axis: 1,
            width_axis: 2,
        });
    }

    /// Counts `count` tokens more; false if that is beyond all sequences.
    fn reserve(&mut self, count: Option<usize>) -> bool {
        let tokens = count
            .and_then(|count| count.checked_add(self.layout.tokens))
            .filter(|&tokens| tokens <= MOST_PAIRS && !self.too_large);
        match tokens {
            Some(tokens) => self.layout.tokens = tokens,
            None => self.too_large = true,
        }
        tokens.is_some()
    }

    /// The embedding of `batch` such sequences, as rotation matrices.
    ///
    /// # Errors
    /// [`TooLarge`].
    pub fn embed(
        self,
        frequencies: Vec<Frequency>,
        precision: Precision,
        batch: usize,
    ) -> Result<Embedding, TooLarge> {
        self.check(&frequencies, batch)?;
        Ok(Embedding::compute(
            self.positions.as_flattened().repeat(batch),
            AXES,
            self.layout,
            frequencies,
            ValueLayout::Matrix,
            precision,
            batch,
        ))
    }

    /// The embedding of a batch whose items have the same pictures at the same tokens, but other positions.
    pub(crate) fn embed_items(
        items: &[Sequence<AXES>],
        value_layout: ValueLayout,
        frequencies: Vec<Frequency>,
        precision: Precision,
    ) -> Result<Embedding, TooLarge> {
        for item in items {
            item.check(&frequencies, items.len())?;
        }
        let layout = items.first().map(|item| item.layout.clone());
        Ok(Embedding::compute(
            items
                .iter()
                .flat_map(|item| item.positions.as_flattened())
                .copied()
                .collect(),
            AXES,
            layout.unwrap_or_default(),
            frequencies,
            value_layout,
            precision,
            items.len(),
        ))
    }

    fn check(&self, frequencies: &[Frequency], batch: usize) -> Result<(), TooLarge> {
        let pairs = self
            .len()
            .checked_mul(frequencies.len().max(AXES))
            .and_then(|pairs| pairs.checked_mul(batch));
        match pairs {
            Some(pairs) if pairs <= MOST_PAIRS && !self.too_large => Ok(()),
            _ => Err(TooLarge),
        }
    }
}
