"""Qwen3VLForConditionalGeneration with random weights and pictures in its texts: the vision tower, and what the text makes of it."""

from common import Taps, generator, normal, randomize, write_case, write_model
from qwen3vl_text_encoder import plain

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

PATCH, MERGE, FRAMES = 8, 2, 2
CONFIG = dict(
    text_config=dict(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        max_position_embeddings=2048,
        rope_parameters=dict(
            rope_type="default", rope_theta=5000000.0, mrope_section=[6, 5, 5], mrope_interleaved=True
        ),
    ),
    vision_config=dict(
        depth=4,
        hidden_size=24,
        intermediate_size=40,
        num_heads=2,
        patch_size=PATCH,
        spatial_merge_size=MERGE,
        temporal_patch_size=FRAMES,
        out_hidden_size=48,
        num_position_embeddings=25,
        deepstack_visual_indexes=[0, 2],
    ),
    image_token_id=300,
    video_token_id=301,
    vision_start_token_id=302,
    vision_end_token_id=303,
    tie_word_embeddings=False,
)
# Tokens of text before, between and behind pictures of so many rows and columns of patches.
CASES = {
    "one": [4, (4, 6), 5],
    "two": [3, (4, 6), 2, (6, 4), 4],
    "four": [2, (2, 4), 1, (4, 4), 1, (2, 2), 1, (6, 2), 3],
    "larger_than_the_table": [2, (8, 10), 3],
    "smallest": [1, (2, 2), 1],
}


def main(out):
    folder = out / "qwen3vl_vision"
    config = Qwen3VLConfig(**CONFIG)
    config._attn_implementation = "sdpa"
    model = randomize(Qwen3VLForConditionalGeneration(config).float(), 4301)
    write_model(folder, model, config=plain(model.config.to_dict()), keep=lambda name: "lm_head" not in name)
    g = generator(4400)
    for name, parts in CASES.items():
        ids, grids = [], []
        for part in parts:
            if isinstance(part, int):
                ids += torch.randint(0, 299, (part,), generator=g).tolist()
            else:
                rows, columns = part
                grids.append((1, rows, columns))
                ids += [302] + [300] * (rows * columns // MERGE**2) + [303]
        ids, grid = torch.tensor([ids]), torch.tensor(grids)
        patches = normal(4500 + len(ids[0]), int(grid.prod(1).sum()), 3 * FRAMES * PATCH * PATCH)
        seen = {}

        def vision(module, args, output):
            seen["embeddings"] = output.pooler_output
            seen.update({f"deepstack.{i}": v for i, v in enumerate(output.deepstack_features)})

        handles = [
            model.model.visual.register_forward_hook(vision),
            model.model.language_model.norm.register_forward_hook(lambda m, a, o: a[0]),
        ]
        kinds = (ids == 300).long()
        with Taps(model.model.visual, ["patch_embed", "blocks.0", "blocks.3"]) as taps:
            hidden = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pixel_values=patches,
                image_grid_thw=grid,
                mm_token_type_ids=kinds,
                output_hidden_states=True,
            ).hidden_states[-1]
        for handle in handles:
            handle.remove()
        positions = model.model.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=grid, attention_mask=torch.ones_like(ids)
        )[0]
        write_case(
            folder,
            name,
            dict(input_ids=ids, patches=patches, grids=grid),
            dict(embeds=hidden, positions=positions[:, 0], **seen, **(taps.outputs if name == "one" else {})),
        )
