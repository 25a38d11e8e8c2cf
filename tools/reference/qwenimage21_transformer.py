"""QwenImage21Transformer2DModel with random weights: every layout of the joint sequence."""

from common import Taps, normal, randomize, write_case, write_model

import math

import torch
from diffusers import QwenImage21Transformer2DModel

CONFIG = dict(
    patch_size=1,
    in_channels=16,
    out_channels=20,
    num_layers=3,
    attention_head_dim=32,
    num_attention_heads=3,
    context_in_dim=64,
    mlp_ratio=2,
    axes_dims_rope=(8, 10, 14),
    eps=1e-6,
    causal_condition=True,
)
# `prompt` is what the text encoder saw: "t" and a number of text tokens, or "i" and the index of a reference picture.
# `shapes` are latent grids (frames, height, width), references first, the target last.
CASES = {
    "t2i": dict(seed=10, prompt=[("t", 7)], shapes=[(1, 4, 6)]),
    "t2i_odd_height": dict(seed=20, prompt=[("t", 5)], shapes=[(1, 3, 4)]),
    "t2i_odd_width": dict(seed=25, prompt=[("t", 6)], shapes=[(1, 4, 7)]),
    "t2i_one_token": dict(seed=80, prompt=[("t", 1)], shapes=[(1, 2, 4)]),
    "t2i_long": dict(seed=90, prompt=[("t", 300)], shapes=[(1, 2, 2)], taps=False),
    "ref1": dict(seed=30, prompt=[("t", 5), ("i", 0), ("t", 3)], shapes=[(1, 4, 4), (1, 6, 4)]),
    "ref2": dict(
        seed=40,
        prompt=[("t", 4), ("i", 0), ("t", 2), ("i", 1), ("t", 6)],
        shapes=[(1, 4, 6), (1, 6, 4), (1, 4, 4)],
    ),
    "ref2_adjacent": dict(
        seed=50, prompt=[("t", 4), ("i", 0), ("i", 1), ("t", 3)], shapes=[(1, 4, 6), (1, 2, 4), (1, 4, 4)]
    ),
    "t2i_padded": dict(seed=60, prompt=[("t", 9)], shapes=[(1, 4, 6)], padding=[0, 3]),
    "ref1_padded": dict(seed=70, prompt=[("t", 4), ("i", 0), ("t", 6)], shapes=[(1, 4, 4), (1, 4, 6)], padding=[2, 0]),
    "ref1_noncausalcond": dict(
        seed=30, prompt=[("t", 5), ("i", 0), ("t", 3)], shapes=[(1, 4, 4), (1, 6, 4)], causal_condition=False
    ),
}
# Small ones: the embedding takes the cosine of 1000 * t * frequency, so the last bit of a frequency, in which exponential
# functions disagree, costs 1e-4 in the output at t = 0.8 and a quarter of that here.
TIMESTEPS = [0.21, 0.08]
TAPS = ["img_in", "txt_in", "time_text_embed", "modulation", "transformer_blocks.0"]


def make():
    model = randomize(QwenImage21Transformer2DModel(**CONFIG), 1001, zero_centered=("text_norm",))
    # Sharper attention and larger gates: a wrong mask, position, modulation row or a missing tanh then stands far above
    # rounding.
    model.time_text_embed.timestep_embedder.linear_2.weight.mul_(2.0)
    model.modulation[1].weight.mul_(1.6)
    for block in model.transformer_blocks:
        block.attn.norm_q.weight.mul_(1.8)
        block.attn.norm_k.weight.mul_(1.8)
        block.attn.to_v.weight.mul_(1.5)
        block.attn.to_out[0].weight.mul_(1.5)
    return model


def inputs(case):
    shapes, padding = case["shapes"], case.get("padding", [0])
    batch, target = len(padding), math.prod(case["shapes"][-1])
    slots = []
    for kind, value in case["prompt"]:
        slots += [False] * value if kind == "t" else [True] * (math.prod(shapes[value]) // 4)
    length = len(slots)
    text = normal(case["seed"], batch, length, CONFIG["context_in_dim"])
    latents = normal(case["seed"] + 1, batch, sum(map(math.prod, shapes)), CONFIG["in_channels"])
    mask = None
    if any(padding):
        mask = torch.ones(batch, length, dtype=torch.bool)
        for row, count in enumerate(padding):
            mask[row, length - count :] = False
        text = text * mask[:, :, None]
    return dict(
        hidden_states=latents,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=mask,
        img_mask=torch.tensor([slots + [True] * (target // 4)] * batch),
        timestep=torch.tensor(TIMESTEPS[:batch]),
    )


def main(out):
    folder = out / "qwenimage21_transformer"
    model = make()
    write_model(folder, model)
    for name, case in CASES.items():
        run = model
        if not case.get("causal_condition", True):
            run = QwenImage21Transformer2DModel(**(CONFIG | {"causal_condition": False})).eval()
            run.load_state_dict(model.state_dict())
        x, shapes = inputs(case), case["shapes"]
        batch = x["hidden_states"].shape[0]
        with Taps(run, TAPS if case.get("taps", True) else []) as taps:
            sample = run(**x, img_shapes=[shapes] * batch).sample
        slots = x["img_mask"][0]
        image_tokens = slots.repeat_interleave(torch.where(slots, 4, 1))
        outputs = {"sample": sample}
        if case.get("taps", True):
            rope = run.pos_embed(shapes, image_tokens, device="cpu")
            outputs |= {"rope_cos": rope.real, "rope_sin": rope.imag} | taps.outputs
        target = math.prod(shapes[-1])
        meta = dict(
            img_shapes=shapes,
            prefix_tokens=len(image_tokens) - target,
            target_tokens=target,
            causal_condition=case.get("causal_condition", True),
        )
        write_case(folder, name, x, outputs, meta)
