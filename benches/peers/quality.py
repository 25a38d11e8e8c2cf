"""Draws with diffusers what the program `quality` drew: the same prompts, seeds, size, steps and guidance, in single precision.

    python benches/peers/quality.py FOLDER MODEL

`quality --python python3` calls it. FOLDER holds `prompts.json`; pictures are written beside it.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from diffusers import QwenImage21Pipeline
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


@torch.inference_mode()
def main():
    folder, model = Path(sys.argv[1]), sys.argv[2]
    wanted = json.loads((folder / "prompts.json").read_text())
    torch.set_num_threads(wanted["threads"])
    # No text needs the processor of videos, which needs torchvision.
    transformers.Qwen3VLProcessor.check_argument_for_proper_class = lambda self, name, argument: None
    files = Path(model) / "processor"
    processor = transformers.Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(files),
        tokenizer=transformers.AutoTokenizer.from_pretrained(files),
        video_processor=None,
        chat_template=(files / "chat_template.jinja").read_text(),
    )
    pipeline = QwenImage21Pipeline.from_pretrained(model, processor=processor, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    for seed, prompt in enumerate(wanted["prompts"]):
        picture = pipeline(
            prompt,
            negative_prompt=" ",
            true_cfg_scale=wanted["guidance"],
            width=wanted["size"],
            height=wanted["size"],
            num_inference_steps=wanted["steps"],
            generator=torch.Generator().manual_seed(seed),
        ).images[0]
        picture.save(folder / f"diffusers-{seed:02}.png")


if __name__ == "__main__":
    main()
