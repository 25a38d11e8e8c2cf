#!/usr/bin/env python3
"""How long diffusers takes for the rotary embeddings that `cargo xtask bench --filter rope` builds.

    python bench_rope.py [THREADS]

A picture of 1024x1024 pixels, three references of the same size, 512 tokens of text. Positions and embedding are built
anew each time, as in the first step of a request; what the library keeps between requests (Qwen-Image's tables of
positions) is not counted, what it keeps within one is.
"""

import os
import sys

os.environ["OMP_NUM_THREADS"] = sys.argv[1] if len(sys.argv) > 1 else str(os.cpu_count())

import statistics
import time
import warnings

warnings.filterwarnings("ignore")

import torch
from diffusers import Flux2Pipeline, FluxPipeline
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from diffusers.models.transformers.transformer_flux2 import Flux2PosEmbed
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope

torch.set_grad_enabled(False)
AXES = [16, 56, 56]
TEXT, SIDE, PICTURES = 512, 64, 4

flux_rope, flux_2_rope = FluxPosEmbed(10000, AXES), Flux2PosEmbed(2000, [32] * 4)
# Without the cache that would answer all but the first call.
QwenEmbedRope._compute_video_freqs = QwenEmbedRope._compute_video_freqs.__wrapped__
qwen_rope, qwen_21_rope = QwenEmbedRope(10000, AXES, scale_rope=True), QwenImage21Rope(10000, AXES)


def flux():
    grid = lambda: FluxPipeline._prepare_latent_image_ids(1, SIDE, SIDE, "cpu", torch.float32)
    return flux_rope(torch.cat([torch.zeros(TEXT, 3), *(grid() for _ in range(PICTURES))]))


def flux_2():
    latents = torch.empty(1, 1, SIDE, SIDE)
    parts = Flux2Pipeline._prepare_text_ids(torch.empty(1, TEXT, 1)), Flux2Pipeline._prepare_latent_ids(latents)
    return flux_2_rope(torch.cat([*parts, Flux2Pipeline._prepare_image_ids([latents] * (PICTURES - 1))], dim=1)[0])


def qwen_image():
    return torch.cat(qwen_rope([[(1, SIDE, SIDE)] * PICTURES], max_txt_seq_len=TEXT)[::-1])


def qwen_image_2_1():
    mask = torch.cat([torch.zeros(TEXT), torch.ones(PICTURES * SIDE * SIDE)]).bool()
    return qwen_21_rope([(1, SIDE, SIDE)] * PICTURES, mask, "cpu")


for family in (flux, flux_2, qwen_image, qwen_image_2_1):
    times = []
    for _ in range(33):
        start = time.perf_counter()
        family()
        times.append(time.perf_counter() - start)
    print(f"{family.__name__}: median {1e3 * statistics.median(times[3:]):.2f} ms, best {1e3 * min(times):.2f} ms")
