"""Numbers that torch makes of others when it changes their type, as bits, since NaN and infinities are among them.

`f8.TYPE.f32`: what each code from 0 to 255 of an 8-bit type stands for. `FROM.in` and `FROM.out.TO`: single and double
precision rounded to fewer bits; doubles are two words each, the lower one first.
"""

from common import generator, write_tensors

import torch

EIGHT_BITS = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# Zeros, halfway cases, the ends of half precision (normal, subnormal) and of single precision, what is no number.
EDGES = [
    0.0, -0.0, 1.0, -1.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65504.0, 65519.99, 65520.0, -65520.0,
    2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2**-25, 2.0**-126, 2.0**-133, 2.0**-149, 3.3895e38, 3.4028e38,
    float("inf"), float("-inf"), float("nan"),
]
RANDOM = 1000


def bits(values):
    return values.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int32}[values.element_size()])


def main(out):
    codes = torch.arange(256, dtype=torch.uint8)
    tensors = {f"f8.{name}.f32": bits(codes.view(dtype).to(torch.float32)) for name, dtype in EIGHT_BITS.items()}

    edges = torch.tensor(EDGES, dtype=torch.float64)
    # Any bits, and numbers of the size that weights have.
    any_bits = torch.randint(-(2**31), 2**31, (RANDOM,), generator=generator(1), dtype=torch.int64).to(torch.int32)
    weights = torch.randn(RANDOM, generator=generator(2))
    singles = torch.cat([edges.float(), any_bits.view(torch.float32), weights])
    doubles = torch.cat([edges, torch.randn(RANDOM, generator=generator(3), dtype=torch.float64) ** 9])
    for name, values in [("f32", singles), ("f64", doubles)]:
        tensors[f"{name}.in"] = bits(values)
        for to, dtype in [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)]:
            tensors[f"{name}.out.{to}"] = bits(values.to(dtype))
    write_tensors(out / "conversions" / "torch.safetensors", tensors, {"torch": torch.__version__.split("+")[0]})
