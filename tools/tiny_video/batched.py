"""Batched forward passes for training, equal to what diffusers computes one request at a time.

Prompts of different lengths are padded on the right; padded rows are masked, and media begin at each prompt's own length, so that a
batch trains exactly the function that is sampled. `train_clips.py --check` compares the two.
"""

import torch
import torch.nn.functional as F
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

import clips
import fast
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

PATCH = (1, 2, 2)
GRID = clips.SIDE // 16
LATENT = clips.SIDE // 16
ROWS = (LATENT // 2) ** 2
TAG_VIDEO, TAG_TEXT, TAG_SOUND = 0, 1, 2
# Which time a row has: of the video, of the sound, of what is given.
VIDEO, SOUND, GIVEN = 0, 1, 2


def blocks(tokenizer, anchors):
    """Token ids of the label and the vision block of each anchor."""
    ids = tokenizer.convert_tokens_to_ids
    for index in range(len(anchors)):
        label = tokenizer(f"<Picture {index + 1}>: ", add_special_tokens=False)["input_ids"]
        yield label, [ids("<|vision_start|>")] + [ids("<|image_pad|>")] * (GRID // 2) ** 2 + [ids("<|vision_end|>")]


def head(tokenizer, anchors):
    """Token ids in front of the prompt."""
    return [i for label, block in blocks(tokenizer, anchors) for i in label + block]


class Layout:
    """All that the samples of one kind share: anchors (`first`, `last`), latents of video and sound, rows of text."""

    def __init__(self, text_encoder, tokenizer, anchors, frames, length, device):
        self.anchors, self.frames, self.length, self.device = anchors, frames, length, device
        self.latents = (frames - 5) // 17 * 5 + 2
        self.sound = clips.sound_latents(frames)
        # Rows of the presentation that are no prompt: a label and a vision block for each anchor.
        self.spans, tags = [], []
        for label, block in blocks(tokenizer, anchors):
            self.spans.append((len(tags) + len(label) + 1, len(block) - 2))
            tags += [TAG_TEXT] * len(label) + [TAG_VIDEO] * len(block)
        tags += [TAG_TEXT] * (length - len(tags))
        # Positions in the text encoder.
        axes, at, row = [], 0, 0
        for start, count in [*self.spans, (length, 0)]:
            plain = torch.arange(start - row) + at
            axes.append(plain.expand(3, -1))
            at, row = at + start - row, start
            if count:
                h, w = torch.meshgrid(torch.arange(GRID // 2), torch.arange(GRID // 2), indexing="ij")
                axes.append(torch.stack([torch.zeros_like(h), h, w]).reshape(3, -1) + at)
                at, row = at + GRID // 2, row + count
        self.positions = torch.cat(axes, dim=1)[:, None].to(device)
        visual = text_encoder.model.visual
        thw = torch.tensor([[1, GRID, GRID]])
        self.interp = [
            t.to(device)
            for t in get_vision_interpolation_indices_and_weights(
                thw,
                num_grid_per_side=visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=visual.spatial_merge_size,
            )
        ]
        self.vision_positions = get_vision_position_ids(thw, visual.spatial_merge_size).to(device)
        # The packed sequence for a prompt of no rows: positions of media count from the rows of text.
        packed = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            torch.ones(0, dtype=torch.long), self.latents, LATENT, LATENT, self.sound, PATCH, 2, TAG_SOUND, TAG_VIDEO, anchors
        )
        self.media = packed[0].float().to(device)
        given, sound, video = len(anchors) * ROWS, 2 * self.sound, self.latents * ROWS
        self.given, self.video = given, video
        self.tags = torch.tensor(
            tags + [TAG_VIDEO] * given + [TAG_SOUND] * sound + [TAG_VIDEO] * video, device=device
        )
        self.times = torch.tensor(
            [VIDEO] * length + [GIVEN] * given + [SOUND] * sound + [VIDEO] * video, device=device
        )
        self.total = length + given + sound + video

    def angles(self, transformer, lengths):
        """cos and sin (n, total, 1, channels) for prompts of these lengths."""
        count = len(lengths)
        text = torch.arange(self.length, device=self.device, dtype=torch.float32)
        text = torch.stack([text, torch.zeros_like(text), torch.zeros_like(text)], dim=1)[None].expand(count, -1, -1)
        media = self.media[None].expand(count, -1, -1).clone()
        media[:, :, 0] += lengths[:, None].float()
        positions = torch.cat([text, media], dim=1)
        angles = (positions[..., None] * transformer.rope.inv_freq).flatten(2)
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        return angles.cos(), angles.sin()

    def masks(self, lengths, dtype):
        """What is added to scores: for the text alone, and for all rows."""
        rows = torch.arange(self.total, device=self.device)
        hidden = (rows[None] >= lengths[:, None]) & (rows[None] < self.length)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, -1e4)[:, None, None]
        return mask[..., : self.length], mask


def encode(text_encoder, layout, ids, pictures=None):
    """Hidden rows (n, length, width) behind the last layer, without its norm. `pictures` (n, anchors, 3, SIDE, SIDE) in [-1, 1]."""
    model = text_encoder.model.language_model
    hidden = model.embed_tokens(ids)
    deep = []
    if layout.spans:
        n, k = pictures.shape[:2]
        seen, deep = fast.vision(text_encoder.model.visual, fast.patches(pictures.flatten(0, 1)), layout)
        seen = seen.view(n, k, *seen.shape[1:])
        deep = [d.view(n, k, *d.shape[1:]) for d in deep]
        for index, (start, count) in enumerate(layout.spans):
            hidden = torch.cat([hidden[:, :start], seen[:, index].to(hidden.dtype), hidden[:, start + count :]], dim=1)
    rotary = model.rotary_emb(hidden, layout.positions)
    for number, layer in enumerate(model.layers):
        hidden = layer(hidden, position_embeddings=rotary, attention_mask=None)
        if number < len(deep):
            for index, (start, count) in enumerate(layout.spans):
                added = hidden[:, start : start + count] + deep[number][:, index].to(hidden.dtype)
                hidden = torch.cat([hidden[:, :start], added, hidden[:, start + count :]], dim=1)
    return hidden


def _attend(attention, x, mask, rotary):
    q, k, v = (p(x).unflatten(-1, (attention.heads, -1)) for p in (attention.to_q, attention.to_k, attention.to_v))
    q, k = attention.norm_q(q), attention.norm_k(k)
    if rotary is not None:
        cos, sin = rotary
        dim = cos.shape[-1]

        def rotate(t):
            turned = t[..., :dim].float()
            first, second = turned.chunk(2, dim=-1)
            turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
            return torch.cat([turned.to(v.dtype), t[..., dim:].to(v.dtype)], dim=-1)

        q, k = rotate(q), rotate(k)
    q, k, v = (t.to(v.dtype).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(v.dtype))
    return attention.to_out[0](out.transpose(1, 2).flatten(2))


def denoise(transformer, layout, text, lengths, given, sound, video, times):
    """Velocities of sound and video rows. `times` (n, 3): of the video, the sound and what is given."""
    refiner = transformer.token_refiner
    text_mask, mask = layout.masks(lengths, torch.float32)
    rows = transformer.context_embedder(text)
    for block in refiner.refiner_blocks:
        rows = rows + _attend(block.attn, block.norm1(rows), text_mask, None)
        rows = rows + block.ff(block.norm2(rows))
    rows = refiner.final_norm(rows)
    seen = [transformer.proj_in(given)] if given is not None else []
    x = torch.cat([rows, *seen, transformer.audio_proj_in(sound), transformer.proj_in(video)], dim=1)
    count = len(times)
    temb = transformer.time_embedder(transformer.time_proj(times.flatten()))
    active = F.silu(temb.float())
    pick = layout.times * 3 + layout.tags
    rotary = layout.angles(transformer, lengths)
    for block in transformer.transformer_blocks:
        table = block.adaln_proj.linear(active).view(count, 9, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = table[:, pick].chunk(6, dim=-1)
        x = x + gate1 * _attend(block.attn, block.norm1(x) * (1 + scale1) + shift1, mask, rotary)
        x = x + gate2 * block.ff(block.norm2(x) * (1 + scale2) + shift2)
    start = layout.length + layout.given
    shift, scale = transformer.norm_out.linear(active).view(count, 3, -1)[:, layout.times[start:]].chunk(2, dim=-1)
    x = transformer.norm_out.norm(x[:, start:]) * (1 + scale) + shift
    return transformer.audio_proj_out(x[:, : 2 * layout.sound]), transformer.proj_out(x[:, 2 * layout.sound :])


def video_rows(latents):
    """Latents (n, channels, frames, h, w) as rows (n, frames * h/2 * w/2, channels * 4), channels slowest."""
    n, c, t, h, w = latents.shape
    return latents.view(n, c, t, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6).reshape(n, t * h * w // 4, c * 4)
