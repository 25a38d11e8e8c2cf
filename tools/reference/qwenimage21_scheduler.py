"""FlowMatchEulerDiscreteScheduler as the Qwen-Image 2.1 pipeline calls it: one file with many schedules, and Euler steps."""

from common import normal, write_tensors

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_shift, retrieve_timesteps

CONFIGS = {
    "qwenimage": dict(
        base_image_seq_len=256,
        base_shift=0.5,
        invert_sigmas=False,
        max_image_seq_len=8192,
        max_shift=0.9,
        num_train_timesteps=1000,
        shift=1.0,
        shift_terminal=0.02,
        time_shift_type="exponential",
        use_dynamic_shifting=True,
    ),
    "defaults_dynamic": dict(use_dynamic_shifting=True),
    "linear": dict(use_dynamic_shifting=True, time_shift_type="linear"),
    "static": dict(shift=3.0),
    "static_terminal": dict(shift=3.0, shift_terminal=0.1),
    "turbo": dict(use_dynamic_shifting=False, shift_terminal=None),
}
TURBO_SIGMAS = [1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568]
TOKENS = [4, 24, 256, 1024, 4096, 8192, 16384]
STEPS = [1, 2, 4, 20, 40]


def schedule(config, tokens, steps, sigmas=None):
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    c = scheduler.config
    mu = calculate_shift(tokens, c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)
    if sigmas is None:
        sigmas = np.linspace(1.0, 1 / steps, steps)
    retrieve_timesteps(scheduler, steps, "cpu", sigmas=sigmas, mu=mu)
    return scheduler, mu


def main(out):
    tensors, cases = {}, {}

    def add(name, config, tokens, steps, sigmas=None):
        scheduler, mu = schedule(CONFIGS[config], tokens, steps, sigmas)
        tensors[f"out.{name}.sigmas"], tensors[f"out.{name}.timesteps"] = scheduler.sigmas, scheduler.timesteps
        cases[name] = dict(config=config, tokens=tokens, steps=steps, mu=mu)
        if sigmas is not None:
            cases[name]["sample_sigmas"] = sigmas
        return scheduler

    for config, values in CONFIGS.items():
        dynamic = values.get("use_dynamic_shifting", False)
        for tokens in TOKENS if dynamic else TOKENS[:1]:
            for steps in STEPS:
                # One step and a terminal shift is a division of zero by zero: the library's sigma is not a number.
                if not (steps == 1 and values.get("shift_terminal")):
                    add(f"{config}.tokens{tokens}.steps{steps}", config, tokens, steps)
    add("turbo.sample_sigmas", "turbo", 4096, len(TURBO_SIGMAS), TURBO_SIGMAS)
    add("qwenimage.sample_sigmas", "qwenimage", 4096, len(TURBO_SIGMAS), TURBO_SIGMAS)

    scheduler = add("euler", "qwenimage", 24, 4)
    scheduler.set_begin_index(0)
    x = normal(301, 1, 24, 16)
    tensors["in.euler.latents"] = x
    tensors["in.euler.velocity"] = normal(302, 4, 1, 24, 16)
    latents = []
    for velocity, t in zip(tensors["in.euler.velocity"], scheduler.timesteps):
        x = scheduler.step(velocity, t, x, return_dict=False)[0]
        latents.append(x)
    tensors["out.euler.latents"] = torch.stack(latents)
    write_tensors(out / "qwenimage21_scheduler" / "schedules.safetensors", tensors, dict(configs=CONFIGS, cases=cases))
