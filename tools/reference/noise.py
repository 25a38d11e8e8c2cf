"""torch's CPU random numbers in float32, as the pipeline draws its initial noise.

The values are those of torch's AVX2 kernel, which the AVX-512 build gives too. The scalar kernel differs in the last bits
of some values; how much is measured here and written to the file's `meta`.
"""

from common import write_tensors

import os
import subprocess
import sys
import tempfile

import torch
from diffusers.utils.torch_utils import randn_tensor
from safetensors.torch import load_file, save_file

SEEDS = [0, 1, 42, 2**32 + 5, 2**63 - 1]
# Whole tensors.
SMALL = [(4,), (15,), (16,), (17,), (30,), (1, 1, 16, 8, 8), (1, 1, 16, 6, 10)]
# The first and last 16 values: a 1024x1024 picture with the published 64 channels.
LARGE = (1, 1, 64, 64, 64)


def name(seed, shape):
    return f"out.seed{seed}.{'x'.join(map(str, shape))}"


def draw():
    tensors = {}
    for seed in SEEDS:
        for shape in [*SMALL, LARGE]:
            x = randn_tensor(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32)
            if shape == LARGE:
                x = x.flatten()
                tensors[name(seed, shape) + ".first"], tensors[name(seed, shape) + ".last"] = x[:16], x[-16:]
            else:
                tensors[name(seed, shape)] = x
    return tensors


def draw_with(capability):
    """The same tensors from another process, since torch chooses its kernels once; None where the processor lacks them."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "noise.safetensors")
        env = os.environ | {"ATEN_CPU_CAPABILITY": capability}
        subprocess.run([sys.executable, __file__, path, capability], env=env, check=True)
        return load_file(path) if os.path.exists(path) else None


def main(out):
    tensors = draw()
    scalar, wide = draw_with("default"), draw_with("avx512")
    assert wide is None or all(torch.equal(wide[k], v) for k, v in tensors.items())
    difference = max(float((scalar[k] - v).abs().max()) for k, v in tensors.items())
    assert all(torch.equal(scalar[k], v) for k, v in tensors.items() if v.numel() < 16 and "x64x" not in k)
    assert difference < 1e-5, difference
    meta = dict(
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        seeds=[str(s) for s in SEEDS],
        scalar_kernel_largest_difference_below=1e-5,
    )
    write_tensors(out / "noise" / "randn.safetensors", tensors, meta)


if __name__ == "__main__":
    if torch.backends.cpu.get_cpu_capability().lower() == sys.argv[2]:
        save_file({k: v.contiguous().clone() for k, v in draw().items()}, sys.argv[1])
