#!/usr/bin/env python3
"""Make a model folder of the published sizes without their weights: for plans of memory, not for pictures.

    python published_folder.py ../../models/tiny-qwen-image-2.1 OUT

Configurations, names and shapes are those of the fixtures in `published/`; tokenizer and schedule those of the tiny checkpoint. The
files have holes where the weights would be: 33 GB by their length, next to nothing on a disk.
"""

import json
import math
import shutil
import sys
from pathlib import Path

PUBLISHED = Path(__file__).parents[2] / "crates/sd-models/tests/fixtures/published"
PARTS = {
    "transformer": ("qwenimage21_transformer.json", "diffusion_pytorch_model.safetensors"),
    "text_encoder": ("qwen3vl_8b.json", "model.safetensors"),
    "vae": ("qwenimage21_vae.json", "diffusion_pytorch_model.safetensors"),
}


def main(tiny, out):
    for part in ("processor", "scheduler"):
        shutil.copytree(tiny / part, out / part, dirs_exist_ok=True, copy_function=shutil.copyfile)
    shutil.copyfile(tiny / "model_index.json", out / "model_index.json")
    limits = {"shortest_edge": 65536, "longest_edge": 16777216}
    for name in ("preprocessor_config.json", "processor_config.json"):
        config = json.loads((out / "processor" / name).read_text())
        for holder in (config, config.get("image_processor", {})):
            if "size" in holder:
                holder["size"] = limits
        (out / "processor" / name).write_text(json.dumps(config))
    for part, (table, name) in PARTS.items():
        published = json.loads((PUBLISHED / table).read_text())
        (out / part).mkdir(exist_ok=True)
        config = json.loads((tiny / part / "config.json").read_text()) | published["config"]
        (out / part / "config.json").write_text(json.dumps(config))
        header, end = {}, 0
        for tensor, shape in published["tensors"].items():
            begin, end = end, end + 2 * math.prod(shape)
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(out / part / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
