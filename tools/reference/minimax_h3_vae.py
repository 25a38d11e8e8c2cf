"""AutoencoderKLMiniMaxH3 with random weights: pictures, clips short and long, tiles."""

import torch
from common import Taps, normal, randomize, write_case, write_model

from diffusers import AutoencoderKLMiniMaxH3
from qwenimage21_vae import statistics

MODELS = {
    # Factors are the published ones, 16 in space and 4 in time; widths are small.
    "minimax_h3_vae": dict(
        latent_channels=3,
        block_out_channels=(4, 4, 4, 8, 8, 12),
        layers_per_block=2,
        norm_num_groups=2,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=8,
        decoder_num_register_tokens=2,
        **statistics(21, 3),
    ),
    # 4 in space, so that long clips are small files.
    "minimax_h3_vae_long": dict(
        latent_channels=6,
        block_out_channels=(4, 8, 12),
        layers_per_block=1,
        spatial_downsample_factors=(2, 2, 1),
        temporal_downsample_factors=(2, 2, 1),
        norm_num_groups=4,
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        **statistics(23, 6),
    ),
}

# Frames, and rows and columns of latents.
ENCODED = {
    "minimax_h3_vae": [(1, 2, 3), (5, 2, 2)],
    "minimax_h3_vae_long": [(1, 2, 3), (3, 3, 2), (17, 2, 2), (22, 2, 3), (39, 3, 2), (40, 2, 2)],
}
# Latent frames, and their rows and columns. The reference cannot decode fewer than three.
DECODED = {
    "minimax_h3_vae": [(3, 1, 2)],
    "minimax_h3_vae_long": [(3, 1, 1), (6, 2, 1), (7, 2, 3), (12, 3, 1), (28, 2, 2)],
}
# Tiles as (pixels, overlap) of the second model, and pixels of height and width: the last two tiles but one along the height
# overlap with both neighbours by more than they are long.
TILED = [((16, 8), (28, 40)), ((12, 4), (12, 20))]

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1, 1)


def make(config, seed):
    model = randomize(AutoencoderKLMiniMaxH3(**config), seed)
    model.disable_tiling()
    # What a head's queries and keys say to each other is to matter.
    for block in model.decoder.transformer_blocks:
        block.attn.to_v.weight.mul_(1.5)
    # The last layer is linear in its weights: a few per cent of the values are to meet the clamp at 0 and 1.
    head = model.decoder.proj_out
    with Taps(model, ["decoder.proj_out"]) as taps:
        model.decode(normal(seed + 1, 1, config["latent_channels"], 7, 3, 3))
    by = 1.0 / taps.outputs["tap.decoder.proj_out"].std()
    head.weight.mul_(by)
    head.bias.mul_(by)
    return model


def frames_first(x):
    """[1, channels, t, h, w] -> [t, channels, h, w]"""
    return x[0].transpose(0, 1)


def of_channels(values):
    return torch.tensor(values).view(1, -1, 1, 1, 1)


def encoded(model, seed, frames, height, width):
    pixels = (0.5 + 0.3 * normal(seed, 1, 3, frames, height, width)).clamp(0, 1)
    posterior = model.encode((pixels - MEAN) / STD).latent_dist
    mean, std = of_channels(model.config.latents_mean), of_channels(model.config.latents_std)
    outputs = dict(mean=posterior.mode(), logvar=posterior.logvar, normalized=(posterior.mode() - mean) / std)
    return {"pixels": frames_first(pixels)}, {name: frames_first(value) for name, value in outputs.items()}


def decoded(model, seed, frames, height, width):
    z = normal(seed, 1, model.config.latent_channels, frames, height, width)
    mean, std = of_channels(model.config.latents_mean), of_channels(model.config.latents_std)
    sample = model.decode(z * std + mean).sample * STD + MEAN
    clamped = float(((sample <= 0) | (sample >= 1)).float().mean())
    return {"normalized": frames_first(z)}, {"frames": frames_first(sample.clamp(0, 1))}, dict(clamped=clamped)


def main(out):
    for number, (name, config) in enumerate(MODELS.items()):
        folder, seed = out / name, 3100 + 200 * number
        model = make(config, seed)
        factor = model.spatial_compression_ratio
        write_model(folder, model)
        for index, (frames, height, width) in enumerate(ENCODED[name]):
            inputs, outputs = encoded(model, seed + 10 + index, frames, height * factor, width * factor)
            write_case(folder, f"encode_{frames}_{height}x{width}", inputs, outputs)
        for index, sizes in enumerate(DECODED[name]):
            inputs, outputs, meta = decoded(model, seed + 40 + index, *sizes)
            write_case(folder, "decode_{}_{}x{}".format(*sizes), inputs, outputs, meta)

    for index, ((size, overlap), (height, width)) in enumerate(TILED):
        model.enable_tiling(size, size, overlap, overlap)
        inputs, outputs = encoded(model, seed + 70 + index, 5, height, width)
        more = decoded(model, seed + 80 + index, 3, height // factor, width // factor)
        meta = dict(size=size, overlap=overlap, split=[model._split_tiles(side, size, overlap) for side in (height, width)])
        write_case(folder, f"tiled_{size}_{overlap}", inputs | more[0], outputs | more[1], meta)
