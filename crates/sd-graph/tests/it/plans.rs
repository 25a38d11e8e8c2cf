//! What a plan promises: the first mistake once, inputs before runs, no result before a run, nothing kept after an error.

use half::f16;
use sd_backend::{Backend, BackendOptions, Device};
use sd_graph::{Cancel, Conv1d, Error, Estimate, Graph, Pairing, Plan, Tensor};

fn processor() -> Backend {
    Backend::new(
        Device::cpu().unwrap(),
        &BackendOptions::default().threads(2),
    )
    .unwrap()
}

/// The text of the first mistake in what `build` makes of `x [2, 3]` and `y [4]`.
fn mistake(build: impl for<'g> Fn(Graph<'g>, Tensor<'g>, Tensor<'g>) -> Tensor<'g>) -> String {
    let outcome = Plan::build(&processor(), |g| {
        let (x, y) = (g.input::<f32>("x", [2, 3]), g.input::<f32>("y", [4]));
        g.output("result", build(g, x, y));
    });
    match outcome {
        Err(Error::Graph(error)) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_first_mistake_comes_out_once_with_names_and_place() {
    let text = mistake(|_, x, y| (x + y).matmul_transposed(y));
    for part in [
        "sum",
        "x [2, 3]",
        "y [4]",
        "plans.rs:",
        "cannot be repeated",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert!(!text.contains("matmul"), "{text}");
}

/// One pair of `x` from channel `first` on, with so many positions and divisors.
fn turned<'g>(
    g: Graph<'g>,
    x: Tensor<'g>,
    [positions, divisors]: [usize; 2],
    first: usize,
) -> Tensor<'g> {
    let positions = g.constant(&vec![0_i32; positions], [positions]);
    let divisors = g.constant(&vec![1.0_f32; divisors], [divisors]);
    x.turn_pairs(positions, divisors, Pairing::Neighbours, first, 1)
}

#[test]
fn every_operation_refuses_what_ggml_would_abort_on() {
    type Case = (
        &'static str,
        for<'g> fn(Graph<'g>, Tensor<'g>, Tensor<'g>) -> Tensor<'g>,
    );
    let cases: &[Case] = &[
        ("fit rows", |_, x, y| x.matmul_transposed(y.reshape([1, 4]))),
        ("two dimensions", |_, x, y| x.matmul_transposed(y)),
        ("elements do not fit", |_, x, _| x.reshape([7])),
        ("1 to 4 dimensions", |_, x, _| x.reshape([1, 1, 1, 2, 3])),
        ("dimension of zero", |_, x, _| x.reshape([0])),
        ("no order", |_, x, _| x.permute([0, 0])),
        ("no dimensions", |_, x, _| x.transpose(0, 2)),
        ("do not lie within", |_, x, _| x.slice(1, 2, 2)),
        ("equal parts", |_, x, _| x.chunk::<2>(1)[0]),
        ("beside 0 differ", |_, x, y| x.concat(y.reshape([1, 4]), 0)),
        ("must be an input or a constant", |g, x, _| {
            x.rows(g.constant(&[0_i32, 1], [2]).slice(0, 0, 1))
        }),
        ("must be i32", |_, x, y| x.rows(y)),
        ("row 2 is not one of 2", |g, x, _| {
            x.rows(g.constant(&[0_i32, 2], [2]))
        }),
        ("row -1 is not one of 2", |g, x, _| {
            x.rows(g.constant(&[-1_i32], [1]))
        }),
        ("[n, in, h, w]", |_, x, y| x.conv2d(y, 1, 1)),
        ("signals takes [n, in, t]", |_, x, y| {
            x.conv1d(y, Conv1d::default())
        }),
        ("a dilation of zero", |_, x, y| {
            let dilation = 0;
            let conv = Conv1d {
                dilation,
                ..Conv1d::default()
            };
            x.reshape([1, 2, 3]).conv1d(y.reshape([2, 2, 1]), conv)
        }),
        ("a kernel of 5 does not fit 3", |_, x, y| {
            let dilation = 4;
            let conv = Conv1d {
                dilation,
                ..Conv1d::default()
            };
            x.reshape([1, 2, 3]).conv1d(y.reshape([1, 2, 2]), conv)
        }),
        ("mask must be f16", |_, x, _| {
            let q = x.reshape([1, 2, 3]);
            q.attention(q, q, Some(x), 1.0)
        }),
        ("mask must be [2, 2]", |g, x, _| {
            let q = x.reshape([1, 2, 3]);
            q.attention(q, q, Some(g.constant(&[f16::ZERO], [1, 1])), 1.0)
        }),
        ("values do not fill", |g, _, _| {
            g.constant(&[1.0_f32; 3], [2, 2])
        }),
        ("must be f32", |g, x, _| x + g.constant(&[f16::ONE; 3], [3])),
        ("cannot become", |_, x, _| x.cast(sd_backend::DType::Q8_0)),
        ("two inputs are called `x`", |g, x, _| {
            x + g.input::<f32>("x", [3])
        }),
        ("eps is NaN", |_, x, _| x.rms_norm(f32::NAN)),
        ("more elements than memory", |g, _, _| {
            g.input::<f32>("vast", [1 << 40, 1 << 40])
        }),
        ("beyond all pictures", |_, x, _| x.pad_end(usize::MAX, 0)),
        ("cannot be continued", |_, x, _| x.pad_circular(3, 0)),
        ("padding takes two dimensions", |_, _, y| {
            y.pad_circular(0, 1)
        }),
        ("cannot be reflected by 0 before and 2", |_, x, _| {
            x.pad_reflect(0, 0, 2)
        }),
        ("no dimension 2", |_, x, _| x.pad_reflect(2, 0, 0)),
        ("turning takes", |g, x, _| turned(g, x, [2, 1], 0)),
        ("positions must be [2]", |g, x, _| {
            turned(g, x.reshape([2, 1, 3]), [3, 1], 0)
        }),
        ("even number of channels", |g, x, _| {
            turned(g, x.reshape([2, 1, 3]), [2, 1], 0)
        }),
        ("divisors must be [3]", |g, x, _| {
            turned(g, x.reshape([1, 1, 6]), [1, 2], 0)
        }),
        ("not among 6", |g, x, _| {
            turned(g, x.reshape([1, 1, 6]), [1, 3], 6)
        }),
        ("not among 6", |g, x, _| {
            turned(g, x.reshape([1, 1, 6]), [1, 3], usize::MAX - 1)
        }),
        ("said by a model", |g, _, _| {
            g.mistake("rotary embedding", "said by a model")
        }),
        ("more elements than memory", |_, x, _| {
            x.upscale_nearest(usize::MAX)
        }),
    ];
    for (expected, build) in cases {
        let text = mistake(build);
        assert!(text.contains(expected), "`{expected}` in `{text}`");
    }
}

#[test]
fn inputs_are_asked_for_before_each_run() {
    let mut backend = processor();
    let mut plan = Plan::build(&backend, |g| {
        let (x, y) = (g.input::<f32>("x", [2]), g.input::<f32>("y", [2]));
        g.output("z", x * y);
    })
    .unwrap();
    let cancel = Cancel::new();
    assert!(
        matches!(plan.run(&mut backend, &cancel), Err(Error::InputNotSet { name }) if name == "x")
    );
    plan.set("x", &[1.0_f32, 2.0]).unwrap();
    assert!(
        matches!(plan.run(&mut backend, &cancel), Err(Error::InputNotSet { name }) if name == "y")
    );
    plan.set("y", &[3.0_f32, 4.0]).unwrap();
    assert!(matches!(plan.read::<f32>("z"), Err(Error::NotRun { .. })));
    plan.run(&mut backend, &cancel).unwrap();
    assert_eq!(plan.read::<f32>("z").unwrap(), [3.0, 8.0]);
    let mut there = [0.0_f32; 2];
    plan.read_into("z", &mut there).unwrap();
    assert_eq!(there, [3.0, 8.0]);
    let too_short = plan.read_into("z", &mut there[..1]);
    assert!(matches!(too_short, Err(Error::WrongValues { .. })));
    assert!(
        matches!(plan.run(&mut backend, &cancel), Err(Error::InputNotSet { name }) if name == "x")
    );
}

#[test]
fn wrong_values_are_named() {
    let mut plan = Plan::build(&processor(), |g| {
        let table = g.input::<f32>("table", [3, 2]);
        let index = g.input::<i32>("index", [2]);
        g.output("rows", table.rows(index));
    })
    .unwrap();
    let text = |outcome: Result<(), Error>| outcome.unwrap_err().to_string();
    assert_eq!(
        text(plan.set("table", &[1.0_f32; 5])),
        "`table` holds 6 values, not 5"
    );
    assert_eq!(
        text(plan.set("table", &[1_i32; 6])),
        "`table` holds f32, not i32"
    );
    assert_eq!(
        text(plan.set("tables", &[1.0_f32; 6])),
        "the plan has no input called `tables`; it has: table, index"
    );
    assert_eq!(
        text(plan.set("index", &[0_i32, 3])),
        "`index` holds row 3 is not one of 3"
    );
    plan.set("index", &[0_i32, 2]).unwrap();
    assert!(matches!(
        plan.read::<i32>("rows"),
        Err(Error::WrongValues { .. })
    ));
    assert!(matches!(
        plan.read::<f32>("nothing"),
        Err(Error::UnknownName { .. })
    ));
}

#[test]
fn an_input_that_nothing_needs_may_still_be_set() {
    let mut backend = processor();
    let mut plan = Plan::build(&backend, |g| {
        let _ = g.input::<f32>("idle", [1000]);
        g.output("y", g.input::<f32>("x", [1]) + 1.0);
    })
    .unwrap();
    plan.set("idle", &[0.0_f32; 1000]).unwrap();
    plan.set("x", &[1.0_f32]).unwrap();
    plan.run(&mut backend, &Cancel::new()).unwrap();
    assert_eq!(plan.read::<f32>("y").unwrap(), [2.0]);
}

#[test]
fn constants_stay_while_inputs_change() {
    let mut backend = processor();
    let mut plan = Plan::build(&backend, |g| {
        let c = g.constant(&[1.0_f32, 2.0, 3.0], [3]);
        let mut x = g.input::<f32>("x", [3]);
        for _ in 0..20 {
            x = x + c;
        }
        g.output("y", x);
        g.output("constant", c);
    })
    .unwrap();
    for round in 0..5 {
        plan.set("x", &[round as f32; 3]).unwrap();
        plan.run(&mut backend, &Cancel::new()).unwrap();
        let base = round as f32;
        assert_eq!(
            plan.read::<f32>("y").unwrap(),
            [base + 20.0, base + 40.0, base + 60.0]
        );
        assert_eq!(plan.read::<f32>("constant").unwrap(), [1.0, 2.0, 3.0]);
    }
}

#[test]
fn a_cancelled_run_says_so_and_the_next_one_works() {
    let mut backend = processor();
    let mut plan =
        Plan::build(&backend, |g| g.output("y", g.input::<f32>("x", [1]) + 1.0)).unwrap();
    let cancel = Cancel::new();
    cancel.cancel();
    plan.set("x", &[1.0_f32]).unwrap();
    let error = plan.run(&mut backend, &cancel).unwrap_err();
    assert!(error.is_cancelled());
    plan.run(&mut backend, &Cancel::new()).unwrap();
    assert_eq!(plan.read::<f32>("y").unwrap(), [2.0]);
}

#[test]
fn a_run_on_the_processor_stops_between_operations() {
    let mut backend = processor();
    let size = 512;
    let mut plan = Plan::build(&backend, |g| {
        let x = g.input::<f32>("x", [size, size]);
        g.output("y", (0..20_000).fold(x, |y, _| y.matmul_transposed(x)));
    })
    .unwrap();
    plan.set("x", &vec![0.0_f32; size * size]).unwrap();
    let cancel = Cancel::new();
    let other = cancel.clone();
    let waiter = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        other.cancel();
    });
    // Twenty thousand products take minutes; only the cancelling ends this.
    assert!(plan.run(&mut backend, &cancel).unwrap_err().is_cancelled());
    waiter.join().unwrap();
    assert!(matches!(plan.read::<f32>("y"), Err(Error::NotRun { .. })));
}

#[test]
fn more_than_memory_is_an_error_before_anything_is_allocated() {
    let error = Plan::build(&processor(), |g| {
        let x = g.input::<f32>("x", [1 << 22, 1 << 22]);
        g.output("y", x + 1.0);
    })
    .unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(error.to_string().contains("TiB"), "{error}");
}

#[test]
fn an_estimate_is_what_the_plan_takes() {
    let backend = processor();
    fn graph(g: Graph<'_>) {
        let x = g.input::<f32>("x", [64, 64]);
        let c = g.constant(&[1.0_f32; 64], [64]);
        g.output("y", (x + c).silu().matmul_transposed(x).softmax(1.0));
    }
    let estimate = Estimate::of(&backend, graph).unwrap();
    let plan = Plan::build(&backend, graph).unwrap();
    assert_eq!(estimate.compute_bytes, plan.compute_bytes());
    assert_eq!(estimate.nodes, plan.nodes());
    assert_eq!((estimate.weight_bytes, estimate.constant_bytes), (0, 256));
}

#[test]
fn a_plan_and_its_backend_move_to_another_thread() {
    let mut backend = processor();
    let mut plan =
        Plan::build(&backend, |g| g.output("y", g.input::<f32>("x", [1]) * 2.0)).unwrap();
    let result = std::thread::spawn(move || {
        plan.set("x", &[21.0_f32]).unwrap();
        plan.run(&mut backend, &Cancel::new()).unwrap();
        plan.read::<f32>("y").unwrap()
    });
    assert_eq!(result.join().unwrap(), [42.0]);
}

/// What one run of a graph of so many segments allocates on the host in the steady state: how often, and bytes.
fn allocations(blocks: usize, is_cut: bool) -> (u64, u64) {
    let mut backend = processor();
    let graph = |g: Graph<'_>| {
        let x = g.input::<f32>("x", [8, 32]);
        let y = (0..blocks).fold(x, |x, n| {
            (x.matmul_transposed(x).silu() + n as f32)
                .matmul_transposed(x.transpose(0, 1))
                .silu()
                .cut(&format!("block.{n}"))
        });
        g.output("y", y);
    };
    let mut plan = match is_cut {
        false => Plan::build(&backend, graph),
        true => Plan::build_in_segments(&backend, graph),
    }
    .unwrap();
    let values = vec![0.25_f32; 8 * 32];
    let mut run = || {
        plan.set("x", &values).unwrap();
        plan.run(&mut backend, &Cancel::new()).unwrap();
        drop(plan.read::<f32>("y").unwrap());
    };
    run();
    let counted = allocation_counter::measure(run);
    (counted.count_total, counted.bytes_total)
}

#[test]
fn a_settled_run_allocates_no_more_on_the_host_for_a_larger_graph() {
    for is_cut in [false, true] {
        let (small, large) = (allocations(2, is_cut), allocations(64, is_cut));
        assert_eq!(small, large, "cut: {is_cut}");
        assert!(large.0 < 32, "{large:?}");
    }
}
