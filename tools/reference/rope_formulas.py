"""Rotary embeddings written down from the published formulas, in float64, for what diffusers does not have.

Two things: the families and reference modes that only stable-diffusion.cpp has, and every family made circular. Nothing
here is shared with the Rust code: a token is a row (positions, period of rows, period of columns), made one by one, and a
rotation is computed from its row alone. Sizes in `meta` are latents, [height, width]; `circular` is "", "x", "y" or "xy".
"""

from common import write_tensors

import math

import numpy as np
import torch

AXES = (16, 56, 56)
PADDING = ((0, 0, 0), None)


def frequencies(*axes):
    """(axis, width, base) -> (axis, radians) of each pair."""
    return [(axis, base ** (-2 * i / width)) for axis, width, base in axes for i in range(width // 2)]


def plain(widths, base):
    return frequencies(*((axis, width, base) for axis, width in enumerate(widths)))


def text(count, position):
    return [(position(i), None) for i in range(count)]


def picture(height, width, position, step=(1, 1)):
    return [(position(r, c), (height * step[0], width * step[1])) for r in range(height) for c in range(width)]


def corner(height, width, index, row=0, column=0):
    return picture(height, width, lambda r, c: (index, row + r, column + c))


def half_up(size, patch):
    return [(side + patch // 2) // patch for side in size]


def ceiling(size, patch):
    return [-(-side // patch) for side in size]


def padded(tokens, multiple=32):
    return tokens + [PADDING] * (-len(tokens) % multiple)


def references(ask, start, base=0, patch=2, centred=False):
    """Reference pictures; the offsets of mode "fixed" are in latents, as published."""
    tokens, index, sheet_h, sheet_w = [], start, 0, 0
    for h, w in ask["references"]:
        row = column = 0
        if ask["mode"] == "fixed":
            if h + sheet_h > w + sheet_w:
                column = sheet_w
            else:
                row = sheet_h
        if ask["mode"] == "decrease":
            index -= 1
        th, tw = half_up((h, w), patch)
        shift = (-math.ceil(th / 2), -math.ceil(tw / 2)) if centred and ask["mode"] != "fixed" else (base + row, base + column)
        tokens += corner(th, tw, int(index * ask.get("scale", 1)), *shift)
        if ask["mode"] == "increase":
            index += 1
        sheet_h, sheet_w = max(sheet_h, h + row), max(sheet_w, w + column)
    return tokens


def flux(ask):
    patch = ask.get("patch", 2)
    tokens = text(ask["text"], lambda i: (0, 0, 0)) + corner(*half_up(ask["target"], patch), 0)
    return tokens + references(ask, 1, patch=patch), plain(AXES, 1e4)


def flux_2(ask):
    tokens = text(ask["text"], lambda i: (0, 0, 0, i))
    for index, size in enumerate([ask["target"], *ask["references"]]):
        tokens += picture(*size, lambda r, c: (10 * index, r, c, 0))
    return tokens, plain((32,) * 4, 2000)


def ovis_image(ask):
    tokens = text(ask["text"], lambda i: (0, i, i)) + corner(*half_up(ask["target"], 2), 0)
    return tokens + references(ask, 1), plain(AXES, 1e4)


def longcat_image(ask):
    n = ask["text"]
    tokens = text(n, lambda i: (0, i, i)) + corner(*half_up(ask["target"], 2), 1, n, n)
    return tokens + references(ask, 2, base=n), plain(AXES, 1e4)


def krea_2(ask):
    tokens = text(ask["text"], lambda i: (0, 0, 0)) + corner(*half_up(ask["target"], 2), 0)
    width = ask.get("head_dim", 128)
    unit = width // 16
    return tokens + references(ask, 1), plain((width - 12 * unit, 6 * unit, 6 * unit), 1000)


def qwen_image(ask):
    h, w = half_up(ask["target"], 2)
    sides = [side for size in [ask["target"], *ask["references"]] for side in half_up(size, 2)]
    start = max(max(sides) // 2, ask["frames"] if ask["mode"] == "decrease" else 0)
    tokens = text(ask["text"], lambda i: (start + i,) * 3)
    for frame in range(ask["frames"]):
        tokens += corner(h, w, frame, -math.ceil(h / 2), -math.ceil(w / 2))
    return tokens + references(ask, 0 if ask["mode"] == "decrease" else 1, centred=True), plain(AXES, 1e4)


def qwen_image_2_1(ask):
    tokens, p = [], 0
    for part in ask["parts"]:
        if isinstance(part, list):
            h, w = part
            tokens += corner(h, w, p, -math.ceil(h / 2), -math.ceil(w / 2))
            p += max(h, w)
        else:
            tokens += text(part, lambda i: (p + i,) * 3)
            p += part
    return tokens, plain(AXES, 1e4)


def mage_flow(ask):
    tokens = text(ask["text"], lambda i: (0, 0, 0))
    for index, (h, w) in enumerate([ask["target"], *ask["references"]]):
        tokens += corner(h, w, index, -(h - h // 2), -(w - w // 2))
    return tokens, plain(AXES, 1e4)


def lens(ask):
    h, w = ask["target"]
    start, n = max(h // 2, w // 2), ask["text"]
    places = np.linspace(start, start + n, n)
    return corner(h, w, 0, -(h // 2), -(w // 2)) + text(n, lambda i: (places[i],) * 3), plain((8, 28, 28), 1e4)


def z_image(ask):
    n = -(-ask["text"] // 32) * 32
    tokens = text(n, lambda i: (i + 1, 0, 0))
    return tokens + padded(corner(*half_up(ask["target"], 2), n + 1)), plain((32, 48, 48), 256)


def llada_image(ask):
    tokens = padded(text(ask["text"], lambda i: (i + 1, 0, 0)))
    return tokens + padded(corner(*ask["target"], len(tokens) + 1)), plain((32, 48, 48), 256)


def llada_image_edit(ask):
    tokens, cursor, ends = [], 1, []
    for _ in range(2):
        tokens += padded(text(ask["text"], lambda i: (cursor + i, 0, 0)))
        cursor += ask["text"]
        ends.append(cursor)
        cursor += 2
    for end in ends:
        tokens += padded(corner(*ask["target"], end))
    start = len(tokens) + 1
    return tokens + padded(text(ask["semantic"], lambda i: (start + i, 0, 0))), plain((32, 48, 48), 256)


def ernie_image(ask):
    n = ask["texts"][0]
    return corner(*ask["target"], n) + text(n, lambda i: (i, 0, 0)), plain((32, 48, 48), 256)


def anima(ask):
    stretched = lambda width, ratio: 1e4 * ratio ** (width / (width - 2))
    tokens = corner(*ceiling(ask["target"], 2), 0) + references(ask, 1)
    return tokens, frequencies((0, 44, 1e4), (1, 42, stretched(42, 4)), (2, 42, stretched(42, 4)))


def boogu(ask):
    n = ask["text"]
    tokens, shift = text(n, lambda i: (i, i, i)), n
    for size in [*ask["references"], ask["target"]]:
        h, w = ceiling(size, 2)
        tokens += corner(h, w, shift)
        shift += max(h, w)
    return tokens, plain((40, 40, 40), 1e4)


def ideogram_4(ask):
    n = ask["texts"][0]
    tokens = text(n, lambda i: (i, i, i)) + picture(*ask["target"], lambda r, c: (65536, 65536 + r, 65536 + c))
    axis = [0] * 128
    for a in (1, 2):
        for k in range(a, min(20 * 3, 128), 3):
            axis[k] = a
    return tokens, [(axis[k], 5e6 ** (-2 * k / 256)) for k in range(128)]


def minit2i(ask):
    width = ask["head_dim"] // 2
    return corner(ask["side"], ask["side"], 0), frequencies((1, width, 1e4), (2, width, 1e4))


def pid(ask):
    (h, w), width = ask["target"], ask["head_dim"] // 2
    along = lambda i, side: 16 * i / (side - 1) if side > 1 else 0.0
    step = [16 / (side - 1) if side > 1 else 1.0 for side in (h, w)]
    base = [1e4, 1e4]
    if ask.get("reference"):
        base = [1e4 * (side / known) ** (width / (width - 2)) for side, known in zip((h, w), ask["reference"])]
    tokens = picture(h, w, lambda r, c: (0, along(r, h), along(c, w)), step)
    rows, columns = frequencies((1, width, base[0])), frequencies((2, width, base[1]))
    return tokens, [pair for both in zip(columns, rows) for pair in both]


def wan(ask):
    h, w = half_up(ask["target"], 2)
    tokens = [token for frame in range(ask["frames"]) for token in corner(h, w, frame)]
    return tokens, plain((44, 42, 42), 1e4)


def rotations(tokens, pairs, circular):
    """The angle of each token and pair, and its cosine and sine."""
    angles = np.empty((len(tokens), len(pairs)))
    for t, (position, periods) in enumerate(tokens):
        for p, (axis, omega) in enumerate(pairs):
            period = None
            if periods is not None:
                period = {1: "y" in circular and periods[0], 2: "x" in circular and periods[1]}.get(axis)
            if period:
                turns = math.floor(omega * period / math.tau + 0.5)
                omega = math.tau * turns / period
            angles[t, p] = float(position[axis]) * omega
    return np.cos(angles), np.sin(angles)


SIX = dict(text=3, target=[6, 10])
THREE = [[4, 2], [2, 6], [8, 2]]
CASES = {
    flux: {
        "fixed": dict(SIX, references=THREE, mode="fixed", circular=""),
        "increase": dict(SIX, references=THREE, mode="increase", scale=2.5, circular="x"),
        "decrease": dict(SIX, references=THREE[:2], mode="decrease", circular="y"),
        "patch_padding": dict(text=2, target=[5, 7], references=[[3, 1]], mode="fixed", circular="xy"),
        "radiance": dict(text=1, target=[40, 24], references=[], mode="fixed", patch=16, circular="xy"),
        "batch": dict(text=1, target=[2, 16], references=[[4, 2]], mode="fixed", batch=2, circular="x"),
    },
    flux_2: {"references": dict(text=2, target=[3, 5], references=[[1, 4], [4, 1]], circular="xy", batch=2)},
    ovis_image: {"references": dict(SIX, references=THREE[:1], mode="fixed", circular="x")},
    longcat_image: {"references": dict(SIX, references=THREE, mode="fixed", circular="xy")},
    krea_2: {
        "references": dict(SIX, references=THREE, mode="increase", circular="y"),
        "other_head": dict(text=1, target=[5, 4], references=[], mode="fixed", head_dim=64, circular=""),
    },
    qwen_image: {
        "fixed": dict(SIX, references=THREE, mode="fixed", frames=1, circular=""),
        "increase": dict(SIX, references=THREE, mode="increase", frames=1, circular="x"),
        "decrease": dict(text=2, target=[5, 6], references=THREE[:2], mode="decrease", frames=3, circular="xy"),
    },
    qwen_image_2_1: {"references": dict(parts=[2, [2, 4], [5, 3], 1, [7, 5]], circular="xy", batch=2)},
    mage_flow: {
        "odd": dict(text=4, target=[3, 5], references=[], circular=""),
        "references": dict(text=2, target=[1, 8], references=[[2, 2], [3, 1], [1, 4]], circular="x", batch=2),
        "both": dict(text=1, target=[4, 1], references=[[2, 5]], circular="xy"),
    },
    lens: {
        "odd": dict(text=4, target=[3, 5], circular=""),
        "one_token": dict(text=1, target=[1, 4], circular="x", batch=2),
        "one_column": dict(text=3, target=[6, 1], circular="y"),
    },
    z_image: {"odd": dict(text=5, target=[6, 10], circular="xy")},
    llada_image: {
        "odd": dict(text=5, target=[3, 5], circular=""),
        "circular": dict(text=33, target=[4, 8], circular="xy", batch=2),
    },
    llada_image_edit: {
        "semantic": dict(text=5, target=[3, 5], semantic=7, circular=""),
        "plain": dict(text=2, target=[1, 6], semantic=0, circular="x"),
        "circular": dict(text=3, target=[6, 2], semantic=33, circular="xy"),
    },
    ernie_image: {"x": dict(texts=[4], target=[3, 8], circular="x"), "xy": dict(texts=[2], target=[7, 5], circular="xy")},
    anima: {
        "references": dict(target=[5, 7], references=THREE, mode="fixed", circular=""),
        "circular": dict(target=[5, 9], references=THREE[:1], mode="fixed", circular="xy", batch=2),
    },
    boogu: {
        "odd": dict(text=4, target=[5, 7], references=[], circular=""),
        "references": dict(text=2, target=[2, 9], references=THREE, circular="x"),
        "both": dict(text=1, target=[9, 1], references=[[3, 5]], circular="xy", batch=2),
    },
    ideogram_4: {"x": dict(texts=[3], target=[3, 5], circular="x"), "xy": dict(texts=[2], target=[4, 7], circular="xy")},
    minit2i: {
        "odd": dict(side=5, head_dim=64, circular=""),
        "circular": dict(side=6, head_dim=48, circular="xy"),
    },
    pid: {
        "stretched": dict(target=[3, 7], head_dim=64, reference=[2, 4], circular=""),
        "plain": dict(target=[5, 4], head_dim=72, circular="x"),
        "one_row": dict(target=[1, 6], head_dim=64, reference=[2, 2], circular="xy"),
        "one_column": dict(target=[6, 1], head_dim=64, reference=[4, 4], circular="xy"),
        "circular": dict(target=[5, 6], head_dim=64, reference=[4, 4], circular="xy"),
    },
    wan: {"clip": dict(frames=2, target=[6, 10], circular="xy", batch=2)},
}


def main(out):
    for family, cases in CASES.items():
        tensors = {}
        for number, (name, ask) in enumerate(cases.items()):
            tokens, pairs = family(ask)
            # One case with all pairs, the others with every seventh.
            ask["pair_step"] = 1 if number == 0 else 7
            cos, sin = rotations(tokens, pairs, ask["circular"])
            for kind, values in (("cos", cos), ("sin", sin)):
                # Items of a batch are alike: one is written.
                tensors[f"out.{name}.{kind}"] = torch.from_numpy(values[:, :: ask["pair_step"]].astype(np.float32))
        write_tensors(out / "rope_formulas" / f"{family.__name__}.safetensors", tensors, dict(cases=cases))
