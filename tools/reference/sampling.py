"""Samplers and spacings of noise levels for flow-matching models: steps of each sampler under given velocities, and schedules.

diffusers where it has the sampler or the spacing. It has no RES multistep solver and not the two spacings that come from
k-diffusion's users, so those are computed here in float64: the solver by quadrature of its integral, not by its closed form.
"""

from common import normal, write_tensors

import math
import types

import mpmath
import numpy as np
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_shift, retrieve_timesteps
from diffusers.schedulers import scheduling_flow_match_euler_discrete as flow_match
from qwenimage21_scheduler import CONFIGS

# Noise levels without the final 0: a model's own, such as people type, and close to each other.
LEVELS = {
    "qwen6": [1.0, 0.8720, 0.7192, 0.5337, 0.3038, 0.02],
    "typed": [0.95, 0.9, 0.6, 0.55, 0.2, 0.1, 0.04],
    "dense": [1.0] + [1.0 - 0.001 * k for k in range(1, 8)],
    "two": [1.0, 0.5],
    "one": [1.0],
}
SHAPE = (1, 8, 4)


def beta_quantile(p, a, b):
    """scipy.stats.beta.ppf by bisection in 30 digits."""
    mpmath.mp.dps = 30
    low, high = mpmath.mpf(0), mpmath.mpf(1)
    for _ in range(80):
        middle = (low + high) / 2
        if mpmath.betainc(a, b, 0, middle, regularized=True) < p:
            low = middle
        else:
            high = middle
    return float((low + high) / 2)


def flow_heun(levels):
    scheduler = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(len(levels))
    sigmas = torch.tensor(levels, dtype=torch.float32)
    timesteps = sigmas * 1000
    scheduler.timesteps = torch.cat([timesteps[:1], timesteps[1:].repeat_interleave(2)])
    scheduler.sigmas = torch.cat([sigmas[:1], sigmas[1:].repeat_interleave(2), torch.zeros(1)])
    return scheduler


def flow_dpm(levels):
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++", prediction_type="flow_prediction", use_flow_sigmas=True
    )
    scheduler.set_timesteps(len(levels))
    scheduler.sigmas = torch.tensor([*levels, 0.0], dtype=torch.float32)
    scheduler.timesteps = scheduler.sigmas[:-1] * 1000
    return scheduler


def flow_unipc(levels):
    """In double precision: one level is 1e-6 below 1, and single precision would keep one digit of that."""
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    scheduler.set_timesteps(sigmas=np.array(levels))
    sigmas = torch.tensor([*levels, 0.0], dtype=torch.float32).double()
    sigmas[0] -= 1e-6 * (sigmas[0] == 1)
    scheduler.sigmas = sigmas
    return scheduler


def flow_euler(levels):
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=levels)
    return scheduler


SAMPLERS = {"euler": flow_euler, "heun": flow_heun, "dpm++_2m": flow_dpm, "unipc": flow_unipc}


def steps_of(scheduler, x, velocities):
    """The latents after each call of the model."""
    scheduler.set_begin_index(0)
    after = []
    x, velocities = x.to(scheduler.sigmas.dtype), velocities.to(scheduler.sigmas.dtype)
    for velocity, t in zip(velocities, scheduler.timesteps):
        x = scheduler.step(velocity, t, x, return_dict=False)[0]
        after.append(x)
    return torch.stack(after).float()


def res_multistep(levels, x, velocities):
    """Zhang and others, Improved Order Analysis and Design of Exponential Integrator for Diffusion Models Sampling (2023).

    With t = -log(sigma), dx/dt = D - x. Between two levels D is the straight line through its last two values, and the
    integral of exp(-(t_next - t)) D(t) is taken by Gauss and Legendre. The last step, to where t is infinite, is D.
    """
    nodes, weights = np.polynomial.legendre.leggauss(40)
    x, after = x.double(), []
    before = None
    for i, sigma in enumerate(levels):
        sigma = float(np.float32(sigma))
        denoised = x - sigma * velocities[i].double()
        if i + 1 == len(levels):
            x = denoised
        else:
            t, t_next = -math.log(sigma), -math.log(float(np.float32(levels[i + 1])))
            at = t + (t_next - t) * (nodes + 1) / 2
            w = weights * (t_next - t) / 2 * np.exp(at - t_next)
            line = w.sum() * denoised
            if before is not None:
                t_before, denoised_before = before
                slope = (denoised - denoised_before) / (t - t_before)
                line = line + (w * (at - t)).sum() * slope
            x = math.exp(t - t_next) * x + line
            before = t, denoised
        after.append(x)
    return torch.stack(after).float()


def bend(t, config, mu):
    t = np.asarray(t, dtype=np.float64)
    if not config.get("use_dynamic_shifting"):
        shift = config.get("shift", 1.0)
        return shift * t / (1 + (shift - 1) * t)
    top = math.exp(mu) if config.get("time_shift_type", "exponential") == "exponential" else mu
    return top / (top + 1 / t - 1)


def simple(n, config, mu):
    """Every so manieth of a table of 1000 levels, from the top."""
    return bend([(1000 - int(i * (1000 / n))) / 1000 for i in range(n)], config, mu)


def sgm_uniform(n, config, mu):
    """Evenly spaced down to the table's last level, which is left out."""
    return bend(np.linspace(1.0, float(bend(0.001, config, mu)), n + 1)[:-1], config, mu)


def converted(n, config, mu, name):
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    # scipy, which the library asks for the beta distribution, is not needed for anything else.
    flow_match.scipy = types.SimpleNamespace(stats=types.SimpleNamespace(beta=types.SimpleNamespace(ppf=beta_quantile)))
    scheduler.register_to_config(**{f"use_{name}_sigmas": True})
    retrieve_timesteps(scheduler, n, "cpu", sigmas=np.linspace(1.0, 1 / n, n), mu=mu)
    return scheduler.sigmas[:-1].numpy()


def main(out):
    tensors, cases = {}, {}
    for name, levels in LEVELS.items():
        x = normal(401, *SHAPE)
        velocities = normal(402, 2 * len(levels), *SHAPE)
        tensors[f"in.{name}.sigmas"] = torch.tensor([*levels, 0.0], dtype=torch.float32)
        tensors[f"in.{name}.latents"], tensors[f"in.{name}.velocities"] = x, velocities
        for sampler, scheduler in SAMPLERS.items():
            tensors[f"out.{name}.{sampler}"] = steps_of(scheduler(levels), x, velocities)
        tensors[f"out.{name}.res_multistep"] = res_multistep(levels, x, velocities)
    for config_name in ["qwenimage", "static", "linear"]:
        config = CONFIGS[config_name]
        c = FlowMatchEulerDiscreteScheduler(**config).config
        for tokens in [64, 4096] if config.get("use_dynamic_shifting") else [64]:
            mu = calculate_shift(tokens, c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)
            for n in [2, 7, 20]:
                found = {"simple": simple(n, config, mu), "sgm_uniform": sgm_uniform(n, config, mu)}
                found |= {s: converted(n, config, mu, s) for s in ["karras", "exponential", "beta"]}
                for spacing, sigmas in found.items():
                    name = f"{spacing}.{config_name}.tokens{tokens}.steps{n}"
                    tensors[f"out.schedule.{name}"] = torch.tensor([*sigmas, 0.0], dtype=torch.float32)
                    cases[name] = dict(spacing=spacing, config=config_name, tokens=tokens, steps=n)
    configs = {name: CONFIGS[name] for name in ["qwenimage", "static", "linear"]}
    write_tensors(out / "sampling" / "sampling.safetensors", tensors, dict(configs=configs, schedules=cases))
