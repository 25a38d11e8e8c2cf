//! Layers over signals `[n, channels, time]`.

use sd_backend::{Device, DeviceKind};
use sd_graph::{Conv1d, Graph, Param, Role, Scope, Tensor};

/// Added to what is divided by, in activations.
const EPS: f32 = 1e-9;

/// Most moments that a number of a channel is repeated for.
const REPEATS: usize = 256;

/// How activations are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// By passes over the signal, which every device has.
    Passes,
    /// By an operation of the processor's own.
    Processor,
}

impl Way {
    pub(super) fn of(device: Device) -> Way {
        match device.kind() {
            DeviceKind::Cpu if !device.is_remote() => Way::Processor,
            _ => Way::Passes,
        }
    }
}

/// A signal `[n, channels, time]` as `[n, channels, rows, row]`, to be combined with a number for each channel. A processor takes
/// a number by itself anew for each element, so it is repeated for a row, and rows are taken by whole vectors.
#[derive(Debug, Clone, Copy)]
struct Rows {
    row: usize,
}

impl Rows {
    fn of(time: usize) -> Rows {
        let mut divisors = (1..=REPEATS).rev();
        Rows {
            row: divisors.find(|&row| time.is_multiple_of(row)).unwrap_or(1),
        }
    }

    fn cut(self, x: Tensor<'_>) -> Tensor<'_> {
        let [n, channels, time] = [0, 1, 2].map(|axis| x.dim(axis));
        x.reshape([n, channels, time / self.row, self.row])
    }

    /// `each [channels, 1]`, repeated.
    fn repeated(self, each: Tensor<'_>) -> Tensor<'_> {
        let channels = each.dim(0);
        let row = each.reshape([1, channels, 1]);
        row.upscale_nearest_by([1, self.row])
            .reshape([channels, 1, self.row])
    }
}

/// `x [n, channels, time]` and to each channel its `bias`.
fn biased<'g>(x: Tensor<'g>, bias: &Param) -> Tensor<'g> {
    let rows = Rows::of(x.dim(2));
    let bias = x.graph().param(bias).reshape([x.dim(1), 1]);
    (rows.cut(x) + rows.repeated(bias)).reshape(x.shape().dims())
}

/// `1 / beta` for each channel.
fn inverse(beta: Tensor<'_>) -> Tensor<'_> {
    let sides = beta.shape();
    let ones = vec![1.0_f32; sides.elements()];
    beta.graph().constant(&ones, sides.dims()) / beta
}

/// `x + share sin(alpha x)^2`, with `alpha` and `share` `[channels, 1]`.
fn snake<'g>(x: Tensor<'g>, alpha: Tensor<'g>, share: Tensor<'g>) -> Tensor<'g> {
    let rows = Rows::of(x.dim(2));
    let cut = rows.cut(x);
    let wave = (cut * rows.repeated(alpha)).sin().square();
    (cut + wave * rows.repeated(share)).reshape(x.shape().dims())
}

/// The kernel of a convolution, as it is or as a direction and a length (`weight_v`, `weight_g`) for each element of its outermost
/// dimension.
#[derive(Debug)]
enum Kernel {
    Folded(Param),
    Apart { length: Param, direction: Param },
}

impl Kernel {
    fn new(scope: &Scope<'_>, shape: [usize; 3]) -> Kernel {
        if scope.has("weight_v") {
            Kernel::Apart {
                length: scope.param("weight_g", [shape[0], 1, 1], Role::Vector),
                direction: scope.param("weight_v", shape, Role::Kernel),
            }
        } else {
            Kernel::Folded(scope.param("weight", shape, Role::Kernel))
        }
    }

    fn tensor<'g>(&self, g: Graph<'g>) -> Tensor<'g> {
        match self {
            Kernel::Folded(weight) => g.param(weight),
            Kernel::Apart { length, direction } => {
                let direction = g.param(direction);
                let [outer, inner, size] = [0, 1, 2].map(|axis| direction.dim(axis));
                let unit = direction.reshape([outer, inner * size]).l2_norm(1e-12);
                (unit * g.param(length).reshape([outer, 1])).reshape([outer, inner, size])
            }
        }
    }
}

/// A convolution.
#[derive(Debug)]
pub(super) struct Conv {
    kernel: Kernel,
    bias: Option<Param>,
    conv: Conv1d,
}

impl Conv {
    /// Declares the kernel `[output, input, size]` and `bias [output]` at `scope`. As many zeros around as keep the length.
    pub(super) fn new(scope: &Scope<'_>, input: usize, output: usize, size: usize) -> Conv {
        Conv::dilated(scope, [input, output, size], 1)
    }

    /// One whose kernel has gaps.
    pub(super) fn dilated(
        scope: &Scope<'_>,
        [input, output, size]: [usize; 3],
        dilation: usize,
    ) -> Conv {
        Conv {
            kernel: Kernel::new(scope, [output, input, size]),
            bias: Some(scope.param("bias", [output], Role::Vector)),
            conv: Conv1d {
                padding: size / 2 * dilation,
                dilation,
                ..Conv1d::default()
            },
        }
    }

    /// One that shortens time by `rate`, with a kernel of twice that.
    pub(super) fn shortening(scope: &Scope<'_>, input: usize, output: usize, rate: usize) -> Conv {
        let mut conv = Conv::new(scope, input, output, 2 * rate);
        conv.conv.stride = rate;
        conv.conv.padding = rate.div_ceil(2);
        conv
    }

    /// One without a bias.
    pub(super) fn without_bias(
        scope: &Scope<'_>,
        input: usize,
        output: usize,
        size: usize,
    ) -> Conv {
        Conv {
            kernel: Kernel::new(scope, [output, input, size]),
            bias: None,
            conv: Conv1d {
                padding: size / 2,
                ..Conv1d::default()
            },
        }
    }

    pub(super) fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let g = x.graph();
        let kernel = self.kernel.tensor(g);
        let y = match self.conv {
            Conv1d {
                stride: 1,
                dilation: 1,
                padding,
            } if kernel.dim(2) == 2 * padding + 1 => convolved(x, kernel),
            conv => x.conv1d(kernel, conv),
        };
        match &self.bias {
            Some(bias) => biased(y, bias),
            None => y,
        }
    }
}

/// The convolution of `x [n, in, t]` with `kernel [out, in, size]` that keeps the length. A step gives several moments: kernels
/// that begin one moment later each see nearly the same patch, and where channels are few, putting patches together takes longer than
/// the product with them.
fn convolved<'g>(x: Tensor<'g>, kernel: Tensor<'g>) -> Tensor<'g> {
    let [n, time] = [0, 2].map(|axis| x.dim(axis));
    let [output, input, size] = [0, 1, 2].map(|axis| kernel.dim(axis));
    let step = step_of(time, output, size);
    let conv = Conv1d {
        stride: step,
        padding: size / 2,
        ..Conv1d::default()
    };
    if step == 1 {
        return x.conv1d(kernel, conv);
    }
    let wide = size + step - 1;
    // Rows of one element more, read as if they had that one less, begin one later each.
    let kernels = kernel
        .pad_end(0, step)
        .reshape([output * input, 1, wide + 1])
        .upscale_nearest_by([step, 1])
        .reshape([output * input, step * (wide + 1)])
        .slice(1, 0, step * wide)
        .reshape([output, input, step, wide])
        .transpose(1, 2)
        .reshape([output * step, input, wide]);
    x.conv1d(kernels, conv)
        .reshape([n, output, step, time / step])
        .transpose(2, 3)
        .reshape([n, output, time])
}

/// Moments that a step of a convolution gives: what takes least time of what divides `time`.
fn step_of(time: usize, output: usize, size: usize) -> usize {
    /// Products in the time that one element of a patch takes, by a profile on a Xeon with AVX-512.
    const PATCH: usize = 80;
    let cost = |step: &usize| (size + step - 1) * (output + PATCH / step);
    let steps = (1..=16).filter(|step| time.is_multiple_of(*step));
    steps.min_by_key(cost).unwrap_or(1)
}

/// A transposed convolution, which lengthens time by `rate`.
#[derive(Debug)]
pub(super) struct Lengthening {
    kernel: Kernel,
    bias: Param,
    rate: usize,
}

impl Lengthening {
    /// Declares the kernel `[input, output, size]` and `bias [output]` at `scope`; `size` is from one to two times `rate`.
    pub(super) fn new(
        scope: &Scope<'_>,
        [input, output, size]: [usize; 3],
        rate: usize,
    ) -> Lengthening {
        Lengthening {
            kernel: Kernel::new(scope, [input, output, size]),
            bias: scope.param("bias", [output], Role::Vector),
            rate,
        }
    }

    /// `[n, input, t]` to `[n, output, rate * t]`. Each moment becomes `size` moments, by one product; of these the first `rate` are its
    /// own, and the others are added to those of the next.
    pub(super) fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let g = x.graph();
        let kernel = self.kernel.tensor(g);
        let (rate, size) = (self.rate, kernel.dim(2));
        let padded = kernel.pad_end(0, 2 * rate - size);
        let [n, input, time] = [0, 1, 2].map(|axis| x.dim(axis));
        let output = kernel.dim(1);
        let spread = x
            .transpose(1, 2)
            .reshape([n * time, input])
            .matmul_transposed(padded.reshape([input, output * 2 * rate]).transpose(0, 1))
            .reshape([n, time, output, 2 * rate]);
        let (own, next) = (spread.slice(3, 0, rate), spread.slice(3, rate, rate));
        let ends = (own.slice(1, 0, 1), next.slice(1, time - 1, 1));
        let joined = match time {
            1 => ends.0.concat(ends.1, 1),
            _ => {
                let middle = own.slice(1, 1, time - 1) + next.slice(1, 0, time - 1);
                ends.0.concat(middle, 1).concat(ends.1, 1)
            }
        };
        let all = joined
            .permute([0, 2, 1, 3])
            .reshape([n, output, (time + 1) * rate]);
        let kept = all.slice(2, (size - rate) / 2, time * rate);
        biased(kept, &self.bias)
    }
}

/// `x + sin(alpha x)^2 / alpha`, with `alpha` for each channel.
#[derive(Debug)]
pub(super) struct Snake {
    alpha: Param,
}

impl Snake {
    pub(super) fn new(scope: &Scope<'_>, channels: usize) -> Snake {
        Snake {
            alpha: scope.param_as("alpha", [1, channels, 1], [channels, 1], Role::Vector),
        }
    }

    pub(super) fn forward<'g>(&self, x: Tensor<'g>, way: Way) -> Tensor<'g> {
        let alpha = x.graph().param(&self.alpha);
        let share = inverse(alpha + EPS);
        match way {
            Way::Passes => snake(x, alpha, share),
            Way::Processor => {
                let [alpha, share] = [alpha, share].map(|each| each.reshape([x.dim(1)]));
                x.snake(alpha, share, None)
            }
        }
    }
}

/// `x + sin(exp(alpha) x)^2 / exp(beta)`, with `alpha` and `beta` for each channel.
#[derive(Debug)]
pub(super) struct SnakeBeta {
    alpha: Param,
    beta: Param,
}

impl SnakeBeta {
    pub(super) fn new(scope: &Scope<'_>, channels: usize) -> SnakeBeta {
        let param = |name| scope.param_as(name, [channels], [channels, 1], Role::Vector);
        SnakeBeta {
            alpha: param("alpha"),
            beta: param("beta"),
        }
    }

    pub(super) fn forward<'g>(&self, x: Tensor<'g>) -> Tensor<'g> {
        let [alpha, share] = self.numbers(x.graph());
        snake(x, alpha, share)
    }

    /// The same between two passes through a filter, by the processor's own operation.
    pub(super) fn forward_doubled<'g>(&self, x: Tensor<'g>, taps: Tensor<'g>) -> Tensor<'g> {
        let [alpha, share] = self.numbers(x.graph()).map(|each| each.reshape([x.dim(1)]));
        x.snake(alpha, share, Some(taps))
    }

    fn numbers<'g>(&self, g: Graph<'g>) -> [Tensor<'g>; 2] {
        let (alpha, beta) = (g.param(&self.alpha).exp(), g.param(&self.beta).exp());
        [alpha, inverse(beta + EPS)]
    }
}
