"""Names and shapes of the published sizes, from the classes themselves on the meta device: no weights are needed."""

import common  # noqa: F401  (the environment)

import json

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    AutoencoderKLWan,
    MiniMaxH3Transformer3DModel,
    QwenImage21Transformer2DModel,
)
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from qwen3vl_text_encoder import plain

QWEN3_VL_8B = dict(
    text_config=dict(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        rope_parameters=dict(
            rope_type="default", rope_theta=5000000.0, mrope_section=[24, 20, 20], mrope_interleaved=True
        ),
    ),
    vision_config=dict(
        depth=27,
        hidden_size=1152,
        intermediate_size=4304,
        num_heads=16,
        out_hidden_size=4096,
        deepstack_visual_indexes=[8, 16, 24],
    ),
    tie_word_embeddings=False,
)


# The VAE of WAN 2.2 TI2V 5B; its statistics are not needed here.
WAN_22 = dict(
    base_dim=160,
    decoder_base_dim=256,
    z_dim=48,
    latents_mean=[0.0] * 48,
    latents_std=[1.0] * 48,
    is_residual=True,
    in_channels=12,
    out_channels=12,
    patch_size=2,
    scale_factor_spatial=16,
)


# Statistics of the sound VAE, which are not needed here.
SOUND = dict(latents_mean=[0.0] * 32, latents_std=[1.0] * 32)


def write(out, name, model, config):
    config = {"_class_name": type(model).__name__} | config
    tensors = {k: list(v.shape) for k, v in model.state_dict().items()}
    lines = ",\n".join(f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in tensors.items())
    path = out / "published" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    config = json.dumps(config, sort_keys=True, separators=(",", ":"))
    path.write_text(f'{{"config":{config},\n"tensors":{{\n{lines}}}}}\n')
    return len(tensors), sum(v.numel() for v in model.state_dict().values())


def main(out):
    with torch.device("meta"):
        models = {
            "qwenimage21_transformer": QwenImage21Transformer2DModel(),
            "qwenimage21_vae": AutoencoderKLQwenImage21(),
            "qwenimage_vae": AutoencoderKLQwenImage(),
            "wan21_vae": AutoencoderKLWan(),
            "wan22_vae": AutoencoderKLWan(**WAN_22),
            "minimax_h3_vae": AutoencoderKLMiniMaxH3(),
            "minimax_h3_sound_vae": AutoencoderKLMiniMaxH3Audio(**SOUND),
            "minimax_h3_transformer": MiniMaxH3Transformer3DModel(),
        }
        text = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**QWEN3_VL_8B))
    counts = {}
    for name, model in models.items():
        config = {k: v for k, v in model.config.items() if not k.startswith("_")}
        counts[name] = write(out, name, model, config)
    counts["qwen3vl_8b"] = write(out, "qwen3vl_8b", text, plain(text.config.to_dict()))
    assert counts == {
        "qwenimage21_transformer": (297, 7_115_124_736),
        "qwenimage21_vae": (238, 337_740_404),
        "qwenimage_vae": (194, 126_892_531),
        "wan21_vae": (194, 126_892_531),
        "wan22_vae": (196, 704_688_668),
        "minimax_h3_vae": (703, 2_603_868_984),
        "minimax_h3_sound_vae": (1087, 151_326_585),
        "minimax_h3_transformer": (638, 33_122_992_896),
        "qwen3vl_8b": (750, 8_767_123_696),
    }, counts
