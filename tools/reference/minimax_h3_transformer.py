"""MiniMaxH3Transformer3DModel with random weights: packed rows of text, pictures, sound and video; schedules; a denoising loop."""

from common import normal, randomize, write_case, write_json, write_model, write_tensors

import torch
from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
from diffusers.loaders.single_file_utils import convert_minimax_h3_transformer_checkpoint_to_diffusers as to_diffusers
from diffusers.models.transformers import transformer_minimax_h3 as module
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
    patchify_video_latents,
)

CONFIG = dict(
    num_attention_heads=3,
    attention_head_dim=32,
    hidden_size=64,
    num_layers=3,
    num_refiner_layers=2,
    ffn_dim=96,
    in_channels=8,
    audio_in_channels=16,
    patch_size=(1, 2, 2),
    text_dim=96,
    freq_dim=32,
    time_embed_hidden_dim=48,
    time_embed_dim=32,
    rope_freq_dim=4,
    rope_theta=10000.0,
    norm_eps=1e-5,
    qk_norm_eps=1e-5,
    final_norm_eps=1e-5,
)
# One layer of each kind: what single files are made of.
SMALL = CONFIG | dict(num_layers=1, num_refiner_layers=1, num_attention_heads=2, hidden_size=32, ffn_dim=64, text_dim=32)
PATCH, CHANNELS, SOUND, VIDEO = (1, 2, 2), 2, 2, 0
# `tags` of text rows: 1 for text, 0 for the slots of a picture. `target` is latent frames, height, width, latents of sound.
CASES = {
    "t2va": dict(seed=300, tags=[1] * 6, target=(7, 4, 6, 9)),
    "t2va_two_frames": dict(seed=305, tags=[1], target=(2, 6, 2, 8)),
    "t2va_silent": dict(seed=307, tags=[1] * 3, target=(2, 2, 4, 0)),
    "fl2va_first_last": dict(
        seed=310, tags=[1, 1, 0, 0, 0, 0, 1, 1], target=(7, 6, 4, 5), keyframes=("first", "last")
    ),
    "fl2va_last": dict(seed=315, tags=[0, 0, 1], target=(2, 2, 6, 3), keyframes=("last",)),
    # Kind, latent frames, height, width, latents of sound.
    "ref2va": dict(
        seed=320,
        tags=[1] * 5,
        target=(7, 4, 4, 6),
        references=[
            ("image", 1, 4, 4, 0),
            ("audio", 0, 0, 0, 4),
            ("video", 7, 4, 6, 5),
            ("video", 2, 2, 4, 0),
        ],
    ),
}
TIMES = dict(video=0.35, sound=0.6)


def make(config=CONFIG, seed=3001):
    model = randomize(MiniMaxH3Transformer3DModel(**config), seed)
    # Sharper attention and larger gates: a wrong position, tag or modulation row then stands far above rounding.
    model.time_embedder.linear_2.weight.mul_(2.0)
    for block in model.transformer_blocks:
        block.attn.norm_q.weight.mul_(1.6)
        block.attn.norm_k.weight.mul_(1.6)
        block.attn.to_v.weight.mul_(1.3)
        block.attn.to_out[0].weight.mul_(1.3)
        block.adaln_proj.linear.weight.mul_(1.3)
    return model


class Reference:
    def __init__(self, kind, has_audio):
        self.kind, self.has_audio = kind, has_audio


def layout(case):
    """What `forward` is told of the packed rows, and how many rows of video and sound are conditions."""
    tags = torch.tensor(case["tags"])
    frames, height, width, sound = case["target"]
    if "references" not in case:
        build = MiniMaxH3PrepareLayoutStep.build_packed_sequence
        keyframes = case.get("keyframes", ())
        rows = build(tags, frames, height, width, sound, PATCH, CHANNELS, SOUND, VIDEO, keyframes)
    else:
        references = [Reference(kind, sound > 0) for kind, *_, sound in case["references"]]
        video = [torch.zeros(1, 1, *sizes) for kind, *sizes, _ in case["references"] if kind != "audio"]
        heard = [torch.zeros(2 * sound, 1) for *_, sound in case["references"] if sound > 0]
        build = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence
        rows = build(tags, references, video, heard, frames, height, width, sound, PATCH, CHANNELS, SOUND, VIDEO)
    positions, tags, video, audio, text, conditions, heard = rows
    fields = dict(token_tags=tags, position_ids=positions, video_indices=video, audio_indices=audio, text_indices=text)
    return fields, conditions, heard


def row_times(fields, conditions, heard, video, sound):
    build = MiniMaxH3SetTimestepsStep.build_row_timesteps
    rows = (fields["video_indices"], fields["audio_indices"], conditions, heard, fields["text_indices"].numel())
    timestep, indices = build(*rows, video, sound, max(video, 0.999), 1.0)
    return dict(timestep=timestep, timestep_indices=indices)


def inputs(case, config):
    fields, conditions, heard = layout(case)
    seed, video = case["seed"], 4 * config["in_channels"]
    given = dict(
        hidden_states=normal(seed, 1, fields["video_indices"].numel(), video),
        audio_hidden_states=normal(seed + 1, 1, fields["audio_indices"].numel(), config["audio_in_channels"]),
        encoder_hidden_states=normal(seed + 2, 1, fields["text_indices"].numel(), config["text_dim"]),
    )
    return given, fields, conditions, heard


def run(model, case, config):
    given, fields, conditions, heard = inputs(case, config)
    times = row_times(fields, conditions, heard, TIMES["video"], TIMES["sound"])
    output = model(**given, **fields, **times)
    outputs = dict(sample=output.sample, audio_sample=output.audio_sample)
    recorded = given | dict(token_tags=fields["token_tags"], timestep_indices=times["timestep_indices"])
    recorded |= dict(timestep=times["timestep"])
    meta = dict(condition_rows=conditions, heard_rows=heard, times=TIMES)
    meta |= {key: case[key] for key in ("tags", "target", "keyframes", "references") if key in case}
    return recorded, outputs, meta


class Table(torch.nn.Module):
    """In the place of the time embedder: rows of a table over [0, 1], interpolated."""

    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table)

    def forward(self, times):
        at = times.clamp(0, 1) * (len(self.table) - 1)
        low = at.floor().long().clamp(max=len(self.table) - 2)
        share = (at - low)[:, None]
        return self.table[low] * (1 - share) + self.table[low + 1] * share


def tabled(model, grid):
    """The same model with a table of `grid` times and AdaLN projections of as many channels: what the time embedder gives there, after
    its activation, in the basis of its own singular vectors."""
    times = torch.linspace(0, 1, grid, dtype=torch.float64)
    embedded = torch.nn.functional.silu(model.time_embedder(model.time_proj(times.float()))).double()
    _, _, basis = torch.linalg.svd(embedded, full_matrices=False)
    table = embedded @ basis.T
    for linear in [block.adaln_proj.linear for block in model.transformer_blocks] + [model.norm_out.linear]:
        linear.weight = torch.nn.Parameter((linear.weight.double() @ basis.T).float())
    model.time_proj, model.time_embedder = torch.nn.Identity(), Table(table.float())
    return model


class NoActivation:
    """AdaLN layers without their activation, as those of a table are."""

    def __enter__(self):
        self.classes = (module.MiniMaxH3AdaLayerNormModulation, module.MiniMaxH3AdaLayerNormOut)
        self.kept = [cls.forward for cls in self.classes]

        def modulation(layer, temb):
            return layer.linear(temb).view(-1, 6 * layer.hidden_size).chunk(6, dim=-1)

        def out(layer, x, temb, rows):
            shift, scale = layer.linear(temb).chunk(2, dim=-1)
            return layer.norm(x) * (1.0 + scale[rows]) + shift[rows]

        for cls, forward in zip(self.classes, (modulation, out)):
            cls.forward = forward

    def __exit__(self, *_):
        for cls, forward in zip(self.classes, self.kept):
            cls.forward = forward


def single(state, heads, is_interleaved):
    """The tensors under the names of the authors, queries, keys and values in one matrix and the gate's rows first."""
    names = {
        "proj_in.": "video_patch_proj.",
        "audio_proj_in.": "audio_patch_proj.",
        "proj_out.": "final_layer.video_out.",
        "audio_proj_out.": "final_layer.audio_out.",
        "context_embedder.": "condition_proj.",
        "time_embedder.linear_1.": "time_embedder.proj_in.",
        "time_embedder.linear_2.": "time_embedder.proj_out.",
        "norm_out.norm.": "final_layer.norm.",
        "norm_out.linear.": "final_layer.adaln_proj.linear.",
        "time_embedder.table": "adaln_t_table",
    }
    inner = {
        "attn.norm_q.": "attn.q_norm.",
        "attn.norm_k.": "attn.k_norm.",
        "attn.to_out.0.": "attn.out_proj.",
        "ff.net.0.proj.": "mlp.fc1.",
        "ff.net.2.": "mlp.fc2.",
    }
    tensors = {"rope.inv_freq": torch.zeros(4)}
    for name, value in state.items():
        if "attn.to_k." in name or "attn.to_v." in name:
            continue
        for old, new in names.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        for old, new in inner.items():
            name = name.replace(old, new)
        if "attn.to_q." in name:
            parts = [state[name], state[name.replace("to_q", "to_k")], state[name.replace("to_q", "to_v")]]
            value = torch.cat(parts)
            if is_interleaved:
                by_head = [part.unflatten(0, (heads, -1)) for part in parts]
                value = torch.stack(by_head, 1).flatten(0, 2)
            name = name.replace("to_q", "qkv_proj")
        if name.endswith("mlp.fc1.weight"):
            value = torch.cat(value.chunk(2)[::-1])
        name = name.replace("token_refiner.refiner_blocks.", "token_refiner.blocks.")
        tensors[name.replace("transformer_blocks.", "blocks.")] = value
    return tensors


def single_files(folder):
    model = make(SMALL, 3011)
    state, case = model.state_dict(), CASES["fl2va_first_last"]
    write_case(folder, "fl2va", *run(model, case, SMALL))
    write_model(folder, model)
    for layout in ("stacked", "interleaved"):
        tensors = single(state, SMALL["num_attention_heads"], layout == "interleaved")
        # The library reads them as what they were.
        back = to_diffusers(dict(tensors), SMALL, qkv_layout=layout)
        assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
        write_tensors(folder / f"{layout}.safetensors", tensors, {})


def schedules(path):
    tensors, cases = {}, {}
    for shift in (12.0, 3.0, 1.0):
        for points in (2, 5, 9, 51):
            scheduler = MiniMaxH3Scheduler(shift=shift)
            scheduler.set_timesteps(points)
            name = f"shift{shift:g}.points{points}"
            tensors |= {f"out.{name}.sigmas": scheduler.sigmas, f"out.{name}.timesteps": scheduler.timesteps}
            x, velocity, steps = normal(350, 4, 8), normal(351, 4, 8), []
            for timestep in scheduler.timesteps:
                x = scheduler.step(velocity, timestep, x, return_dict=False)[0]
                steps.append(x)
            tensors[f"out.{name}.last"] = steps[-1]
            tensors[f"out.{name}.first"] = steps[0]
            cases[name] = dict(shift=shift, points=points)
    tensors |= {"in.sample": normal(350, 4, 8), "in.velocity": normal(351, 4, 8)}
    write_tensors(path, tensors, cases)


def denoise(model, folder, name, case, points=5):
    """The loop of the modular pipeline: two schedules, conditions as they are, one prediction for each step."""
    video, sound = MiniMaxH3Scheduler(shift=12.0), MiniMaxH3Scheduler(shift=3.0)
    video.set_timesteps(points)
    sound.set_timesteps(points)
    fields, conditions, heard = layout(case)
    frames, height, width, count = case["target"]
    seed, channels = case["seed"], CONFIG["in_channels"]
    latents, waves = normal(seed, channels, frames, height, width), normal(seed + 1, 2, count, 16)
    text = normal(seed + 2, 1, fields["text_indices"].numel(), CONFIG["text_dim"])
    seen, known = normal(seed + 3, conditions, 4 * channels), normal(seed + 4, heard, 16)
    rows = torch.cat([seen, patchify_video_latents(latents[None], PATCH)])
    waves_rows = torch.cat([known, waves.flatten(0, 1)])
    every = []
    for t, ts in zip(video.timesteps, sound.timesteps):
        times = row_times(fields, conditions, heard, float(t), float(ts))
        given = dict(hidden_states=rows[None], audio_hidden_states=waves_rows[None], encoder_hidden_states=text)
        seen_velocity, heard_velocity = model(**given, **fields, **times, return_dict=False)
        rows, waves_rows = rows.clone(), waves_rows.clone()
        rows[conditions:] = video.step(seen_velocity[0, conditions:], t, rows[conditions:], return_dict=False)[0]
        waves_rows[heard:] = sound.step(heard_velocity[0, heard:], ts, waves_rows[heard:], return_dict=False)[0]
        every.append(rows[conditions:])
    # [frames, rows, columns, channels, 2, 2] as [channels, frames, height, width].
    last = rows[conditions:].unflatten(0, (frames, height // 2, width // 2)).unflatten(3, (channels, 2, 2))
    last = last.permute(3, 0, 1, 4, 2, 5).reshape(channels, frames, height, width)
    given = dict(latents=latents, sound=waves, text=text[0], condition_rows=seen, heard_rows=known)
    given["token_tags"] = fields["token_tags"]
    made = dict(latents=last, sound=waves_rows[heard:].reshape(2, count, 16), video_rows=torch.stack(every))
    meta = dict(points=points) | {key: case[key] for key in ("tags", "target", "keyframes", "references") if key in case}
    write_case(folder, name, given, made, meta)


def main(out):
    folder = out / "minimax_h3_transformer"
    model = make()
    write_model(folder, model)
    for name, case in CASES.items():
        write_case(folder, name, *run(model, case, CONFIG))
    latents = normal(330, 1, 8, 3, 4, 6)
    write_case(folder, "patchify", dict(latents=latents[0]), dict(rows=patchify_video_latents(latents, PATCH)))

    folder = out / "minimax_h3_denoise"
    anchored = dict(seed=340, tags=[1, 1, 0, 0, 0, 0, 1, 1], target=(7, 4, 4, 6), keyframes=("first",))
    denoise(model, folder, "fl2va", anchored)
    denoise(model, folder, "ref2va", CASES["ref2va"] | dict(seed=360))

    folder = out / "minimax_h3_table"
    table = tabled(make(SMALL, 3011), 9)
    with NoActivation():
        write_case(folder, "fl2va", *run(table, CASES["fl2va_first_last"], SMALL))
    write_json(folder / "config.json", SMALL, indent=1, sort_keys=True)
    write_tensors(folder / "model.safetensors", single(table.state_dict(), 2, False), {})

    single_files(out / "minimax_h3_single")
    schedules(out / "minimax_h3_scheduler" / "schedules.safetensors")
