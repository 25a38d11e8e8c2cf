//! Tensors picked from checkpoints, under names of their own.

use std::ops::Range;
use std::sync::Arc;

use super::Checkpoint;
use super::contents::Contents;
use super::error::CheckpointError;
use super::tensor_info::{Location, TensorInfo};

/// Which rows of a stored tensor make a tensor: its outermost side is cut into `of` equal parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// The part, counted from 0.
    pub part: usize,
    /// How many parts there are.
    pub of: usize,
}

impl Rows {
    /// The whole tensor.
    pub const ALL: Rows = Rows { part: 0, of: 1 };

    /// The rows of a tensor with `rows` of them; `None` if these are no equal parts.
    fn range(self, rows: usize) -> Option<Range<usize>> {
        let each = rows.checked_div(self.of)?;
        let fits = each * self.of == rows && self.part < self.of;
        fits.then(|| self.part * each..(self.part + 1) * each)
    }
}

/// Puts a checkpoint together from tensors of others: under other names, as rows of a larger tensor, from several files.
///
/// Nothing is copied or read: what is selected lies where it lay, so that it can be mapped there, and the files are shared. A row
/// of a quantised type is whole blocks, so that rows of it are as good as a tensor.
///
/// ```
/// use sd_graph::{Checkpoint, Rows, Selection, StoredType};
///
/// # fn main() -> Result<(), sd_graph::CheckpointError> {
/// let fused = ("gate_up.weight".to_owned(), StoredType::Q8_0, vec![128, 64]);
/// let file = Checkpoint::from_table("a file", [fused])?;
/// let mut halves = Selection::new(&file);
/// halves.add("gate.weight", &file, "gate_up.weight", Rows { part: 0, of: 2 })?;
/// halves.add("up.weight", &file, "gate_up.weight", Rows { part: 1, of: 2 })?;
/// assert_eq!(halves.finish()?.get("up.weight").map(|info| info.shape.clone()), Some(vec![64, 64]));
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Selection {
    contents: Contents,
}

impl Selection {
    /// An empty selection that goes by the path of `main` in errors, and has its metadata.
    pub fn new(main: &Checkpoint) -> Selection {
        Selection {
            contents: Contents {
                path: main.0.path.clone(),
                files: main.0.files.clone(),
                metadata: main.0.metadata.clone(),
                values: main.0.values.clone(),
                ..Contents::default()
            },
        }
    }

    /// Adds `rows` of the tensor `stored` of `from` as `name`.
    ///
    /// # Errors
    /// [`CheckpointError::NoSuchTensor`]; [`CheckpointError::Tensor`] for a name that was given already, and for rows that are no
    /// equal parts.
    pub fn add(
        &mut self,
        name: impl Into<String>,
        from: &Checkpoint,
        stored: &str,
        rows: Rows,
    ) -> Result<(), CheckpointError> {
        let name = name.into();
        let wrong = |reason: String| CheckpointError::tensor(from.path(), stored, reason);
        let info = from.find(stored)?;
        if self.contents.tensors.contains_key(&name) {
            return Err(wrong(format!("it is a second tensor called {name}")));
        }
        let mut part = info.clone();
        if rows != Rows::ALL {
            let count = info.shape.first().copied();
            let range = count.and_then(|count| rows.range(count)).ok_or_else(|| {
                let count = count.unwrap_or(0);
                wrong(format!("its {count} rows are not {} equal parts", rows.of))
            })?;
            let mut shape = info.shape.clone();
            if let Some(outermost) = shape.first_mut() {
                *outermost = range.len();
            }
            part = TensorInfo::new(info.stored, shape).map_err(wrong)?;
            let each = info.bytes / rows.of as u64;
            if part.bytes != each {
                return Err(wrong("its rows are no whole bytes".to_owned()));
            }
            part.location = info.location.map(|at| Location {
                offset: at.offset + each * rows.part as u64,
                ..at
            });
        }
        if let Some(location) = &mut part.location {
            location.file = self.file_of(from, location.file);
        }
        self.contents.tensors.insert(name, part);
        Ok(())
    }

    /// Adds everything of `from` under its own names.
    ///
    /// # Errors
    /// [`CheckpointError::Tensor`] for a name that is there already.
    pub fn add_all(&mut self, from: &Checkpoint) -> Result<(), CheckpointError> {
        from.tensors()
            .try_for_each(|(name, _)| self.add(name, from, name, Rows::ALL))
    }

    /// The number here of file `index` of `from`.
    fn file_of(&mut self, from: &Checkpoint, index: usize) -> usize {
        let Some(file) = from.0.files.get(index) else {
            return usize::MAX;
        };
        let files = &mut self.contents.files;
        let known = files.iter().position(|known| Arc::ptr_eq(known, file));
        known.unwrap_or_else(|| {
            files.push(Arc::clone(file));
            files.len() - 1
        })
    }

    /// The checkpoint. Only files that something was selected from count as its own.
    ///
    /// # Errors
    /// [`CheckpointError::Tensor`] if the sizes of all tensors together overflow.
    pub fn finish(self) -> Result<Checkpoint, CheckpointError> {
        Ok(Checkpoint(Arc::new(self.contents.finish()?)))
    }
}

impl Checkpoint {
    /// The tensors whose names begin with `prefix`, without it.
    ///
    /// # Errors
    /// As for [`Selection::finish`].
    pub fn below(&self, prefix: &str) -> Result<Checkpoint, CheckpointError> {
        let mut selection = Selection::new(self);
        for (name, _) in self.tensors() {
            if let Some(rest) = name.strip_prefix(prefix) {
                selection.add(rest, self, name, Rows::ALL)?;
            }
        }
        selection.finish()
    }
}
