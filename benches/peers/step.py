"""What diffusers takes for the calls that the program `step` did last: the same weights, the same inputs.

    cargo xtask bench step --device CUDA0 --backends DIR --folder /dev/shm/step
    python benches/peers/step.py --folder /dev/shm/step --device cuda --type bfloat16

Prints a line for each case with seconds of a call (median) and of processor time, the ratios of `step`'s to them, and the relative
error (Euclidean norm) of `step`'s velocity against this one. Bytes on a GPU are the most that torch's allocator held. The same goes to
`peer.json`.
"""

import argparse
import json
import time
from pathlib import Path

import numpy
import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from safetensors.torch import load_file


def numbers(count, seed):
    n = torch.arange(count, dtype=torch.int64)
    return ((n * 37 + n // 257 * 11 + seed * 31) % 257).float() / 128.0 - 1.0


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--type", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    last = json.loads((arguments.folder / "last.json").read_text())
    torch.set_num_threads(last["threads"])
    on_gpu = arguments.device != "cpu"
    dtype = getattr(torch, arguments.type)
    with torch.device("meta"):
        model = QwenImage21Transformer2DModel(
            in_channels=64, out_channels=64, num_layers=last["blocks"], attention_head_dim=128,
            num_attention_heads=32, context_in_dim=4096, axes_dims_rope=(16, 56, 56),
        )
    model = model.to_empty(device=arguments.device).to(dtype).eval()
    weights = {name: tensor.to(arguments.device, dtype) for name, tensor in load_file(arguments.folder / "transformer.safetensors").items()}
    lost = model.load_state_dict(weights, strict=False)
    assert not lost.unexpected_keys and not lost.missing_keys, lost
    del weights
    # Buffers that were made on the meta device, such as frequencies, are made again.
    fresh = QwenImage21Transformer2DModel(
        in_channels=64, out_channels=64, num_layers=1, attention_head_dim=128, num_attention_heads=1, context_in_dim=64, axes_dims_rope=(16, 56, 56)
    )
    model.pos_embed = fresh.pos_embed.to(arguments.device)
    model.time_text_embed.time_proj = fresh.time_text_embed.time_proj

    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"diffusers, {arguments.type}, {device}, {torch.get_num_threads()} threads")
    print(f"{'size':>6} {'references':>10} {'prefix':>8} {'call s':>9} {'cpu s':>9} {'sd type':>8} {'sd ratio':>9} {'of cpu':>7} {'sd error':>9} {'most MiB':>9}")
    done = {}
    for case in last["cases"]:
        key = (case["size"], case["references"], case["prefix"] != "off")
        if key not in done:
            done[key] = measure(model, arguments, last, *key)
        seconds, busy, velocity, most = done[key]
        theirs = torch.from_numpy(numpy.fromfile(arguments.folder / case["velocity"], dtype=numpy.float32)).view_as(velocity)
        error = ((theirs - velocity).norm() / velocity.norm()).item()
        case.update(peer_seconds=seconds, peer_bytes=most, error=error)
        print(
            f"{case['size']:>6} {case['references']:>10} {case['prefix']:>8} {seconds:9.4f} {busy:9.4f} {case['type']:>8} "
            f"{case['seconds'] / seconds:9.3f} {case['processor_seconds'] / busy:7.3f} {error:9.1e} {most >> 20:>9}"
        )
    (arguments.folder / "peer.json").write_text(json.dumps({"program": "diffusers", "device": device, "type": arguments.type, "cases": last["cases"]}))


def measure(model, arguments, last, size, references, is_cached):
    dtype, on_gpu = next(model.parameters()).dtype, arguments.device != "cpu"
    side, text = size // 16, last["text"]
    shapes = [(1, side, side)] * (references + 1)
    slots = side * side // 4
    mask = [False] * (text // 2) + [True] * (slots * references) + [False] * (text - text // 2) + [True] * slots
    pixels = side * side * (references + 1)
    encoded = torch.zeros(1, len(mask) - slots, 4096)
    encoded[0, [at for at, is_image in enumerate(mask[: len(mask) - slots]) if not is_image]] = numbers(text * 4096, 1).view(text, 4096)
    given = dict(
        hidden_states=numbers(pixels * 64, 0).view(1, pixels, 64).to(arguments.device, dtype),
        encoder_hidden_states=encoded.to(arguments.device, dtype),
        img_mask=torch.tensor([mask]).to(arguments.device),
        img_shapes=[shapes],
        timestep=torch.tensor([0.5], device=arguments.device, dtype=dtype),
        return_dict=False,
    )
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if is_cached:
        cache = QwenImage21KVCache(last["blocks"])
        model(**given, kv_cache=cache, kv_cache_mode="extract")
        given.update(kv_cache=cache, kv_cache_mode="cached")
    seconds, busy = [], []
    for run in range(arguments.runs + 1):
        begin, used = time.perf_counter(), time.process_time()
        velocity = model(**given)[0]
        velocity = velocity[0, -side * side :].float().cpu()
        if run > 0:
            seconds.append(time.perf_counter() - begin)
            busy.append(time.process_time() - used)
    most = torch.cuda.max_memory_allocated() if on_gpu else 0
    return sorted(seconds)[len(seconds) // 2], sorted(busy)[len(busy) // 2], velocity, most


if __name__ == "__main__":
    main()
