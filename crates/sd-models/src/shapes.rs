//! What the shapes of tensors say about the model that they belong to.

use sd_graph::Checkpoint;

/// Layers that are counted. More than any model has.
const MOST: usize = 4096;

/// A checkpoint, asked for shapes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shapes<'c>(&'c Checkpoint);

impl<'c> Shapes<'c> {
    pub(crate) fn of(checkpoint: &'c Checkpoint) -> Shapes<'c> {
        Shapes(checkpoint)
    }

    /// The sides of a tensor.
    pub(crate) fn sides(self, name: &str) -> Result<&'c [usize], String> {
        let info = self.0.get(name);
        info.map(|info| info.shape.as_slice())
            .ok_or_else(|| format!("no tensor {name}"))
    }

    /// Both sides of a matrix.
    pub(crate) fn matrix(self, name: &str) -> Result<[usize; 2], String> {
        let sides = self.sides(name)?;
        <[usize; 2]>::try_from(sides).map_err(|_| format!("{name} is no matrix: {sides:?}"))
    }

    /// The length of a vector, whose sides of 1 do not count.
    pub(crate) fn vector(self, name: &str) -> Result<usize, String> {
        Ok(self.sides(name)?.iter().product())
    }

    pub(crate) fn has(self, name: &str) -> bool {
        self.0.get(name).is_some()
    }

    /// How many tensors there are whose names have a number in the place of `#`, counted from 0.
    pub(crate) fn count(self, pattern: &str) -> usize {
        let is_there = |index: &usize| self.has(&pattern.replacen('#', &index.to_string(), 1));
        (0..MOST).take_while(is_there).count()
    }
}
