//! Samplers against diffusers' and formulas in float64, and against an equation whose solution is known.

use sd_models::{FlowMatchEuler, Sampler, Schedule, Scheduler};

use crate::fixtures::{Case, folder, max_error};

fn recorded() -> Case {
    Case::read(&folder("sampling").join("sampling.safetensors"))
}

/// Values are up to 4, 10 where levels are spaced unevenly, and rounded once a step. The reference computes the weights of DPM-Solver++ in single precision, from
/// logarithms whose differences lose up to four digits where levels are close. It starts UniPC 1e-6 below 1.
const TOLERANCE: [(Sampler, f32); 5] = [
    (Sampler::Euler, 2e-6),
    (Sampler::Heun, 2e-6),
    (Sampler::DpmPlusPlus2M, 5e-6),
    (Sampler::UniPc, 5e-6),
    (Sampler::ResMultistep, 5e-6),
];

#[test]
fn every_sampler_goes_the_references_way() {
    let case = recorded();
    for name in ["qwen6", "typed", "dense", "two", "one"] {
        let sigmas = &case.get(&format!("in.{name}.sigmas")).f32;
        let schedule = Schedule::exact(&sigmas[..sigmas.len() - 1], 1000).unwrap();
        let start = &case.get(&format!("in.{name}.latents")).f32;
        let velocities = &case.get(&format!("in.{name}.velocities")).f32;
        for (sampler, tolerance) in TOLERANCE {
            let should = &case.get(&format!("out.{name}.{}", sampler.name())).f32;
            let calls = sampler.calls(schedule.steps());
            assert_eq!(should.len(), calls * start.len(), "{name} {sampler:?}");
            let mut latents = start.clone();
            let mut sampling = sampler.start(&schedule);
            while !sampling.is_done() {
                let part = sampling.calls() * start.len()..(sampling.calls() + 1) * start.len();
                sampling.advance(&mut latents, &velocities[part.clone()]);
                let error = max_error(&latents, &should[part]);
                println!("{name} {sampler:?} call {}: {error:e}", sampling.calls());
                assert!(
                    error <= tolerance,
                    "{name} {sampler:?} call {}: off by {error:e}",
                    sampling.calls()
                );
            }
            assert_eq!(sampling.calls(), calls, "{name} {sampler:?}");
            // There is nowhere left to go.
            let there = latents.clone();
            sampling.advance(&mut latents, &velocities[..start.len()]);
            assert_eq!(latents, there);
        }
    }
}

#[test]
fn levels_are_laid_out_as_in_the_reference() {
    let case = recorded();
    let mut compared = 0;
    for (name, facts) in case.meta["schedules"].as_object().unwrap() {
        let config = &case.meta["configs"][facts["config"].as_str().unwrap()];
        let config: FlowMatchEuler = serde_json::from_value(config.clone()).unwrap();
        let number = |key: &str| facts[key].as_u64().unwrap() as usize;
        let scheduler: Scheduler = facts["spacing"].as_str().unwrap().parse().unwrap();
        let schedule = config
            .schedule_as(&scheduler, number("steps"), number("tokens"))
            .unwrap();
        let should = &case.get(&format!("out.schedule.{name}")).f32;
        let error = max_error(schedule.sigmas(), should);
        // Levels are shifted in single precision: a few rounding errors of numbers up to 1.
        assert!(error <= 5e-7, "{name}: off by {error:e}");
        compared += 1;

        // A checkpoint may ask for the same by its configuration.
        let key = format!("use_{}_sigmas", scheduler.name());
        let mut asking = case.meta["configs"][facts["config"].as_str().unwrap()].clone();
        asking[key.as_str()] = true.into();
        let asking: FlowMatchEuler = serde_json::from_value(asking).unwrap();
        if asking != config {
            let own = asking.schedule(number("steps"), number("tokens")).unwrap();
            assert_eq!(own, schedule, "{name}");
        }
    }
    assert!(compared >= 75, "{compared}");
}

/// Data that are normally distributed about `mean`, each number with its own deviation: what a perfect model predicts, and
/// where it leads, are known.
struct Gaussian {
    mean: f64,
    deviations: Vec<f64>,
}

impl Gaussian {
    fn spread(&self, sigma: f64) -> impl Iterator<Item = f64> + '_ {
        let deviations = self.deviations.iter();
        deviations.map(move |deviation| ((1.0 - sigma) * deviation).hypot(sigma))
    }

    fn velocity(&self, x: &[f32], sigma: f32) -> Vec<f32> {
        let sigma = f64::from(sigma);
        let centre = (1.0 - sigma) * self.mean;
        let each = x.iter().zip(&self.deviations).zip(self.spread(sigma));
        each.map(|((&x, deviation), spread)| {
            let slope = (sigma - (1.0 - sigma) * deviation * deviation) / (spread * spread);
            (slope * (f64::from(x) - centre) - self.mean) as f32
        })
        .collect()
    }

    /// Where the equation leads from `x` at the level `sigma`.
    fn solution(&self, x: &[f32], sigma: f32) -> Vec<f64> {
        let sigma = f64::from(sigma);
        let centre = (1.0 - sigma) * self.mean;
        let each = x.iter().zip(&self.deviations).zip(self.spread(sigma));
        each.map(|((&x, deviation), spread)| {
            self.mean + deviation / spread * (f64::from(x) - centre)
        })
        .collect()
    }
}

#[test]
fn errors_fall_with_the_order() {
    let data = Gaussian {
        mean: 0.7,
        deviations: vec![0.5, 0.8, 1.3, 2.0],
    };
    let start = [1.1, -0.6, 0.4, -1.7];
    // From where not all is noise: at 1 logarithms are infinite, and there first steps are of first order.
    let error = |sampler: Sampler, steps: usize| {
        let sigmas: Vec<f32> = (0..steps)
            .map(|step| 0.9 * (1.0 - step as f32 / steps as f32))
            .collect();
        let schedule = Schedule::exact(&sigmas, 1000).unwrap();
        let mut x = start.to_vec();
        let mut sampling = sampler.start(&schedule);
        while !sampling.is_done() {
            let velocity = data.velocity(&x, sampling.sigma());
            sampling.advance(&mut x, &velocity);
        }
        let should = data.solution(&start, sigmas[0]);
        let squares = x
            .iter()
            .zip(should)
            .map(|(x, y)| (f64::from(*x) - y).powi(2));
        squares.sum::<f64>().sqrt()
    };
    for (sampler, order) in [
        (Sampler::Euler, 1.0),
        (Sampler::Heun, 2.0),
        (Sampler::DpmPlusPlus2M, 2.0),
        (Sampler::UniPc, 2.0),
        (Sampler::ResMultistep, 2.0),
    ] {
        let (coarse, fine) = (error(sampler, 24), error(sampler, 96));
        let measured = (coarse / fine).log2() / 2.0;
        println!("{sampler:?}: order {measured:.2}, errors {coarse:e} and {fine:e}");
        assert!(
            (measured - order).abs() <= 0.35,
            "{sampler:?}: order {measured:.2}, errors {coarse:e} and {fine:e}"
        );
    }
}

#[test]
fn impossible_levels_and_names_are_refused() {
    for (sigmas, part) in [
        (&[][..], "0 steps"),
        (&[1.0, 1.0], "position 2: each level is below"),
        (&[0.5, 0.8], "position 2"),
        (&[1.1, 0.5], "position 1: levels are above 0"),
        (&[1.0, 0.0], "the final 0 is implied"),
        (&[1.0, -0.1], "position 2"),
        (&[f32::NAN], "position 1"),
        (&[1.0, f32::NEG_INFINITY], "position 2"),
        (&[0.5; 1001], "1001 steps"),
    ] {
        let scheduler = Scheduler::Exact(sigmas.to_vec());
        let refused = FlowMatchEuler::default().schedule_as(&scheduler, 4, 64);
        let error = refused.unwrap_err().to_string();
        assert!(error.contains(part), "{sigmas:?}: {error}");
    }
    for scheduler in Scheduler::NAMED {
        let steps = FlowMatchEuler::default().schedule_as(&scheduler, 0, 64);
        assert!(steps.is_err(), "{scheduler:?}");
        assert_eq!(scheduler.name().parse::<Scheduler>().unwrap(), scheduler);
        // One step, and as many as there may be, are levels that fall.
        for steps in [1, 2, 1000] {
            let config =
                serde_json::json!({ "shift_terminal": 0.02, "use_dynamic_shifting": true });
            let config: FlowMatchEuler = serde_json::from_value(config).unwrap();
            let schedule = config.schedule_as(&scheduler, steps, 4096).unwrap();
            assert_eq!(schedule.steps(), steps);
            let levels = schedule.sigmas();
            let falls = levels.windows(2).all(|pair| pair[0] > pair[1]);
            assert!(falls && levels[0] <= 1.0, "{scheduler:?}: {levels:?}");
        }
    }
    let both = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        &both,
        r#"{ "use_karras_sigmas": true, "use_beta_sigmas": true }"#,
    )
    .unwrap();
    let error = FlowMatchEuler::read(both.path()).unwrap_err().to_string();
    assert!(
        error.contains("at most one of use_karras_sigmas"),
        "{error}"
    );
    let error = "euler_b".parse::<Sampler>().unwrap_err().to_string();
    assert!(error.contains("euler, heun, dpm++_2m"), "{error}");
}
