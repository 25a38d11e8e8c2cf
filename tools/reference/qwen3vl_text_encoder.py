"""Qwen3VLForConditionalGeneration with random weights, text only: the hidden state before the final norm."""

from common import generator, randomize, write_case, write_model

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

VOCABULARY = 320
CONFIG = dict(
    text_config=dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        max_position_embeddings=2048,
        rope_parameters=dict(
            rope_type="default", rope_theta=5000000.0, mrope_section=[6, 5, 5], mrope_interleaved=True
        ),
    ),
    # The vision tower is there because the class wants one; its weights are not written.
    vision_config=dict(
        depth=1,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=64,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    ),
    image_token_id=300,
    video_token_id=301,
    vision_start_token_id=302,
    vision_end_token_id=303,
    tie_word_embeddings=False,
)


def make():
    config = Qwen3VLConfig(**CONFIG)
    config._attn_implementation = "sdpa"
    return randomize(Qwen3VLForConditionalGeneration(config).float(), 4001)


def run(model, ids, mask=None):
    """What the pipeline reads, with the hook it uses, and every layer's output."""
    mask = torch.ones_like(ids) if mask is None else mask
    text = model.model.language_model
    layers = []
    handles = [layer.register_forward_hook(lambda m, a, o: layers.append(o)) for layer in text.layers]
    handles.append(text.embed_tokens.register_forward_hook(lambda m, a, o: layers.append(o)))
    handles.append(text.norm.register_forward_hook(lambda m, a, o: a[0]))
    output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    embeds = output.hidden_states[-1]
    assert torch.equal(embeds, layers[-1])
    return embeds, {f"tap.layers.{i - 1}" if i else "tap.embed_tokens": v for i, v in enumerate(layers)}


def main(out):
    folder = out / "qwen3vl_text_encoder"
    model = make()
    write_model(folder, model, config=plain(model.config.to_dict()), keep=lambda name: ".visual." not in name)
    g = generator(4100)

    def ids(batch, length):
        return torch.randint(0, 299, (batch, length), generator=g)

    x = ids(1, 11)
    embeds, layers = run(model, x)
    write_case(folder, "text", dict(input_ids=x), dict(embeds=embeds, **layers))
    for name, length in (("one_token", 1), ("long", 300)):
        x = ids(1, length)
        write_case(folder, name, dict(input_ids=x), dict(embeds=run(model, x)[0]))
    x = ids(2, 9)
    mask = torch.ones_like(x)
    mask[1, :4] = 0
    meta = dict(note="rows whose attention_mask is 0 carry no meaning")
    write_case(folder, "left_padded", dict(input_ids=x, attention_mask=mask), dict(embeds=run(model, x, mask)[0]), meta)


def plain(config):
    """The configuration without what names a version or a precision of the library."""
    drop = ("transformers_version", "dtype", "_name_or_path", "architectures")
    return {k: plain(v) if isinstance(v, dict) else v for k, v in config.items() if k not in drop}
