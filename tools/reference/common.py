"""What every fixture script shares: a pinned environment, seeded weights, files with fixed bytes.

Import this module before torch: it chooses the CPU kernels, which decide the last bits of every result.
"""

import os

# AVX2 kernels on every x86-64 machine: torch's random numbers and functions differ in their last bits between the scalar,
# AVX2 and AVX-512 kernels, and MKL's sums between processors.
os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import json
import math
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import torch
from safetensors.torch import save

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
torch.set_grad_enabled(False)
torch.backends.mkldnn.enabled = os.environ.get("REFERENCE_ONEDNN", "0") == "1"

REPOSITORY = Path(__file__).resolve().parents[2]
TINY_MODEL = REPOSITORY / "models" / "tiny-qwen-image-2.1"


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(seed, *shape):
    return torch.randn(*shape, generator=generator(seed))


def randomize(model, seed, zero_centered=()):
    """Seed every parameter so that none is neutral: no norm weight of exactly one, no bias of exactly zero."""
    g = generator(seed)
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        r = torch.randn(parameter.shape, generator=g)
        if any(part in name for part in zero_centered):
            value = 0.3 * r
        elif leaf == "bias":
            value = 0.1 * r
        elif leaf == "gamma" or parameter.ndim == 1:
            value = 1 + 0.25 * r
        elif name.endswith("embed_tokens.weight"):
            value = 0.5 * r
        else:
            value = r / math.sqrt(parameter[0].numel())
        parameter.copy_(value)
    return model.eval()


def write_json(path, value, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, **(how or {"indent": 1})) + "\n")


def write_tensors(path, tensors, meta):
    """One safetensors file; `meta` is JSON under the header's key `meta`."""
    flat = {}
    for name, value in tensors.items():
        value = value.detach()
        if value.dtype == torch.bool:
            value = value.to(torch.uint8)
        elif value.dtype == torch.int64:
            value = value.to(torch.int32)
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(f"{path.name}: {name} is not finite")
        flat[name] = value.clone().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save(flat, metadata={"meta": json.dumps(meta, separators=(",", ":"))}))


def write_case(folder, name, inputs, outputs, meta=None):
    """`case_NAME.safetensors`: tensors `in.*` and `out.*`, integers as I32, booleans as U8."""
    tensors = {f"in.{k}": v for k, v in inputs.items() if v is not None} | {f"out.{k}": v for k, v in outputs.items()}
    write_tensors(folder / f"case_{name}.safetensors", tensors, meta or {})


def write_model(folder, model, config=None, keep=lambda name: True):
    """`config.json` and `model.safetensors` (F32, the library's own tensor names)."""
    if config is None:
        config = {k: v for k, v in model.config.items() if not k.startswith("_")}
    config = {"_class_name": type(model).__name__} | config
    write_json(folder / "config.json", config, indent=1, sort_keys=True)
    state = {k: v for k, v in model.state_dict().items() if keep(k)}
    assert all(v.dtype == torch.float32 for v in state.values())
    write_tensors(folder / "model.safetensors", state, {})


class Taps:
    """The outputs of named submodules while a `with` block runs; `pick` may cut the frame axis."""

    def __init__(self, model, names, pick=lambda o: o):
        self.modules = dict(model.named_modules())
        self.names, self.pick = names, pick
        self.outputs, self.handles = {}, []

    def __enter__(self):
        for name in self.names:
            self.handles.append(self.modules[name].register_forward_hook(self.hook(name)))
        return self

    def hook(self, name):
        def keep(module, args, output):
            self.outputs[f"tap.{name}"] = self.pick(output[0] if isinstance(output, tuple) else output).clone()

        return keep

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()
