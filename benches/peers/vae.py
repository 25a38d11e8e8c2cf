"""What diffusers takes for what the program `vae` did last: the same files, the same input, the same threads.

    cargo xtask bench vae --model wan21 --size 832x480 --frames 17 --folder /tmp/vae
    python benches/peers/vae.py --folder /tmp/vae

Prints one JSON object as `vae` does, with the relative error (Euclidean norm) of the results of `vae` against these. Bytes on a
GPU are the most that torch's allocator held; on a processor what the process had resident beyond what it had before. Sound is computed in
single precision whatever is asked for, as diffusers does (on a GPU torch's convolutions then use TF32).
"""

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, AutoencoderKLQwenImage21, AutoencoderKLWan
from safetensors.torch import load_file

CLASSES = {
    "wan21": AutoencoderKLWan,
    "wan22": AutoencoderKLWan,
    "qwen21": AutoencoderKLQwenImage21,
    "minimaxh3": AutoencoderKLMiniMaxH3,
    "minimaxh3sound": AutoencoderKLMiniMaxH3Audio,
}

# What MiniMax H3's takes pixels from 0 to 1 less of, and by.
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1, 1)


def resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--type", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--tile", action="store_true", help="with diffusers' own tiles")
    parser.add_argument("--runs", type=int, help="as many as `vae` did unless given")
    arguments = parser.parse_args()
    last = json.loads((arguments.folder / "last.json").read_text())
    folder = Path(last["folder"])
    torch.set_num_threads(last["threads"])
    on_gpu = arguments.device != "cpu"

    is_sound = last["model"] == "minimaxh3sound"
    dtype = torch.float32 if is_sound else getattr(torch, arguments.type)
    before = resident()
    vae = CLASSES[last["model"]].from_pretrained(folder, torch_dtype=dtype).to(arguments.device)
    is_of_h3 = last["model"] == "minimaxh3"
    if is_of_h3 and last["tile"] is None:
        vae.disable_tiling()
    elif arguments.tile:
        vae.enable_tiling()
    mean, std = MEAN.to(arguments.device), STD.to(arguments.device)
    # [frames, channels, height, width] -> [1, channels, frames, height, width]
    load = lambda name: load_file(folder / f"{name}.safetensors")["latents"]
    if is_sound:
        # [2, 1, count, width] -> latents [2, width, count]; samples [2, 1, 1, count] -> [2, 1, count]
        given = load("input")[:, 0].transpose(1, 2) if last["task"] == "decode" else load("input")[:, 0]
        given = given.contiguous().to(arguments.device)
    else:
        given = load("input").transpose(0, 1)[None].to(arguments.device, dtype)

    def run():
        if is_sound:
            return vae.decode(given).sample if last["task"] == "decode" else vae.encode(given).latent_dist.mode().transpose(1, 2)
        if last["task"] == "decode":
            sample = vae.decode(given).sample
            return (sample * std + mean).clamp(0, 1) if is_of_h3 else sample
        pixels = (given - mean) / std if is_of_h3 else given
        return vae.encode(pixels).latent_dist.mode()

    seconds, busy = [], []
    runs = len(last["runs"]) if arguments.runs is None else arguments.runs
    for number in range(runs + 1):
        begin, used = time.perf_counter(), time.process_time()
        result = run()
        if on_gpu:
            torch.cuda.synchronize()
        if number > 0:
            seconds.append(round(time.perf_counter() - begin, 4))
            busy.append(round(time.process_time() - used, 2))
    result = (result[:, None] if is_sound else result[0].transpose(0, 1)).float().cpu()
    theirs = load("result")
    error = ((theirs - result).norm() / result.norm()).item()
    print(
        json.dumps(
            {
                "program": "diffusers",
                **{key: last[key] for key in ["task", "model", "width", "height", "frames", "sound_seconds"] if key in last},
                "device": torch.cuda.get_device_name() if on_gpu else "CPU",
                "threads": torch.get_num_threads(),
                "type": str(dtype).removeprefix("torch."),
                "seconds": sorted(seconds)[len(seconds) // 2] if seconds else None,
                "processor_seconds": sorted(busy)[len(busy) // 2] if busy else None,
                "runs": seconds,
                "processor_runs": busy,
                "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else resident() - before,
                "error_of_sd": error,
            }
        )
    )


if __name__ == "__main__":
    main()
