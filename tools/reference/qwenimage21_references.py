"""The pipeline on the tiny trained checkpoint with reference pictures of odd sizes, with alpha, none and four of them."""

from common import generator, normal, write_case
from qwenimage21_tokens import pipeline

import numpy as np
import torch
from PIL import Image

STEPS = 3
RESOLUTION = 128
# Name: prompt, negative prompt, guidance, pictures as (width, height, mode).
CASES = {
    "one_odd": ("make the circle yellow", None, 1.0, [(97, 61, "RGB")]),
    "alpha": ("change the background to orange", None, 1.0, [(75, 130, "RGBA")]),
    "two_guided": ("a red circle", "", 2.5, [(50, 90, "RGBA"), (128, 128, "RGB")]),
    "four_empty": ("", "", 1.5, [(33, 40, "RGB"), (200, 90, "RGBA"), (64, 64, "RGB"), (41, 120, "RGB")]),
}


def picture(seed, width, height, mode):
    """Soft blobs with sharp corners in them, some see-through where there is alpha."""
    channels = len(mode)
    coarse = normal(seed, height // 8 + 2, width // 8 + 2, channels).clamp(-2, 2) * 60 + 128
    fine = torch.nn.functional.interpolate(coarse.permute(2, 0, 1)[None], (height, width), mode="bilinear")[0]
    fine[:, height // 4 : height // 2, width // 4 : width // 2] = torch.tensor([250.0, 20, 40, 0][:channels])[:, None, None]
    if channels == 4:
        fine[3, : height // 5] = 255
    return Image.fromarray(np.ascontiguousarray(fine.permute(1, 2, 0).round().byte().numpy()), mode)


def main(out):
    pipe = pipeline()
    folder = out / "qwenimage21_references"
    for index, (name, (prompt, negative, guidance, pictures)) in enumerate(CASES.items()):
        images = [picture(7000 + 10 * index + i, *which) for i, which in enumerate(pictures)]
        caught, calls, steps, resized = {}, [], [], []
        encode, resize = pipe.encode_prompt, pipe.image_processor.resize

        def spy(*args, **kwargs):
            result = encode(*args, **kwargs)
            kind = "negative_" if "embeds" in caught else ""
            caught[kind + "embeds"], caught[kind + "slots"] = result[0], result[2]
            return result

        def keep(image, *args, **kwargs):
            result = resize(image, *args, **kwargs)
            resized.append(torch.from_numpy(np.array(result)))
            return result

        def before(module, args, kwargs):
            kind = "negative_" if "input_ids" in caught else ""
            caught[kind + "input_ids"] = kwargs["input_ids"]

        handles = [
            pipe.text_encoder.register_forward_pre_hook(before, with_kwargs=True),
            pipe.transformer.register_forward_pre_hook(
                lambda m, a, k: calls.append(k["hidden_states"]), with_kwargs=True
            ),
        ]
        pipe.encode_prompt = spy
        pipe.image_processor.resize = keep
        image = pipe(
            prompt=prompt,
            negative_prompt=negative,
            true_cfg_scale=guidance,
            image=images,
            num_inference_steps=STEPS,
            generator=generator(index),
            output_resolution=RESOLUTION,
            use_kv_cache=False,
            output_type="pt",
            callback_on_step_end=lambda p, i, t, k: steps.append(k["latents"].clone()) or {},
        ).images
        pipe.encode_prompt = encode
        del pipe.image_processor.resize
        for handle in handles:
            handle.remove()
        target = steps[-1].shape[1]
        # Asked for once for the text encoder and once for the VAE.
        resized = resized[: 2 * len(images)][::2]
        inputs = {f"picture{i}": torch.from_numpy(np.array(image.convert("RGBA"))) for i, image in enumerate(images)}
        outputs = {f"resized{i}": value for i, value in enumerate(resized)}
        outputs |= dict(
            reference_latents=calls[0][0, :-target],
            initial_latents=calls[0][0, -target:],
            latents=torch.stack([step[0] for step in steps]),
            image=(image[0].permute(1, 2, 0) * 255).round().byte(),
            **caught,
        )
        height, width = image.shape[2:]
        meta = dict(
            prompt=prompt,
            negative=negative,
            guidance=guidance,
            steps=STEPS,
            seed=index,
            resolution=RESOLUTION,
            width=width,
            height=height,
        )
        write_case(folder, name, inputs, outputs, meta)
