//! The operations in double precision on plain vectors: slow, plain, and apart from everything they check.

/// A tensor in double precision, outermost dimension first.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Array {
    pub(crate) dims: Vec<usize>,
    pub(crate) values: Vec<f64>,
}

impl Array {
    pub(crate) fn new(dims: &[usize], values: Vec<f64>) -> Array {
        assert_eq!(dims.iter().product::<usize>(), values.len());
        Array {
            dims: dims.to_vec(),
            values,
        }
    }

    /// Numbers between -1 and 1 from a multiplicative generator, the same on every machine, exact in half precision.
    pub(crate) fn random(dims: &[usize], seed: u64) -> Array {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let values = (0..dims.iter().product()).map(|_| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            f64::from((state >> 40) as u32 % 513) / 256.0 - 1.0
        });
        Array::new(dims, values.collect())
    }

    pub(crate) fn f32(&self) -> Vec<f32> {
        self.values.iter().map(|&value| value as f32).collect()
    }

    fn strides(&self) -> Vec<usize> {
        let mut strides = vec![1; self.dims.len()];
        for axis in (0..self.dims.len().saturating_sub(1)).rev() {
            strides[axis] = strides[axis + 1] * self.dims[axis + 1];
        }
        strides
    }

    /// The value at an index of which leading dimensions may be missing and dimensions of one are repeated.
    pub(crate) fn at(&self, index: &[usize]) -> f64 {
        let skip = index.len() - self.dims.len();
        let offset: usize = index[skip..]
            .iter()
            .zip(&self.dims)
            .zip(self.strides())
            .map(|((&at, &dim), stride)| if dim == 1 { 0 } else { at * stride })
            .sum();
        self.values[offset]
    }

    /// An array whose value at each index is `value(index)`.
    pub(crate) fn from_fn(dims: &[usize], mut value: impl FnMut(&[usize]) -> f64) -> Array {
        let mut index = vec![0; dims.len()];
        let mut values = Vec::new();
        'all: loop {
            values.push(value(&index));
            for axis in (0..dims.len()).rev() {
                index[axis] += 1;
                if index[axis] < dims[axis] {
                    continue 'all;
                }
                index[axis] = 0;
            }
            break;
        }
        Array::new(dims, values)
    }

    pub(crate) fn map(&self, each: impl Fn(f64) -> f64) -> Array {
        Array::new(
            &self.dims,
            self.values.iter().map(|&value| each(value)).collect(),
        )
    }

    pub(crate) fn zip(&self, other: &Array, each: impl Fn(f64, f64) -> f64) -> Array {
        Array::from_fn(&self.dims, |index| each(self.at(index), other.at(index)))
    }

    /// Applies `each` to every row of the innermost dimension.
    pub(crate) fn rows(&self, each: impl Fn(&[f64]) -> Vec<f64>) -> Array {
        let inner = *self.dims.last().unwrap();
        Array::new(
            &self.dims,
            self.values.chunks(inner).flat_map(each).collect(),
        )
    }

    pub(crate) fn permute(&self, axes: &[usize]) -> Array {
        let dims: Vec<usize> = axes.iter().map(|&axis| self.dims[axis]).collect();
        Array::from_fn(&dims, |index| {
            let mut source = vec![0; index.len()];
            for (&axis, &at) in axes.iter().zip(index) {
                source[axis] = at;
            }
            self.at(&source)
        })
    }
}

pub(crate) fn matmul_transposed(x: &Array, w: &Array) -> Array {
    let rank = x.dims.len().max(w.dims.len());
    let (k, n) = (x.dims[x.dims.len() - 1], w.dims[w.dims.len() - 2]);
    let mut dims = x.dims.clone();
    dims[rank - 1] = n;
    Array::from_fn(&dims, |index| {
        (0..k)
            .map(|inner| {
                let mut xi = index.to_vec();
                xi[rank - 1] = inner;
                let mut wi = index.to_vec();
                wi[rank - 2] = index[rank - 1];
                wi[rank - 1] = inner;
                // Outer dimensions of the weight are shared by groups of the first factor's.
                for axis in 0..rank - 2 {
                    if w.dims.len() == rank {
                        wi[axis] = index[axis] / (x.dims[axis] / w.dims[axis]);
                    }
                }
                x.at(&xi) * w.at(&wi)
            })
            .sum()
    })
}

pub(crate) fn softmax(row: &[f64]) -> Vec<f64> {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = row.iter().map(|&value| (value - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

pub(crate) fn attention(
    q: &Array,
    k: &Array,
    v: &Array,
    mask: Option<&Array>,
    scale: f64,
) -> Array {
    let [heads, queries, channels] = q.dims[..] else {
        panic!()
    };
    let [kv_heads, keys, width] = v.dims[..] else {
        panic!()
    };
    let group = heads / kv_heads;
    let mut result = Array::new(&[queries, heads, width], vec![0.0; queries * heads * width]);
    for head in 0..heads {
        for query in 0..queries {
            let scores: Vec<f64> = (0..keys)
                .map(|key| {
                    let dot: f64 = (0..channels)
                        .map(|c| q.at(&[head, query, c]) * k.at(&[head / group, key, c]))
                        .sum();
                    dot * scale + mask.map_or(0.0, |mask| mask.at(&[query, key]))
                })
                .collect();
            let weights = softmax(&scores);
            for c in 0..width {
                result.values[(query * heads + head) * width + c] = (0..keys)
                    .map(|key| weights[key] * v.at(&[head / group, key, c]))
                    .sum();
            }
        }
    }
    result
}

pub(crate) fn conv2d(x: &Array, kernel: &Array, stride: usize, padding: [usize; 2]) -> Array {
    let [rows, columns] = padding;
    let [n, input, h, w] = x.dims[..] else {
        panic!()
    };
    let [output, _, kh, kw] = kernel.dims[..] else {
        panic!()
    };
    let size =
        |input: usize, kernel: usize, padding: usize| (input + 2 * padding - kernel) / stride + 1;
    let dims = [n, output, size(h, kh, rows), size(w, kw, columns)];
    Array::from_fn(&dims, |index| {
        let mut sum = 0.0;
        for c in 0..input {
            for y in 0..kh {
                for x_offset in 0..kw {
                    let (row, column) = (index[2] * stride + y, index[3] * stride + x_offset);
                    if (rows..h + rows).contains(&row) && (columns..w + columns).contains(&column) {
                        sum += x.at(&[index[0], c, row - rows, column - columns])
                            * kernel.at(&[index[1], c, y, x_offset]);
                    }
                }
            }
        }
        sum
    })
}

/// The error function to about 1e-15, by its series and continued fraction.
pub(crate) fn erf(x: f64) -> f64 {
    if x < 0.0 {
        return -erf(-x);
    }
    if x > 6.0 {
        return 1.0;
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > 1e-17 * sum.abs() && n < 200.0 {
        n += 1.0;
        term *= -x * x / n;
        sum += term / (2.0 * n + 1.0);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}
