"""AutoencoderKLMiniMaxH3Audio with random weights: short sounds, odd ones, and one that is decoded and encoded in several pieces."""

from common import generator, normal, randomize, torch, write_case, write_model

from diffusers import AutoencoderKLMiniMaxH3Audio
from qwenimage21_vae import statistics

# Rates, kernels and dilations are among the published ones; widths are small.
CONFIG = dict(
    encoder_dim=4,
    encoder_rates=(2, 5),
    latent_dim=64,
    latent_channels=8,
    num_attention_heads=2,
    decoder_dim=32,
    decoder_rates=(5, 2),
    decoder_kernel_sizes=(9, 4),
    **statistics(17, 8),
)

# Samples: whole latents, some over, less than one, and far more latents than one of them depends on.
CASES = [120, 133, 7, 3000]


def make(seed):
    model = randomize(AutoencoderKLMiniMaxH3Audio(**CONFIG), seed)
    g = generator(seed + 1)
    for name, parameter in model.named_parameters():
        # Lengths of kernels and frequencies of activations are near one, as trained ones are.
        if name.endswith("weight_g") or (name.startswith("encoder") and name.endswith("alpha")):
            parameter.copy_(1 + 0.25 * torch.randn(parameter.shape, generator=g))
        elif name.startswith("decoder") and name.endswith(("alpha", "beta")):
            parameter.copy_(0.25 * torch.randn(parameter.shape, generator=g))
    # The last convolution is linear: scale it so that a few per cent of the samples meet the clamp at -1 and 1.
    head = model.decoder.conv_post
    for _ in range(3):
        decoded = model.decode(normal(seed + 2, 2, 8, 12)).sample
        head.weight_g.mul_(0.45 / decoded.std() if decoded.abs().max() < 1 else 0.4)
    return model


def main(out):
    folder = out / "minimax_h3_sound_vae"
    model = make(3200)
    write_model(folder, model)
    mean, std = (torch.tensor(CONFIG[name]).view(1, -1, 1) for name in ("latents_mean", "latents_std"))
    for index, samples in enumerate(CASES):
        x = 0.5 * normal(3210 + 2 * index, 2, 1, samples)
        latents = (model.encode(x).latent_dist.mode() - mean) / std
        z = normal(3211 + 2 * index, *latents.shape)
        decoded = model.decode(z * std + mean).sample
        # [channel, latent, number], as a transformer has them.
        inputs = {"samples": x[:, 0], "z": z.transpose(1, 2)}
        outputs = {"latents": latents.transpose(1, 2), "decoded": decoded[:, 0]}
        write_case(folder, f"{samples}", inputs, outputs, dict(clamped=float((decoded.abs() >= 1).float().mean())))
