"""Of prompts that the grammar makes: how many clips show the asked colour, shape and direction, with a tone at the asked pitch.

    python check_quality.py prompts 32 > prompts.json                     # what is asked
    python check_quality.py sample PIPELINE prompts.json FOLDER           # make them through diffusers, float32, on a CPU
    python check_quality.py judge prompts.json FOLDER                     # judge FOLDER/00.png and 00.wav, 01.png ...
    python check_quality.py record PIPELINE run.safetensors               # one short run for the tests

A clip is an animated PNG and a WAV file, as `sd video --output 00.png` writes them too.
"""

import json
import random
import sys
import wave
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageSequence
from safetensors.torch import save_file

import parts  # first: it makes the modules of the tiny picture model known
import batched
import clips

FRAMES, POINTS = 56, 21


def prompts(count):
    rng = random.Random(2024)
    made = []
    for index in range(count):
        names = clips.random_clip(rng)[0]
        made.append({"prompt": clips.caption(rng, names), "seed": index, **names})
    return made


class Pipeline:
    """The folder's parts in float32, through diffusers, one request at a time."""

    def __init__(self, folder):
        from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
        from transformers import Qwen3VLForConditionalGeneration
        from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

        folder = Path(folder)
        kind = {"torch_dtype": torch.float32}
        self.transformer = MiniMaxH3Transformer3DModel.from_pretrained(folder / "transformer", **kind)
        self.vae = AutoencoderKLMiniMaxH3.from_pretrained(folder / "vae", **kind)
        self.sound_vae = AutoencoderKLMiniMaxH3Audio.from_pretrained(folder / "audio_vae", **kind)
        self.text_encoder = Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.float32)
        self.tokenizer = Qwen2Tokenizer.from_pretrained(folder / "tokenizer")
        self.schedulers = [MiniMaxH3Scheduler.from_pretrained(folder / name) for name in ("scheduler", "audio_scheduler")]

    def text(self, prompt):
        """What the text encoder's last layer says, without the norm behind it."""
        kept = []
        hook = self.text_encoder.model.language_model.layers[-1].register_forward_hook(lambda m, i, o: kept.append(o))
        ids = torch.tensor([self.tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        self.text_encoder.model(input_ids=ids, use_cache=False)
        hook.remove()
        return kept[0][0] if isinstance(kept[0], tuple) else kept[0]

    @torch.no_grad()
    def __call__(self, prompt, seed, frames, points):
        """Pixels (frames, height, width, 3) of 8 bits and samples (2, count)."""
        from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep, MiniMaxH3SetTimestepsStep

        latents, count = (frames - 5) // 17 * 5 + 2, clips.sound_latents(frames)
        text = self.text(prompt)
        tags = torch.ones(text.shape[1], dtype=torch.long)
        pos, tags, vi, ai, ti, _, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            tags, latents, batched.LATENT, batched.LATENT, count, batched.PATCH, 2, 2, 0, ()
        )
        generator = torch.Generator().manual_seed(seed)
        video = torch.randn(1, parts.VIDEO_CHANNELS, latents, batched.LATENT, batched.LATENT, generator=generator)
        video = batched.video_rows(video)
        sound = torch.randn(1, 2 * count, parts.SOUND_CHANNELS, generator=generator)
        for schedule in self.schedulers:
            schedule.set_timesteps(points)
        for t, ta in zip(*(s.timesteps for s in self.schedulers)):
            times, where = MiniMaxH3SetTimestepsStep.build_row_timesteps(vi, ai, 0, 0, ti.numel(), float(t), float(ta), 0.999, 1.0)
            dv, da = self.transformer(
                hidden_states=video, audio_hidden_states=sound, encoder_hidden_states=text, timestep=times, timestep_indices=where,
                token_tags=tags, position_ids=pos, video_indices=vi, audio_indices=ai, text_indices=ti, return_dict=False,
            )
            video = self.schedulers[0].step(dv, t, video, return_dict=False)[0]
            sound = self.schedulers[1].step(da, ta, sound, return_dict=False)[0]
        h = batched.LATENT // 2
        z = video.view(1, latents, h, h, parts.VIDEO_CHANNELS, 2, 2).permute(0, 4, 1, 2, 5, 3, 6).reshape(1, -1, latents, 2 * h, 2 * h)
        config = self.vae.config
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
        pixels = self.vae.decode(z * std + mean).sample
        mean, std = (torch.tensor(v).view(1, 3, 1, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        pixels = ((pixels * std + mean).clamp(0, 1) * 255).round().byte()[0].permute(1, 2, 3, 0).numpy()
        config = self.sound_vae.config
        mean, std = (torch.tensor(v).view(1, -1, 1) for v in (config.latents_mean, config.latents_std))
        z = sound.view(2, count, -1).transpose(1, 2) * std + mean
        return pixels, self.sound_vae.decode(z).sample[:, 0].numpy()


def sample(folder, asked, out):
    pipeline = Pipeline(folder)
    for index, ask in enumerate(asked):
        if not (out / f"{index:02}.wav").exists():
            write(out, index, *pipeline(ask["prompt"], ask["seed"], FRAMES, POINTS))


def record(folder, path):
    """One short run, of which some frames and the beginning of the sound are kept for the tests."""
    prompt, seed, frames, points, shown = "a red circle moves right on a black background with a tone of 440 hertz", 3, 22, 9, (0, 11, 21)
    pixels, samples = Pipeline(folder)(prompt, seed, frames, points)
    said = {"prompt": prompt, "seed": seed, "frames": frames, "steps": points, "shown": shown}
    tensors = {"pixels": torch.from_numpy(pixels[list(shown)].copy()).contiguous(), "sound": torch.from_numpy(samples[:, :8000].copy()).contiguous()}
    save_file(tensors, path, {"meta": json.dumps(said)})


def write(out, index, pixels, samples):
    out.mkdir(parents=True, exist_ok=True)
    frames = [Image.fromarray(p) for p in pixels]
    frames[0].save(out / f"{index:02}.png", save_all=True, append_images=frames[1:], duration=1000 / clips.FPS)
    with wave.open(str(out / f"{index:02}.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(clips.RATE)
        file.writeframes((samples.T * 32767).round().astype("<i2").tobytes())


def read(out, index):
    frames = ImageSequence.Iterator(Image.open(out / f"{index:02}.png"))
    pixels = np.stack([np.asarray(frame.convert("RGB")) for frame in frames]).astype(np.float32)
    with wave.open(str(out / f"{index:02}.wav")) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        data = np.frombuffer(file.readframes(file.getnframes()), dtype={2: "<i2", 4: "<i4"}[width])
    return pixels, data.reshape(-1, channels).T / float(2 ** (8 * width - 1)), rate


def judge(ask, pixels, samples, rate):
    """What of `ask` a clip of pixels (frames, height, width, 3) and samples (2, count) shows."""
    ground = np.median(pixels.reshape(-1, 3), axis=0)
    seen = np.abs(pixels - ground).sum(-1) > 90
    if not seen.any():
        return {key: False for key in ("background", "colour", "direction", "pitch", "follows", "all")}
    near = lambda value, table: min(table, key=lambda name: np.square(np.array(table[name]) * 255 - value).sum())
    colour = near(np.median(pixels[seen], axis=0), clips.COLOURS)
    rows, columns = np.mgrid[: pixels.shape[1], : pixels.shape[2]]
    centres = np.array([[(m * columns).sum(), (m * rows).sum()] / np.maximum(m.sum(), 1) for m in seen])
    moved = centres[-4:].mean(0) - centres[:4].mean(0)
    axis = int(abs(moved[1]) > abs(moved[0]))
    direction = (("right", "left"), ("down", "up"))[axis][int(moved[axis] < 0)]
    whole = samples.sum(0)
    loud = np.sqrt((whole**2).mean())
    if ask["pitch"] is None:
        pitch = follows = loud < 0.03
    else:
        middle = whole[len(whole) // 4 : -len(whole) // 4]
        spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
        heard = spectrum.argmax() * rate / len(middle)
        pitch = loud > 0.1 and abs(heard / ask["pitch"] - 1) < 0.02
        # Where the tone is heard, at the start and at the end, is where the shape is.
        def where(part):
            left, right = np.sqrt((part**2).mean(1)) + 1e-9
            return np.arctan2(right, left) / (np.pi / 2)
        eighth = samples.shape[1] // 8
        gaps = [where(samples[:, :eighth]) - centres[:7, 0].mean() / pixels.shape[2], where(samples[:, -eighth:]) - centres[-7:, 0].mean() / pixels.shape[2]]
        follows = bool(np.abs(gaps).max() < 0.12)
    marks = {
        "background": near(ground, clips.BACKGROUNDS) == ask["background"],
        "colour": colour == ask["colour"],
        "direction": bool(direction == ask["direction"] and abs(moved[axis]) > 20),
        "pitch": bool(pitch),
        "follows": bool(follows),
    }
    return {**marks, "all": all(marks.values())}


def main():
    verb, *rest = sys.argv[1:]
    if verb == "prompts":
        print(json.dumps(prompts(int(rest[0])), indent=1))
    elif verb == "sample":
        sample(rest[0], json.loads(Path(rest[1]).read_text()), Path(rest[2]))
    elif verb == "record":
        record(*rest)
    elif verb == "judge":
        asked = json.loads(Path(rest[0]).read_text())
        marks = [judge(ask, *read(Path(rest[1]), index)) for index, ask in enumerate(asked)]
        for ask, mark in zip(asked, marks):
            missed = [key for key, right in mark.items() if not right and key != "all"]
            if missed:
                print(ask["prompt"], "->", ", ".join(missed))
        print({key: sum(mark[key] for mark in marks) for key in marks[0]}, "of", len(marks))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
