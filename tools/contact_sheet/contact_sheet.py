#!/usr/bin/env python3
"""Lay pictures three by three beside themselves, and once more with their contrast raised, so that seams show.

    python contact_sheet.py OUT.png PICTURE.png...

One column for each picture. The second row shows how far each pixel is from the picture's commonest colour, sixteen
times as strong, on grey: what an eye might miss in a flat background. Needs numpy and Pillow.
"""

import sys

import numpy as np
from PIL import Image

GAP = 8


def sheet(paths):
    columns = []
    for path in paths:
        picture = np.asarray(Image.open(path).convert("RGB"))
        colours, counts = np.unique(picture.reshape(-1, 3), axis=0, return_counts=True)
        distance = picture.astype(int) - colours[counts.argmax()].astype(int)
        strong = np.clip(128 + 16 * distance, 0, 255).astype(np.uint8)
        columns.append([np.tile(part, (3, 3, 1)) for part in (picture, strong)])
    height, width, _ = columns[0][0].shape
    out = Image.new("RGB", (len(columns) * (width + GAP) - GAP, 2 * height + GAP), "black")
    for column, parts in enumerate(columns):
        for row, part in enumerate(parts):
            out.paste(Image.fromarray(part), (column * (width + GAP), row * (height + GAP)))
    return out


if __name__ == "__main__":
    sheet(sys.argv[2:]).quantize(64).save(sys.argv[1], optimize=True)
