//! Every operation on every device of the build, against double precision.

use half::f16;
use sd_backend::{Backend, BackendOptions, DType, DeviceKind};
use sd_graph::{Cancel, Conv1d, Convolution, Graph, Pairing, Plan, Tensor};

use crate::reference::{self, Array};

/// Runs `build` on `inputs` on every device and compares with `expected`.
///
/// Tolerance: on the processor sums of up to a few hundred products in single precision, relative to the largest value
/// (2e-5 leaves room for ggml's fast exponentials); elsewhere products pass through half precision (2^-11) inside.
#[track_caller]
pub(crate) fn check(
    name: &str,
    inputs: &[&Array],
    expected: &Array,
    build: impl for<'g> Fn(Graph<'g>, &[Tensor<'g>]) -> Tensor<'g>,
) {
    check_with(name, inputs, expected, 2e-5, build);
}

#[track_caller]
pub(crate) fn check_with(
    name: &str,
    inputs: &[&Array],
    expected: &Array,
    processor_tolerance: f64,
    build: impl for<'g> Fn(Graph<'g>, &[Tensor<'g>]) -> Tensor<'g>,
) {
    let mut on_processor = None;
    for device in crate::devices() {
        let mut backend = Backend::new(device, &BackendOptions::default().threads(2)).unwrap();
        let mut plan = Plan::build(&backend, |g| {
            let tensors: Vec<Tensor<'_>> = inputs
                .iter()
                .enumerate()
                .map(|(index, input)| g.input::<f32>(&index.to_string(), &input.dims))
                .collect();
            g.output("result", build(g, &tensors));
        })
        .unwrap_or_else(|error| panic!("{name} on {device}: {error}"));
        assert_eq!(
            plan.output_shape("result").unwrap().dims(),
            expected.dims,
            "{name} on {device}"
        );

        // Twice, since ggml reuses the memory of inputs.
        for _ in 0..2 {
            for (index, input) in inputs.iter().enumerate() {
                plan.set(&index.to_string(), &input.f32()).unwrap();
            }
            plan.run(&mut backend, &Cancel::new())
                .unwrap_or_else(|error| panic!("{name} on {device}: {error}"));
            let result = plan.read::<f32>("result").unwrap();
            if device.kind() == DeviceKind::Cpu {
                on_processor = Some(result.clone());
            } else if device.is_remote() {
                // The test's server has the same processor.
                assert_eq!(Some(&result), on_processor.as_ref(), "{name} on {device}");
            }
            let tolerance = if device.kind() == DeviceKind::Cpu {
                processor_tolerance
            } else {
                4e-3
            };
            let largest = expected
                .values
                .iter()
                .fold(1.0_f64, |largest, value| largest.max(value.abs()));
            let worst = result
                .iter()
                .zip(&expected.values)
                .map(|(&is, should)| (f64::from(is) - should).abs())
                .fold(0.0, |worst: f64, error| {
                    if error.is_nan() {
                        f64::INFINITY
                    } else {
                        worst.max(error)
                    }
                });
            assert!(
                worst <= tolerance * largest,
                "{name} on {device}: off by {worst:e} of {largest:e}"
            );
        }
    }
}

fn random(dims: &[usize], seed: u64) -> Array {
    Array::random(dims, seed)
}

#[test]
fn sums_products_and_their_kin() {
    let a = random(&[2, 3, 5], 1);
    for (b, seed) in [
        (vec![2, 3, 5], 2),
        (vec![5], 3),
        (vec![3, 1], 4),
        (vec![1, 3, 5], 5),
        (vec![1], 6),
    ] {
        let b = random(&b, seed).map(|value| value + 2.0);
        check("sum", &[&a, &b], &a.zip(&b, |a, b| a + b), |_, t| {
            t[0] + t[1]
        });
        check(
            "sum, swapped",
            &[&b, &a],
            &a.zip(&b, |a, b| a + b),
            |_, t| t[0] + t[1],
        );
        check("difference", &[&a, &b], &a.zip(&b, |a, b| a - b), |_, t| {
            t[0] - t[1]
        });
        check("product", &[&a, &b], &a.zip(&b, |a, b| a * b), |_, t| {
            t[0] * t[1]
        });
        check("quotient", &[&a, &b], &a.zip(&b, |a, b| a / b), |_, t| {
            t[0] / t[1]
        });
    }
    check("affine", &[&a], &a.map(|v| v * -1.5 + 0.25), |_, t| {
        t[0].affine(-1.5, 0.25)
    });
    check("offset", &[&a], &a.map(|v| v + 1.0), |_, t| t[0] + 1.0);
    check("scale", &[&a], &a.map(|v| v * 3.0), |_, t| t[0] * 3.0);
    check("negation", &[&a], &a.map(|v| -v), |_, t| -t[0]);

    // One row of some columns: contiguous for ggml, with the strides of what it is a part of.
    let table = random(&[4, 12], 8);
    let row = Array {
        dims: vec![1, 6],
        values: table.values[2 * 12 + 6..3 * 12].to_vec(),
    };
    check(
        "affine of a row",
        &[&table],
        &row.map(|v| v + 1.0),
        |_, t| t[0].slice(1, 6, 6).slice(0, 2, 1) + 1.0,
    );
    check(
        "silu of a row",
        &[&table],
        &row.map(|v| v / (1.0 + (-v).exp())),
        |_, t| t[0].slice(1, 6, 6).slice(0, 2, 1).silu(),
    );
}

#[test]
fn activations() {
    let a = random(&[3, 40], 7).map(|v| v * 6.0);
    let gelu_tanh = |x: f64| {
        0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
    };
    check("silu", &[&a], &a.map(|x| x / (1.0 + (-x).exp())), |_, t| {
        t[0].silu()
    });
    check("gelu_tanh", &[&a], &a.map(gelu_tanh), |_, t| {
        t[0].gelu_tanh()
    });
    check(
        "gelu_erf",
        &[&a],
        &a.map(|x| 0.5 * x * (1.0 + reference::erf(x / 2.0_f64.sqrt()))),
        |_, t| t[0].gelu_erf(),
    );
    check("tanh", &[&a], &a.map(f64::tanh), |_, t| t[0].tanh());
    check(
        "sigmoid",
        &[&a],
        &a.map(|x| 1.0 / (1.0 + (-x).exp())),
        |_, t| t[0].sigmoid(),
    );
    check("sin", &[&a], &a.map(f64::sin), |_, t| t[0].sin());
    check("exp", &[&a], &a.map(f64::exp), |_, t| t[0].exp());
    check("square", &[&a], &a.map(|x| x * x), |_, t| t[0].square());
}

#[test]
fn norms() {
    let a = random(&[2, 3, 33], 8);
    let mean = |row: &[f64]| row.iter().sum::<f64>() / row.len() as f64;
    let square = |row: &[f64]| row.iter().map(|v| v * v).sum::<f64>();
    let layer = a.rows(|row| {
        let m = mean(row);
        let variance = mean(&row.iter().map(|v| (v - m) * (v - m)).collect::<Vec<_>>());
        row.iter()
            .map(|v| (v - m) / (variance + 1e-6).sqrt())
            .collect()
    });
    let rms = a.rows(|row| {
        row.iter()
            .map(|v| v / (square(row) / row.len() as f64 + 1e-6).sqrt())
            .collect()
    });
    let l2 = a.rows(|row| {
        row.iter()
            .map(|v| v / square(row).sqrt().max(1e-12))
            .collect()
    });
    check("layer_norm", &[&a], &layer, |_, t| t[0].layer_norm(1e-6));
    check("rms_norm", &[&a], &rms, |_, t| t[0].rms_norm(1e-6));
    check("l2_norm", &[&a], &l2, |_, t| t[0].l2_norm(1e-12));
    let zeros = Array::new(&[2, 8], vec![0.0; 16]);
    check("l2_norm of zeros", &[&zeros], &zeros, |_, t| {
        t[0].l2_norm(1e-12)
    });
    let turned = a.permute(&[2, 0, 1]).rows(|row| {
        row.iter()
            .map(|v| v / (square(row) / row.len() as f64).sqrt())
            .collect()
    });
    check("rms_norm of a view", &[&a], &turned, |_, t| {
        t[0].permute([2, 0, 1]).rms_norm(0.0)
    });
}

#[test]
fn matrix_products() {
    for (x, w) in [
        (vec![5, 64], vec![7, 64]),
        (vec![1, 32], vec![3, 32]),
        (vec![2, 5, 31], vec![7, 31]),
        (vec![6, 5, 16], vec![2, 4, 16]),
        (vec![2, 6, 5, 8], vec![2, 3, 4, 8]),
        // Many rows at once, which a processor may do from panels: whole and broken ones, one and several, with a rest of each side.
        (vec![33, 100], vec![128, 100]),
        (vec![133, 513], vec![64, 513]),
        (vec![4, 35, 7], vec![2, 192, 7]),
        (vec![40, 64], vec![72, 64]),
    ] {
        let (x, w) = (random(&x, 9), random(&w, 10));
        let name = format!("product of {:?} and {:?}", x.dims, w.dims);
        check(
            &name,
            &[&x, &w],
            &reference::matmul_transposed(&x, &w),
            |_, t| t[0].matmul_transposed(t[1]),
        );
    }
    let (x, w) = (random(&[5, 16], 11), random(&[16, 7], 12));
    let expected = reference::matmul_transposed(&x, &w.permute(&[1, 0]));
    check(
        "product with a transposed view",
        &[&x, &w],
        &expected,
        |_, t| t[0].matmul_transposed(t[1].transpose(0, 1)),
    );
    check(
        "product of a transposed view",
        &[&x.permute(&[1, 0]), &w],
        &expected,
        |_, t| t[0].transpose(0, 1).matmul_transposed(t[1].transpose(0, 1)),
    );
}

#[test]
fn half_precision_weights() {
    let (x, w) = (random(&[5, 64], 13), random(&[7, 64], 14));
    let expected = reference::matmul_transposed(&x, &w);
    for dtype in [DType::F16, DType::BF16] {
        // The inputs are exact in half precision; bfloat16 keeps eight bits of the activations.
        let tolerance = if dtype == DType::BF16 { 4e-3 } else { 1e-3 };
        check_with("product", &[&x, &w], &expected, tolerance, |_, t| {
            t[0].matmul_transposed(t[1].cast(dtype))
        });
    }
}

/// So that a seed gives the same picture whatever computes it.
#[test]
fn threads_do_not_change_a_number() {
    // Rows of full panels, and of one that is not full.
    for rows in [192, 521] {
        threads_agree_on_products(rows);
    }
}

fn threads_agree_on_products(rows: usize) {
    let (x, w) = (random(&[70, 600], 13), random(&[rows, 600], 14));
    let with = |threads: usize, dtype: DType| {
        let options = BackendOptions::default().threads(threads);
        let device = sd_backend::Device::cpu().unwrap();
        let mut backend = Backend::new(device, &options).unwrap();
        let mut plan = Plan::build(&backend, |g| {
            let (x, w) = (g.input::<f32>("x", &x.dims), g.input::<f32>("w", &w.dims));
            g.output("y", x.matmul_transposed(w.cast(dtype)));
        })
        .unwrap();
        plan.set("x", &x.f32()).unwrap();
        plan.set("w", &w.f32()).unwrap();
        plan.run(&mut backend, &Cancel::new()).unwrap();
        plan.read::<f32>("y").unwrap()
    };
    // Many columns are computed from packed panels, deeper than one of them.
    let expected = reference::matmul_transposed(&x, &w);
    let largest = expected.values.iter().fold(0.0_f64, |m, v| m.max(v.abs()));
    for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::F16, 1e-3), (DType::BF16, 4e-3)] {
        let one = with(1, dtype);
        let pairs = one.iter().zip(&expected.values);
        let worst = pairs.fold(0.0_f64, |m, (&is, should)| {
            m.max((f64::from(is) - should).abs())
        });
        assert!(
            worst <= tolerance * largest,
            "{dtype}: off by {worst:e} of {largest:e}"
        );
        for threads in [2, 3, 5] {
            assert!(with(threads, dtype) == one, "{dtype}, {threads} threads");
        }
    }
}

#[test]
fn softmax_and_attention() {
    let a = random(&[4, 3, 17], 15);
    let soft = a.rows(|row| reference::softmax(&row.iter().map(|v| v * 0.5).collect::<Vec<_>>()));
    check("softmax", &[&a], &soft, |_, t| t[0].softmax(0.5));

    for (heads, kv_heads, queries, keys, channels) in [
        (4, 4, 5, 9, 32),
        (4, 2, 6, 6, 32),
        (1, 1, 70, 70, 64),
        (2, 1, 1, 600, 16),
        (3, 3, 80, 80, 64),
    ] {
        let q = random(&[heads, queries, channels], 16);
        let k = random(&[kv_heads, keys, channels], 17);
        let v = random(&[kv_heads, keys, channels], 18);
        let scale = 1.0 / (channels as f64).sqrt();
        let name = format!("attention of {heads}/{kv_heads} heads, {queries} x {keys}");
        let expected = reference::attention(&q, &k, &v, None, scale);
        check(&name, &[&q, &k, &v], &expected, |_, t| {
            t[0].attention(t[1], t[2], None, scale as f32)
        });

        if queries == keys {
            let causal = Array::from_fn(&[queries, keys], |at| {
                if at[1] <= at[0] {
                    0.0
                } else {
                    f64::NEG_INFINITY
                }
            });
            let mask: Vec<f16> = causal
                .values
                .iter()
                .map(|&value| f16::from_f64(value))
                .collect();
            let expected = reference::attention(&q, &k, &v, Some(&causal), scale);
            check(
                &format!("masked {name}"),
                &[&q, &k, &v],
                &expected,
                |g, t| {
                    t[0].attention(
                        t[1],
                        t[2],
                        Some(g.constant(&mask, [queries, keys])),
                        scale as f32,
                    )
                },
            );
        }
    }

    // As models use it: tokens before heads in memory.
    let (q, k, v) = (
        random(&[6, 2, 16], 19),
        random(&[7, 2, 16], 20),
        random(&[7, 2, 16], 21),
    );
    let swap = |x: &Array| x.permute(&[1, 0, 2]);
    let expected = reference::attention(&swap(&q), &swap(&k), &swap(&v), None, 0.25);
    check("attention over views", &[&q, &k, &v], &expected, |_, t| {
        t[0].transpose(0, 1)
            .attention(t[1].transpose(0, 1), t[2].transpose(0, 1), None, 0.25)
    });
}

#[test]
fn layout() {
    let a = random(&[2, 3, 4, 5], 22);
    check("permute", &[&a], &a.permute(&[3, 0, 2, 1]), |_, t| {
        t[0].permute([3, 0, 2, 1])
    });
    check(
        "permute rank 3",
        &[&random(&[2, 3, 4], 23)],
        &random(&[2, 3, 4], 23).permute(&[1, 2, 0]),
        |_, t| t[0].permute([1, 2, 0]),
    );
    let moved = a.permute(&[1, 0, 2, 3]);
    check(
        "reshape of a view",
        &[&a],
        &Array::new(&[3, 40], moved.values.clone()),
        |_, t| t[0].transpose(0, 1).reshape([3, 40]),
    );
    for axis in 0..4 {
        let mut dims = a.dims.clone();
        dims[axis] = 2;
        let start = a.dims[axis] - 2;
        let part = Array::from_fn(&dims, |index| {
            let mut at = index.to_vec();
            at[axis] += start;
            a.at(&at)
        });
        check("slice", &[&a], &part, |_, t| t[0].slice(axis, start, 2));
        let mut dims = a.dims.clone();
        dims[axis] += 2;
        let both = Array::from_fn(&dims, |index| {
            let mut at = index.to_vec();
            if at[axis] < a.dims[axis] {
                a.at(&at)
            } else {
                at[axis] -= a.dims[axis];
                part.at(&at)
            }
        });
        check("concat", &[&a], &both, |_, t| {
            t[0].concat(t[0].slice(axis, start, 2), axis)
        });
    }
    let table = random(&[6, 5], 24);
    let index = [4_i32, 0, 0, 5];
    let rows = Array::from_fn(&[4, 5], |at| table.at(&[index[at[0]] as usize, at[1]]));
    check("rows", &[&table], &rows, |g, t| {
        t[0].rows(g.constant(&index, [4]))
    });
    check("cast to half and back", &[&table], &table, |_, t| {
        t[0].cast(DType::F16).cast(DType::F32)
    });
    check("an input as output", &[&table], &table, |_, t| t[0]);
}

#[test]
fn pictures() {
    let x = random(&[1, 3, 6, 7], 25);
    for (kernel, stride, padding) in [(3, 1, 1), (1, 1, 0), (3, 2, 0), (2, 2, 1)] {
        let kernel = random(&[5, 3, kernel, kernel], 26);
        let expected = reference::conv2d(&x, &kernel, stride, [padding; 2]);
        check("conv2d", &[&x, &kernel], &expected, |_, t| {
            t[0].conv2d(t[1], stride, padding)
        });
        for by in [Convolution::Direct, Convolution::Patches] {
            let what = format!("conv2d by {by:?}");
            check(&what, &[&x, &kernel], &expected, |_, t| {
                t[0].conv2d_by(t[1], stride, [padding; 2], by)
            });
        }
        check_with(
            "conv2d in half precision",
            &[&x, &kernel],
            &expected,
            1e-3,
            |_, t| t[0].conv2d(t[1].cast(DType::F16), stride, padding),
        );
    }
    // A single pixel whose channels lay innermost: its row has a stride that is no element's.
    let pixel = random(&[1, 1, 1, 3], 33);
    let kernel = random(&[5, 3, 3, 3], 34);
    let turned = pixel.permute(&[0, 3, 1, 2]);
    let expected = reference::conv2d(&turned, &kernel, 1, [1, 1]);
    for by in [Convolution::Direct, Convolution::Patches] {
        let what = format!("conv2d of a pixel by {by:?}");
        check(&what, &[&pixel, &kernel], &expected, |_, t| {
            let x = t[0].permute([0, 3, 1, 2]);
            x.conv2d_by(t[1], 1, [1, 1], by)
        });
    }
    let batch = random(&[2, 3, 5, 4], 27);
    let kernel = random(&[2, 3, 3, 3], 28);
    check(
        "conv2d of two",
        &[&batch, &kernel],
        &reference::conv2d(&batch, &kernel, 1, [1, 1]),
        |_, t| t[0].conv2d(t[1], 1, 1),
    );
    for padding in [[1, 0], [0, 2]] {
        let expected = reference::conv2d(&batch, &kernel, 1, padding);
        check("conv2d by axis", &[&batch, &kernel], &expected, |_, t| {
            t[0].conv2d_padded(t[1], 1, padding)
        });
    }
    // Wrapped around, up to the whole picture on either side; one row or column is its own neighbour.
    for (dims, rows, columns) in [
        ([2, 3, 5, 4], 1, 1),
        ([1, 2, 5, 4], 0, 4),
        ([1, 2, 5, 4], 5, 0),
        ([1, 1, 1, 3], 1, 2),
        ([1, 1, 3, 1], 0, 1),
    ] {
        let x = random(&dims, 29);
        let wrapped = Array::from_fn(
            &[dims[0], dims[1], dims[2] + 2 * rows, dims[3] + 2 * columns],
            |at| {
                let wrap =
                    |index: usize, padding: usize, side: usize| (index + side - padding) % side;
                let row = wrap(at[2], rows, dims[2]);
                x.at(&[at[0], at[1], row, wrap(at[3], columns, dims[3])])
            },
        );
        check("pad_circular", &[&x], &wrapped, |_, t| {
            t[0].pad_circular(rows, columns)
        });
    }
    let turned = x.permute(&[0, 1, 3, 2]);
    let wrapped = Array::from_fn(&[1, 3, 9, 6], |at| {
        turned.at(&[at[0], at[1], (at[2] + 6) % 7, at[3]])
    });
    check("pad_circular of a view", &[&x], &wrapped, |_, t| {
        t[0].transpose(2, 3).pad_circular(1, 0)
    });

    for (axis, before, after) in [(2, 1, 1), (3, 1, 0), (3, 2, 6), (1, 0, 2), (2, 0, 0)] {
        let mut dims = x.dims.clone();
        let side = dims[axis];
        dims[axis] += before + after;
        let mirrored = Array::from_fn(&dims, |at| {
            let mut at = at.to_vec();
            let place = at[axis].abs_diff(before);
            at[axis] = place.min(2 * (side - 1) - place);
            x.at(&at)
        });
        check("pad_reflect", &[&x], &mirrored, |_, t| {
            t[0].pad_reflect(axis, before, after)
        });
    }

    let doubled = Array::from_fn(&[1, 3, 12, 14], |at| {
        x.at(&[at[0], at[1], at[2] / 2, at[3] / 2])
    });
    check("upscale_nearest", &[&x], &doubled, |_, t| {
        t[0].upscale_nearest(2)
    });
    let padded = Array::from_fn(&[1, 3, 7, 9], |at| {
        if at[2] < 6 && at[3] < 7 {
            x.at(at)
        } else {
            0.0
        }
    });
    check("pad_end", &[&x], &padded, |_, t| t[0].pad_end(1, 2));
}

#[test]
fn signals() {
    for (channels, time, size, stride, padding, dilation) in [
        (3, 9, 3, 1, 1, 1),
        (3, 40, 7, 1, 9, 3),
        (2, 50, 11, 1, 25, 5),
        (4, 12, 4, 2, 1, 1),
        (1, 20, 10, 5, 3, 1),
        (3, 1, 1, 1, 0, 1),
        (2, 30, 3, 2, 4, 4),
    ] {
        let x = random(&[2, channels, time], 35);
        let kernel = random(&[5, channels, size], 36);
        let last = time + 2 * padding - dilation * (size - 1) - 1;
        let expected = Array::from_fn(&[2, 5, last / stride + 1], |at| {
            let mut sum = 0.0;
            for channel in 0..channels {
                for tap in 0..size {
                    let moment = (at[2] * stride + tap * dilation).checked_sub(padding);
                    let moment = moment.filter(|&moment| moment < time);
                    sum += moment.map_or(0.0, |moment| {
                        x.at(&[at[0], channel, moment]) * kernel.at(&[at[1], channel, tap])
                    });
                }
            }
            sum
        });
        let conv = Conv1d {
            stride,
            padding,
            dilation,
        };
        check("conv1d", &[&x, &kernel], &expected, |_, t| {
            t[0].conv1d(t[1], conv)
        });
    }
}

#[test]
fn pairs_of_channels_turn_with_their_token() {
    let (tokens, heads, channels) = (5, 3, 12);
    let x = random(&[tokens, heads, channels], 30);
    let positions = [0_i32, -7, 3, 100, 1];
    let divisors = [1.0_f32, 2.0, 10.0, f32::INFINITY, 1.5, 3.0];
    for (pairing, first, pairs) in [
        (Pairing::Neighbours, 0, 6),
        (Pairing::Halves, 0, 6),
        (Pairing::Neighbours, 4, 3),
        (Pairing::Halves, 2, 4),
    ] {
        let turned = Array::from_fn(&[tokens, heads, channels], |at| {
            let Some(inside) = at[2].checked_sub(first).filter(|&at| at < 2 * pairs) else {
                return x.at(at);
            };
            let (pair, is_second) = match pairing {
                Pairing::Neighbours => (inside / 2, inside % 2 == 1),
                Pairing::Halves => (inside % pairs, inside >= pairs),
            };
            let (a, b) = match pairing {
                Pairing::Neighbours => (first + 2 * pair, first + 2 * pair + 1),
                Pairing::Halves => (first + pair, first + pair + pairs),
            };
            let (a, b) = (x.at(&[at[0], at[1], a]), x.at(&[at[0], at[1], b]));
            let (sin, cos) = (f64::from(positions[at[0]]) / f64::from(divisors[pair])).sin_cos();
            if is_second {
                a * sin + b * cos
            } else {
                a * cos - b * sin
            }
        });
        let name = format!("turn_pairs, {pairing:?} from {first}");
        check(&name, &[&x], &turned, |g, t| {
            let positions = g.constant(&positions, [tokens]);
            let divisors = g.constant(&divisors, [channels / 2]);
            t[0].turn_pairs(positions, divisors, pairing, first, pairs)
        });
        let view = x.permute(&[1, 0, 2]);
        check(&format!("{name} of a view"), &[&view], &turned, |g, t| {
            let positions = g.constant(&positions, [tokens]);
            let divisors = g.constant(&divisors, [channels / 2]);
            t[0].transpose(0, 1)
                .turn_pairs(positions, divisors, pairing, first, pairs)
        });
    }
}
