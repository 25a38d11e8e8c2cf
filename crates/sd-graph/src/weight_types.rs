//! Which type a weight has in memory: what its use allows, what was asked for, and what its rows have room for.

use std::fmt;
use std::str::FromStr;

use regex::{Regex, RegexBuilder};
use sd_backend::DType;

use crate::checkpoint::StoredType;
use crate::convert::is_convertible;

/// Bytes that a compiled pattern may take: far more than names need, and nothing that hurts.
const PATTERN_LIMIT: usize = 1 << 20;

/// What a parameter is used for, which says what types it may have in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// The second factor of products: any type that the file has, or that is asked for.
    Matrix,
    /// A table that rows are taken from. As a matrix, but not every device takes rows from every type: where such a
    /// one is asked for, the table becomes `q8_0`.
    Table,
    /// A convolution's kernel: F32 or F16.
    Kernel,
    /// Added or multiplied element by element: F32.
    Vector,
}

/// How parameters are brought into memory.
///
/// What is asked for holds for matrices and tables; kernels follow where F32 or F16 is asked for, vectors are always F32
/// ([`Role`]). Where nothing is asked for, the file's own type is kept if one can compute with it: F64 becomes F32,
/// floating-point types of 8 bits become F16, which holds all of their values.
///
/// A row must be whole blocks of a quantised type. One that is not becomes another type: `q4_K` `q5_0`, `q5_K` `q5_1`,
/// `q6_K` `q8_0`, other types with long blocks `iq4_nl`; and where that does not fit either, F16, or BF16 if the file has
/// that. [`Declarations::fallbacks`](crate::Declarations::fallbacks) tells of them.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct LoadOptions {
    /// The type of weights that no rule names; `None` keeps the file's.
    pub weight_type: Option<DType>,
    /// Types by name, which come before [`LoadOptions::weight_type`].
    pub tensor_types: TensorTypes,
    /// What stands before the names in rules: the component that the checkpoint is, `transformer`.
    pub component: String,
}

impl LoadOptions {
    /// Asks for one type: see [`LoadOptions`] for what follows it.
    pub fn weight_type(mut self, dtype: DType) -> Self {
        self.weight_type = Some(dtype);
        self
    }

    /// Adds rules behind those that are there.
    pub fn tensor_types(mut self, rules: TensorTypes) -> Self {
        self.tensor_types.0.extend(rules.0);
        self
    }

    /// Says which part of a model is loaded: its name and a dot stand before the tensors' names when rules look at them.
    pub fn component(mut self, name: &str) -> Self {
        name.clone_into(&mut self.component);
        self
    }

    /// The name under which rules and reports know the tensor `name` of the checkpoint.
    pub(crate) fn full_name(&self, name: &str) -> String {
        if self.component.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.component)
        }
    }

    /// The type asked for the tensor of this full name.
    pub(crate) fn asked(&self, full_name: &str) -> Option<DType> {
        self.tensor_types.of(full_name).or(self.weight_type)
    }
}

/// Rules that give weights types by their names; the first whose pattern is found decides.
///
/// As text: `PATTERN=TYPE`, several of them with commas between: `transformer_blocks\..*attn=q8_0,\.proj\.=f16`. A
/// pattern is a regular expression in the syntax of the `regex` crate, which is searched for anywhere in the full name:
/// `transformer.transformer_blocks.0.attn.to_q.weight`. It may contain commas and equals signs.
///
/// ```
/// use sd_graph::TensorTypes;
///
/// let rules: TensorTypes = r"^vae\.=f32,attn\.to_[qk]=q8_0".parse()?;
/// assert!("attn=q9".parse::<TensorTypes>().is_err());
/// # Ok::<(), sd_graph::WeightTypeError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct TensorTypes(Vec<Rule>);

#[derive(Debug, Clone)]
struct Rule {
    pattern: Regex,
    dtype: DType,
}

impl TensorTypes {
    /// Adds a rule behind those that are there: weights in whose name `pattern` is found get `dtype`.
    ///
    /// # Errors
    /// [`WeightTypeError::Pattern`].
    pub fn rule(mut self, pattern: &str, dtype: DType) -> Result<TensorTypes, WeightTypeError> {
        let pattern = RegexBuilder::new(pattern)
            .size_limit(PATTERN_LIMIT)
            .build()
            .map_err(|error| WeightTypeError::Pattern {
                pattern: pattern.to_owned(),
                reason: reason(&error),
            })?;
        self.0.push(Rule { pattern, dtype });
        Ok(self)
    }

    /// The type that the first fitting rule gives the weight of this full name.
    pub fn of(&self, name: &str) -> Option<DType> {
        let fits = |rule: &&Rule| rule.pattern.is_match(name);
        self.0.iter().find(fits).map(|rule| rule.dtype)
    }

    /// Whether there is no rule.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for TensorTypes {
    type Err = WeightTypeError;

    fn from_str(text: &str) -> Result<TensorTypes, WeightTypeError> {
        let mut rules = TensorTypes::default();
        // A comma ends a rule only where the text before it ends as one does: patterns have commas too.
        let mut begin = 0;
        let ends = text.match_indices(',').map(|(at, _)| at);
        for end in ends.chain([text.len()]) {
            let piece = &text[begin..end];
            let is_word = |word: &str| {
                let word = word.trim();
                !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
            };
            match piece.rsplit_once('=') {
                Some((pattern, name)) if is_word(name) && !pattern.trim().is_empty() => {
                    rules = rules.rule(pattern.trim(), weight_type(name)?)?;
                    begin = end + 1;
                }
                _ if end < text.len() => {}
                _ => {
                    return Err(WeightTypeError::Form {
                        rule: piece.trim().to_owned(),
                    });
                }
            }
        }
        Ok(rules)
    }
}

/// The type called `text`, in upper or lower case, if weights can be given it: it can be made of single precision.
///
/// # Errors
/// [`WeightTypeError::UnknownType`], which lists those that can.
pub fn weight_type(text: &str) -> Result<DType, WeightTypeError> {
    DType::from_name(text.trim())
        .filter(|&dtype| is_convertible(StoredType::F32, dtype))
        .ok_or_else(|| WeightTypeError::UnknownType {
            text: text.trim().to_owned(),
        })
}

/// Types that [`weight_type`] knows.
fn weight_types() -> impl Iterator<Item = DType> {
    let made = |dtype: &DType| is_convertible(StoredType::F32, *dtype);
    DType::ALL.iter().copied().filter(made)
}

/// A text that gives no types to weights.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightTypeError {
    /// There is no such type, or weights cannot be made of it.
    #[error("`{text}` is no type that weights can be given; these are: {}", weight_types().map(DType::name).collect::<Vec<_>>().join(", "))]
    UnknownType {
        /// What was given.
        text: String,
    },
    /// A rule without a pattern or without a type.
    #[error("`{rule}` has not the form PATTERN=TYPE, such as attn=q8_0")]
    Form {
        /// What was given.
        rule: String,
    },
    /// A pattern that is no regular expression, or one that takes too much memory.
    #[error("the pattern `{pattern}` is no regular expression: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// The last line of what the `regex` crate says: the lines before it point into the pattern.
fn reason(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default();
    last.strip_prefix("error: ").unwrap_or(last).to_owned()
}

/// A weight that could not be given the type that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fallback {
    /// Full name of the weight, as rules see it.
    pub name: String,
    /// The type that was asked for.
    pub asked: DType,
    /// The type it has.
    pub got: DType,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {} instead of {}", self.name, self.got, self.asked)
    }
}

/// The type in memory of a tensor stored as `stored` with rows of `row` elements; `None` if it cannot serve. Where nothing
/// is asked for, rows may not be whole blocks of the result.
pub(crate) fn memory_type(
    stored: StoredType,
    role: Role,
    row: usize,
    asked: Option<DType>,
) -> Option<DType> {
    let (own, is_float) = match stored {
        StoredType::F64 | StoredType::F32 => (DType::F32, true),
        StoredType::F16
        | StoredType::F8E4M3
        | StoredType::F8E5M2
        | StoredType::F8E4M3Fnuz
        | StoredType::F8E5M2Fnuz => (DType::F16, true),
        StoredType::BF16 => (DType::BF16, true),
        _ => match stored.in_memory().filter(|dtype| dtype.is_quantized()) {
            Some(own) => (own, true),
            // Integers and scales: as values they may serve, but as a matrix they are a code whose key is elsewhere.
            None => (DType::F32, false),
        },
    };
    let memory = match (role, asked) {
        (Role::Vector, _) => DType::F32,
        _ if !is_float => return None,
        (Role::Kernel, Some(asked @ (DType::F32 | DType::F16))) => asked,
        // ggml has no convolution with BF16 or quantised kernels. In half precision it rounds the pictures too, which
        // is done only where it was asked for or the file was made for it.
        (Role::Kernel, _) if own == DType::F16 => DType::F16,
        (Role::Kernel, _) => DType::F32,
        (Role::Matrix | Role::Table, None) => own,
        (Role::Matrix, Some(asked)) => fitting(asked, own, row),
        (Role::Table, Some(asked)) if asked == own || rows_everywhere(asked) => {
            fitting(asked, own, row)
        }
        (Role::Table, Some(_)) => fitting(DType::Q8_0, own, row),
    };
    is_convertible(stored, memory).then_some(memory)
}

/// `asked`, or what stands for it where rows of `row` elements are not whole blocks of it, in a file with type `own`.
fn fitting(asked: DType, own: DType, row: usize) -> DType {
    let fits = |dtype: &DType| dtype.row_bytes(row).is_some();
    let half = if own == DType::BF16 { own } else { DType::F16 };
    [asked, with_short_blocks(asked)]
        .into_iter()
        .find(fits)
        .unwrap_or(half)
}

/// A type with blocks of 32 that loses no more than `dtype`, as llama.cpp chooses it.
fn with_short_blocks(dtype: DType) -> DType {
    match dtype {
        DType::Q4K => DType::Q5_0,
        DType::Q5K => DType::Q5_1,
        DType::Q6K => DType::Q8_0,
        dtype if dtype.block_len() > 32 => DType::Iq4Nl,
        dtype => dtype,
    }
}

/// Whether every device takes rows from a table of this type.
fn rows_everywhere(dtype: DType) -> bool {
    matches!(
        dtype,
        DType::F32
            | DType::F16
            | DType::BF16
            | DType::Q4_0
            | DType::Q4_1
            | DType::Q5_0
            | DType::Q5_1
            | DType::Q8_0
    )
}
