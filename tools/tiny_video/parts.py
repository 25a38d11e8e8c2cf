"""Tokenizer, configurations and untrained modules of the tiny MiniMax H3, and the folder that they are saved in."""

import json
import shutil
import sys
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

# In front of installed packages, one of which is called `build` too.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tiny_model"))
import build  # noqa: E402  the tokenizer's training and the processor of the tiny picture model

import clips  # noqa: E402

VOCABULARY = 448
WIDTH = 128
VIDEO_CHANNELS, SOUND_CHANNELS = 16, 16
VIDEO_SHIFT, SOUND_SHIFT = 4.0, 2.0


def make_tokenizer(folder):
    build.VOCAB_SIZE = VOCABULARY
    build.scenes.corpus = clips.corpus
    return build.make_tokenizer(folder, 20000)


def make_text_encoder(tokenizer):
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "bos_token_id": ids("<|endoftext|>"),
            "eos_token_id": ids("<|im_end|>"),
            "dtype": "float32",
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": build.PATCH,
            "spatial_merge_size": build.MERGE,
            "temporal_patch_size": build.TEMPORAL,
            "out_hidden_size": WIDTH,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    return Qwen3VLForConditionalGeneration(config)


def make_vae():
    return AutoencoderKLMiniMaxH3(
        latent_channels=VIDEO_CHANNELS,
        block_out_channels=(16, 24, 32, 32, 32, 32),
        layers_per_block=1,
        norm_num_groups=8,
        decoder_num_layers=2,
        # A patch of 3072 numbers is a linear map of this many heads of 32: with 5 of them edges stay soft.
        decoder_num_attention_heads=8,
        decoder_attention_head_dim=32,
        decoder_ffn_mult=2,
        latents_mean=(0.0,) * VIDEO_CHANNELS,
        latents_std=(1.0,) * VIDEO_CHANNELS,
    )


def make_sound_vae():
    return AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4,
        latent_dim=64,
        latent_channels=SOUND_CHANNELS,
        num_attention_heads=2,
        decoder_dim=96,
        decoder_rates=(5, 5, 4, 4, 2),
        decoder_kernel_sizes=(9, 9, 8, 8, 4),
        resblock_kernel_sizes=(3, 7),
        resblock_dilation_sizes=((1, 3, 5), (1, 3, 5)),
        latents_mean=[0.0] * SOUND_CHANNELS,
        latents_std=[1.0] * SOUND_CHANNELS,
    )


def make_transformer():
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=3,
        attention_head_dim=64,
        hidden_size=160,
        num_layers=6,
        num_refiner_layers=2,
        ffn_dim=352,
        in_channels=VIDEO_CHANNELS,
        audio_in_channels=SOUND_CHANNELS,
        patch_size=(1, 2, 2),
        text_dim=WIDTH,
        freq_dim=128,
        time_embed_hidden_dim=160,
        time_embed_dim=32,
        rope_freq_dim=8,
    )


def save(folder, tokenizer_folder, transformer, text_encoder, vae, sound_vae):
    """Writes the folder as `ModularPipeline.save_pretrained` lays it out: half precision throughout (the sound's autoencoder computes in float32 all the same)."""
    folder = Path(folder)
    if folder.exists():
        shutil.rmtree(folder)
    half = torch.float16
    transformer.to("cpu", half).save_pretrained(folder / "transformer")
    text_encoder.config.dtype = half
    text_encoder.to("cpu", half).save_pretrained(folder / "text_encoder")
    vae.to("cpu", half).save_pretrained(folder / "vae")
    sound_vae.to("cpu", half).save_pretrained(folder / "audio_vae")
    MiniMaxH3Scheduler(shift=VIDEO_SHIFT).save_pretrained(folder / "scheduler")
    MiniMaxH3Scheduler(shift=SOUND_SHIFT).save_pretrained(folder / "audio_scheduler")
    tokenizer = Qwen2Tokenizer.from_pretrained(tokenizer_folder)
    tokenizer.save_pretrained(folder / "tokenizer")
    build.make_processor(tokenizer).save_pretrained(folder / "processor")
    parts = {
        "transformer": ("diffusers", "MiniMaxH3Transformer3DModel"),
        "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
        "vae": ("diffusers", "AutoencoderKLMiniMaxH3"),
        "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio"),
        "scheduler": ("diffusers", "MiniMaxH3Scheduler"),
        "audio_scheduler": ("diffusers", "MiniMaxH3Scheduler"),
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "processor": ("transformers", "Qwen3VLProcessor"),
    }
    index = {
        "_blocks_class_name": "MiniMaxH3Blocks",
        "_class_name": "MiniMaxH3ModularPipeline",
        "_diffusers_version": "0.42.1",
        "canvas_short_edge": clips.SIDE,
        "canvas_max_pixels": clips.SIDE * clips.SIDE,
    }
    for name, (library, kind) in parts.items():
        index[name] = [library, kind, {"subfolder": name, "type_hint": [library, kind], "variant": None, "revision": None}]
    (folder / "modular_model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
    return folder
