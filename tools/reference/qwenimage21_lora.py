"""LoRAs for the transformer of `qwenimage21_transformer`, in the styles of three programs, and what it predicts with them.

`diffusers.safetensors` is written by diffusers and added by peft at run time; the other two are merged into the weights here.
"""

from common import normal, write_tensors

import tempfile
from pathlib import Path

import torch
from diffusers import QwenImage21Pipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save

import qwenimage21_transformer as base

CASE = "t2i"
# How many times each is added.
STRENGTHS = {"diffusers": 0.8, "kohya": -0.5, "comfyui": 1.25}
TARGETS = ["to_q", "to_v", "to_out.0", "gate_layer", "proj", "img_in", "proj_out", "txt_in.in_layer", "modulation.1"]


def factors(seed, rank, output, inner):
    """Down and up, large enough to change the result by about as much as it is."""
    down = normal(seed, rank, inner) / inner**0.5
    up = 0.6 * normal(seed + 1, output, rank) / rank**0.5
    return down, up


def diffusers_file(path):
    """A LoRA as diffusers saves one: `transformer.MODULE.lora_A.weight`, its alpha in the metadata."""
    model = base.make()
    config = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, alpha_pattern={"transformer_blocks.1.attn.to_q": 3})
    model.add_adapter(config)
    names = sorted(name for name, _ in model.named_parameters() if ".lora_A." in name)
    parameters = dict(model.named_parameters())
    for number, name in enumerate(names):
        down, up = parameters[name], parameters[name.replace("lora_A", "lora_B")]
        new = factors(5000 + 10 * number, down.shape[0], up.shape[0], down.shape[1])
        down.data.copy_(new[0])
        up.data.copy_(new[1])
    settings = model.peft_config["default"].to_dict()
    # A set, whose order differs from run to run.
    settings["target_modules"] = sorted(settings["target_modules"])
    with tempfile.TemporaryDirectory() as folder:
        QwenImage21Pipeline.save_lora_weights(
            folder,
            transformer_lora_layers=get_peft_model_state_dict(model),
            transformer_lora_adapter_metadata=settings,
        )
        (file,) = Path(folder).glob("*.safetensors")
        with safe_open(file, "pt") as saved:
            tensors = {name: saved.get_tensor(name) for name in saved.keys()}
            # One entry of two, since their order differs from run to run too.
            key = "lora_adapter_metadata"
            metadata = {key: saved.metadata()[key]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save(tensors, metadata=metadata))
    return len(names)


def kohya_file(model, path):
    """`lora_unet_MODULE_WITH_UNDERSCORES.lora_down.weight`, with alphas: half the rank for some, none for others."""
    tensors, additions = {}, []
    modules = ["transformer_blocks.0.attn.to_k", "transformer_blocks.2.img_mlp.gate_layer", "norm_out.linear"]
    modules.append("time_text_embed.timestep_embedder.linear_2")
    for number, name in enumerate(modules):
        output, inner = model.get_submodule(name).weight.shape
        down, up = factors(6000 + 10 * number, 3, output, inner)
        flat = "lora_unet_" + name.replace(".", "_")
        tensors |= {f"{flat}.lora_down.weight": down, f"{flat}.lora_up.weight": up}
        scale = 1.0
        if number % 2 == 0:
            tensors[f"{flat}.alpha"] = torch.tensor(1.5)
            scale = 1.5 / 3
        additions.append((name, scale * up @ down))
    write_tensors(path, tensors, {})
    return additions


def comfyui_file(model, path):
    """`diffusion_model.MODULE.lora_A.weight` for a model that keeps gate and up projection as one matrix, the gate's rows first."""
    tensors, additions = {}, []
    for block in range(2):
        name = f"transformer_blocks.{block}.img_mlp"
        rows, inner = model.get_submodule(f"{name}.gate_layer").weight.shape
        down, up = factors(7000 + 10 * block, 2, 2 * rows, inner)
        key = f"diffusion_model.{name}.gate_up"
        tensors |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up, f"{key}.alpha": torch.tensor(4.0)}
        delta = 4.0 / 2 * up @ down
        additions += [(f"{name}.gate_layer", delta[:rows]), (f"{name}.proj", delta[rows:])]
    write_tensors(path, tensors, {})
    return additions


def main(out):
    folder = out / "qwenimage21_lora"
    diffusers_file(folder / "diffusers.safetensors")
    case = base.CASES[CASE]
    inputs = base.inputs(case)
    predict = lambda model: model(**inputs, img_shapes=[case["shapes"]]).sample

    merged = base.make()
    additions = {
        "kohya": kohya_file(merged, folder / "kohya.safetensors"),
        "comfyui": comfyui_file(merged, folder / "comfyui.safetensors"),
    }
    outputs = {"none": predict(merged)}
    with_adapter = base.make()
    state, metadata = QwenImage21Pipeline.lora_state_dict(folder / "diffusers.safetensors", return_lora_metadata=True)
    with_adapter.load_lora_adapter(state, prefix="transformer", metadata=metadata)
    with_adapter.set_adapters("default_0", STRENGTHS["diffusers"])
    outputs["diffusers"] = predict(with_adapter)
    for style, added in additions.items():
        model = base.make()
        for name, delta in added:
            model.get_submodule(name).weight.add_(STRENGTHS[style] * delta)
        outputs[style] = predict(model)
    # All three together, on the modules that peft has wrapped and those that it has not.
    for style, added in additions.items():
        for name, delta in added:
            module = with_adapter.get_submodule(name)
            getattr(module, "base_layer", module).weight.add_(STRENGTHS[style] * delta)
    outputs["all"] = predict(with_adapter)
    meta = {"case": CASE, "strengths": STRENGTHS}
    write_tensors(folder / "outputs.safetensors", outputs, meta)
    for name, sample in outputs.items():
        print(f"  {name}: moved by {(sample - outputs['none']).norm() / outputs['none'].norm():.3f}")
