//! A call of the transformer for each condition, and what is kept of conditions between calls.

use sd_backend::{Backend, DType, Device};
use sd_graph::{Cancel, Graph, Plan, Progress, Reporter, RunnerCache};

use super::condition::Condition;
use super::layout::{Layout, Segment};
use super::model::QwenImage21;
use super::prefix::{Prefix, PrefixCache, PrefixKey};
use super::transformer::{Transformer, timestep_embedding};
use crate::canvas::Canvas;
use crate::error::Result;

/// One call of the transformer for each condition.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// The picture.
    pub canvas: Canvas,
    /// From 0 to 1.
    pub timestep: f32,
    /// The type in which keys and values of the prefix are kept with their conditions, if they are.
    pub prefix: Option<DType>,
}

/// What one call of the transformer for each condition took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepReport {
    /// Bytes of weights that were moved, of those that come and go.
    pub weight_bytes: u64,
    /// Conditions whose keys and values were stored.
    pub stored: usize,
    /// Conditions whose keys and values were read.
    pub read: usize,
    /// Whether something was stored that turned out to be incomplete, and was given up.
    pub is_incomplete: bool,
}

/// What a plan of the transformer is for: a layout, a pass where several run together, and what becomes of the prefix.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Call {
    layout: Layout,
    pass: usize,
    prefix: Prefix,
}

impl QwenImage21 {
    /// The velocity `[height * width, channels]` that the transformer predicts for latents of `canvas` at `timestep` (from
    /// 0 to 1) under `condition`.
    ///
    /// # Errors
    /// The engine's.
    pub fn velocity(
        &mut self,
        backend: &mut Backend,
        condition: &Condition,
        latents: &[f32],
        canvas: impl Into<Canvas>,
        timestep: f32,
        cancel: &Cancel,
    ) -> Result<Vec<f32>> {
        let step = Step {
            canvas: canvas.into(),
            timestep,
            prefix: None,
        };
        let quiet = &mut |_: &Progress| {};
        let (mut velocities, _) =
            self.velocities(backend, &[condition], latents, step, cancel, quiet)?;
        Ok(velocities.pop().unwrap_or_default())
    }

    /// As [`QwenImage21::velocity`] for each of `conditions`, and what it took. Weights that come and go do so once for all
    /// conditions; `progress` hears of those that are loaded to stay, and of
    /// segments.
    ///
    /// Where `step` says so, the first call for a condition keeps the keys and values of its tokens with it, and later ones
    /// compute the picture's alone, until [`QwenImage21::release_prefix`].
    ///
    /// # Errors
    /// The engine's.
    pub fn velocities(
        &mut self,
        backend: &mut Backend,
        conditions: &[&Condition],
        latents: &[f32],
        step: Step,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<(Vec<Vec<f32>>, StepReport)> {
        let is_streamed = self.transformer.weights.is_streamed();
        let mut calls: Vec<(Call, RunnerCache)> = conditions
            .iter()
            .enumerate()
            .map(|(pass, condition)| {
                let layout = layout_of(&condition.segments, step.canvas);
                let (prefix, cache) = self.prefix_of(condition, &layout, backend.device(), step);
                let pass = if is_streamed { pass } else { 0 };
                (
                    Call {
                        layout,
                        pass,
                        prefix,
                    },
                    cache,
                )
            })
            .collect();
        let stores = |call: &Call| matches!(call.prefix, Prefix::Store(_));
        let is_storing = calls.iter().any(|(call, _)| stores(call));
        if let Some(dtype) = step.prefix.filter(|_| is_streamed && is_storing) {
            // Weights that come and go are laid out for graphs of one kind.
            for (call, _) in &mut calls {
                if let Prefix::Read(_) = call.prefix {
                    call.prefix = Prefix::Store(dtype);
                }
            }
        }

        let module = &self.transformer.module;
        let graph =
            |call: &Call, g: Graph<'_>| transformer_graph(g, module, &call.layout, call.prefix);
        let mut report = StepReport::default();
        let mut velocities = Vec::with_capacity(calls.len());
        if is_streamed {
            let keys: Vec<Call> = calls.iter().map(|(call, _)| call.clone()).collect();
            let plans = &mut self.transformer_plans;
            plans.get_or_build_all(&keys, backend, cancel, progress, graph)?;
            if !is_storing {
                // Only now: what they share with plans that read is loaded.
                plans.retain(|call| !stores(call));
            }
            let mut plans = plans.get_or_build_all(&keys, backend, cancel, progress, graph)?;
            for ((plan, condition), (call, cache)) in plans.iter_mut().zip(conditions).zip(&calls) {
                set_inputs(plan, call, condition, latents, step.timestep, cache)?;
            }
            let run = Plan::run_together(&mut plans, backend, cancel, progress)?;
            report.weight_bytes = run.weight_bytes;
            for plan in plans {
                velocities.push(plan.read("velocity")?);
            }
        } else {
            for (condition, (call, cache)) in conditions.iter().zip(&calls) {
                if !is_storing {
                    // They have done what they are for, and what they compute in is needed now.
                    self.transformer_plans.retain(|call| !stores(call));
                }
                let plan = self.transformer_plans.get_or_build_with(
                    call.clone(),
                    backend,
                    cancel,
                    progress,
                    |g| graph(call, g),
                )?;
                set_inputs(plan, call, condition, latents, step.timestep, cache)?;
                plan.run_with(backend, cancel, progress)?;
                velocities.push(plan.read("velocity")?);
            }
        }
        for (condition, (call, cache)) in conditions.iter().zip(&calls) {
            match call.prefix {
                Prefix::Compute => {}
                Prefix::Read(_) => report.read += 1,
                Prefix::Store(dtype) if self.is_complete(cache, &call.layout, dtype) => {
                    report.stored += 1;
                }
                Prefix::Store(_) => {
                    report.is_incomplete = true;
                    condition.prefixes.release(Some(&self.identity));
                }
            }
        }
        Ok((velocities, report))
    }

    /// What a call does about keys and values of `condition`, and the cache for it.
    fn prefix_of(
        &mut self,
        condition: &Condition,
        layout: &Layout,
        device: Device,
        step: Step,
    ) -> (Prefix, RunnerCache) {
        let is_fixed = self.transformer.module.has_fixed_prefix(layout);
        let Some(dtype) = step.prefix.filter(|_| is_fixed) else {
            return (Prefix::Compute, RunnerCache::new());
        };
        self.keepers.retain(|known| known.upgrade().is_some());
        let mut known = self.keepers.iter();
        if !known.any(|known| known.is_of(&condition.prefixes)) {
            self.keepers.push(condition.prefixes.downgrade());
        }
        let cache = condition.prefixes.cache(&PrefixKey {
            model: self.identity.clone(),
            device,
            circular: step.canvas.circular,
            dtype,
        });
        match self.is_complete(&cache, layout, dtype) {
            true => (Prefix::Read(dtype), cache),
            false => (Prefix::Store(dtype), cache),
        }
    }

    /// Whether a cache holds keys and values of every block, as they should be.
    fn is_complete(&self, cache: &RunnerCache, layout: &Layout, dtype: DType) -> bool {
        let module = &self.transformer.module;
        let entries = module.prefix_entries(layout.prefix_tokens(), dtype);
        entries.iter().all(|entry| cache.holds(entry))
    }

    /// The type in which keys and values of the prefix can be kept: where rows are no whole blocks of Q8_0, F16.
    pub fn prefix_type(&self, wanted: PrefixCache) -> Option<DType> {
        let dtype = wanted.dtype()?;
        let channels = self.transformer.module.config().attention_head_dim;
        Some(match dtype.row_bytes(channels) {
            Some(_) => dtype,
            None => DType::F16,
        })
    }

    /// Gives up what this model has kept with `condition`.
    pub fn release_prefix(&self, condition: &Condition) {
        condition.prefixes.release(Some(&self.identity));
    }

    /// Gives up what this model has kept with any condition, and says whether that was anything.
    pub fn drop_prefixes(&mut self) -> bool {
        self.drop_other_prefixes(&[])
    }

    /// As [`QwenImage21::drop_prefixes`] for all conditions but these.
    pub(crate) fn drop_other_prefixes(&mut self, but: &[&Condition]) -> bool {
        let mut had_any = false;
        for keeper in &self.keepers {
            let is_spared = but
                .iter()
                .any(|condition| keeper.is_of(&condition.prefixes));
            if let Some(prefixes) = keeper.upgrade().filter(|_| !is_spared) {
                had_any |= prefixes.release(Some(&self.identity));
            }
        }
        had_any
    }
}

pub(super) fn layout_of(prompt: &[Segment], canvas: Canvas) -> Layout {
    Layout::new(prompt.to_vec(), canvas.height, canvas.width).circular(canvas.circular)
}

pub(super) fn transformer_graph(
    g: Graph<'_>,
    module: &Transformer,
    layout: &Layout,
    prefix: Prefix,
) {
    let config = module.config();
    let is_read = matches!(prefix, Prefix::Read(_));
    let pixels = match is_read {
        true => layout.target_tokens(),
        false => layout.image_tokens(),
    };
    let latents = g.input::<f32>("latents", [pixels, config.in_channels]);
    let text = || g.input::<f32>("text", [layout.text_tokens(), config.context_in_dim]);
    let text = (!is_read).then(text);
    let timestep = g.input::<f32>("timestep", [2, timestep_embedding(0.0).len()]);
    let velocity = module.forward_with(g, layout, latents, text, timestep, prefix);
    g.output("velocity", velocity);
}

/// Gives the plan of a transformer what it is asked for.
fn set_inputs(
    plan: &mut Plan,
    call: &Call,
    condition: &Condition,
    latents: &[f32],
    timestep: f32,
    cache: &RunnerCache,
) -> Result<()> {
    let references = condition.references.0.iter();
    match call.prefix {
        Prefix::Read(_) => plan.set("latents", latents)?,
        Prefix::Compute | Prefix::Store(_) => {
            let before = references.flat_map(|reference| &reference.latents);
            let joint: Vec<f32> = before.chain(latents).copied().collect();
            plan.set("latents", &joint)?;
            plan.set("text", &condition.hidden)?;
        }
    }
    if call.prefix != Prefix::Compute {
        plan.attach(cache)?;
    }
    let timesteps = [timestep_embedding(timestep), timestep_embedding(0.0)];
    Ok(plan.set("timestep", timesteps.as_flattened())?)
}
