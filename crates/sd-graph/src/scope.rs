//! Declaring a model's parameters by path, so that everything wrong with a checkpoint is known before a byte moves.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;

use sd_backend::DType;

use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::low_rank::{Adapters, LowRank};
use crate::param::Param;
use crate::shape::Shape;
use crate::weight_types::{Fallback, LoadOptions, Role, memory_type};

/// Everything that does not fit between a model and a checkpoint, in one report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mismatch {
    /// Name of the checkpoint.
    pub checkpoint: String,
    /// Names the model needs and the checkpoint lacks.
    pub missing: Vec<String>,
    /// Tensors of another shape: name, wanted, found.
    pub misshapen: Vec<(String, Vec<usize>, Vec<usize>)>,
    /// Tensors of a type that cannot be used: name and type, and what it was to become.
    pub unusable: Vec<(String, String)>,
    /// Names in the checkpoint that the model does not know.
    pub unused: Vec<String>,
}

impl Mismatch {
    fn is_empty(&self) -> bool {
        self.missing.is_empty()
            && self.misshapen.is_empty()
            && self.unusable.is_empty()
            && self.unused.is_empty()
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Names beyond these are counted, not listed.
        const LISTED: usize = 8;
        fn list<T>(
            f: &mut fmt::Formatter<'_>,
            what: &str,
            items: &[T],
            show: impl Fn(&T) -> String,
        ) -> fmt::Result {
            if items.is_empty() {
                return Ok(());
            }
            let shown: Vec<String> = items.iter().take(LISTED).map(show).collect();
            write!(f, "; {} {what}: {}", items.len(), shown.join(", "))?;
            if items.len() > LISTED {
                write!(f, " and {} more", items.len() - LISTED)
            } else {
                Ok(())
            }
        }
        write!(f, "{} does not fit the model", self.checkpoint)?;
        list(f, "missing", &self.missing, String::clone)?;
        list(
            f,
            "of another shape",
            &self.misshapen,
            |(name, wanted, found)| format!("{name} ({found:?} instead of {wanted:?})"),
        )?;
        list(
            f,
            "of a type that cannot be used",
            &self.unusable,
            |(name, stored)| format!("{name} ({stored})"),
        )?;
        list(f, "unknown", &self.unused, String::clone)
    }
}

impl std::error::Error for Mismatch {}

/// The parameters that a model has declared so far, against a checkpoint.
#[derive(Debug)]
pub struct Declarations<'c> {
    checkpoint: &'c Checkpoint,
    options: LoadOptions,
    names: Names,
    adapters: Adapters,
    state: RefCell<State>,
}

type Translate = dyn Fn(&str) -> String;

/// From a model's names to those of the file.
#[derive(Default)]
struct Names(Option<Box<Translate>>);

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() {
            "translated"
        } else {
            "as they are"
        })
    }
}

#[derive(Debug, Default)]
struct State {
    params: Vec<Param>,
    used: BTreeSet<String>,
    ignored: Vec<String>,
    fallbacks: Vec<Fallback>,
    mismatch: Mismatch,
}

/// A place in a checkpoint's tree of names: `transformer_blocks.3.attn`.
#[derive(Debug, Clone)]
pub struct Scope<'d> {
    declarations: &'d Declarations<'d>,
    path: String,
    /// Whether weights here are in single precision, whatever is asked for all of them.
    is_precise: bool,
}

impl<'c> Declarations<'c> {
    /// Starts declaring what a model needs of `checkpoint`.
    pub fn new(checkpoint: &'c Checkpoint, options: LoadOptions) -> Declarations<'c> {
        Declarations {
            checkpoint,
            options,
            names: Names::default(),
            adapters: Adapters::default(),
            state: RefCell::default(),
        }
    }

    /// Says how the file calls what a model calls by another name: files of the same model come from several programs.
    /// Parameters and errors have the file's names then.
    pub fn translate(mut self, names: impl Fn(&str) -> String + 'static) -> Declarations<'c> {
        self.names = Names(Some(Box::new(names)));
        self
    }

    /// Says which low-rank additions there are, by the names of their matrices in the file; [`Scope::low_rank`] declares them.
    pub fn adapt(mut self, adapters: Adapters) -> Declarations<'c> {
        self.adapters = adapters;
        self
    }

    /// Matrices with low-rank additions that nothing declared so far has asked for: no layer of the model has such a matrix.
    pub fn unused_adapters(&self) -> Vec<String> {
        self.adapters.unused()
    }

    /// The root of the tree of names.
    pub fn root(&self) -> Scope<'_> {
        Scope {
            declarations: self,
            path: String::new(),
            is_precise: false,
        }
    }

    /// Parameters declared so far that could not be given the type asked for, because their rows are not whole blocks of
    /// it or not every device takes rows from it. What [`Role`] says of kernels and vectors is not among them.
    pub fn fallbacks(&self) -> Vec<Fallback> {
        self.state.borrow().fallbacks.clone()
    }

    /// How many parameters were declared so far: those of several modules can be told apart by it, since they come in order.
    pub fn declared(&self) -> usize {
        self.state.borrow().params.len()
    }

    /// Ends declaring: the parameters in order of declaration, if all of them are there and nothing else is.
    ///
    /// # Errors
    /// [`Mismatch`] with everything that is missing, misshapen, unusable or unknown.
    pub fn finish(self) -> Result<Vec<Param>, Mismatch> {
        let adapters = self.adapters;
        let State {
            params,
            used,
            ignored,
            fallbacks,
            mut mismatch,
        } = self.state.into_inner();
        let is_ignored = |name: &str| {
            ignored.iter().any(|path| {
                name.strip_prefix(path.as_str())
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            })
        };
        mismatch.unused = self
            .checkpoint
            .tensors()
            .map(|(name, _)| name)
            .filter(|name| !used.contains(*name) && !is_ignored(name) && !adapters.has_factor(name))
            .map(str::to_owned)
            .collect();
        mismatch.checkpoint = self.checkpoint.path().display().to_string();
        if mismatch.is_empty() {
            if let [first, ..] = &fallbacks[..] {
                tracing::warn!(checkpoint = %mismatch.checkpoint, weights = fallbacks.len(), %first, "weights could not be given the type asked for");
            }
            Ok(params)
        } else {
            Err(mismatch)
        }
    }
}

impl<'d> Scope<'d> {
    /// The scope `name` below this one.
    pub fn sub(&self, name: impl fmt::Display) -> Scope<'d> {
        Scope {
            declarations: self.declarations,
            path: self.full_name(name),
            is_precise: self.is_precise,
        }
    }

    /// This place for weights that all else passes through, and that are few: they are in single precision whatever is asked for all
    /// weights. Those that a file has quantised stay so, and rules by name ([`LoadOptions::tensor_types`]) hold.
    pub fn in_single_precision(&self) -> Scope<'d> {
        Scope {
            is_precise: true,
            ..self.clone()
        }
    }

    /// Whether the checkpoint has a tensor `name` here.
    pub fn has(&self, name: &str) -> bool {
        self.declarations
            .checkpoint
            .get(&self.name_in_file(name))
            .is_some()
    }

    /// Says that `name` here, and everything below it, is known but not needed.
    pub fn ignore(&self, name: &str) {
        let path = self.name_in_file(name);
        self.declarations.state.borrow_mut().ignored.push(path);
    }

    /// Declares a parameter. Dimensions of size 1 may be missing or added in the file (a norm's weight `[96, 1, 1]` is
    /// a vector of 96), as long as the other sizes are the same in the same order. A quantised matrix that is kept as it
    /// is needs an innermost size of whole blocks. [`LoadOptions`] says which type it gets.
    ///
    /// What is wrong with it is told by [`Declarations::finish`]; until then a stand-in of the wanted shape goes on.
    pub fn param(&self, name: &str, shape: impl AsRef<[usize]>, role: Role) -> Param {
        self.param_as(name, shape.as_ref(), shape.as_ref(), role)
    }

    /// As [`Scope::param`], for a tensor that the file has as `stored`, which may have more dimensions than a graph's
    /// tensors, and a graph as `shape`: the same elements in the same order.
    pub fn param_as(
        &self,
        name: &str,
        stored: impl AsRef<[usize]>,
        shape: impl AsRef<[usize]>,
        role: Role,
    ) -> Param {
        let name = self.name_in_file(name);
        let options = &self.declarations.options;
        let full_name = options.full_name(&name);
        let stays = || {
            let info = self.declarations.checkpoint.get(&name)?;
            let is_quantized = |dtype: DType| dtype.is_quantized();
            let stored = info.stored.in_memory();
            (!stored.is_some_and(is_quantized)).then_some(DType::F32)
        };
        let asked = match self.is_precise {
            true => options.tensor_types.of(&full_name).or_else(stays),
            false => options.asked(&full_name),
        };
        self.declare(name, stored.as_ref(), shape.as_ref(), role, asked)
    }

    /// Declares the low-rank additions to the matrix `name [output, input]` that there are.
    pub fn low_rank(&self, name: &str, [output, input]: [usize; 2]) -> Vec<LowRank> {
        let weight = self.name_in_file(name);
        let factor = |name: &str, shape: [usize; 2]| {
            self.declare(name.to_owned(), &shape, &shape, Role::Matrix, None)
        };
        let adapters = self.declarations.adapters.of(&weight).iter();
        adapters
            .map(|adapter| LowRank {
                down: factor(&adapter.down, [adapter.rank, input]),
                up: factor(&adapter.up, [output, adapter.rank]),
                scale: adapter.scale,
            })
            .collect()
    }

    /// Declares the tensor that the file has as `name` and `wanted`, and that `asked` is asked for.
    fn declare(
        &self,
        name: String,
        wanted: &[usize],
        shape: &[usize],
        role: Role,
        asked: Option<DType>,
    ) -> Param {
        let mut state = self.declarations.state.borrow_mut();
        let count = |dims: &[usize]| dims.iter().try_fold(1_usize, |n, &dim| n.checked_mul(dim));
        let checked = Shape::new(shape).and_then(|shape| {
            if count(wanted) == Some(shape.elements()) {
                Ok(shape)
            } else {
                Err(format!("{wanted:?} is not {shape}").into())
            }
        });
        let shape = checked.as_ref().copied().unwrap_or(Shape::ONE);
        let misshapen = |info: &TensorInfo| (name.clone(), wanted.to_vec(), info.shape.clone());
        let mut dtype = DType::F32;
        match self.declarations.checkpoint.get(&name) {
            None => state.mismatch.missing.push(name.clone()),
            Some(info) if checked.is_err() || significant(&info.shape) != significant(wanted) => {
                state.mismatch.misshapen.push(misshapen(info));
            }
            Some(info) => {
                let full_name = self.declarations.options.full_name(&name);
                // What is asked for holds for these two; the others go their own way, and that is no news.
                let ruled = matches!(role, Role::Matrix | Role::Table);
                match memory_type(info.stored, role, shape.inner(), asked) {
                    // The file's rows are whole blocks; those of another shape of the same sizes may not be.
                    Some(memory) if memory.row_bytes(shape.inner()).is_none() => {
                        state.mismatch.misshapen.push(misshapen(info));
                    }
                    Some(memory) => {
                        dtype = memory;
                        if let Some(asked) = asked.filter(|&asked| ruled && asked != memory) {
                            state.fallbacks.push(Fallback {
                                name: full_name,
                                asked,
                                got: memory,
                            });
                        }
                    }
                    None => {
                        let stored = info.stored;
                        let text = match asked.filter(|_| ruled) {
                            Some(asked) => format!("{stored} as {asked}"),
                            None => stored.to_string(),
                        };
                        state.mismatch.unusable.push((name.clone(), text));
                    }
                }
            }
        }
        state.used.insert(name.clone());
        let param = Param::new(name, shape, dtype);
        state.params.push(param.clone());
        param
    }

    fn name_in_file(&self, name: &str) -> String {
        let name = self.full_name(name);
        match &self.declarations.names.0 {
            Some(translate) => translate(&name),
            None => name,
        }
    }

    fn full_name(&self, name: impl fmt::Display) -> String {
        if self.path.is_empty() {
            name.to_string()
        } else {
            format!("{}.{name}", self.path)
        }
    }
}

/// The sides that say something: all but those of 1.
fn significant(dims: &[usize]) -> Vec<usize> {
    dims.iter().copied().filter(|&dim| dim != 1).collect()
}
