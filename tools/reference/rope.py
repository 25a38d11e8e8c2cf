"""Rotary embeddings of every family that the library has: cosines and sines, one file for each.

Positions come from the library's own pipelines wherever those have a function for them. `meta` says what was asked for.
Sizes in `meta` are latents, [height, width].
"""

from common import write_tensors

from types import SimpleNamespace

import torch
from diffusers import ErnieImageTransformer2DModel, Flux2Pipeline, FluxPipeline, Krea2Pipeline
from diffusers.models.transformers import transformer_minimax_h3, transformer_qwenimage, transformer_qwenimage21
from diffusers.models.transformers.transformer_cosmos import CosmosRotaryPosEmbed
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from diffusers.models.transformers.transformer_flux2 import Flux2PosEmbed
from diffusers.models.transformers.transformer_ideogram4 import Ideogram4MRoPE
from diffusers.models.transformers.transformer_krea2 import Krea2RotaryPosEmbed
from diffusers.models.transformers.transformer_longcat_image import LongCatImagePosEmbed
from diffusers.models.transformers.transformer_ovis_image import OvisImagePosEmbed
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from diffusers.models.transformers.transformer_z_image import RopeEmbedder, ZImageTransformer2DModel
from diffusers.modular_pipelines.minimax_h3 import before_denoise as h3
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import Ideogram4Pipeline
from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import prepare_pos_ids

AXES = [16, 56, 56]
# Text tokens, target latents, references' latents: odd token counts, one row, one column, one token.
JOINT = {
    "odd": dict(text=4, target=[6, 10], references=[]),
    "one_row": dict(text=3, target=[2, 14], references=[[2, 6]]),
    "one_column": dict(text=1, target=[10, 2], references=[[6, 2]]),
}


def pairs(x, *, halves=False):
    """The first of each two equal channels."""
    return x[..., : x.shape[-1] // 2] if halves else x[..., ::2]


def flux(ask):
    grid = lambda size: FluxPipeline._prepare_latent_image_ids(1, size[0] // 2, size[1] // 2, "cpu", torch.float32)
    ids = [torch.zeros(ask["text"], 3), grid(ask["target"])]
    for size in ask["references"]:
        reference = grid(size)
        reference[..., 0] = 1
        ids.append(reference)
    return map(pairs, FluxPosEmbed(10000, AXES)(torch.cat(ids)))


def flux_2(ask):
    latents = lambda size: torch.empty(1, 1, *size)
    ids = [Flux2Pipeline._prepare_text_ids(torch.empty(1, ask["text"], 1)), Flux2Pipeline._prepare_latent_ids(latents(ask["target"]))]
    if ask["references"]:
        ids.append(Flux2Pipeline._prepare_image_ids([latents(size) for size in ask["references"]]))
    return map(pairs, Flux2PosEmbed(2000, [32] * 4)(torch.cat(ids, dim=1)[0]))


def ovis_image(ask):
    # As OvisImagePipeline._prepare_prompt_embeds has them, which cannot be called without an encoder.
    text = torch.zeros(ask["text"], 3)
    text[..., 1:] = torch.arange(ask["text"])[:, None]
    target = FluxPipeline._prepare_latent_image_ids(1, ask["target"][0] // 2, ask["target"][1] // 2, "cpu", torch.float32)
    return map(pairs, OvisImagePosEmbed(10000, AXES)(torch.cat([text, target])))


def longcat_image(ask):
    start = (ask["text"], ask["text"])
    ids = [prepare_pos_ids(0, "text", (0, 0), num_token=ask["text"])]
    for index, (height, width) in enumerate([ask["target"], *ask["references"]]):
        ids.append(prepare_pos_ids(index + 1, "image", start, height=height // 2, width=width // 2))
    return map(pairs, LongCatImagePosEmbed(10000, AXES)(torch.cat(ids)))


def from_complex(x):
    return x.real, x.imag


def qwen_image(ask):
    rope = transformer_qwenimage.QwenEmbedRope(10000, AXES, scale_rope=True)
    shapes = [(ask["frames"], ask["target"][0] // 2, ask["target"][1] // 2)]
    shapes += [(1, height // 2, width // 2) for height, width in ask["references"]]
    pictures, text = rope([shapes], max_txt_seq_len=ask["text"])
    return from_complex(torch.cat([text, pictures]))


def qwen_image_layered(ask):
    rope = transformer_qwenimage.QwenEmbedLayer3DRope(10000, AXES, scale_rope=True)
    sizes = [ask["target"]] * ask["frames"] + ask["references"]
    pictures, text = rope([[(1, height // 2, width // 2) for height, width in sizes]], max_txt_seq_len=ask["text"])
    return from_complex(torch.cat([text, pictures]))


def qwen_image_2_1(ask):
    rope = transformer_qwenimage21.QwenImage21Rope(10000, AXES)
    shapes = [(1, *part) for part in ask["parts"] if isinstance(part, list)]
    mask = torch.cat([torch.ones(part[0] * part[1]) if isinstance(part, list) else torch.zeros(part) for part in ask["parts"]])
    return from_complex(rope(shapes, mask.bool(), "cpu"))


def z_image(ask):
    model = object.__new__(ZImageTransformer2DModel)
    image, caption = torch.empty(1, 1, *ask["target"]), torch.empty(ask["text"], 1)
    _, features, _, image_ids, caption_ids, _, _ = ZImageTransformer2DModel.patchify_and_embed(model, [image], [caption], 2, 1)
    rope = RopeEmbedder(256.0, [32, 48, 48], [512, 512, 512])
    # The function gives more positions than padded features; the model cuts them off.
    return from_complex(rope(torch.cat([caption_ids[0][: len(features[0])], image_ids[0]])))


def ernie_image(ask):
    model = ErnieImageTransformer2DModel(
        hidden_size=128, num_attention_heads=1, num_layers=1, ffn_hidden_size=8, in_channels=1, out_channels=1, patch_size=1, text_in_dim=8
    )
    angles = []
    model.pos_embed.register_forward_hook(lambda module, args, output: angles.append(output))
    texts, (height, width) = ask["texts"], ask["target"]
    model(
        hidden_states=torch.zeros(len(texts), 1, height, width),
        timestep=torch.zeros(len(texts)),
        text_bth=torch.zeros(len(texts), max(texts), 8),
        text_lens=torch.tensor(texts),
    )
    angles = pairs(angles[0].flatten(0, 2))
    return angles.cos(), angles.sin()


def anima(ask):
    rope = CosmosRotaryPosEmbed(128, rope_scale=(1.0, 4.0, 4.0))
    return (pairs(x, halves=True) for x in rope(torch.empty(1, 1, 1, *ask["target"])))


def ideogram_4(ask):
    ids, _, _ = Ideogram4Pipeline._prepare_ids(ask["texts"], *ask["target"], max(ask["texts"]), "cpu")
    rope = Ideogram4MRoPE(256, 5_000_000, (24, 20, 20))
    return (pairs(x, halves=True).flatten(0, 1) for x in rope(ids))


def krea_2(ask):
    ids = Krea2Pipeline.prepare_position_ids(ask["text"], ask["target"][0] // 2, ask["target"][1] // 2, "cpu")
    return map(pairs, Krea2RotaryPosEmbed(1000, [32, 48, 48])(ids))


def wan(ask):
    rope = WanRotaryPosEmbed(128, (1, 2, 2), 64)
    return (pairs(x).flatten(0, 2) for x in rope(torch.empty(1, 1, ask["frames"], *ask["target"])))


def h3_rope(ids):
    rope = transformer_minimax_h3.MiniMaxH3RotaryPosEmbed()
    return (pairs(x, halves=True) for x in rope(ids))


def minimax_h3(ask):
    frames, height, width, sound = ask["target"]
    build = h3.MiniMaxH3PrepareLayoutStep.build_packed_sequence
    tags = torch.ones(ask["text"])
    return h3_rope(build(tags, frames, height, width, sound, (1, 2, 2), 2, 2, 0, tuple(ask["keyframes"]))[0])


def minimax_h3_references(ask):
    references, visual, audio = [], [], []
    for kind, *sizes in ask["references"]:
        sound = sizes[-1] if kind != "image" else 0
        references.append(SimpleNamespace(kind=kind, has_audio=sound > 0))
        if kind != "audio":
            frames, height, width = sizes[:3] if kind == "video" else (1, *sizes)
            visual.append(torch.empty(1, 1, frames, height, width))
        if sound:
            audio.append(torch.empty(2 * sound, 1))
    frames, height, width, sound = ask["target"]
    step = next(c for c in vars(h3).values() if hasattr(c, "build_ref2va_packed_sequence"))
    tags = torch.ones(ask["text"])
    return h3_rope(step.build_ref2va_packed_sequence(tags, references, visual, audio, frames, height, width, sound, (1, 2, 2), 2, 2, 0)[0])


CASES = {
    flux: JOINT,
    flux_2: {
        "odd": dict(text=4, target=[3, 5], references=[]),
        "one_reference": dict(text=2, target=[1, 4], references=[[2, 3]]),
        "three_references": dict(text=1, target=[4, 1], references=[[2, 2], [1, 3], [3, 1]]),
    },
    ovis_image: {"odd": JOINT["odd"], "one_row": dict(text=3, target=[2, 14], references=[])},
    longcat_image: JOINT,
    qwen_image: {
        "odd": dict(text=4, target=[6, 10], references=[], frames=1),
        "frames": dict(text=2, target=[4, 6], references=[], frames=3),
        "three_references": dict(text=3, target=[2, 14], references=[[6, 2], [2, 2], [4, 30]], frames=1),
    },
    qwen_image_layered: {
        "layers": dict(text=2, target=[4, 6], references=[[6, 2]], frames=3),
        "many_layers": dict(text=3, target=[2, 4], references=[[2, 4]], frames=7),
    },
    qwen_image_2_1: {
        "odd": dict(parts=[4, [3, 5]]),
        "one_row": dict(parts=[1, [1, 7]]),
        "references": dict(parts=[2, [2, 4], 1, [4, 2], [3, 1], 2, [5, 1]]),
    },
    z_image: {"odd": dict(text=5, target=[6, 10]), "full": dict(text=32, target=[2, 64])},
    ernie_image: {"odd": dict(texts=[4], target=[3, 5]), "batch": dict(texts=[5, 2], target=[1, 4])},
    anima: {"odd": dict(target=[6, 10]), "one_row": dict(target=[2, 14]), "one_column": dict(target=[14, 2])},
    ideogram_4: {"odd": dict(texts=[4], target=[3, 5]), "batch": dict(texts=[5, 2], target=[1, 4])},
    krea_2: {"odd": dict(text=4, target=[6, 10]), "one_column": dict(text=2, target=[14, 2])},
    wan: {"odd": dict(frames=3, target=[6, 10]), "one_row": dict(frames=1, target=[2, 14])},
    minimax_h3: {
        "text": dict(text=3, target=[7, 4, 6, 2], keyframes=[]),
        "keyframes": dict(text=2, target=[6, 2, 6, 1], keyframes=["first", "last"]),
    },
    minimax_h3_references: {
        "all": dict(
            text=2,
            target=[3, 4, 4, 2],
            references=[["image", 6, 2], ["audio", 3], ["video", 2, 2, 4, 9], ["video", 6, 2, 2, 0]],
        ),
    },
}


def main(out):
    for family, cases in CASES.items():
        tensors = {}
        for number, (name, ask) in enumerate(cases.items()):
            cos, sin = family(ask)
            # All pairs of the first case, every seventh of the others: an order that is right once is right.
            ask["pair_step"] = 1 if number == 0 else 7
            tensors[f"out.{name}.cos"], tensors[f"out.{name}.sin"] = cos[..., :: ask["pair_step"]], sin[..., :: ask["pair_step"]]
        write_tensors(out / "rope" / f"{family.__name__}.safetensors", tensors, dict(cases=cases))
