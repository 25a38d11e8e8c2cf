"""AutoencoderKLQwenImage21 with random weights, one frame: the published structure in small, and another one."""

from common import Taps, normal, randomize, write_case, write_model

import torch
from diffusers import AutoencoderKLQwenImage21


def statistics(seed, channels):
    mean = [round(float(v), 4) for v in normal(seed, channels)]
    std = [round(float(v), 4) for v in normal(seed + 1, channels).mul(0.5).abs() + 0.5]
    return dict(latents_mean=mean, latents_std=std)


CONFIGS = {
    # The published multipliers, blocks and temporal flags.
    "qwenimage21_vae": dict(
        base_dim=2,
        decoder_base_dim=4,
        z_dim=16,
        dim_mult=[1, 2, 4, 8, 8],
        num_res_blocks=2,
        temperal_downsample=[False, True, True, True],
        is_residual=True,
        in_channels=4,
        out_channels=4,
        patch_size=None,
        scale_factor_temporal=8,
        scale_factor_spatial=16,
        **statistics(3, 16),
    ),
    # Three levels of resampling, RGB, no width of its own for the decoder, and multipliers that take each branch of the
    # shortcuts' index arithmetic: wider and narrower, one source channel per output position and many.
    "qwenimage21_vae_variant": dict(
        base_dim=4,
        decoder_base_dim=None,
        z_dim=6,
        dim_mult=[2, 1, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, False],
        is_residual=True,
        in_channels=3,
        out_channels=3,
        patch_size=None,
        scale_factor_temporal=2,
        scale_factor_spatial=8,
        **statistics(5, 6),
    ),
}


def frame(x):
    return x[:, :, 0]


def decode(model, z):
    return frame(model.decode(z[:, :, None]).sample)


def make(config, seed):
    model = randomize(AutoencoderKLQwenImage21(**config), seed)
    # The last convolution is linear in its weights: scale them so that a few per cent of the values meet the clamp at -1
    # and 1.
    head = model.decoder.conv_out
    with Taps(model, ["decoder.conv_out"]) as taps:
        decode(model, normal(seed + 1, 1, config["z_dim"], 6, 6))
    scale = 0.45 / taps.outputs["tap.decoder.conv_out"].std()
    head.weight.mul_(scale)
    head.bias.mul_(scale)
    return model


def decoder_taps(config):
    last = len(config["dim_mult"]) - 1
    names = ["post_quant_conv", "decoder.conv_in", "decoder.mid_block.attentions.0", "decoder.mid_block"]
    for i in range(last + 1):
        # The inside of the small blocks only.
        if i < 2:
            names += [f"decoder.up_blocks.{i}.resnets.0", f"decoder.up_blocks.{i}.upsampler"]
        if i < last:
            names.append(f"decoder.up_blocks.{i}.avg_shortcut")
        names.append(f"decoder.up_blocks.{i}")
    return [*names, "decoder.conv_out"]


def encoder_taps(config):
    blocks = [f"encoder.down_blocks.{i}" for i in range(len(config["dim_mult"]))]
    return ["encoder.conv_in", *blocks, "encoder.mid_block", "encoder.norm_out", "encoder.conv_out", "quant_conv"]


def decode_case(folder, model, name, seed, height, width, batch=1, taps=()):
    """Latents as the pipeline's loop leaves them (normalized), and as the decoder reads them."""
    config = model.config
    factor = config.scale_factor_spatial
    normalized = normal(seed, batch, config.z_dim, height // factor, width // factor)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (config.latents_mean, config.latents_std))
    z = normalized * std + mean
    with Taps(model, taps, frame) as kept:
        decoded = decode(model, z)
    meta = dict(height=height, width=width, clamped=float((decoded.abs() >= 1).float().mean()))
    write_case(folder, name, dict(normalized=normalized, z=z), dict(decoded=decoded, **kept.outputs), meta)


def encode_case(folder, model, name, seed, height, width, taps=()):
    config = model.config
    pixels = (0.6 * normal(seed, 1, config.in_channels, height, width)).clamp(-1, 1)
    with Taps(model, taps, frame) as kept:
        posterior = model.encode(pixels[:, :, None]).latent_dist
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (config.latents_mean, config.latents_std))
    outputs = dict(mean=frame(posterior.mode()), logvar=frame(posterior.logvar))
    outputs["normalized"] = (outputs["mean"] - mean) / std
    write_case(folder, name, dict(pixels=pixels), outputs | kept.outputs, dict(height=height, width=width))


def main(out):
    for number, (name, config) in enumerate(CONFIGS.items()):
        folder, seed = out / name, 2000 + 100 * number
        model = make(config, seed)
        write_model(folder, model)
        # Pixel sizes of 2x3 and 4x2 latents.
        for i, (height, width, taps) in enumerate(((2, 3, True), (4, 2, False))):
            height, width = height * config["scale_factor_spatial"], width * config["scale_factor_spatial"]
            size = f"{height}x{width}"
            kept = (decoder_taps(config), encoder_taps(config)) if taps else ((), ())
            decode_case(folder, model, f"decode_{size}", seed + 10 + i, height, width, taps=kept[0])
            encode_case(folder, model, f"encode_{size}", seed + 20 + i, height, width, taps=kept[1])
        if number == 0:
            decode_case(folder, model, "decode_96x160", seed + 12, 96, 160)
            decode_case(folder, model, "decode_batch2", seed + 13, 32, 32, batch=2)
