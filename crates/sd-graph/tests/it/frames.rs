//! Operations on frames and states that stay between runs, on every device of the build.

use sd_backend::{Backend, BackendOptions, DType, MemoryKind};
use sd_graph::{Cancel, Error, Estimate, FrameConv, Graph, Plan, Shape, State, Tensor};

use crate::ops::{check, check_with};
use crate::reference::Array;

fn backends() -> impl Iterator<Item = Backend> {
    crate::devices()
        .into_iter()
        .map(|device| Backend::new(device, &BackendOptions::default().threads(2)).unwrap())
}

/// A causal convolution written down: zeros before the first frame and around each.
pub(crate) fn causal(x: &Array, kernel: &Array, conv: FrameConv) -> Array {
    let &[frames, input, height, width] = &x.dims[..] else {
        panic!("{:?}", x.dims)
    };
    let &[output, _, depth, kh, kw] = &kernel.dims[..] else {
        panic!("{:?}", kernel.dims)
    };
    let [above, left] = conv.padding;
    let dims = [
        (frames - conv.past) / conv.stride,
        output,
        (height + 2 * above - kh) / conv.spatial_stride + 1,
        (width + 2 * left - kw) / conv.spatial_stride + 1,
    ];
    Array::from_fn(&dims, |at| {
        let mut sum = 0.0;
        for (i, d, y, x_) in (0..input).flat_map(|i| {
            (0..depth)
                .flat_map(move |d| (0..kh).flat_map(move |y| (0..kw).map(move |x| (i, d, y, x))))
        }) {
            let frame = (conv.past + at[0] * conv.stride + conv.stride + d).checked_sub(depth);
            let row = (at[2] * conv.spatial_stride + y)
                .checked_sub(above)
                .filter(|&row| row < height);
            let column = (at[3] * conv.spatial_stride + x_)
                .checked_sub(left)
                .filter(|&column| column < width);
            if let (Some(frame), Some(row), Some(column)) = (frame, row, column) {
                sum += x.at(&[frame, i, row, column]) * kernel.at(&[at[1], i, d, y, x_]);
            }
        }
        sum
    })
}

#[test]
fn causal_convolutions_see_what_was_and_nothing_before_the_beginning() {
    // Frames, of them past, strides in time and space, kernel, padding.
    for (frames, past, [stride, spatial_stride], [depth, kh, kw], padding) in [
        (1, 0, [1, 1], [3, 3, 3], [1, 1]),
        (2, 0, [1, 1], [3, 3, 3], [1, 1]),
        (5, 0, [1, 1], [3, 3, 3], [1, 1]),
        (5, 1, [1, 1], [3, 3, 3], [1, 1]),
        (6, 2, [1, 1], [3, 3, 3], [1, 1]),
        (3, 0, [1, 1], [3, 1, 1], [0, 0]),
        (3, 2, [1, 1], [3, 1, 1], [0, 0]),
        (3, 1, [2, 1], [3, 1, 1], [0, 0]),
        (5, 1, [2, 1], [3, 1, 1], [0, 0]),
        (6, 0, [2, 1], [3, 3, 1], [1, 0]),
        (9, 0, [3, 1], [5, 1, 2], [0, 1]),
        (4, 0, [1, 1], [1, 2, 2], [0, 0]),
        (5, 1, [2, 2], [3, 3, 3], [0, 0]),
        (1, 0, [1, 2], [3, 3, 3], [1, 1]),
    ] {
        let x = Array::random(&[frames, 3, 5, 4], 40);
        let kernel = Array::random(&[2, 3, depth, kh, kw], 41);
        let conv = FrameConv {
            side: [kh, kw],
            padding,
            past,
            stride,
            spatial_stride,
        };
        let expected = causal(&x, &kernel, conv);
        let flat = Array::new(&[6, depth, kh * kw], kernel.values.clone());
        let name = format!("{frames} frames, {conv:?}");
        check(&name, &[&x, &flat], &expected, |_, t| {
            t[0].conv3d_causal(t[1], conv)
        });
        // Kernel and picture are rounded to half precision.
        check_with(&name, &[&x, &flat], &expected, 1e-3, |_, t| {
            t[0].conv3d_causal(t[1].cast(DType::F16), conv)
        });
    }
}

#[test]
fn every_other_frame() {
    let x = Array::random(&[7, 2, 3, 4], 42);
    for (axis, start, step, len) in [(0, 1, 2, 3), (0, 0, 3, 3), (1, 1, 5, 1), (2, 0, 2, 2)] {
        let mut dims = x.dims.clone();
        dims[axis] = len;
        let part = Array::from_fn(&dims, |at| {
            let mut at = at.to_vec();
            at[axis] = start + at[axis] * step;
            x.at(&at)
        });
        check("slice_by", &[&x], &part, |_, t| {
            t[0].slice_by(axis, start, step, len)
        });
    }
}

#[test]
fn parts_of_views_are_parts_of_what_is_seen() {
    let x = Array::random(&[2, 3, 4, 5], 44);
    for axes in [[0, 3, 1, 2], [3, 2, 1, 0], [1, 0, 2, 3]] {
        let view = x.permute(&axes);
        for axis in 0..4 {
            let mut dims = view.dims.clone();
            dims[axis] = 1;
            let part = Array::from_fn(&dims, |at| {
                let mut at = at.to_vec();
                at[axis] += 1;
                view.at(&at)
            });
            check("slice of a view", &[&x], &part, |_, t| {
                t[0].permute(axes).slice(axis, 1, 1)
            });
        }
    }
}

#[test]
fn squares_of_pixels_become_channels_and_come_back() {
    let x = Array::random(&[2, 3, 4, 6], 43);
    for factor in [1, 2] {
        let dims = [2, 3 * factor * factor, 4 / factor, 6 / factor];
        let squares = Array::from_fn(&dims, |at| {
            let (channel, inside) = (at[1] / (factor * factor), at[1] % (factor * factor));
            let (row, column) = (inside / factor, inside % factor);
            x.at(&[
                at[0],
                channel,
                at[2] * factor + row,
                at[3] * factor + column,
            ])
        });
        check("pixel_unshuffle", &[&x], &squares, |_, t| {
            t[0].pixel_unshuffle(factor)
        });
        check("pixel_shuffle", &[&squares], &x, |_, t| {
            t[0].pixel_shuffle(factor)
        });
    }
}

#[test]
fn mistakes_with_frames_are_told() {
    type Build = for<'g> fn(Graph<'g>, Tensor<'g>) -> Tensor<'g>;
    fn conv<'g>(g: Graph<'g>, x: Tensor<'g>, kernel: [usize; 3], conv: FrameConv) -> Tensor<'g> {
        x.conv3d_causal(g.input::<f32>("kernel", kernel), conv)
    }
    const PLAIN: FrameConv = FrameConv {
        side: [1, 1],
        padding: [0, 0],
        past: 0,
        stride: 1,
        spatial_stride: 1,
    };
    let cases: &[(&str, Build)] = &[
        ("takes frames", |g, x| {
            conv(g, x.reshape([8, 3, 4]), [2, 1, 1], PLAIN)
        }),
        ("does not have 9", |g, x| conv(g, x, [2, 1, 9], PLAIN)),
        ("do not fit a kernel of 3", |g, x| {
            conv(g, x, [3, 1, 1], PLAIN)
        }),
        ("no frames are left", |g, x| {
            conv(g, x, [2, 1, 1], FrameConv { past: 4, ..PLAIN })
        }),
        ("no whole steps", |g, x| {
            conv(
                g,
                x,
                [2, 1, 1],
                FrameConv {
                    past: 1,
                    stride: 2,
                    ..PLAIN
                },
            )
        }),
        ("no whole steps of 0", |g, x| {
            conv(g, x, [2, 1, 1], FrameConv { stride: 0, ..PLAIN })
        }),
        ("a stride of zero", |g, x| {
            let spatial_stride = 0;
            let none = FrameConv {
                spatial_stride,
                ..PLAIN
            };
            conv(g, x, [2, 1, 1], none)
        }),
        ("beyond all pictures", |g, x| {
            conv(
                g,
                x,
                [2, 1, 1],
                FrameConv {
                    padding: [usize::MAX, 0],
                    ..PLAIN
                },
            )
        }),
        ("make no view", |_, x| x.slice_by(3, 0, 2, 1)),
        ("make no view", |_, x| x.slice_by(0, 0, 0, 1)),
        ("do not lie within", |_, x| x.slice_by(0, 1, 2, 3)),
        ("do not lie within", |_, x| x.slice_by(0, 0, usize::MAX, 3)),
        ("do not lie within", |_, x| x.slice_by(0, 0, 1, 0)),
        ("do not fill 3x4", |_, x| x.pixel_unshuffle(2)),
        ("no squares of 2", |_, x| x.pixel_shuffle(2)),
        ("no squares of 0", |_, x| x.pixel_shuffle(0)),
        ("no value or first part", |g, x| {
            g.keep(&State::new("small", Shape::new(&[3, 2, 3, 4]).unwrap()), x);
            x
        }),
        ("given f32", |g, x| {
            g.keep(&State::new("half", x.shape()), x.cast(DType::F16));
            x
        }),
    ];
    let backend = backends().next().unwrap();
    for (wanted, build) in cases {
        let outcome = Estimate::of(&backend, |g| {
            let x = g.input::<f32>("x", [4, 2, 3, 4]);
            g.output("result", build(g, x));
        });
        match outcome {
            Err(Error::Graph(error)) => {
                let text = error.to_string();
                assert!(text.contains(wanted), "{wanted}: {text}");
            }
            other => panic!("{wanted}: {other:?}"),
        }
    }
}

/// Two states that each become the other and a sum: what is read is what was there when the run began.
#[test]
fn states_stay_between_runs_and_are_written_last() {
    for mut backend in backends() {
        let shape = Shape::new(&[2, 3]).unwrap();
        let (a, b) = (State::new("a", shape), State::new("b", shape));
        let build = |g: Graph<'_>| {
            let x = g.input::<f32>("x", [2, 3]);
            let (was_a, was_b) = (g.state(&a), g.state(&b));
            g.keep(&a, was_b);
            g.keep(&b, was_a + x);
            g.output("sum", was_a + was_b);
        };
        assert!(matches!(
            Plan::build(&backend, build),
            Err(Error::NotLoaded { .. })
        ));
        Estimate::of(&backend, build).unwrap();
        State::allocate([&a, &b], &backend).unwrap();
        let mut plan = Plan::build(&backend, build).unwrap();
        let mut run = |backend: &mut Backend, x: f32| {
            plan.set("x", &[x; 6]).unwrap();
            plan.run(backend, &Cancel::new()).unwrap();
            plan.read::<f32>("sum").unwrap()
        };
        // (a, b) = (0, 0), (0, 1), (1, 2), (2, 5).
        assert_eq!(run(&mut backend, 1.0), [0.0; 6]);
        assert_eq!(run(&mut backend, 2.0), [1.0; 6]);
        assert_eq!(run(&mut backend, 4.0), [3.0; 6]);
        assert_eq!(run(&mut backend, 0.0), [7.0; 6]);

        // Another plan goes on with them, moves rows within one, and writes only the first of the other.
        let mut other = Plan::build(&backend, |g| {
            let was = g.state(&b);
            let row = g.input::<f32>("row", [1, 3]);
            g.output("b", was);
            g.keep(&b, was.slice(0, 1, 1).concat(row, 0));
            g.keep(&a, row * 2.0);
        })
        .unwrap();
        // (a, b) = (5, 2) when it begins.
        for (row, should) in [(7.0, [2.0, 2.0]), (8.0, [2.0, 7.0]), (9.0, [7.0, 8.0])] {
            other.set("row", &[row; 3]).unwrap();
            other.run(&mut backend, &Cancel::new()).unwrap();
            let is = other.read::<f32>("b").unwrap();
            assert_eq!([is[0], is[3]], should);
        }
        let sum = run(&mut backend, 0.0);
        assert_eq!((sum[0], sum[3]), (18.0 + 8.0, 5.0 + 9.0), "{sum:?}");
    }
}

/// What a state in half precision was given is rounded once, and takes half the memory.
#[test]
fn states_in_half_precision_round_what_they_keep() {
    for mut backend in backends() {
        let shape = Shape::new(&[2, 33]).unwrap();
        let (half, whole) = (
            State::in_half_precision("half", shape),
            State::new("whole", shape),
        );
        assert_eq!((half.bytes(), whole.bytes()), (132, 264));
        State::allocate([&half], &backend).unwrap();
        let mut plan = Plan::build(&backend, |g| {
            let x = g.input::<f32>("x", [1, 33]);
            let was = g.state(&half);
            assert_eq!(was.dtype(), DType::F16);
            g.output("was", was.cast(DType::F32));
            g.keep(&half, was.slice(0, 1, 1).cast(DType::F32).concat(x, 0));
        })
        .unwrap();
        let third = half::f16::from_f32(1.0 / 3.0).to_f32();
        for should in [[0.0, 0.0], [0.0, third], [third, third]] {
            plan.set("x", &[1.0_f32 / 3.0; 33]).unwrap();
            plan.run(&mut backend, &Cancel::new()).unwrap();
            let was = plan.read::<f32>("was").unwrap();
            assert_eq!([was[0], was[65]], should, "{}", backend.device());
        }
    }
}

/// Layers that look back at what they kept: each writes it as soon as it is there, so that many layers compute in the memory
/// of a few.
#[test]
fn what_is_kept_does_not_wait_for_the_end() {
    for mut backend in backends() {
        let (frames, size) = (4, 64 * 64);
        let states: Vec<State> = (0..12)
            .map(|layer| State::new(format!("{layer}"), Shape::new(&[2, 64, 64]).unwrap()))
            .collect();
        let build = |layers: usize| {
            let states = &states;
            move |g: Graph<'_>| {
                let mut x = g.input::<f32>("x", [frames, 64, 64]);
                for state in &states[..layers] {
                    let seen = g.state(state).concat(x, 0);
                    g.keep(state, seen.slice(0, frames, 2));
                    // Half of the frame itself, and half of that two frames before.
                    x = (seen.slice(0, 2, frames) + seen.slice(0, 0, frames)) * 0.5;
                }
                g.output("y", x);
            }
        };
        let bytes = |layers| Estimate::of(&backend, build(layers)).unwrap().compute_bytes;
        let (few, many) = (bytes(3), bytes(12));
        assert!(many <= few + 2 * size * 4, "{few} {many}");

        State::allocate(&states, &backend).unwrap();
        let mut plan = Plan::build(&backend, build(12)).unwrap();
        let mut seen = Vec::new();
        for chunk in 0..4 {
            let frame = |frame: usize| vec![f32::from(chunk == 0 && frame == 0); size as usize];
            let values: Vec<f32> = (0..frames).flat_map(frame).collect();
            plan.set("x", &values).unwrap();
            plan.run(&mut backend, &Cancel::new()).unwrap();
            let y = plan.read::<f32>("y").unwrap();
            seen.extend(y.chunks_exact(size as usize).map(|frame| frame[7]));
        }
        // The binomial coefficients of 12, on every other frame.
        for (index, is) in seen.iter().enumerate() {
            let step = index / 2;
            let ways = (0..step).fold(1.0, |ways, k| ways * (12 - k) as f32 / (k + 1) as f32);
            let should = if index % 2 == 0 { ways / 4096.0 } else { 0.0 };
            assert!((is - should).abs() < 1e-6, "{index}: {is}, not {should}");
        }
    }
}

#[test]
fn states_are_on_the_account_until_nobody_has_them() {
    let backend = backends().next().unwrap();
    let cached = || {
        backend
            .ledger()
            .report(backend.device())
            .used
            .of(MemoryKind::Cache)
    };
    let state = State::new("kept", Shape::new(&[1000]).unwrap());
    State::allocate([&state], &backend).unwrap();
    assert!(cached() >= 4000);
    drop(state);
    assert_eq!(cached(), 0);
}
