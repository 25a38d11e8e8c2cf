//! Shapes, written outermost first as papers do, and the shape rules of every operation as pure functions.
//!
//! A rule returns the shape of the result or, in words, why there is none. Nothing here knows a graph or a device.

use std::borrow::Cow;
use std::fmt;

use crate::snake::TAPS;

/// Most dimensions a tensor can have: ggml keeps four.
pub const MAX_RANK: usize = 4;

/// Most elements of one tensor, so that neither its bytes nor ggml's signed counts can overflow.
const MAX_ELEMENTS: usize = isize::MAX as usize / 64;

/// Why an operation has no result, in words.
pub type Reason = Cow<'static, str>;

/// The result of a shape rule.
pub type Rule = Result<Shape, Reason>;

/// The size of a tensor in each dimension, outermost first: `[batch, channels, height, width]`.
///
/// Between one and four dimensions, none of them zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: u8,
}

impl Shape {
    /// One element.
    pub const ONE: Shape = Shape {
        dims: [1; MAX_RANK],
        rank: 1,
    };

    /// The shape with these sizes, outermost first.
    ///
    /// # Errors
    /// No dimensions or more than four, a zero among them, or a product that no memory could hold.
    pub fn new(dims: &[usize]) -> Result<Shape, Reason> {
        if dims.is_empty() || dims.len() > MAX_RANK {
            return Err(format!(
                "a tensor has 1 to {MAX_RANK} dimensions, not {}",
                dims.len()
            )
            .into());
        }
        if dims.contains(&0) {
            return Err(format!("{dims:?} has a dimension of zero").into());
        }
        let elements = dims
            .iter()
            .try_fold(1_usize, |product, &dim| product.checked_mul(dim));
        if elements.is_none_or(|elements| elements > MAX_ELEMENTS) {
            return Err(format!("{dims:?} has more elements than memory can hold").into());
        }
        let mut shape = Shape {
            dims: [1; MAX_RANK],
            rank: dims.len() as u8,
        };
        shape.dims[..dims.len()].copy_from_slice(dims);
        Ok(shape)
    }

    /// Sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank()]
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        usize::from(self.rank)
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.dims().iter().product()
    }

    /// Size of the innermost dimension.
    pub fn inner(&self) -> usize {
        self.dims[self.rank() - 1]
    }

    /// Sizes in ggml's order: innermost first, filled up with ones. The only place where the order turns.
    pub(crate) fn to_ne(self) -> [i64; MAX_RANK] {
        let mut ne = [1; MAX_RANK];
        for (ne, &dim) in ne.iter_mut().zip(self.dims().iter().rev()) {
            *ne = dim as i64;
        }
        ne
    }

    /// ggml's number of the dimension `axis`.
    pub(crate) fn ggml_axis(&self, axis: usize) -> i32 {
        (self.rank() - 1 - axis) as i32
    }

    /// The size `index` places from the inside; 1 beyond the outermost.
    fn inner_size(&self, index: usize) -> usize {
        if index < self.rank() {
            self.dims[self.rank() - 1 - index]
        } else {
            1
        }
    }

    fn with_dim(mut self, axis: usize, size: usize) -> Shape {
        self.dims[axis] = size;
        self
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.dims(), f)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.dims(), f)
    }
}

/// `a` op `b`, where `b` is repeated along dimensions of size 1 and missing outer ones; `a` never is.
pub fn broadcast(a: Shape, b: Shape) -> Rule {
    if b.rank() > a.rank() {
        return Err("the second operand has more dimensions than the first".into());
    }
    for index in 0..b.rank() {
        let (have, want) = (b.inner_size(index), a.inner_size(index));
        if have != want && have != 1 {
            return Err(
                format!("the second operand cannot be repeated from {have} to {want}").into(),
            );
        }
    }
    Ok(a)
}

/// `x [.., m, k] * w [.., n, k]` transposed `-> [.., m, n]`; the third dimension from the inside of `w` must divide that of
/// `x`, the fourth be the same.
pub fn matmul_transposed(x: Shape, w: Shape) -> Rule {
    if w.rank() < 2 {
        return Err("the second factor needs two dimensions".into());
    }
    if x.inner() != w.inner() {
        return Err(format!(
            "rows of {} elements do not fit rows of {}",
            x.inner(),
            w.inner()
        )
        .into());
    }
    let rank = x.rank().max(w.rank());
    for index in 2..rank {
        let (have, want) = (w.inner_size(index), x.inner_size(index));
        if !want.is_multiple_of(have) {
            return Err(
                "outer dimensions of the second factor do not divide those of the first".into(),
            );
        }
        // Vulkan shares a factor along the third dimension only; the same holds everywhere, so that graphs do.
        if index > 2 && have != want {
            return Err("the outermost of four dimensions must be the same in both factors".into());
        }
    }
    let mut dims = [1; MAX_RANK];
    for (index, dim) in dims[..rank].iter_mut().rev().enumerate() {
        *dim = match index {
            0 => w.inner_size(1),
            _ => x.inner_size(index),
        };
    }
    Shape::new(&dims[..rank])
}

/// The same elements in another shape.
pub fn reshape(a: Shape, to: &[usize]) -> Rule {
    let to = Shape::new(to)?;
    if to.elements() != a.elements() {
        return Err(format!("{} elements do not fit {to}", a.elements()).into());
    }
    Ok(to)
}

/// Dimension `i` of the result is dimension `axes[i]` of `a`.
pub fn permute(a: Shape, axes: &[usize]) -> Rule {
    let mut seen = [false; MAX_RANK];
    if axes.len() != a.rank()
        || !axes
            .iter()
            .all(|&axis| axis < a.rank() && !std::mem::replace(&mut seen[axis], true))
    {
        return Err(format!("{axes:?} is no order of {} dimensions", a.rank()).into());
    }
    let mut dims = [1; MAX_RANK];
    for (dim, &axis) in dims.iter_mut().zip(axes) {
        *dim = a.dims[axis];
    }
    Shape::new(&dims[..a.rank()])
}

/// Elements `start .. start + len` along `axis`.
pub fn slice(a: Shape, axis: usize, start: usize, len: usize) -> Rule {
    check_axis(a, axis)?;
    if len == 0 || start.checked_add(len).is_none_or(|end| end > a.dims[axis]) {
        return Err(format!(
            "{len} elements from {start} do not lie within {}",
            a.dims[axis]
        )
        .into());
    }
    Ok(a.with_dim(axis, len))
}

/// `len` elements along `axis`, from `start` on every `step`-th; of the innermost dimension every one, since ggml's views
/// keep elements side by side.
pub fn slice_by(a: Shape, axis: usize, start: usize, step: usize, len: usize) -> Rule {
    check_axis(a, axis)?;
    if step == 0 || (step > 1 && axis + 1 == a.rank()) {
        return Err(format!("every {step} elements of dimension {axis} make no view").into());
    }
    let span = len
        .checked_sub(1)
        .and_then(|gaps| gaps.checked_mul(step))
        .map_or(usize::MAX, |span| span.saturating_add(1));
    slice(a, axis, start, if len == 0 { 0 } else { span })?;
    Ok(a.with_dim(axis, len))
}

/// What a state of shape `state` holds after `value` was put into it: a value of its shape, or of fewer elements along the
/// outermost dimension, which are its first.
pub fn keep(state: Shape, value: Shape) -> Rule {
    if value.dims().get(1..) != state.dims().get(1..) || value.dims[0] > state.dims[0] {
        return Err(format!("{value} is no value or first part of a state {state}").into());
    }
    Ok(value)
}

/// `a` and `b` one behind the other along `axis`.
pub fn concat(a: Shape, b: Shape, axis: usize) -> Rule {
    check_axis(a, axis)?;
    let others_differ = a.rank() != b.rank()
        || (0..a.rank()).any(|index| index != axis && a.dims[index] != b.dims[index]);
    if others_differ {
        return Err(format!("dimensions beside {axis} differ").into());
    }
    let mut dims = a.dims;
    dims[axis] = a.dims[axis].saturating_add(b.dims[axis]);
    Shape::new(&dims[..a.rank()])
}

/// `table [n, width]`, `index [count] -> [count, width]`.
pub fn rows(table: Shape, index: Shape) -> Rule {
    if table.rank() != 2 || index.rank() != 1 {
        return Err("rows are taken from a matrix by a vector of indices".into());
    }
    Shape::new(&[index.elements(), table.inner()])
}

/// `x [n, in, h, w]`, `kernel [out, in, kh, kw] -> [n, out, h', w']` with `padding` rows and columns of zeros around, and
/// `dilation` from one element of the kernel to the next.
pub fn conv2d(
    x: Shape,
    kernel: Shape,
    stride: usize,
    padding: [usize; 2],
    dilation: usize,
) -> Rule {
    if x.rank() != 4 || kernel.rank() != 4 {
        return Err("a convolution takes [n, in, h, w] and a kernel [out, in, kh, kw]".into());
    }
    if x.dims[1] != kernel.dims[1] {
        return Err(format!(
            "{} channels do not fit a kernel for {}",
            x.dims[1], kernel.dims[1]
        )
        .into());
    }
    if stride == 0 || dilation == 0 {
        let which = if stride == 0 { "stride" } else { "dilation" };
        return Err(format!("a {which} of zero").into());
    }
    let size = |input: usize, kernel: usize, padding: usize| -> Result<usize, Reason> {
        let padded = input.saturating_add(padding.saturating_mul(2));
        let kernel = (kernel - 1).saturating_mul(dilation).saturating_add(1);
        padded
            .checked_sub(kernel)
            .map(|room| room / stride + 1)
            .ok_or_else(|| {
                format!("a kernel of {kernel} does not fit {padded} padded elements").into()
            })
    };
    Shape::new(&[
        x.dims[0],
        kernel.dims[0],
        size(x.dims[2], kernel.dims[2], padding[0])?,
        size(x.dims[3], kernel.dims[3], padding[1])?,
    ])
}

/// `x [tokens, heads, channels]`, `positions [tokens]`, `divisors [channels / 2] -> x`'s shape, where `pairs` pairs from
/// channel `first` on lie within the channels.
pub fn turn_pairs(x: Shape, positions: Shape, divisors: Shape, first: usize, pairs: usize) -> Rule {
    let &[tokens, _, channels] = x.dims() else {
        return Err("turning takes [tokens, heads, channels]".into());
    };
    if positions.dims() != [tokens] {
        return Err(format!("positions must be [{tokens}], not {positions}").into());
    }
    // ggml reads a divisor for each pair of all channels, whatever is turned.
    if divisors.dims() != [channels / 2] || !channels.is_multiple_of(2) {
        let half = channels / 2;
        return Err(format!("divisors must be [{half}] for an even number of channels").into());
    }
    let end = pairs
        .checked_mul(2)
        .and_then(|turned| turned.checked_add(first));
    if pairs == 0 || !first.is_multiple_of(2) || end.is_none_or(|end| end > channels) {
        return Err(format!("{pairs} pairs from channel {first} are not among {channels}").into());
    }
    Ok(x)
}

/// `x [n, channels, time]`, with a number for each channel twice and, where there are some, as many taps as there have to be.
pub fn snake(x: Shape, alpha: Shape, share: Shape, taps: Option<Shape>) -> Rule {
    let &[_, channels, _] = x.dims() else {
        return Err("snakes take [n, channels, time]".into());
    };
    if alpha.dims() != [channels] || share.dims() != [channels] {
        return Err(format!("{alpha} and {share} must both be [{channels}]").into());
    }
    match taps {
        Some(taps) if taps.dims() != [TAPS] => Err(format!("{taps} taps must be {TAPS}").into()),
        _ => Ok(x),
    }
}

/// `x [.., h, w] -> [.., h + 2 rows, w + 2 columns]`, where no more can be continued than there is.
pub fn pad_circular(x: Shape, rows: usize, columns: usize) -> Rule {
    let mut dims = x.dims().to_vec();
    let [.., height, width] = dims.as_mut_slice() else {
        return Err("padding takes two dimensions".into());
    };
    for (side, padding) in [(height, rows), (width, columns)] {
        if padding > *side {
            return Err(format!("{padding} elements cannot be continued from {side}").into());
        }
        *side = side.saturating_add(padding.saturating_mul(2));
    }
    Shape::new(&dims)
}

/// `x [.., h, w] -> [.., h * factor, w * factor]`.
pub fn upscale(x: Shape, factors: [usize; 2]) -> Rule {
    if x.rank() < 2 || factors.contains(&0) {
        return Err("enlarging takes two dimensions and factors of at least 1".into());
    }
    let mut dims = x.dims;
    for (dim, factor) in dims[x.rank() - 2..x.rank()].iter_mut().zip(factors) {
        *dim = dim.saturating_mul(factor);
    }
    Shape::new(&dims[..x.rank()])
}

/// `q [heads, m, d]`, `k [kv_heads, n, d]`, `v [kv_heads, n, e]`, `mask [m, n] -> [m, heads, e]`.
pub fn attention(q: Shape, k: Shape, v: Shape, mask: Option<Shape>) -> Rule {
    if q.rank() != 3 || k.rank() != 3 || v.rank() != 3 {
        return Err("attention takes [heads, tokens, channels]".into());
    }
    let ([heads, m, d, _], [kv_heads, n, kd, _], [v_heads, vn, e, _]) = (q.dims, k.dims, v.dims);
    if kd != d {
        return Err(format!("queries of {d} channels do not fit keys of {kd}").into());
    }
    if v_heads != kv_heads || vn != n {
        return Err("keys and values differ in heads or tokens".into());
    }
    if !heads.is_multiple_of(kv_heads) {
        return Err(format!("{heads} heads cannot share {kv_heads} heads of keys").into());
    }
    if mask.is_some_and(|mask| mask.dims() != [m, n]) {
        return Err(format!("the mask must be [{m}, {n}]").into());
    }
    Shape::new(&[m, heads, e])
}

fn check_axis(a: Shape, axis: usize) -> Result<(), Reason> {
    if axis < a.rank() {
        Ok(())
    } else {
        Err(format!("there is no dimension {axis} of {}", a.rank()).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(dims: &[usize]) -> Shape {
        Shape::new(dims).unwrap()
    }

    /// The result's sizes, or none where the rule refuses.
    fn dims(rule: Rule) -> Option<Vec<usize>> {
        rule.ok().map(|shape| shape.dims().to_vec())
    }

    #[test]
    fn a_shape_is_one_to_four_sizes_above_zero() {
        assert!(Shape::new(&[]).is_err());
        assert!(Shape::new(&[1; 5]).is_err());
        assert!(Shape::new(&[3, 0]).is_err());
        assert!(Shape::new(&[1 << 32, 1 << 32]).is_err());
        assert!(Shape::new(&[1 << 31, 1 << 31]).is_err());
        assert_eq!(shape(&[2, 3, 4]).elements(), 24);
        assert_eq!(shape(&[2, 3, 4]).to_ne(), [4, 3, 2, 1]);
        assert_eq!(shape(&[2, 3, 4]).ggml_axis(0), 2);
    }

    #[test]
    fn only_the_second_operand_is_repeated() {
        assert_eq!(
            dims(broadcast(shape(&[2, 3]), shape(&[3]))),
            Some(vec![2, 3])
        );
        assert_eq!(
            dims(broadcast(shape(&[2, 3]), shape(&[2, 1]))),
            Some(vec![2, 3])
        );
        assert_eq!(dims(broadcast(shape(&[3]), shape(&[2, 3]))), None);
        // ggml would repeat 2 into 4; numpy and the papers would not.
        assert_eq!(dims(broadcast(shape(&[4]), shape(&[2]))), None);
    }

    #[test]
    fn products_follow_rows() {
        assert_eq!(
            dims(matmul_transposed(shape(&[5, 4]), shape(&[7, 4]))),
            Some(vec![5, 7])
        );
        assert_eq!(
            dims(matmul_transposed(shape(&[4]), shape(&[7, 4]))),
            Some(vec![1, 7])
        );
        assert_eq!(
            dims(matmul_transposed(shape(&[6, 5, 4]), shape(&[2, 7, 4]))),
            Some(vec![6, 5, 7])
        );
        assert_eq!(
            dims(matmul_transposed(shape(&[6, 5, 4]), shape(&[4, 7, 4]))),
            None
        );
        assert_eq!(
            dims(matmul_transposed(shape(&[5, 3]), shape(&[7, 4]))),
            None
        );
        assert_eq!(dims(matmul_transposed(shape(&[5, 4]), shape(&[4]))), None);
        assert_eq!(
            dims(matmul_transposed(
                shape(&[2, 6, 5, 4]),
                shape(&[2, 3, 7, 4])
            )),
            Some(vec![2, 6, 5, 7])
        );
        assert_eq!(
            dims(matmul_transposed(
                shape(&[2, 3, 5, 4]),
                shape(&[1, 3, 7, 4])
            )),
            None
        );
    }

    #[test]
    fn views_stay_inside() {
        let a = shape(&[2, 6]);
        assert_eq!(dims(reshape(a, &[3, 4])), Some(vec![3, 4]));
        assert_eq!(dims(reshape(a, &[5])), None);
        assert_eq!(
            dims(permute(shape(&[2, 3, 4]), &[2, 0, 1])),
            Some(vec![4, 2, 3])
        );
        assert_eq!(dims(permute(a, &[0, 0])), None);
        assert_eq!(dims(permute(a, &[1])), None);
        assert_eq!(dims(permute(a, &[0, 2])), None);
        assert_eq!(dims(slice(a, 1, 2, 4)), Some(vec![2, 4]));
        assert_eq!(dims(slice(a, 1, 3, 4)), None);
        assert_eq!(dims(slice(a, 1, usize::MAX, 4)), None);
        assert_eq!(dims(slice(a, 2, 0, 1)), None);
        assert_eq!(dims(slice(a, 0, 0, 0)), None);
        assert_eq!(dims(concat(a, shape(&[3, 6]), 0)), Some(vec![5, 6]));
        assert_eq!(dims(concat(a, shape(&[3, 6]), 1)), None);
        assert_eq!(dims(rows(shape(&[9, 4]), shape(&[3]))), Some(vec![3, 4]));
        assert_eq!(dims(rows(shape(&[9]), shape(&[3]))), None);
    }

    #[test]
    fn pictures_keep_count_of_borders() {
        let x = shape(&[1, 3, 5, 7]);
        assert_eq!(
            dims(conv2d(x, shape(&[8, 3, 3, 3]), 1, [1, 1], 1)),
            Some(vec![1, 8, 5, 7])
        );
        assert_eq!(
            dims(conv2d(x, shape(&[8, 3, 3, 3]), 1, [0, 1], 1)),
            Some(vec![1, 8, 3, 7])
        );
        assert_eq!(dims(pad_circular(x, 1, 2)), Some(vec![1, 3, 7, 11]));
        assert_eq!(dims(pad_circular(x, 5, 7)), Some(vec![1, 3, 15, 21]));
        assert_eq!(dims(pad_circular(x, 6, 0)), None);
        assert_eq!(dims(pad_circular(shape(&[3]), 0, 1)), None);
        assert_eq!(
            dims(conv2d(x, shape(&[8, 3, 3, 3]), 2, [0, 0], 1)),
            Some(vec![1, 8, 2, 3])
        );
        assert_eq!(dims(conv2d(x, shape(&[8, 4, 3, 3]), 1, [1, 1], 1)), None);
        assert_eq!(dims(conv2d(x, shape(&[8, 3, 9, 9]), 1, [1, 1], 1)), None);
        assert_eq!(dims(conv2d(x, shape(&[8, 3, 3, 3]), 0, [1, 1], 1)), None);
        assert_eq!(dims(conv2d(x, shape(&[8, 3, 3, 3]), 1, [1, 1], 0)), None);
        assert_eq!(dims(upscale(x, [2, 2])), Some(vec![1, 3, 10, 14]));
        assert_eq!(dims(upscale(x, [1, 3])), Some(vec![1, 3, 5, 21]));
        assert_eq!(dims(upscale(x, [1, 0])), None);
        assert_eq!(dims(upscale(x, [1, usize::MAX])), None);
    }

    #[test]
    fn attention_shares_heads_of_keys() {
        let q = shape(&[4, 5, 8]);
        let kv = shape(&[2, 7, 8]);
        assert_eq!(
            dims(attention(q, kv, shape(&[2, 7, 6]), None)),
            Some(vec![5, 4, 6])
        );
        assert_eq!(
            dims(attention(q, kv, kv, Some(shape(&[5, 7])))),
            Some(vec![5, 4, 8])
        );
        assert_eq!(dims(attention(q, kv, kv, Some(shape(&[7, 5])))), None);
        assert_eq!(
            dims(attention(q, shape(&[3, 7, 8]), shape(&[3, 7, 8]), None)),
            None
        );
        assert_eq!(dims(attention(q, shape(&[2, 7, 4]), kv, None)), None);
    }
}
