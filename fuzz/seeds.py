#!/usr/bin/env python3
"""Makes small inputs that the fuzz targets start from, most of them right: python3 fuzz/seeds.py

They go to fuzz/corpus/TARGET/seed-*, beside what fuzzing found. Needs nothing but Python.
"""

import base64
import json
import struct
import zlib
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


def write(target, name, data):
    path = CORPUS / target / f"seed-{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def safetensors(header, data=b""):
    text = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
    return struct.pack("<Q", len(text.encode())) + text.encode() + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(version, entries, tensors, alignment=32):
    """`entries`: key, type, bytes of the value; `tensors`: name, dimensions innermost first, type, bytes."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    for key, kind, value in entries:
        head += text(key) + struct.pack("<I", kind) + value
    data = b""
    for name, dims, kind, content in tensors:
        head += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        head += struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % alignment)
    return head + bytes(-len(head) % alignment) + data


# Safetensors: each type, packed ones included, metadata, scalars, empty tensors, escapes.
types = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}
header, at = {"__metadata__": {"format": "pt"}}, 0
for number, (dtype, bits) in enumerate(types.items()):
    size = 4 * bits // 8
    header[f"t.{number}"] = entry(dtype, [2, 2], at, at + size)
    at += size
write("safetensors", "types", safetensors(header, bytes(range(256)) [:at]))
write("safetensors", "scalar", safetensors({"s": entry("F32", [], 0, 4)}, b"abcd"))
write("safetensors", "empty", safetensors({"e": entry("F16", [3, 0], 0, 0)}))
write("safetensors", "nothing", safetensors({}))
write("safetensors", "padded", safetensors('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   ', b"x"))
write("safetensors", "escapes", safetensors(r'{"\u00e9\ud83d\ude00\n":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":[{}]}}', b"x"))
write("safetensors", "twice", safetensors('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', b"xy"))
write("safetensors", "wraps", safetensors({"a": entry("U8", [2**32, 2**32], 0, 0)}))
write("safetensors", "null", safetensors('{"__metadata__":null,"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"abcd"))
write("safetensors", "overlap", safetensors({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"abc"))

# GGUF: both versions, values of each kind, tensors of many types.
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18), 42: (64, 18),
}
values = [
    ("general.architecture", 8, text("tiny")),
    ("u8", 0, b"\1"), ("i8", 1, b"\xff"), ("u16", 2, b"\1\2"), ("i16", 3, b"\1\2"), ("u32", 4, b"\1\2\3\4"),
    ("i32", 5, b"\1\2\3\4"), ("f32", 6, struct.pack("<f", 1.5)), ("bool", 7, b"\1"), ("u64", 10, struct.pack("<Q", 7)),
    ("i64", 11, struct.pack("<q", -7)), ("f64", 12, struct.pack("<d", 0.1)),
    ("texts", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
    ("numbers", 9, struct.pack("<IQ", 4, 20) + bytes(80)),
    ("none", 9, struct.pack("<IQ", 6, 0)),
]
tensors = [(f"t.{kind}", [block], kind, bytes(size)) for kind, (block, size) in BLOCKS.items()]
write("gguf", "values", gguf(3, values, [("w", [2, 3], 0, bytes(24))]))
write("gguf", "types", gguf(3, [], tensors))
write("gguf", "version-2", gguf(2, values[:1], [("blk.0.w", [32, 2], 8, bytes(68))]))
write("gguf", "aligned", gguf(3, [("general.alignment", 4, struct.pack("<I", 64))], [("w", [1], 0, b"abcd"), ("v", [1], 1, b"ab")], 64))
write("gguf", "nothing", gguf(3, [], []))
write("gguf", "four", gguf(3, [], [("w", [1, 2, 1, 2], 1, bytes(8))]))
write("gguf", "wraps", gguf(3, [], [("w", [2**32, 2**32], 0, b"")]))

# The index of the two shards that the target lays down.
names = {"a.one": "a.safetensors", "a.two": "a.safetensors", "b.one": "b.safetensors", "b.two": "b.safetensors"}
write("index", "both", json.dumps({"metadata": {"total_size": 18}, "weight_map": names}))
write("index", "one", json.dumps({"weight_map": {"a.one": "a.safetensors"}}))
write("index", "wrong", json.dumps({"weight_map": {"b.one": "a.safetensors"}}))
write("index", "outside", json.dumps({"weight_map": {"a.one": "../a.safetensors", "b.one": "/b.safetensors"}}))
write("index", "missing", json.dumps({"weight_map": {"a.one": "c.safetensors"}}))
write("index", "twice", '{"weight_map":{"a.one":"a.safetensors","a.one":"b.safetensors"},"more":[1,null]}')
write("index", "none", "{}")

# Conversion: stored type, type in memory, shift, data. Types are counted as the enumerations do.
numbers = struct.pack("<64f", *[(at - 30) / 7 for at in range(64)])
for stored in range(22):
    write("convert", f"plain-{stored}", bytes([stored, 0, stored % 4]) + numbers[:32])
sizes = [18, 18, 18, 20, 22, 24, 34, 36, 84, 110, 144, 176, 210, 292, 66, 74, 82, 98, 110, 50, 56, 18, 136, 54, 66, 17, 36]
for number, size in enumerate(sizes):
    write("convert", f"blocks-{number}", bytes([22 + number, 0, 0]) + bytes(at * 37 % 256 for at in range(size)))
for memory in range(8, 37):
    write("convert", f"quantise-{memory}", bytes([1, memory, 0]) + numbers * 4)
write("convert", "nan", bytes([1, 12, 0]) + struct.pack("<32f", *[float("nan")] * 32))

for number, budget in enumerate(["auto", "8GiB", " 1.5 gib ", "free-512MiB", "cuda0=8GiB, cpu=auto", "a=1,a=2", "1e30", "=1", "0"]):
    write("budget", str(number), budget)

rules = ["q8_0", r"transformer_blocks\..*attn=q8_0,.*=f16", "f16,attn=q4_K", r"\.(to_q|to_k)\.=q4_0", "(=f16", "a=q9", "=f16", "x=", "[,=]=f16", "a{1000}{1000}=f32", ""]
for number, rule in enumerate(rules):
    write("rules", str(number), rule)

# Configurations: which file, then what the tiny model has in it.
tiny = Path(__file__).parents[1] / "models" / "tiny-qwen-image-2.1"
files = ["model_index.json", "sd-defaults.json", "scheduler/scheduler_config.json", "text_encoder/config.json",
         "transformer/config.json", "vae/config.json", "processor/preprocessor_config.json"]
for number, name in enumerate(files):
    # Short lines are changed faster than long ones.
    value = json.loads((tiny / name).read_text())
    value = json.dumps(value, separators=(",", ":")).encode()
    write("config", name.replace("/", "-"), bytes([number]) + value)
    # 133 is a multiple of their number: the same file, and a plan.
    write("config", "plan-" + name.replace("/", "-"), bytes([133 + number]) + value)

# Pictures: a PNG of each kind of pixel, a JPEG that lies on its side, WebPs with and without loss.
def png(kind, channels, depth=8):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    row = bytes([0]) + bytes(at * 41 % 256 for at in range(5 * channels * depth // 8))
    head = struct.pack(">IIBBBBB", 5, 3, depth, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(row * 3)) + chunk(b"IEND", b"")


for kind, channels in [(0, 1), (2, 3), (4, 2), (6, 4)]:
    write("picture", f"png-{kind}", png(kind, channels))
write("picture", "png-16", png(6, 4, 16))
write("picture", "jpeg", base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/4QAiRXhpZgAATU0AKgAAAAgAAQESAAMAAAABAAYAAAAAAAD/2wBDABQODxIPDRQSEBIXFRQYHjIhHhwcHj"
    "0sLiQySUBMS0dARkVQWnNiUFVtVkVGZIhlbXd7gYKBTmCNl4x9lnN+gXz/2wBDARUXFx4aHjshITt8U0ZTfHx8fHx8fHx8fHx8fHx8fHx8fHx8"
    "fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHz/wAARCAAFAAkDASIAAhEBAxEB/8QAFgABAQEAAAAAAAAAAAAAAAAAAAEE/8QAHBAAAQMFAA"
    "AAAAAAAAAAAAAAAAEDIQQFFaHw/8QAFQEBAQAAAAAAAAAAAAAAAAAAAAP/xAAaEQACAgMAAAAAAAAAAAAAAAAAAwIxBBET/9oADAMBAAIRAxEA"
    "PwCUlqYiNG/FMcgBBjZ7sYbmc7P/2Q=="
))
write("picture", "webp", base64.b64decode(
    "UklGRi4AAABXRUJQVlA4TCIAAAAvCAABELmM6H/sIqL/AYVsI0DHdP56P8FwDOCwTwCESuIC"
))
write("picture", "webp-lossy", base64.b64decode(
    "UklGRnoAAABXRUJQVlA4WAoAAAAQAAAACAAABAAAQUxQSB8AAAABRyAQSCTy2x9kh4jIDGQBJmMYSyyx5H+FENH/WCMfAFZQOCA0AAAA0AEAnQ"
    "EqCQAFAAQAaCWwAnQBDrsFjgAA/tz924rcYQDLs1wy951HqT41eOqzV6hFlAAAAA=="
))


def wav(code, channels, rate, bits, samples, extensible=False):
    """A WAV file; `code` is 1 for whole numbers, 3 for floating point."""
    size = bits // 8
    body = struct.pack("<HHIIHH", 0xFFFE if extensible else code, channels, rate, rate * channels * size, channels * size, bits)
    if extensible:
        body += struct.pack("<HHI", 22, bits, (1 << channels) - 1) + struct.pack("<H", code) + bytes.fromhex("000000001000800000aa00389b71")
    chunk = lambda name, data: name + struct.pack("<I", len(data)) + data
    value = struct.pack("<f", -0.5) if code == 3 else bytes(size - 1) + b"\x40"
    chunks = chunk(b"fmt ", body) + chunk(b"LIST", b"INFO") + chunk(b"data", value * channels * samples)
    return chunk(b"RIFF", b"WAVE" + chunks)


for name, file in {
    "u8": wav(1, 1, 8000, 8, 5),
    "s16": wav(1, 2, 44100, 16, 20),
    "s24": wav(1, 2, 96000, 24, 6),
    "s24-extensible": wav(1, 6, 48000, 24, 6, True),
    "s32": wav(1, 3, 22050, 32, 4),
    "f32": wav(3, 2, 32000, 32, 9),
    "f32-extensible": wav(3, 8, 48000, 32, 3, True),
    "silence": wav(1, 2, 32000, 16, 0),
}.items():
    write("sound", name, file)
