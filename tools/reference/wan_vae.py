"""AutoencoderKLWan (WAN 2.1 and 2.2) and AutoencoderKLQwenImage with random weights: pictures and clips."""

from common import Taps, normal, randomize, write_case, write_model

from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from qwenimage21_vae import statistics

# Multipliers, blocks and temporal flags are the published ones; widths are small.
PUBLISHED = dict(dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[], temperal_downsample=[False, True, True])
MODELS = {
    "wan21_vae": (AutoencoderKLWan, dict(base_dim=2, z_dim=4, **PUBLISHED, **statistics(11, 4))),
    "wan22_vae": (
        AutoencoderKLWan,
        # The decoder is wider than the encoder. With these widths the shortcuts take all their ways: to every channel from
        # several, to several from one.
        dict(
            base_dim=2,
            decoder_base_dim=3,
            z_dim=6,
            **PUBLISHED,
            **statistics(13, 6),
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_temporal=4,
            scale_factor_spatial=16,
        ),
    ),
    "qwenimage_vae": (AutoencoderKLQwenImage, dict(base_dim=2, z_dim=4, **PUBLISHED, **statistics(15, 4))),
}

# Frames, and rows and columns of latents: pictures, whole chunks and frames that make none, wide and high. A clip's third
# chunk is the first that looks back at all it can, the fourth the first that looks back at a third.
CASES = {
    "wan21_vae": [
        (1, 2, 3), (1, 4, 2), (2, 1, 2), (5, 2, 3), (7, 2, 1), (9, 3, 2), (17, 1, 2), (4, 1, 1), (81, 1, 1)
    ],
    "wan22_vae": [(1, 2, 3), (1, 3, 1), (5, 1, 2), (9, 2, 1), (17, 1, 1)],
    "qwenimage_vae": [(1, 3, 2), (5, 1, 2)],
}


def scale(config):
    return 2 ** (len(config["dim_mult"]) - 1) * (config.get("patch_size") or 1)


def make(kind, config, seed):
    model = randomize(kind(**config), seed)
    # The last convolution is linear in its weights: scale them so that a few per cent of the values meet the clamp at -1
    # and 1.
    head = model.decoder.conv_out
    with Taps(model, ["decoder.conv_out"]) as taps:
        model.decode(normal(seed + 1, 1, config["z_dim"], 2, 4, 4))
    by = 0.45 / taps.outputs["tap.decoder.conv_out"].std()
    head.weight.mul_(by)
    head.bias.mul_(by)
    return model


def frames_first(x):
    """[1, channels, t, h, w] -> [t, channels, h, w]"""
    return x[0].transpose(0, 1)


def case(folder, model, config, frames, height, width, seed):
    factor = scale(config)
    channels = config.get("in_channels", 3) // (config.get("patch_size") or 1) ** 2
    pixels = (0.6 * normal(seed, 1, channels, frames, height * factor, width * factor)).clamp(-1, 1)
    mean = model.encode(pixels).latent_dist.mode()
    z = normal(seed + 1, *mean.shape)
    decoded = model.decode(z).sample
    inputs = {"pixels": frames_first(pixels), "z": frames_first(z)}
    outputs = {"mean": frames_first(mean), "decoded": frames_first(decoded)}
    meta = dict(clamped=float((decoded.abs() >= 1).float().mean()))
    write_case(folder, f"{frames}_{height * factor}x{width * factor}", inputs, outputs, meta)


def main(out):
    for number, (name, (kind, config)) in enumerate(MODELS.items()):
        folder, seed = out / name, 2500 + 100 * number
        model = make(kind, config, seed)
        write_model(folder, model)
        for index, sizes in enumerate(CASES[name]):
            case(folder, model, config, *sizes, seed + 10 + 2 * index)
