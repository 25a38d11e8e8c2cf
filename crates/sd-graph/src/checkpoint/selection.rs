//! Tensors picked from checkpoints, under names of their own.

use std::ops::Range;
use std::sync::Arc;

use super::Checkpoint;
use super::contents::Contents;
use super::error::CheckpointError;
use super::tensor_info::{Location, Pieces, TensorInfo};

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
/// Nothing is copied or read: what is selected lies where it lay, so that it can be mapped there (but for what lies in pieces), and
/// the files are shared. A row
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
            if info.pieces.is_some() {
                return Err(wrong("it lies in pieces itself".to_owned()));
            }
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
        if let Some(pieces) = &mut part.pieces {
            let starts = &mut Arc::make_mut(pieces).starts;
            for start in starts {
                start.file = self.file_of(from, start.file);
            }
        }
        self.contents.tensors.insert(name, part);
        Ok(())
    }

    /// Adds tensors of one type and shape as `name`, along a new side `axis` that is as long as there are tensors: a kernel of
    /// which a file keeps each frame as a tensor. It cannot be mapped, but is read without a copy of the whole.
    ///
    /// # Errors
    /// As for [`Selection::add`]; [`CheckpointError::Tensor`] for tensors that are not alike, have fewer sides than `axis`, or are
    /// quantised within it.
    pub fn stack(
        &mut self,
        name: impl Into<String>,
        from: &Checkpoint,
        stored: &[&str],
        axis: usize,
    ) -> Result<(), CheckpointError> {
        let name = name.into();
        let wrong = |reason: String| CheckpointError::tensor(from.path(), &name, reason);
        let infos: Vec<&TensorInfo> = (stored.iter())
            .map(|stored| from.find(stored))
            .collect::<Result<_, _>>()?;
        let Some((first, others)) = infos.split_first() else {
            return Err(wrong("it is made of no tensors".to_owned()));
        };
        let is_alike = |other: &&TensorInfo| {
            (other.stored, &other.shape, other.pieces.is_some())
                == (first.stored, &first.shape, false)
        };
        if first.pieces.is_some() || !others.iter().all(is_alike) || axis > first.shape.len() {
            return Err(wrong("it is made of tensors that do not fit".to_owned()));
        }
        let mut shape = first.shape.clone();
        let turns: usize = shape.iter().take(axis).product();
        shape.insert(axis, infos.len());
        let info = TensorInfo::new(first.stored, shape).map_err(wrong)?;
        let length = first.bytes.checked_div(turns as u64).unwrap_or(0);
        let is_within_rows = axis + 1 == info.shape.len() && first.stored.is_quantized();
        if length * turns as u64 != first.bytes || is_within_rows {
            return Err(wrong("its pieces are no whole bytes".to_owned()));
        }
        let starts = infos
            .iter()
            .map(|info| info.location)
            .collect::<Option<_>>();
        let stride = length;
        self.add_pieces(
            name,
            from,
            info,
            starts.map(|starts| Pieces {
                starts,
                length,
                stride,
            }),
        )
    }

    /// Adds of each of `groups` equal groups of rows of the tensor `stored` one part, `rows`, as `name`: the queries of a projection
    /// whose file has queries, keys and values of each head one behind the other. It cannot be mapped.
    ///
    /// # Errors
    /// As for [`Selection::add`].
    pub fn add_grouped(
        &mut self,
        name: impl Into<String>,
        from: &Checkpoint,
        stored: &str,
        groups: usize,
        rows: Rows,
    ) -> Result<(), CheckpointError> {
        let info = from.find(stored)?;
        let wrong = |reason: String| CheckpointError::tensor(from.path(), stored, reason);
        let count = info.shape.first().copied().unwrap_or(0);
        let parts = groups.saturating_mul(rows.of);
        let is_whole =
            parts > 0 && count.is_multiple_of(parts) && info.bytes.is_multiple_of(parts as u64);
        if !is_whole || rows.part >= rows.of || info.pieces.is_some() {
            let of = rows.of;
            return Err(wrong(format!(
                "its {count} rows are not {groups} groups of {of} equal parts"
            )));
        }
        let mut shape = info.shape.clone();
        if let Some(outermost) = shape.first_mut() {
            *outermost = count / rows.of;
        }
        let part = TensorInfo::new(info.stored, shape).map_err(wrong)?;
        let length = info.bytes / parts as u64;
        let start = info.location.map(|at| Location {
            offset: at.offset + length * rows.part as u64,
            ..at
        });
        let pieces = start.map(|start| Pieces {
            starts: vec![start],
            length,
            stride: length * rows.of as u64,
        });
        self.add_pieces(name.into(), from, part, pieces)
    }

    fn add_pieces(
        &mut self,
        name: String,
        from: &Checkpoint,
        mut info: TensorInfo,
        pieces: Option<Pieces>,
    ) -> Result<(), CheckpointError> {
        if self.contents.tensors.contains_key(&name) {
            let reason = "it is there already";
            return Err(CheckpointError::tensor(from.path(), &name, reason));
        }
        info.pieces = pieces.map(|mut pieces| {
            for start in &mut pieces.starts {
                start.file = self.file_of(from, start.file);
            }
            Arc::new(pieces)
        });
        self.contents.tensors.insert(name, info);
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

    /// The checkpoint. Its files are those of the main checkpoint and those that something was selected from.
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
