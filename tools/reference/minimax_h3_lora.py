"""LoRAs for the transformer of `minimax_h3_transformer` in the styles of three programs, and what it predicts with them.

All are read by diffusers' own conversions and merged into the weights here. DiffSynth-Studio's has the rows of queries, keys and values
head by head, which diffusers undoes for heads of 128 channels alone; so that is done here.
"""

from common import normal, write_tensors

import json

import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_minimax_h3_lora_to_diffusers as to_diffusers
from safetensors.torch import save

import minimax_h3_transformer as base

CASE = "t2va"
# How many times each is added.
STRENGTHS = {"diffusers": 0.8, "musubi": -0.5, "diffsynth": 1.25}
ALPHA = 3.0


def factors(seed, rank, output, inner):
    down = normal(seed, rank, inner) / inner**0.5
    up = 0.6 * normal(seed + 1, output, rank) / rank**0.5
    return down, up


def sides(model, module):
    """Rows and columns of the matrix that the authors call `module`."""
    names = {name.removesuffix(".weight"): value.shape for name, value in model.items()}
    return names[module]


def published(state):
    return base.single(state, base.CONFIG["num_attention_heads"], False)


def stacked(name, value):
    """Rows of `qkv_proj` in DiffSynth's order in everybody else's."""
    if "qkv_proj.lora_B.default" not in name:
        return value.clone()
    heads = base.CONFIG["num_attention_heads"]
    return value.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def musubi(state):
    modules = ["blocks.0.attn.qkv_proj", "blocks.1.mlp.fc1", "blocks.2.mlp.fc2", "blocks.0.adaln_proj.linear"]
    modules += ["token_refiner.blocks.1.attn.out_proj", "final_layer.video_out", "condition_proj", "audio_patch_proj"]
    tensors = {}
    for number, module in enumerate(modules):
        down, up = factors(8000 + 10 * number, 3, *sides(published(state), module))
        flat = "lora_unet_" + module.replace(".", "_")
        tensors |= {f"{flat}.lora_down.weight": down, f"{flat}.lora_up.weight": up, f"{flat}.alpha": torch.tensor(1.5)}
    return tensors


def diffsynth(state):
    tensors = {}
    for number, module in enumerate(["blocks.1.attn.qkv_proj", "token_refiner.blocks.0.attn.qkv_proj", "blocks.2.attn.out_proj"]):
        down, up = factors(8200 + 10 * number, 4, *sides(published(state), module))
        tensors |= {f"{module}.lora_A.default.weight": down, f"{module}.lora_B.default.weight": up}
    return tensors


def diffusers(state):
    tensors = {}
    modules = ["transformer_blocks.0.attn.to_q", "transformer_blocks.2.ff.net.0.proj", "time_embedder.linear_2", "norm_out.linear"]
    for number, module in enumerate(modules):
        down, up = factors(8400 + 10 * number, 2, *state[f"{module}.weight"].shape)
        tensors |= {f"transformer.{module}.lora_A.weight": down, f"transformer.{module}.lora_B.weight": up}
    return tensors


def main(out):
    folder = out / "minimax_h3_lora"
    folder.mkdir(parents=True, exist_ok=True)
    state = base.make().state_dict()
    files = {"musubi": musubi(state), "diffsynth": diffsynth(state)}
    additions = {}
    for style, tensors in files.items():
        write_tensors(folder / f"{style}.safetensors", tensors, {})
        read = to_diffusers({name.replace(".default.", "."): stacked(name, value) for name, value in tensors.items()})
        read = {name.removeprefix("transformer."): value for name, value in read.items()}
        modules = {name.split(".lora_")[0] for name in read}
        additions[style] = {m: read[f"{m}.lora_B.weight"] @ read[f"{m}.lora_A.weight"] for m in sorted(modules)}
    tensors = diffusers(state)
    metadata = {"transformer.lora_alpha": ALPHA, "transformer.r": 2}
    file = save(tensors, metadata={"lora_adapter_metadata": json.dumps(metadata)})
    (folder / "diffusers.safetensors").write_bytes(file)
    names = sorted({name.split(".lora_")[0] for name in tensors})
    product = lambda m: ALPHA / 2 * tensors[f"{m}.lora_B.weight"] @ tensors[f"{m}.lora_A.weight"]
    additions["diffusers"] = {m.removeprefix("transformer."): product(m) for m in names}

    def predict(styles):
        model = base.make()
        for style in styles:
            for module, delta in additions[style].items():
                model.get_submodule(module).weight.add_(STRENGTHS[style] * delta)
        _, outputs, _ = base.run(model, base.CASES[CASE], base.CONFIG)
        return outputs["sample"]

    outputs = {"none": predict([])} | {style: predict([style]) for style in STRENGTHS} | {"all": predict(STRENGTHS)}
    write_tensors(folder / "outputs.safetensors", outputs, dict(case=CASE, strengths=STRENGTHS))
    for name, sample in outputs.items():
        print(f"  {name}: moved by {(sample - outputs['none']).norm() / outputs['none'].norm():.3f}")
