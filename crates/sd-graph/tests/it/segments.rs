//! Graphs in segments: the same bytes as in one piece, whatever is cut where.

use sd_backend::{Device, Ledger};
use sd_graph::{Cancel, Estimate, Graph, Plan, Shape, State, Tensor};

use crate::blocks::{backend, values};

/// The bytes of `y` of a graph in one piece and in as many as it has, on the processor; and its segments.
fn both_ways(build: impl for<'g> Fn(Graph<'g>) + Copy) -> (Vec<f32>, Vec<f32>, Vec<String>) {
    let cpu = Device::cpu().unwrap();
    let mut outcome = Vec::new();
    let mut segments = Vec::new();
    let mut backend = backend(cpu, &Ledger::default());
    let estimate = Estimate::of(&backend, build).unwrap();
    for is_cut in [false, true] {
        let mut plan = match is_cut {
            false => Plan::build(&backend, build),
            true => Plan::build_in_segments(&backend, build),
        }
        .unwrap();
        let compute_bytes = match is_cut {
            false => estimate.compute_bytes,
            true => estimate.segmented_bytes,
        };
        assert_eq!(plan.compute_bytes(), compute_bytes);
        segments = plan.segmentation().segments;
        plan.set("x", &values(1024, 3)).unwrap();
        plan.run(&mut backend, &Cancel::new()).unwrap();
        outcome.push(plan.read::<f32>("y").unwrap());
    }
    let cut = outcome.pop().unwrap();
    (outcome.pop().unwrap(), cut, segments)
}

/// Some operations that give what they are given, more or less.
fn wide<'g>(x: Tensor<'g>) -> Tensor<'g> {
    let g = x.graph();
    let parts: Vec<Tensor<'g>> = (0..8).map(|n| (x + n as f32).silu()).collect();
    let sum = parts.iter().fold(x, |sum, part| sum + *part);
    sum * g.constant(&[0.25_f32], [1])
}

#[test]
fn views_of_what_is_kept_and_one_node_segments() {
    // Three views of one boundary, one of them the mark itself, and a marked view of an input.
    let (whole, cut, segments) = both_ways(|g| {
        let x = g.input::<f32>("x", [4, 16, 16]);
        let turned = x.transpose(0, 1).cut("leaf");
        let y = wide(x).transpose(0, 1).cut("views");
        let one = y.slice(0, 0, 8);
        let other = y.slice(0, 8, 8);
        let flat = y.reshape([64, 16]);
        let z = one.matmul_transposed(other).cut("single");
        let w = wide(z.reshape([16, 8])).cut("again");
        let sum = flat.matmul_transposed(w.reshape([8, 16]));
        g.output(
            "y",
            wide(sum)
                + turned
                    .slice(0, 0, 1)
                    .slice(1, 0, 1)
                    .reshape([16])
                    .slice(0, 0, 1),
        );
    });
    assert!(whole == cut);
    assert_eq!(segments, ["views", "single", "again", "final"]);

    // A segment of one operation between two views.
    let (whole, cut, segments) = both_ways(|g| {
        let x = wide(g.input::<f32>("x", [32, 32])).cut("a");
        let y = (x.transpose(0, 1) + 1.0).cut("b");
        let z = wide(y.transpose(0, 1)).cut("c");
        g.output("y", z.transpose(0, 1));
    });
    assert!(whole == cut);
    assert_eq!(segments, ["a", "b", "c", "final"]);
}

#[test]
fn whatever_order_groups_are_marked_in() {
    // "late" is marked first and needs "early"; "dead" is for nobody; two marks in one group; an output in the middle.
    let (whole, cut, segments) = both_ways(|g| {
        let x = g.input::<f32>("x", [32, 32]);
        let a = wide(x);
        let b = wide(a.matmul_transposed(x));
        let b = b.cut("late");
        let a = a.cut("early");
        let _ = wide(b).cut("dead");
        let c = wide(b).cut("pair");
        let d = wide(c + a).cut("pair");
        let _ = d.cut("moved");
        g.output("middle", a.transpose(0, 1));
        g.output("y", wide(c) + d);
        g.output("input", x);
    });
    assert!(whole == cut);
    assert_eq!(segments, ["late", "pair", "moved", "final"]);
}

#[test]
fn what_several_segments_use_is_kept_if_that_is_cheaper() {
    let cpu = Device::cpu().unwrap();
    fn graph(g: Graph<'_>) {
        let x = g.input::<f32>("x", [32, 32]);
        // A product, which nobody marks.
        let p = x.matmul_transposed(x);
        let a = wide(x + p).cut("a");
        let b = wide(a + p).cut("b");
        g.output("y", wide(b) + p);
    }
    let (whole, cut, _) = both_ways(graph);
    assert!(whole == cut);
    let plan = Plan::build_in_segments(&backend(cpu, &Ledger::default()), graph).unwrap();
    let how = plan.segmentation();
    assert_eq!((how.added_cuts, how.recomputed), (1, 0), "{how:?}");
}

#[test]
fn states_are_read_by_every_segment_and_written_behind_the_last() {
    let backend_of = || backend(Device::cpu().unwrap(), &Ledger::default());
    let mut outcomes = Vec::new();
    for is_cut in [false, true] {
        let mut backend = backend_of();
        let state = State::new("seen", Shape::new(&[32, 32]).unwrap());
        State::allocate([&state], &backend).unwrap();
        let graph = |g: Graph<'_>| {
            let x = g.input::<f32>("x", [32, 32]);
            let a = wide(x + g.state(&state)).cut("a");
            g.keep(&state, a);
            let b = wide(a.matmul_transposed(g.state(&state))).cut("b");
            g.output("y", b + g.state(&state));
        };
        let mut plan = match is_cut {
            false => Plan::build(&backend, graph),
            true => Plan::build_in_segments(&backend, graph),
        }
        .unwrap();
        assert_eq!(
            plan.segmentation().segments.len(),
            if is_cut { 3 } else { 1 }
        );
        let mut run = || {
            plan.set("x", &values(1024, 3)).unwrap();
            plan.run(&mut backend, &Cancel::new()).unwrap();
            plan.read::<f32>("y").unwrap()
        };
        outcomes.push([run(), run(), run()]);
    }
    assert!(outcomes[0] == outcomes[1]);
    assert!(outcomes[0][0] != outcomes[0][1]);
}
