"""What diffusers takes for the steps of MiniMax H3's transformer that `h3-step` did last: the same weights, the same inputs.

    cargo xtask bench h3-step --device CUDA0 --backends DIR --folder /dev/shm/h3
    python benches/peers/h3_step.py --folder /dev/shm/h3 --device cuda --type bfloat16

Prints a line for each case with seconds of a step (median) and of processor time, the ratios of ours to them, and the relative errors
(Euclidean norm) of our velocities of video and of sound against these. diffusers refines text and makes modulations in every step:
what that takes by itself is printed too. Bytes on a GPU are the most that torch's allocator held. The same goes to `peer.json`.
"""

import argparse
import json
import time
from pathlib import Path

import numpy
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep, MiniMaxH3SetTimestepsStep
from safetensors import safe_open

PATCH, CHANNELS, SOUND, VIDEO = (1, 2, 2), 2, 2, 0


def numbers(rows, width, seed):
    n = torch.arange(rows * width, dtype=torch.int64)
    return (((n * 37 + n // 257 * 11 + seed * 31) % 257).float() / 128.0 - 1.0).view(1, rows, width)


def load(folder, device, dtype):
    """The model with its weights read straight to where they are used: there may be no room for two."""
    config = json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel.from_config(config)
    for name, module in model.named_children():
        if name not in model._keep_in_fp32_modules:
            module.to(dtype)
    model = model.to_empty(device=device).eval()
    # Computed, not loaded.
    model.rope = MiniMaxH3RotaryPosEmbed(config["rope_freq_dim"], config["rope_theta"]).to(device)
    wanted = model.state_dict()
    with safe_open(folder / "diffusion_pytorch_model.safetensors", "pt") as file:
        names = set(file.keys())
        assert names == set(wanted), names ^ set(wanted)
        for name in names:
            wanted[name].copy_(file.get_tensor(name))
    return model, config


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--type", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    last = json.loads((arguments.folder / "last.json").read_text())
    torch.set_num_threads(last["threads"])
    on_gpu, device = arguments.device != "cpu", arguments.device
    model, config = load(arguments.folder, device, getattr(torch, arguments.type))

    tags = torch.ones(last["text"], dtype=torch.long)
    rows = MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags, *last["clip"], PATCH, CHANNELS, SOUND, VIDEO)
    positions, tags, video, sound, text, *_ = rows
    video_time, sound_time = last["times"]
    timestep, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video, sound, 0, 0, text.numel(), video_time, sound_time, max(video_time, 0.999), 1.0
    )
    given = dict(
        hidden_states=numbers(video.numel(), 4 * config["in_channels"], 0),
        audio_hidden_states=numbers(sound.numel(), config["audio_in_channels"], 2),
        encoder_hidden_states=numbers(text.numel(), config["text_dim"], 1),
        token_tags=tags, position_ids=positions, timestep=timestep, timestep_indices=indices,
        video_indices=video, audio_indices=sound, text_indices=text,
    )
    given = {name: value.to(device) for name, value in given.items()}

    def step():
        return [part[0].float().cpu() for part in model(**given, return_dict=False)]

    def prepare():
        """What a step has before and beside its blocks, and we have once for a run."""
        hidden = given["encoder_hidden_states"].to(model.context_embedder.weight.dtype)
        model.token_refiner(model.context_embedder(hidden))
        times = model.time_embedder(model.time_proj(given["timestep"]).to(model.time_embedder.linear_1.weight.dtype))
        for block in model.transformer_blocks:
            made = block.adaln_proj(times)
        return made[0].float().cpu()

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds, busy, velocity = measure(step, arguments.runs)
    most = torch.cuda.max_memory_allocated() if on_gpu else 0
    once, once_busy, _ = measure(prepare, arguments.runs)

    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"diffusers, {arguments.type}, {name}, {torch.get_num_threads()} threads")
    print(f"a step: {seconds:.4f} s, processor {busy:.4f} s, most {most >> 20} MiB")
    print(f"of it text and modulations: {once:.4f} s, processor {once_busy:.4f} s")
    for case in last["cases"]:
        ours = torch.from_numpy(numpy.fromfile(arguments.folder / case["velocity"], dtype=numpy.float32))
        ours = ours.split([part.numel() for part in velocity])
        errors = [((is_.view_as(be) - be).norm() / be.norm()).item() for is_, be in zip(ours, velocity)]
        case.update(peer_seconds=seconds, peer_processor_seconds=busy, peer_bytes=most, error=max(errors))
        print(
            f"{case['name']}: ratio {case['seconds'] / seconds:.3f}, of processor time {case['processor_seconds'] / busy:.3f}, "
            f"error of video {errors[0]:.1e}, of sound {errors[1]:.1e}"
        )
    (arguments.folder / "peer.json").write_text(
        json.dumps({"program": "diffusers", "device": name, "type": arguments.type, "cases": last["cases"]})
    )


def measure(run, runs):
    """Median seconds of wall and of processor time, after one run to warm up, and the last result."""
    seconds, busy = [], []
    for number in range(runs + 1):
        begin, used = time.perf_counter(), time.process_time()
        result = run()
        if number > 0:
            seconds.append(time.perf_counter() - begin)
            busy.append(time.process_time() - used)
    return sorted(seconds)[len(seconds) // 2], sorted(busy)[len(busy) // 2], result


if __name__ == "__main__":
    main()
