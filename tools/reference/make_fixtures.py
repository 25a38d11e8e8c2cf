#!/usr/bin/env python3
"""Make the fixtures of crates/sd-models/tests/fixtures, or compare them with fresh ones.

    python make_fixtures.py                  write them
    python make_fixtures.py --check          make them in a temporary folder and compare every byte
    python make_fixtures.py --only noise     one script (repeatable), also with --check
    python make_fixtures.py --out FOLDER     write them elsewhere
"""

import argparse
import importlib
import shutil
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True

import common

# Script -> the folders it owns.
SCRIPTS = {
    "qwenimage21_transformer": ["qwenimage21_transformer"],
    "qwenimage21_lora": ["qwenimage21_lora"],
    "qwenimage21_scheduler": ["qwenimage21_scheduler"],
    "sampling": ["sampling"],
    "qwenimage21_vae": ["qwenimage21_vae", "qwenimage21_vae_variant"],
    "minimax_h3_vae": ["minimax_h3_vae", "minimax_h3_vae_long"],
    "wan_vae": ["wan21_vae", "wan22_vae", "qwenimage_vae"],
    "minimax_h3_sound_vae": ["minimax_h3_sound_vae"],
    "qwen3vl_text_encoder": ["qwen3vl_text_encoder"],
    "qwen3vl_vision": ["qwen3vl_vision"],
    "qwenimage21_tokens": ["qwenimage21_pipeline"],
    "qwenimage21_references": ["qwenimage21_references"],
    "rope": ["rope"],
    "rope_formulas": ["rope_formulas"],
    "minimax_h3_transformer": [
        "minimax_h3_transformer",
        "minimax_h3_denoise",
        "minimax_h3_table",
        "minimax_h3_single",
        "minimax_h3_scheduler",
    ],
    "minimax_h3_lora": ["minimax_h3_lora"],
    "noise": ["noise"],
    "conversions": ["conversions"],
    "minimax_h3_pipeline": ["minimax_h3_pipeline"],
    "published": ["published"],
}
FIXTURES = common.REPOSITORY / "crates" / "sd-models" / "tests" / "fixtures"


def make(out, scripts):
    for script in scripts:
        for folder in SCRIPTS[script]:
            shutil.rmtree(out / folder, ignore_errors=True)
        importlib.import_module(script).main(out)
        files = [p for folder in SCRIPTS[script] for p in (out / folder).rglob("*") if p.is_file()]
        print(f"{script}: {len(files)} files, {sum(p.stat().st_size for p in files) / 1e3:.0f} kB", flush=True)


def files(root, scripts):
    folders = [root / folder for script in scripts for folder in SCRIPTS[script]]
    return {p.relative_to(root) for folder in folders for p in folder.rglob("*") if p.is_file()}


def difference(fresh, kept):
    """How far two unequal files are apart, in words."""
    if fresh.suffix != ".safetensors":
        return "different text"
    from safetensors.torch import load_file

    a, b = load_file(fresh), load_file(kept)
    if {k: v.shape for k, v in a.items()} != {k: v.shape for k, v in b.items()}:
        return "different tensors"
    gap, worst = max((float((a[k].double() - b[k].double()).abs().max()), k) for k in a)
    return f"largest absolute difference {gap:.3g} in {worst}"


def check(scripts):
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        make(fresh, scripts)
        made, kept = files(fresh, scripts), files(FIXTURES, scripts)
        problems = [f"{p}: not in the repository" for p in sorted(made - kept)]
        problems += [f"{p}: no script makes it" for p in sorted(kept - made)]
        for p in sorted(made & kept):
            if (fresh / p).read_bytes() != (FIXTURES / p).read_bytes():
                problems.append(f"{p}: {difference(fresh / p, FIXTURES / p)}")
    print("\n".join(problems) or f"{len(made)} files are as in the repository")
    return 1 if problems else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", action="append", choices=SCRIPTS)
    parser.add_argument("--out", type=Path, default=FIXTURES)
    args = parser.parse_args()
    scripts = args.only or list(SCRIPTS)
    if args.check:
        sys.exit(check(scripts))
    make(args.out, scripts)


if __name__ == "__main__":
    main()
