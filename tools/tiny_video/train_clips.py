"""Train the tiny MiniMax H3 from nothing: tokenizer, both autoencoders, then transformer and text encoder.

    python train_clips.py --out FOLDER --stage vae --seconds 400
    python train_clips.py --out FOLDER --stage sound --seconds 400      # may run beside the one above
    python train_clips.py --out FOLDER --stage transformer --seconds 420
    python train_clips.py --out FOLDER --stage decoder --seconds 300    # may run beside the one above
    python train_clips.py --out FOLDER --stage save

The budget is wall-clock time, over which the learning rate is annealed; each stage reads what the earlier left in FOLDER. A GPU
with bf16 is assumed; `--device cpu --steps 2` is a dry run. `--check` compares the batched forward passes with diffusers' own.
"""

import argparse
import functools
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import parts  # first: it makes the modules of the tiny picture model known
import batched
import clips
from tiny_loop import Loop, log

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# (anchors, frames): samples of a batch, share of the steps
KINDS = {
    ((), 22): (128, 0.24),
    ((), 39): (96, 0.18),
    ((), 56): (64, 0.28),
    (("first",), 22): (96, 0.08),
    (("first",), 56): (64, 0.12),
    (("first", "last"), 22): (96, 0.04),
    (("first", "last"), 39): (64, 0.06),
}


@functools.cache
def constant(values, device):
    """A value for each colour; made once, since recorded graphs may not copy from the host."""
    return torch.tensor(values, device=device).view(1, 3, 1, 1, 1)


def normalized(pixels):
    """From [0, 1] to what the video VAE sees."""
    return (pixels - constant(IMAGENET_MEAN, pixels.device)) / constant(IMAGENET_STD, pixels.device)


def random_rows(count, seed, palette=False):
    rng = random.Random(seed)
    rows = torch.tensor([clips.random_clip(rng)[1] for _ in range(count)])
    if palette:
        # So that the autoencoder knows more than the colours with names.
        for part in (clips.COLOUR, clips.BACKGROUND):
            free = torch.rand(count) < 0.35
            rows[free, part] = torch.rand(int(free.sum()), 3)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# video autoencoder


def vae_moments(vae, x):
    """Of 22 frames: 17 are one chunk, the next five the beginning of another."""
    first = vae.quant_conv(vae.encoder(x[:, :, :17]))
    second = vae.quant_conv(vae.encoder(x[:, :, 17:]))
    return torch.cat([first, second], dim=2)


def kept(decoded):
    """Of the 28 frames of a decoded piece of seven latents those that stand for frames 0 to 21."""
    return torch.cat([decoded[:, :, 3:20], decoded[:, :, 23:28]], dim=2)


def vae_loss(vae, pixels, noise):
    moments = vae_moments(vae, normalized(pixels)).float()
    mean, logvar = moments.chunk(2, dim=1)
    logvar = logvar.clamp(-30, 20)
    z = mean + (0.5 * logvar).exp() * noise
    out = kept(vae.decoder(vae.post_quant_conv(z))).float()
    error = (out - normalized(pixels)) * constant(IMAGENET_STD, pixels.device) * 2
    dy = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    dx = (error[..., 1:] - error[..., :-1]).abs().mean()
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return error.abs().mean() + 2 * error.square().mean() + 0.5 * (dx + dy) + 1e-4 * kl


def some_clips(rows, count, side):
    """Pixels (count, 3, 22, side, side): crowds, and at full size half of them clips as the transformer will see them."""
    device = rows.device
    if side < clips.SIDE:
        return clips.crowd(count, 22, side, device)
    pick = rows[torch.randint(len(rows), (count - count // 2,), device=device)]
    begin = torch.randint(clips.FRAMES - 22, (len(pick), 1), device=device)
    plain = clips.draw(pick, begin + torch.arange(22, device=device))
    return torch.cat([plain, clips.crowd(count // 2, 22, side, device)])


def train_vae(args, out):
    vae = parts.make_vae().to(args.device)
    with torch.no_grad():
        # The blocks begin as the identity; a little of them lets gradients in at once.
        for block in vae.decoder.transformer_blocks:
            block.scale1.fill_(0.3)
            block.scale2.fill_(0.3)
    rows = random_rows(400 if args.device == "cpu" else 40000, 1, palette=True).to(args.device)
    loop = Loop([vae], args, 1.5e-3, args.seconds, args.steps, 0.998)
    # Small pictures first: four times the steps.
    sizes = {64: 8, 128: 2} if args.device == "cpu" else {64: 48, 128: 20}
    tensors = {}
    for side, batch in sizes.items():
        latent = side // 16
        tensors[side] = (
            torch.empty(batch, 3, 22, side, side, device=args.device),
            torch.empty(batch, parts.VIDEO_CHANNELS, 7, latent, latent, device=args.device),
        )
    total, count, shown = torch.zeros((), device=args.device), 0, time.time()
    while not loop.done():
        side = 64 if loop.progress() < 0.7 else 128
        pixels, noise = tensors[side]
        pixels.copy_(some_clips(rows, len(pixels), side))
        noise.normal_()
        total += loop.backward(f"vae{side}", lambda: vae_loss(vae, pixels, noise))
        loop.update()
        count += 1
        if time.time() - shown > 20 or loop.done():
            log(f"vae {side} step {loop.step} ({(time.time() - shown) / count * 1000:.1f} ms) loss {(total / count).item():.5f}")
            loop.check(count)
            total.zero_()
            count, shown = 0, time.time()
    loop.ema.apply()
    report = {"steps": loop.step, "psnr_db": vae_psnr(vae, args)}
    log("vae", report)
    save_file({k: v.contiguous().cpu() for k, v in vae.state_dict().items()}, out / "vae.safetensors")
    return report


@torch.no_grad()
def vae_psnr(vae, args):
    fresh = random_rows(4 if args.device == "cpu" else 64, 99).to(args.device)
    x = (clips.draw(fresh, torch.arange(22)) * 255).round() / 255
    made = kept(vae.decoder(vae.post_quant_conv(vae_moments(vae, normalized(x))[:, : parts.VIDEO_CHANNELS])))
    error = ((made - normalized(x)) * constant(IMAGENET_STD, x.device)).square().mean()
    return round(-10 * math.log10(error.item()), 2)


def train_decoder(args, out):
    """The video decoder alone, with the encoder as it is: may run beside the transformer, which needs the encoder only."""
    vae = load(parts.make_vae(), out / "vae.safetensors").to(args.device)
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)
    rows = random_rows(400 if args.device == "cpu" else 40000, 4).to(args.device)
    batch, stock = (2, 8) if args.device == "cpu" else (48, 6000)
    half = torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.device != "cpu")
    pixels, moments = [], []
    with torch.no_grad():
        for _ in range(0, stock, batch):
            x = (some_clips(rows, batch, clips.SIDE) * 255).round()
            with half:
                moments.append(vae_moments(vae, normalized(x / 255)).float())
            pixels.append(x.byte())
    pixels, (mean, logvar) = torch.cat(pixels), torch.cat(moments).chunk(2, dim=1)
    spread = (0.5 * logvar.clamp(-30, 20)).exp()
    usual = mean.std((0, 2, 3, 4), keepdim=True)
    log("stock", len(pixels), "usual", usual.flatten().tolist())
    modules = [vae.decoder, vae.post_quant_conv]
    loop = Loop(modules, args, 1e-3, args.seconds, args.steps, 0.999)
    target, z = torch.empty_like(pixels[:batch], dtype=torch.float32), torch.empty_like(mean[:batch])

    def loss():
        made = kept(vae.decoder(vae.post_quant_conv(z))).float()
        error = (made - normalized(target / 255)) * constant(IMAGENET_STD, made.device) * 2
        dy = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
        dx = (error[..., 1:] - error[..., :-1]).abs().mean()
        return error.abs().mean() + 2 * error.square().mean() + 0.5 * (dx + dy)

    total, count, shown = torch.zeros((), device=args.device), 0, time.time()
    while not loop.done():
        pick = torch.randint(len(pixels), (batch,), device=args.device)
        target.copy_(pixels[pick])
        # Latents that come from the transformer are a little off.
        off = torch.rand(batch, 1, 1, 1, 1, device=args.device) * 0.1 * usual
        z.copy_(mean[pick] + torch.randn_like(z) * (spread[pick] + off))
        total += loop.backward("decoder", loss)
        loop.update()
        count += 1
        if time.time() - shown > 20 or loop.done():
            log(f"decoder step {loop.step} ({(time.time() - shown) / count * 1000:.1f} ms) loss {(total / count).item():.5f}")
            loop.check(count)
            total.zero_()
            count, shown = 0, time.time()
    loop.ema.apply()
    report = {"steps": loop.step, "psnr_db": vae_psnr(vae, args)}
    log("decoder", report)
    state = {k: v.contiguous().cpu() for k, v in vae.state_dict().items() if k.startswith(("decoder.", "post_quant_conv."))}
    save_file(state, out / "decoder.safetensors")
    return report


# ---------------------------------------------------------------------------------------------------------------------
# sound autoencoder


def spectra(wave):
    for size in (256, 1024, 2048):
        window = torch.hann_window(size, device=wave.device)
        yield torch.stft(wave, size, size // 4, window=window, return_complex=True).abs()


def sound_loss(vae, wave, noise):
    hidden = vae.pre_block(vae.encoder(wave).transpose(1, 2)).transpose(1, 2)
    mean, logs = vae.mean_proj(hidden), vae.logs_proj(hidden).clamp(-10, 3)
    out = vae.decoder(vae.dec_in_proj(mean + logs.exp() * noise))
    error = (out - wave).abs().mean() * 4 + (out - wave).square().mean() * 20
    for made, true in zip(spectra(out[:, 0].float()), spectra(wave[:, 0].float())):
        error = error + (made - true).abs().mean() / true.shape[1] ** 0.5 * 2
    kl = 0.5 * (mean.square() + (2 * logs).exp() - 1 - 2 * logs).mean()
    return error + 2e-4 * kl


def sound_batch(rows, samples, device):
    """Single channels: the clips' tones, and others so that the autoencoder knows more than five pitches."""
    rows = rows.clone()
    free = torch.rand(len(rows), device=device) < 0.3
    rows[free, clips.PITCH] = 110 * 2 ** (torch.rand(int(free.sum()), device=device) * 4)
    wave = clips.sound(rows, samples)
    return wave[torch.arange(len(rows), device=device), torch.randint(2, (len(rows),), device=device)][:, None]


def train_sound(args, out):
    vae = parts.make_sound_vae().to(args.device)
    rows = random_rows(400 if args.device == "cpu" else 20000, 2).to(args.device)
    batch, frames = (2, 10) if args.device == "cpu" else (64, 40)
    args.no_graphs = True if args.device == "cpu" else args.no_graphs
    loop = Loop([vae], args, 1.5e-3, args.seconds, args.steps, 0.998)
    loop.half = False
    wave = torch.empty(batch, 1, frames * clips.HOP, device=args.device)
    noise = torch.empty(batch, parts.SOUND_CHANNELS, frames, device=args.device)
    total, count, shown = torch.zeros((), device=args.device), 0, time.time()
    while not loop.done():
        pick = rows[torch.randint(len(rows), (batch,), device=args.device)]
        # Pieces from the beginning, where the tone rises, and from later: there it is under way.
        late = clips.HOP * 53 if torch.rand(()) < 0.5 else 0
        whole = sound_batch(pick, wave.shape[-1] + late, args.device)
        wave.copy_(whole[..., late:])
        noise.normal_()
        total += loop.backward("sound", lambda: sound_loss(vae, wave, noise))
        loop.update()
        count += 1
        if time.time() - shown > 20 or loop.done():
            log(f"sound step {loop.step} ({(time.time() - shown) / count * 1000:.1f} ms) loss {(total / count).item():.5f}")
            loop.check(count)
            total.zero_()
            count, shown = 0, time.time()
    loop.ema.apply()
    with torch.no_grad():
        fresh = random_rows(4 if args.device == "cpu" else 64, 98).to(args.device)
        fresh = fresh[fresh[:, clips.PITCH] > 0]
        wave = clips.sound(fresh, 93 * clips.HOP).flatten(0, 1)[:, None]
        made = vae.decode(vae.encode(wave).latent_dist.mode()).sample
        ratio = wave.square().mean() / (made - wave).square().mean()
        report = {"steps": loop.step, "snr_db": round(10 * math.log10(ratio.item()), 2)}
    log("sound", report)
    save_file({k: v.contiguous().cpu() for k, v in vae.state_dict().items()}, out / "sound.safetensors")
    return report


# ---------------------------------------------------------------------------------------------------------------------
# transformer and text encoder


class Pool:
    """Latents of all clips; batches of each kind are cut from them."""

    @torch.no_grad()
    def __init__(self, args, vae, sound_vae):
        count = 24 if args.device == "cpu" else 8000
        rng = random.Random(3)
        clips_, rows = zip(*(clips.random_clip(rng) for _ in range(count)))
        self.names, self.rows = clips_, torch.tensor(rows, device=args.device)
        size = 4 if args.device == "cpu" else 24
        video, single, spread, sound, stills = [], [], [], [], []
        seen = [0, *[n - 1 for n in clips.LENGTHS]]
        self.stills_at = {frame: index for index, frame in enumerate(seen)}
        half = torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.device != "cpu")
        for start in range(0, count, size):
            part = self.rows[start : start + size]
            pixels = (clips.draw(part, torch.arange(clips.FRAMES)) * 255).round()
            x = normalized(pixels / 255)
            with half:
                pieces = [vae.quant_conv(vae.encoder(x[:, :, at : min(at + 17, clips.FRAMES)])) for at in range(0, clips.FRAMES, 17)]
            # Pieces of 17 frames have five latents, the five frames at the end two.
            moments = torch.cat(pieces, dim=2).float()
            video.append(moments[:, : parts.VIDEO_CHANNELS].to(torch.bfloat16))
            still = x[:, :, seen].transpose(1, 2).flatten(0, 1)[:, :, None]
            with half:
                moments = vae.quant_conv(vae.encoder(still)).float()[:, :, 0].view(len(part), len(seen), -1, batched.LATENT, batched.LATENT)
            mean, logvar = moments.chunk(2, dim=2)
            single.append(mean.to(torch.bfloat16))
            spread.append((0.5 * logvar.clamp(-30, 20)).exp().to(torch.bfloat16))
            stills.append(pixels[:, :, seen].transpose(1, 2).byte())
            wave = clips.sound(part, clips.sound_latents(clips.FRAMES) * clips.HOP)
            mean = sound_vae.encode(wave.flatten(0, 1)[:, None]).latent_dist.mode()
            sound.append(mean.view(len(part), 2, *mean.shape[1:]))
        self.video, self.single, self.spread, self.sound, self.stills = (torch.cat(v) for v in (video, single, spread, sound, stills))

    def statistics(self):
        axes = (0, 2, 3, 4)
        video = self.video.float()
        sound = self.sound
        return [[round(v, 4) for v in t.tolist()] for t in (video.mean(axes), video.std(axes), sound.mean((0, 1, 3)), sound.std((0, 1, 3)))]


class Kind:
    """Static tensors of one kind of sample, which batches are copied into."""

    def __init__(self, args, kind, pool, text_encoder, tokenizer, statistics):
        anchors, frames = kind
        batch, self.share = KINDS[kind]
        self.batch = batch = 2 if args.device == "cpu" else batch
        self.pool, self.anchors, self.frames, device = pool, anchors, frames, args.device
        rng = random.Random(frames + len(anchors))
        variants = 3
        texts = [clips.caption(rng, names, seen=bool(anchors)) for names in pool.names for _ in range(variants)]
        self.variants = variants
        prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        head = batched.head(tokenizer, anchors)
        lengths = [len(head) + len(p) for p in prompts]
        length = max(lengths)
        self.layout = batched.Layout(text_encoder, tokenizer, anchors, frames, length, device)
        pad = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        table = torch.full((len(prompts), length), pad, dtype=torch.int16)
        for index, line in enumerate(prompts):
            line = head + line
            table[index, : len(line)] = torch.tensor(line, dtype=torch.int16)
        self.ids, self.lengths = table.to(device), torch.tensor(lengths, device=device)
        video = [torch.tensor(v, device=device) for v in statistics[:2]]
        self.video_mean, self.video_std = (v.view(1, -1, 1, 1, 1) for v in video)
        self.sound_mean, self.sound_std = (torch.tensor(v, device=device).view(1, 1, -1, 1) for v in statistics[2:])
        self.b_ids = torch.zeros(batch, length, dtype=torch.long, device=device)
        self.b_lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.b_video = torch.zeros(batch, self.layout.video, parts.VIDEO_CHANNELS * 4, device=device)
        self.b_sound = torch.zeros(batch, 2 * self.layout.sound, parts.SOUND_CHANNELS, device=device)
        self.b_video_noise, self.b_sound_noise = torch.zeros_like(self.b_video), torch.zeros_like(self.b_sound)
        self.b_times = torch.zeros(batch, 3, device=device)
        self.b_given = torch.zeros(batch, self.layout.given, parts.VIDEO_CHANNELS * 4, device=device) if anchors else None
        self.b_pictures = torch.zeros(batch, len(anchors), 3, clips.SIDE, clips.SIDE, dtype=torch.uint8, device=device) if anchors else None

    def fill(self):
        pool, layout = self.pool, self.layout
        device = pool.video.device
        pick = torch.randint(len(pool.video), (self.batch,), device=device)
        text = pick * self.variants + torch.randint(self.variants, (self.batch,), device=device)
        self.b_ids.copy_(self.ids[text])
        self.b_lengths.copy_(self.lengths[text])
        video = (pool.video[pick, :, : layout.latents].float() - self.video_mean) / self.video_std
        self.b_video.copy_(batched.video_rows(video))
        sound = (pool.sound[pick, :, :, : layout.sound] - self.sound_mean) / self.sound_std
        self.b_sound.copy_(sound.transpose(2, 3).flatten(1, 2))
        self.b_video_noise.normal_()
        self.b_sound_noise.normal_()
        uniform = torch.rand(self.batch, device=device)
        base = torch.where(torch.rand(self.batch, device=device) < 0.5, uniform, torch.sigmoid(torch.randn(self.batch, device=device)))
        sigma = [s * base / (1 + (s - 1) * base) for s in (parts.VIDEO_SHIFT, parts.SOUND_SHIFT)]
        times = [1 - s for s in sigma]
        self.b_times.copy_(torch.stack([*times, times[0].clamp(min=0.999)], dim=1))
        if self.anchors:
            at = [0 if anchor == "first" else pool.stills_at[self.frames - 1] for anchor in self.anchors]
            mean, spread = (t[pick][:, at].float() for t in (pool.single, pool.spread))
            still = mean + spread * torch.randn_like(mean)
            still = (still.transpose(1, 2) - self.video_mean) / self.video_std
            still = 0.999 * still + 0.001 * torch.randn_like(still)
            self.b_given.copy_(batched.video_rows(still))
            self.b_pictures.copy_(pool.stills[pick][:, at])

    def loss(self, text_encoder, transformer):
        pictures = self.b_pictures.float() / 127.5 - 1 if self.anchors else None
        text = batched.encode(text_encoder, self.layout, self.b_ids, pictures)
        tv, ta = self.b_times[:, 0, None, None], self.b_times[:, 1, None, None]
        video = tv * self.b_video + (1 - tv) * self.b_video_noise
        sound = ta * self.b_sound + (1 - ta) * self.b_sound_noise
        va, vv = batched.denoise(
            transformer, self.layout, text, self.b_lengths, self.b_given, sound, video, self.b_times
        )
        return F.mse_loss(vv.float(), self.b_video - self.b_video_noise) + 0.7 * F.mse_loss(
            va.float(), self.b_sound - self.b_sound_noise
        )


def load(module, path):
    module.load_state_dict(load_file(path))
    return module


def train_transformer(args, out):
    tokenizer = parts.make_tokenizer(out / "tokenizer")
    vae, sound_vae = load(parts.make_vae(), out / "vae.safetensors"), load(parts.make_sound_vae(), out / "sound.safetensors")
    vae, sound_vae = vae.to(args.device).requires_grad_(False), sound_vae.to(args.device).requires_grad_(False)
    pool = Pool(args, vae, sound_vae)
    statistics = pool.statistics()
    (out / "statistics.json").write_text(json.dumps(statistics))
    log("pool", len(pool.video), "clips; statistics", statistics)
    text_encoder, transformer = parts.make_text_encoder(tokenizer).to(args.device), parts.make_transformer().to(args.device)
    with torch.no_grad():
        for head in (transformer.proj_out, transformer.audio_proj_out):
            head.weight.zero_()
            head.bias.zero_()
        for block in transformer.transformer_blocks:
            block.adaln_proj.linear.weight.mul_(0.3)
            # Gates begin open.
            block.adaln_proj.linear.bias.view(3, 6, -1)[:, [2, 5]] += 0.5
    kinds = {kind: Kind(args, kind, pool, text_encoder, tokenizer, statistics) for kind in KINDS}
    log("kinds", {str(k): v.layout.total for k, v in kinds.items()})
    loop = Loop([text_encoder, transformer], args, 1.5e-3, args.seconds, args.steps, 0.9995, 0.01)
    rng = random.Random(5)
    totals = {kind: [torch.zeros((), device=args.device), 0] for kind in KINDS}
    shown, history, since = time.time(), [], 0
    while not loop.done():
        kind = rng.choices(list(kinds), [k.share for k in kinds.values()])[0]
        kinds[kind].fill()
        loss = loop.backward(str(kind), lambda: kinds[kind].loss(text_encoder, transformer))
        totals[kind][0] += loss.nan_to_num(0.0)
        totals[kind][1] += 1
        loop.update()
        since += 1
        if time.time() - shown > 20 or loop.done():
            values = {"+".join(k[0]) + str(k[1]): round((t / max(c, 1)).item(), 4) for k, (t, c) in totals.items()}
            log(f"transformer step {loop.step} ({(time.time() - shown) / since * 1000:.1f} ms) loss {values}")
            history.append({"step": loop.step, "loss": values})
            loop.check(since)
            totals = {kind: [torch.zeros((), device=args.device), 0] for kind in KINDS}
            shown, since = time.time(), 0
    loop.ema.apply()
    for name, module in (("text_encoder", text_encoder), ("transformer", transformer)):
        state = {k: v.contiguous().cpu() for k, v in module.state_dict().items() if k != "lm_head.weight"}
        save_file(state, out / f"{name}.safetensors")
    return {"steps": loop.step, "history": history}


def save(args, out):
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer.from_pretrained(out / "tokenizer")
    vae, sound_vae = load(parts.make_vae(), out / "vae.safetensors"), load(parts.make_sound_vae(), out / "sound.safetensors")
    if (out / "decoder.safetensors").exists():
        _, unexpected = vae.load_state_dict(load_file(out / "decoder.safetensors"), strict=False)
        assert not unexpected, unexpected
    statistics = json.loads((out / "statistics.json").read_text())
    vae.register_to_config(latents_mean=statistics[0], latents_std=statistics[1])
    sound_vae.register_to_config(latents_mean=statistics[2], latents_std=statistics[3])
    text_encoder = parts.make_text_encoder(tokenizer)
    missing, unexpected = text_encoder.load_state_dict(load_file(out / "text_encoder.safetensors"), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    transformer = load(parts.make_transformer(), out / "transformer.safetensors")
    folder = parts.save(out / "pipeline", out / "tokenizer", transformer, text_encoder, vae, sound_vae)
    log("saved", folder, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()), "bytes")


@torch.no_grad()
def check(args, out):
    """The batched passes beside diffusers' and transformers' own, with untrained weights."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep, MiniMaxH3SetTimestepsStep

    tokenizer = parts.make_tokenizer(out / "tokenizer")
    text_encoder, transformer = parts.make_text_encoder(tokenizer), parts.make_transformer()
    rng = random.Random(7)
    texts = [clips.caption(rng, clips.random_clip(rng)[0]) for _ in range(2)]
    for anchors in ((), ("first",), ("first", "last")):
        head = batched.head(tokenizer, anchors)
        prompts = [head + tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
        length = max(len(p) for p in prompts)
        layout = batched.Layout(text_encoder, tokenizer, anchors, 22, length, "cpu")
        ids = torch.zeros(2, length, dtype=torch.long)
        for index, line in enumerate(prompts):
            ids[index, : len(line)] = torch.tensor(line)
        lengths = torch.tensor([len(p) for p in prompts])
        pictures = torch.rand(2, len(anchors), 3, clips.SIDE, clips.SIDE) * 2 - 1 if anchors else None
        given = torch.randn(2, layout.given, 64) if anchors else None
        sound, video = torch.randn(2, 2 * layout.sound, 16), torch.randn(2, layout.video, 64)
        times = torch.tensor([[0.3, 0.5, 0.999], [0.7, 0.8, 0.999]])
        text = batched.encode(text_encoder, layout, ids, pictures)
        va, vv = batched.denoise(transformer, layout, text, lengths, given, sound, video, times)
        for index in range(2):
            count = int(lengths[index])
            extra = {}
            if anchors:
                import fast

                extra = {
                    "pixel_values": fast.patches(pictures[index]).flatten(0, 1),
                    "image_grid_thw": torch.tensor([[1, batched.GRID, batched.GRID]] * len(anchors)),
                    "mm_token_type_ids": (ids[index : index + 1, :count] == tokenizer.convert_tokens_to_ids("<|image_pad|>")).long(),
                }
            kept = []
            hook = text_encoder.model.language_model.layers[-1].register_forward_hook(lambda m, i, o: kept.append(o))
            text_encoder.model(input_ids=ids[index : index + 1, :count], use_cache=False, **extra)
            hook.remove()
            theirs = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
            tags = layout.tags[:count]
            pos, tags, vi, ai, ti, ncv, nca = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
                tags, layout.latents, batched.LATENT, batched.LATENT, layout.sound, batched.PATCH, 2, 2, 0, anchors
            )
            t, where = MiniMaxH3SetTimestepsStep.build_row_timesteps(vi, ai, ncv, nca, count, *times[index, [0, 1, 2]].tolist(), 1.0)
            rows = torch.cat([given[index], video[index]]) if anchors else video[index]
            ov, oa = transformer(
                hidden_states=rows[None], audio_hidden_states=sound[index][None], encoder_hidden_states=theirs, timestep=t,
                timestep_indices=where, token_tags=tags, position_ids=pos, video_indices=vi, audio_indices=ai, text_indices=ti,
                return_dict=False,
            )
            print(anchors, index, "text", (theirs[0] - text[index, :count]).abs().max().item(), "video",
                  (ov[0, ncv:] - vv[index]).abs().max().item(), "sound", (oa[0] - va[index]).abs().max().item())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--stage", choices=("vae", "sound", "decoder", "transformer", "save"))
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_cudnn_sdp(False)
    if args.check:
        return check(args, out)
    stages = {"vae": train_vae, "sound": train_sound, "decoder": train_decoder, "transformer": train_transformer, "save": save}
    report = stages[args.stage](args, out)
    if report:
        (out / f"{args.stage}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
