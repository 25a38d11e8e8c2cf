"""The MiniMax H3 pipeline of diffusers, all its blocks, with tiny random models and the text encoder of the tiny picture model.

The blocks are diffusers' own. Two numbers of theirs are changed: they take a text encoder of four layers, read behind its last, where
the published one has 64 and is read behind 50; and they make clips of less than five seconds.
"""

from common import TINY_MODEL, generator, normal, randomize, write_case, write_json, write_model

import copy

import numpy as np
import torch
from PIL import Image
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3Ref2VATextEncoderStep
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline
from qwenimage21_vae import statistics
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import video_processing_qwen3_vl as clips

CANVAS = dict(canvas_short_edge=32, canvas_max_pixels=32 * 96, reference_image_short_edge=64)
STEPS = 4
FRAMES = 22
SAMPLE_RATE = 32000
SHIFTS = dict(scheduler=12.0, audio_scheduler=3.0)
TRANSFORMER = dict(
    num_attention_heads=2,
    attention_head_dim=32,
    hidden_size=32,
    num_layers=2,
    num_refiner_layers=1,
    ffn_dim=40,
    in_channels=3,
    audio_in_channels=4,
    patch_size=(1, 2, 2),
    text_dim=128,
    freq_dim=16,
    time_embed_hidden_dim=24,
    time_embed_dim=12,
    rope_freq_dim=4,
)
VAE = dict(
    latent_channels=3,
    block_out_channels=(4, 4, 4, 8, 8, 12),
    layers_per_block=1,
    norm_num_groups=2,
    decoder_num_layers=1,
    decoder_num_attention_heads=2,
    decoder_attention_head_dim=8,
    decoder_num_register_tokens=2,
    **statistics(31, 3),
)
SOUND = dict(
    encoder_dim=2,
    latent_dim=64,
    latent_channels=4,
    num_attention_heads=2,
    decoder_dim=32,
    decoder_rates=(5, 5, 4, 4, 2),
    decoder_kernel_sizes=(9, 9, 8, 8, 4),
    resblock_kernel_sizes=(3,),
    resblock_dilation_sizes=((1, 3),),
    **statistics(32, 4),
)


class Pipeline(MiniMaxH3ModularPipeline):
    min_duration = 0.0
    text_encoder_layer = 4


class VideoProcessor:
    """The steps of transformers' own, which needs torchvision to resize: here Pillow does, as in its image processor."""

    temporal_patch_size = 2

    def __init__(self, images):
        self.images = images

    def __call__(self, videos, do_sample_frames, return_tensors):
        assert not do_sample_frames and return_tensors == "pt"
        values, grids = [], []
        mean, std = (torch.tensor(v).view(1, 1, 3, 1, 1) for v in (self.images.image_mean, self.images.image_std))
        for video in videos:
            count, height, width, _ = video.shape
            height, width = clips.smart_resize(count, height, width, 2, 32, min_pixels=4096, max_pixels=1048576)
            resized = [Image.fromarray(v).resize((width, height), Image.Resampling.BICUBIC) for v in video]
            frames = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)[None]
            frames = (frames * np.float32(self.images.rescale_factor) - mean) / std
            flat, t, h, w = clips.Qwen3VLVideoProcessor.patchify(self, frames, 16, 2, 2)
            values.append(flat[0])
            grids.append((t, h, w))
        return dict(pixel_values_videos=torch.cat(values), video_grid_thw=torch.tensor(grids))


def picture(width, height, frame=0):
    """Pixels (height, width, 3) that a line of code makes in any language."""
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    return ((x * 5 + y * 3 + c * 70 + frame * 9 + (x // 7) * (y // 5) * 31) % 256).astype(np.uint8)


def sound(samples):
    """Two channels of samples, multiples of 1/256."""
    i = np.arange(samples)
    left, right = (i * 13 % 201 - 100) / 256, (i * 7 % 151 - 75) / 256
    return torch.from_numpy(np.stack([left, right]).astype(np.float32))


def clip(width, height, frames):
    return np.stack([picture(width, height, frame) for frame in range(frames)])


def make_models():
    transformers = []
    for seed in (3301, 3302):
        model = randomize(MiniMaxH3Transformer3DModel(**TRANSFORMER), seed)
        model.time_embedder.linear_2.weight.mul_(2.0)
        transformers.append(model)
    vae = randomize(AutoencoderKLMiniMaxH3(**VAE), 3303)
    # Most pixels are to lie between black and white, where they say something.
    vae.decoder.proj_out.weight.mul_(0.5)
    audio = randomize(AutoencoderKLMiniMaxH3Audio(**SOUND), 3304)
    for _ in range(3):
        out = audio.decode(normal(3305, 2, SOUND["latent_channels"], 12)).sample
        audio.decoder.conv_post.weight_g.mul_(0.35 / float(out.std()) if float(out.abs().max()) < 1 else 0.4)
    return dict(transformer=transformers[0], transformer_ref=transformers[1], vae=vae, audio_vae=audio)


def make_pipeline(models):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL / "processor")
    Qwen3VLProcessor.check_argument_for_proper_class = lambda self, name, argument: None
    images = Qwen2VLImageProcessorPil.from_pretrained(TINY_MODEL / "processor")
    processor = Qwen3VLProcessor(image_processor=images, tokenizer=tokenizer, video_processor=None)
    processor.video_processor = VideoProcessor(images)
    text = Qwen3VLForConditionalGeneration.from_pretrained(TINY_MODEL / "text_encoder", dtype=torch.float32)
    # Behind the last layer stands the norm; with one more layer, what is before it can be had.
    layers = text.model.language_model.layers
    layers.append(copy.deepcopy(layers[0]))
    text.config.text_config.num_hidden_layers = len(layers)
    pipe = Pipeline(blocks=MiniMaxH3Blocks())
    schedulers = {name: MiniMaxH3Scheduler(shift=shift) for name, shift in SHIFTS.items()}
    pipe.update_components(
        text_encoder=text, tokenizer=tokenizer, processor=processor, **schedulers, **models, **CANVAS
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def cases():
    frame = lambda *size: Image.fromarray(picture(*size))
    return {
        "text": dict(prompt="a large red circle on a blue background", width=64, height=32),
        "first": dict(prompt="a red circle", image=frame(75, 50)),
        "first_last": dict(prompt="it turns green", image=frame(40, 60), last_image=frame(90, 41), width=64, height=32),
        "last": dict(prompt="", last_image=frame(64, 96), width=32, height=64),
        "references": dict(
            prompt="<Picture 1> moves as in <Video 1> to <Audio 2>",
            width=32,
            height=32,
            references=[
                MiniMaxH3ImageReference(frame(50, 70)),
                MiniMaxH3VideoReference(clip(48, 40, 20), fps=30.0, audio=sound(9000), sample_rate=SAMPLE_RATE),
                MiniMaxH3AudioReference(sound(40000), sample_rate=SAMPLE_RATE),
                MiniMaxH3VideoReference(clip(66, 33, 30), fps=24.0),
            ],
        ),
    }


def main(out):
    folder = out / "minimax_h3_pipeline"
    models = make_models()
    pipe = make_pipeline(models)
    for name, model in models.items():
        write_model(folder / name, model)
        (folder / name / "model.safetensors").rename(folder / name / "diffusion_pytorch_model.safetensors")
    for name, shift in SHIFTS.items():
        write_json(folder / name / "scheduler_config.json", dict(_class_name="MiniMaxH3Scheduler", shift=shift))
    index = dict(_class_name="MiniMaxH3ModularPipeline", _blocks_class_name="MiniMaxH3Blocks", **CANVAS)
    write_json(folder / "modular_model_index.json", index)

    ids = {}
    build = MiniMaxH3Ref2VATextEncoderStep._build_presentation
    text = pipe.text_encoder.model
    text.register_forward_pre_hook(lambda m, a, k: ids.update(ids=k["input_ids"][0]), with_kwargs=True)
    for seed, (name, request) in enumerate(cases().items()):
        state = pipe(
            **request, num_frames=FRAMES, num_inference_steps=STEPS, generator=generator(seed), output_type="pt"
        )
        get = lambda key: state.get(key)
        frames, audio = get("videos"), get("audio")
        outputs = dict(
            ids=ids["ids"],
            tags=get("text_token_tags"),
            embeds=get("prompt_embeds")[0],
            latents=get("latents")[0],
            sound_latents=get("audio_latents"),
            # Every seventh frame, every eighth sample.
            frames=(frames[0, ::7].permute(0, 2, 3, 1) * 255).round().byte(),
            samples=audio[0, :, ::8],
        )
        for index, condition in enumerate(get("condition_latents") or []):
            outputs[f"condition{index}"] = condition[0]
        for index, rows in enumerate(get("audio_condition_latents") or []):
            outputs[f"sound{index}"] = rows
        meta = dict(
            prompt=request["prompt"],
            steps=STEPS,
            frames=FRAMES,
            seed=seed,
            width=get("width"),
            height=get("height"),
            samples=audio.shape[-1],
        )
        write_case(folder, name, {}, outputs, meta)
