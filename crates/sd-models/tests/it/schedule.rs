//! Schedules against diffusers', and configurations that are refused.

use sd_models::FlowMatchEuler;

use crate::fixtures::{Case, folder, max_error};

/// The reference computes in single precision with values up to 1 (1000 for timesteps): a few rounding errors.
const TOLERANCE: f32 = 5e-7;

#[test]
fn sigmas_and_timesteps_are_the_references() {
    let case = Case::read(&folder("qwenimage21_scheduler").join("schedules.safetensors"));
    let configs = case.meta["configs"].as_object().unwrap();
    let mut compared = 0;
    for (name, facts) in case.meta["cases"].as_object().unwrap() {
        let config: FlowMatchEuler =
            serde_json::from_value(configs[facts["config"].as_str().unwrap()].clone()).unwrap();
        let tokens = facts["tokens"].as_u64().unwrap() as usize;
        let schedule = match facts["sample_sigmas"].as_array() {
            Some(levels) => {
                let levels: Vec<f32> = levels
                    .iter()
                    .map(|level| level.as_f64().unwrap() as f32)
                    .collect();
                config.schedule_of(&levels, tokens).unwrap()
            }
            None => config
                .schedule(facts["steps"].as_u64().unwrap() as usize, tokens)
                .unwrap(),
        };
        if let Some(mu) = facts["mu"].as_f64() {
            assert!((config.mu(tokens) - mu).abs() < 1e-12, "{name}");
        }
        let sigmas = &case.get(&format!("out.{name}.sigmas")).f32;
        assert!(
            max_error(schedule.sigmas(), sigmas) <= TOLERANCE,
            "{name}: {:?} {sigmas:?}",
            schedule.sigmas()
        );
        let timesteps: Vec<f32> = (0..schedule.steps())
            .map(|step| schedule.timestep(step))
            .collect();
        assert!(
            max_error(&timesteps, &case.get(&format!("out.{name}.timesteps")).f32)
                <= TOLERANCE * 1000.0,
            "{name}"
        );
        compared += 1;
    }
    assert!(compared >= 40, "{compared}");
}

#[test]
fn one_step_goes_from_noise_to_nothing() {
    let config = serde_json::json!({ "shift_terminal": 0.02, "use_dynamic_shifting": true });
    let config: FlowMatchEuler = serde_json::from_value(config).unwrap();
    assert_eq!(config.schedule(1, 64).unwrap().sigmas(), [1.0, 0.0]);
}

#[test]
fn impossible_numbers_of_steps_are_refused() {
    for steps in [0, 1001, usize::MAX] {
        assert!(
            FlowMatchEuler::default()
                .schedule(steps, 64)
                .unwrap_err()
                .to_string()
                .contains("at least 1")
        );
    }
    assert!(FlowMatchEuler::default().schedule_of(&[], 64).is_err());
}

#[test]
fn a_step_follows_the_velocity() {
    let case = Case::read(&folder("qwenimage21_scheduler").join("schedules.safetensors"));
    let schedule = {
        let config: FlowMatchEuler =
            serde_json::from_value(case.meta["configs"]["qwenimage"].clone()).unwrap();
        config.schedule(4, 24).unwrap()
    };
    assert!(max_error(schedule.sigmas(), &case.get("out.euler.sigmas").f32) <= TOLERANCE);
    let mut latents = case.get("in.euler.latents").f32.clone();
    let velocities = &case.get("in.euler.velocity").f32;
    let recorded = &case.get("out.euler.latents").f32;
    for step in 0..4 {
        let part = step * latents.len()..(step + 1) * latents.len();
        schedule.euler_step(step, &mut latents, &velocities[part.clone()]);
        assert!(max_error(&latents, &recorded[part]) <= 2e-6, "step {step}");
    }
}
