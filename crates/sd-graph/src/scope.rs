//! Declaring a model's parameters by path, so that everything wrong with a checkpoint is known before a byte moves.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;

use sd_backend::DType;

use crate::checkpoint::{Checkpoint, StoredType};
use crate::convert::is_convertible;
use crate::param::Param;
use crate::shape::Shape;

/// What a parameter is used for, which says what types it may have in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// The second factor of products, or a table that rows are taken from: any type that the file has.
    Matrix,
    /// A convolution's kernel: F32 or F16.
    Kernel,
    /// Added or multiplied element by element: F32.
    Vector,
}

/// How parameters are brought into memory.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Converts floating-point and quantised weights to this type; `None` keeps the file's type where the role allows it.
    pub convert_to: Option<DType>,
}

impl LoadOptions {
    /// Converts floating-point and quantised weights to `dtype`: F32 or F16.
    pub fn convert_to(mut self, dtype: DType) -> Self {
        self.convert_to = Some(dtype);
        self
    }
}

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
    /// Tensors of a type that cannot be used: name and type.
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
    state: RefCell<State>,
}

#[derive(Debug, Default)]
struct State {
    params: Vec<Param>,
    used: BTreeSet<String>,
    ignored: Vec<String>,
    mismatch: Mismatch,
}

/// A place in a checkpoint's tree of names: `transformer_blocks.3.attn`.
#[derive(Debug, Clone)]
pub struct Scope<'d> {
    declarations: &'d Declarations<'d>,
    path: String,
}

impl<'c> Declarations<'c> {
    /// Starts declaring what a model needs of `checkpoint`.
    pub fn new(checkpoint: &'c Checkpoint, options: LoadOptions) -> Declarations<'c> {
        Declarations {
            checkpoint,
            options,
            state: RefCell::default(),
        }
    }

    /// The root of the tree of names.
    pub fn root(&self) -> Scope<'_> {
        Scope {
            declarations: self,
            path: String::new(),
        }
    }

    /// Ends declaring: the parameters in order of declaration, if all of them are there and nothing else is.
    ///
    /// # Errors
    /// [`Mismatch`] with everything that is missing, misshapen, unusable or unknown.
    pub fn finish(self) -> Result<Vec<Param>, Mismatch> {
        let State {
            params,
            used,
            ignored,
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
            .filter(|name| !used.contains(*name) && !is_ignored(name))
            .map(str::to_owned)
            .collect();
        mismatch.checkpoint = self.checkpoint.path().display().to_string();
        if mismatch.is_empty() {
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
        }
    }

    /// Whether the checkpoint has a tensor `name` here.
    pub fn has(&self, name: &str) -> bool {
        self.declarations
            .checkpoint
            .get(&self.full_name(name))
            .is_some()
    }

    /// Says that `name` here, and everything below it, is known but not needed.
    pub fn ignore(&self, name: &str) {
        let path = self.full_name(name);
        self.declarations.state.borrow_mut().ignored.push(path);
    }

    /// Declares a parameter. Dimensions of size 1 may be missing or added in the file (a norm's weight `[96, 1, 1]` is
    /// a vector of 96), as long as the other sizes are the same in the same order. A quantised matrix that is kept as it
    /// is needs an innermost size of whole blocks.
    ///
    /// What is wrong with it is told by [`Declarations::finish`]; until then a stand-in of the wanted shape goes on.
    pub fn param(&self, name: &str, shape: impl AsRef<[usize]>, role: Role) -> Param {
        let name = self.full_name(name);
        let wanted = shape.as_ref();
        let mut state = self.declarations.state.borrow_mut();
        let checked = Shape::new(wanted);
        let shape = checked.as_ref().copied().unwrap_or(Shape::ONE);
        let mut dtype = DType::F32;
        match (self.declarations.checkpoint.get(&name), checked) {
            (None, _) => state.mismatch.missing.push(name.clone()),
            (Some(info), Err(_)) => {
                state
                    .mismatch
                    .misshapen
                    .push((name.clone(), wanted.to_vec(), info.shape.clone()));
            }
            (Some(info), Ok(_)) => {
                let significant = |dims: &[usize]| {
                    dims.iter()
                        .copied()
                        .filter(|&dim| dim != 1)
                        .collect::<Vec<_>>()
                };
                if significant(&info.shape) != significant(wanted) {
                    state.mismatch.misshapen.push((
                        name.clone(),
                        wanted.to_vec(),
                        info.shape.clone(),
                    ));
                } else {
                    match memory_type(info.stored, role, &self.declarations.options) {
                        // The file's rows are whole blocks; those of another shape of the same sizes may not be.
                        Some(memory) if memory.row_bytes(shape.inner()).is_none() => {
                            state.mismatch.misshapen.push((
                                name.clone(),
                                wanted.to_vec(),
                                info.shape.clone(),
                            ));
                        }
                        Some(memory) => dtype = memory,
                        None => state
                            .mismatch
                            .unusable
                            .push((name.clone(), info.stored.to_string())),
                    }
                }
            }
        }
        state.used.insert(name.clone());
        let param = Param::new(name, shape, dtype);
        state.params.push(param.clone());
        param
    }

    fn full_name(&self, name: impl fmt::Display) -> String {
        if self.path.is_empty() {
            name.to_string()
        } else {
            format!("{}.{name}", self.path)
        }
    }
}

/// The type in memory of a tensor stored as `stored`; `None` if it cannot serve.
fn memory_type(stored: StoredType, role: Role, options: &LoadOptions) -> Option<DType> {
    let own = match stored {
        StoredType::F64 | StoredType::F32 => DType::F32,
        StoredType::F16 => DType::F16,
        StoredType::BF16 => DType::BF16,
        _ => stored.in_memory().filter(|dtype| dtype.is_quantized())?,
    };
    let wanted = options.convert_to.unwrap_or(own);
    let memory = match (role, wanted) {
        (Role::Vector, _) => DType::F32,
        (Role::Kernel, DType::F16) => DType::F16,
        // ggml has no convolution with BF16 or quantised kernels; F32 holds every value of one.
        (Role::Kernel, _) => DType::F32,
        (Role::Matrix, wanted) => wanted,
    };
    is_convertible(stored, memory).then_some(memory)
}
