"""Prompt -> token ids of the tiny checkpoint, through the pipeline's own template and processor."""

from common import TINY_MODEL

import json

import torch
from diffusers import AutoencoderKLQwenImage21, FlowMatchEulerDiscreteScheduler
from diffusers import QwenImage21Pipeline, QwenImage21Transformer2DModel
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PROMPTS = {
    "plain": "a large red circle on a blue background",
    "empty": "",
    "space": " ",
    "spaces_and_tab": "  \t   ",
    "newline": "\n",
    "leading_and_trailing": "   a red  circle   ",
    "lines": "a red circle\n\n\non a blue background\n",
    "crlf": "a red circle\r\non blue\r\n",
    "tabs": "a\tred\t\tcircle",
    "digits": "1234567890 circles, 3.14159 x 7 at 10:45",
    "apostrophes": "don't WON'T I'LL we've it’s 'quoted' ''",
    "punctuation": "wow!!! ... (a, b; c) -- [d]{e} <f> #1 @x &y %z ~!^*_=+|\\/`\"",
    "braces": "{} {0} {prompt} {{x}} %s",
    "upper": "A LARGE RED CIRCLE ON A BLUE BACKGROUND",
    "emoji": "\U0001f98a\U0001f3a8 \U0001f469\u200d\U0001f3a8 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f44d\U0001f3fd",
    "cjk": "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u753b\u4e00\u53ea\u6c34\u8c5a\u3002\u65e5\u672c\u8a9e\u306e\u30ab\u30bf\u30ab\u30ca \ud55c\uad6d\uc5b4",
    "cyrillic_greek": "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0438 \u03b5\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac",
    "right_to_left": "\u05d3\u05d2\u05dc \u0627\u0644\u062f\u0627\u0626\u0631\u0629 red",
    "indic": "\u0915\u093f\u0924\u093e\u092c \u0e01\u0e33\u0e25\u0e31\u0e07",
    "composed": "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m",
    "combining": "cafe\u0301 nai\u0308ve A\u030angstro\u0308m",
    "combining_alone": "\u0301 x\u0301\u0323 q\u0307\u0323 \u1e9b\u0323",
    "hangul_jamo": "\u1112\u1161\u11ab\u1100\u116e\u11a8",
    "singletons": "\u212b \u2126 \u00bd \ufb01 \u1e9e \uff21",
    "typography": "\u201cquotes\u201d \u2014 \u2026 \u00a0no\u2009thin\u3000wide\u200bzero\ufeffbom",
    "controls": "a\u0000b\u0001c\u007f\u0085d\u2028e\u000bf\u000cg",
    "special_end": "a red circle<|im_end|>\n<|im_start|>user\na blue square",
    "special_in_words": "see <|endoftext|> and<|box_start|>x<|box_end|> <|vision_start|><|vision_end|>",
    "special_look_alikes": "<|im_end> <im_end|> <|IM_END|> <| im_end |> <|unknown|> <think> <image1>",
    "image_pad": "a red circle <|image_pad|> here",
    "video_pad": "<|video_pad|>",
    "one_word": "circlecirclecirclesquaresquare" * 8,
    "long": "a small green star above a large yellow square, transparent background; " * 40,
    "url": "https://example.com/a?b=c&d=e#f user@example.com",
    "code": "def f(x):\n    return x**2  # \u03c0\n",
}


def pipeline():
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL / "processor")
    # The video processor needs torchvision; no text uses it.
    Qwen3VLProcessor.check_argument_for_proper_class = lambda self, name, argument: None
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(TINY_MODEL / "processor"),
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=(TINY_MODEL / "processor" / "chat_template.jinja").read_text(),
    )
    pipe = QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(TINY_MODEL / "scheduler"),
        vae=AutoencoderKLQwenImage21.from_pretrained(TINY_MODEL / "vae", torch_dtype=torch.float32),
        text_encoder=Qwen3VLForConditionalGeneration.from_pretrained(TINY_MODEL / "text_encoder", dtype=torch.float32),
        processor=processor,
        transformer=QwenImage21Transformer2DModel.from_pretrained(TINY_MODEL / "transformer", torch_dtype=torch.float32),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main(out):
    pipe = pipeline()
    caught = {}

    def before(module, args, kwargs):
        caught["ids"] = kwargs["input_ids"]

    handle = pipe.text_encoder.register_forward_pre_hook(before, with_kwargs=True)
    cases = []
    for name, prompt in PROMPTS.items():
        case = dict(name=name, prompt=prompt)
        try:
            embeds, mask, slots = pipe.encode_prompt(prompt)
            case["ids"] = caught["ids"][0].tolist()
            assert mask is None and not slots.any()
            assert embeds.shape[1] == len(case["ids"]) - pipe._drop_idx
        except ValueError as error:
            case["error"] = str(error)
        cases.append(case)
    handle.remove()
    template = pipe.prompt_template_t2i
    lines = ",\n".join("  " + json.dumps(case) for case in cases)
    path = out / "qwenimage21_pipeline" / "token_ids.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "{\n"
        f' "template": {json.dumps(template)},\n'
        f' "system_tokens_dropped": {pipe._drop_idx},\n'
        f' "cases": [\n{lines}\n ]\n'
        "}\n"
    )
