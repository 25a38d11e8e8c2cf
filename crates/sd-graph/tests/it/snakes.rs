//! Periodic activations, against double precision.

use sd_backend::{Backend, BackendOptions, DeviceKind};
use sd_graph::{Cancel, Error, Plan};

use crate::reference::Array;

const TAPS: [f64; 12] = [
    0.01, 0.02, -0.03, -0.06, 0.13, 0.43, 0.44, 0.12, -0.05, -0.02, 0.02, 0.01,
];

/// What the operation says that it gives, moment by moment.
fn expected(x: &Array, alpha: &[f64], share: &[f64], is_doubled: bool) -> Vec<f64> {
    let [_, channels, time] = x.dims[..] else {
        panic!("no signal");
    };
    let mut all = Vec::new();
    for (row, x) in x.values.chunks(time).enumerate() {
        let channel = row % channels;
        let bend = |x: f64| x + share[channel] * (alpha[channel] * x).sin().powi(2);
        if !is_doubled {
            all.extend(x.iter().map(|&x| bend(x)));
            continue;
        }
        let tap = |at: isize| {
            usize::try_from(at)
                .ok()
                .and_then(|at| TAPS.get(at))
                .unwrap_or(&0.0)
        };
        let within = |at: isize, length: usize| at.clamp(0, length as isize - 1) as usize;
        let double: Vec<f64> = (0..2 * time as isize)
            .map(|to| {
                let from = (to / 2 - 4)..=(to / 2 + 4);
                let sum: f64 = from
                    .map(|from| x[within(from, time)] * tap(to + 5 - 2 * from))
                    .sum();
                bend(2.0 * sum)
            })
            .collect();
        all.extend((0..time as isize).map(|to| {
            let from = (2 * to - 5)..=(2 * to + 6);
            from.map(|from| double[within(from, 2 * time)] * tap(from - 2 * to + 5))
                .sum::<f64>()
        }));
    }
    all
}

/// Lengths around that of a run, arguments beyond those that the fast sine takes, and a device that does not have it.
#[test]
fn snakes_bend_at_once_what_filters_and_sines_bend_one_by_one() {
    let alpha = [0.5, 3.0, 20_000.0];
    let share = [2.0, 0.3, 0.1];
    for time in [1, 2, 5, 255, 256, 257, 259, 262, 600] {
        for is_doubled in [false, true] {
            let x = Array::random(&[2, 3, time], time as u64);
            let should = expected(&x, &alpha, &share, is_doubled);
            for device in crate::devices() {
                let mut backend =
                    Backend::new(device, &BackendOptions::default().threads(2)).unwrap();
                let plan = Plan::build(&backend, |g| {
                    let numbers = |values: &[f64]| {
                        let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
                        g.constant(&values, [values.len()])
                    };
                    let taps = is_doubled.then(|| numbers(&TAPS));
                    let x = g.input::<f32>("x", &x.dims);
                    g.output("y", x.snake(numbers(&alpha), numbers(&share), taps));
                });
                if device.kind() != DeviceKind::Cpu || device.is_remote() {
                    let error = plan.unwrap_err();
                    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
                    continue;
                }
                let mut plan = plan.unwrap();
                plan.set("x", &x.f32()).unwrap();
                plan.run(&mut backend, &Cancel::new()).unwrap();
                let is = plan.read::<f32>("y").unwrap();
                for (at, (is, should)) in is.iter().zip(&should).enumerate() {
                    // An angle of 20,000 has no more than half a thousandth behind the point: a tenth of that in the result.
                    let tolerance = match at / time % 3 {
                        2 => 2e-3,
                        _ => 2e-6,
                    };
                    let error = (f64::from(*is) - should).abs();
                    assert!(error <= tolerance, "{at} of {time}: off by {error:e}");
                }
            }
        }
    }
}
