"""Clips of one moving shape with a tone: what they show, how they look and sound, and what is said of them."""

import math
import random

import torch

SIDE = 128
FPS = 24
RATE = 32000
HOP = 800
# Frames that are drawn; shorter clips are the beginnings of these.
FRAMES = 56
LENGTHS = (22, 39, 56)

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.65, 0.2),
    "blue": (0.15, 0.25, 0.9),
    "yellow": (0.95, 0.85, 0.1),
    "orange": (0.95, 0.5, 0.05),
    "purple": (0.55, 0.15, 0.7),
    "cyan": (0.1, 0.8, 0.85),
    "pink": (0.95, 0.55, 0.75),
}
BACKGROUNDS = {"black": (0.0, 0.0, 0.0), "white": (1.0, 1.0, 1.0), "gray": (0.5, 0.5, 0.5), "brown": (0.4, 0.25, 0.1)}
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
PITCHES = (220, 330, 440, 660, 880)
LOUDNESS = 0.5

# Columns of a row that says what a clip shows: shape, colour, background, start, step of a frame, radius, pitch.
SHAPE, COLOUR, BACKGROUND, START, STEP, RADIUS, PITCH = 0, slice(1, 4), slice(4, 7), slice(7, 9), slice(9, 11), 11, 12
COLUMNS = 13


def random_clip(rng):
    """What a clip shows: names for the caption and a row of numbers for drawing."""
    names = {
        "shape": rng.choice(SHAPES),
        "colour": rng.choice(list(COLOURS)),
        "background": rng.choice(list(BACKGROUNDS)),
        "direction": rng.choice(list(DIRECTIONS)),
        "pitch": rng.choice(PITCHES) if rng.random() > 0.06 else None,
    }
    radius = rng.uniform(15, 22)
    speed = rng.uniform(0.9, 1.3)
    way = DIRECTIONS[names["direction"]]
    path = speed * (FRAMES - 1)
    along = rng.uniform(radius, SIDE - radius - path)
    across = rng.uniform(radius + 8, SIDE - radius - 8)
    if sum(way) < 0:
        along = SIDE - along
    start = (along, across) if way[0] else (across, along)
    row = [
        SHAPES.index(names["shape"]),
        *COLOURS[names["colour"]],
        *BACKGROUNDS[names["background"]],
        *start,
        speed * way[0],
        speed * way[1],
        radius,
        names["pitch"] or 0,
    ]
    return names, row


WAYS = {
    "right": ("right", "to the right"),
    "left": ("left", "to the left"),
    "up": ("up", "upwards"),
    "down": ("down", "downwards"),
}


def caption(rng, names, seen=False):
    """A sentence about a clip. If its first picture is `seen`, colours may be left to the picture."""
    way = rng.choice(WAYS[names["direction"]])
    verb = rng.choice(("moves", "moves", "moving", "slides"))
    pitch = names["pitch"]
    sound = (
        rng.choice((f"with a tone of {pitch} hertz", f"with a {pitch} hertz tone", f"tone of {pitch} hertz"))
        if pitch
        else rng.choice(("without sound", "silent"))
    )
    thing = f"{names['colour']} {names['shape']}"
    place = rng.choice((f"on a {names['background']} background", f"over {names['background']}"))
    if seen and rng.random() < 0.5:
        thing, place = names["shape"], ""
        article = "the"
    else:
        article = "an" if names["colour"] == "orange" else "a"
    return rng.choice(
        (
            f"{article} {thing} {verb} {way} {place} {sound}",
            f"{article} {thing} {verb} {way} {place}, {sound}",
            f"{sound}, {article} {thing} {verb} {way} {place}",
        )
    ).replace("  ", " ").replace(" ,", ",").strip()


def corpus(count):
    rng = random.Random(11)
    for _ in range(count):
        yield caption(rng, random_clip(rng)[0], seen=rng.random() < 0.3)
    for index in range(1, 4):
        yield from [f"<Picture {index}>: "] * 50


def covered(kind, centre, radius, side):
    """How much of each pixel a shape covers: (n, frames, side, side) for centres (n, frames, 2), kinds and radii (n,)."""
    axis = torch.arange(side, device=centre.device) + 0.5
    x = (axis - centre[:, :, 0, None, None]).expand(-1, -1, side, -1)
    y = (axis[:, None] - centre[:, :, 1, None, None]).expand(-1, -1, -1, side)
    r, kind = (v[:, None, None, None] for v in (radius, kind))
    ax, ay = x.abs(), y.abs()
    circle = (x.square() + y.square()).sqrt() - r
    square = torch.maximum(ax, ay) - 0.88 * r
    triangle = torch.maximum(0.866 * ax - 0.5 * y - 0.5 * r, y - 0.5 * r)
    cross = torch.minimum(torch.maximum(ax - 0.35 * r, ay - r), torch.maximum(ax - r, ay - 0.35 * r))
    distance = torch.where(kind == 0, circle, torch.where(kind == 1, square, torch.where(kind == 2, triangle, cross)))
    return (0.5 - distance).clamp(0, 1)


def draw(rows, frames, device=None):
    """Pictures (n, 3, frames, SIDE, SIDE) from 0 to 1 of the clips in `rows` at the numbers in `frames` (n, count) or (count,)."""
    rows = rows.to(device or rows.device)
    if frames.dim() == 1:
        frames = frames[None].expand(len(rows), -1)
    frames = frames.to(rows.device)
    centre = rows[:, None, START] + rows[:, None, STEP] * frames[:, :, None]
    cover = covered(rows[:, SHAPE].long(), centre, rows[:, RADIUS], SIDE)[:, None]
    colour, ground = (rows[:, part, None, None, None] for part in (COLOUR, BACKGROUND))
    return colour * cover + ground * (1 - cover)


def crowd(count, frames, side, device, shapes=6):
    """Clips (count, 3, frames, side, side) of many shapes of any colour that move anywhere: something to see in every corner."""
    palette = torch.tensor([*COLOURS.values(), *BACKGROUNDS.values()], device=device)

    def colour():
        named = palette[torch.randint(len(palette), (count,), device=device)]
        free = torch.rand(count, 3, device=device)
        return torch.where(torch.rand(count, 1, device=device) < 0.6, named, free)[:, :, None, None, None]

    picture = colour().expand(-1, -1, frames, side, side)
    number = torch.arange(frames, device=device)[None, :, None]
    for _ in range(shapes):
        start = torch.rand(count, 1, 2, device=device) * (side + 20) - 10
        step = (torch.rand(count, 1, 2, device=device) * 2 - 1) * 1.5
        step = step * (torch.rand(count, 1, 1, device=device) < 0.8)
        radius = torch.rand(count, device=device) * 20 + 6
        kind = torch.randint(len(SHAPES), (count,), device=device)
        cover = covered(kind, start + step * (number - frames / 2), radius, side)[:, None]
        picture = colour() * cover + picture * (1 - cover)
    return picture


def sound(rows, samples, device=None):
    """Both channels (n, 2, samples) of the clips' tones: each is heard where its shape is, from left to right."""
    rows = rows.to(device or rows.device)
    time = torch.arange(samples, device=rows.device, dtype=torch.float64) / RATE
    phase = (2 * math.pi * rows[:, PITCH, None].double() * time).fmod(2 * math.pi).float()
    where = (rows[:, START, None][:, 0] + rows[:, STEP, None][:, 0] * (time * FPS).float()) / SIDE
    angle = where.clamp(0, 1) * (math.pi / 2)
    rise = (time * 200).clamp(max=1).float()
    tone = LOUDNESS * torch.sin(phase) * rise
    return torch.stack([tone * angle.cos(), tone * angle.sin()], dim=1)


def sound_latents(frames):
    """Latents of sound that go with so many frames, as the reference rounds them."""
    return int(round(frames / FPS * (RATE // HOP)))
