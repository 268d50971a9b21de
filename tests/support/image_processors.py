"""The processor of each type that sees images, with a tiny tokenizer and a tiny model, and what comes of prompts with images.

    case = ProcessorCase("internvl")
    prompt = case.maker.prompt(case.text(2), pictures)       # as a request comes
    inputs = case.own_inputs(case.text(2), pictures)         # as transformers makes it
    case.model.generate(**inputs)

    python tests/support/image_processors.py internvl llava          # a line of JSON for each: what `compare` returns

Nothing is downloaded. Most processors need torchvision, which the environment of the tests has not. The program adds it
(torchvision_beside.py). Without it there are those of PaliGemma, Gemma 3, LLaVA and some others, which use Pillow alone.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from torchvision_beside import add_torchvision

    add_torchvision()

import inspect
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import transformers
from every_type import tiny_model
from image_inputs import CHANGES
from image_models import picture
from tiny_models import make_tokenizer
from transformers import FeatureExtractionMixin, PreTrainedModel
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES
from transformers.utils import is_torchvision_available

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.images.processor import PromptMaker
from fa_serve.engine.request.prompts import PromptReader
from fa_serve.spec import ParameterError

VOCAB = 448
LONGEST = 1024
_NAMES: dict[str, str] = {
    "image_token": "<image>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "image_start_token": "<image_start>",
    "image_end_token": "<image_end>",
    "image_thumbnail_token": "<img_thumbnail>",
    "img_line_break_token": "<line>",
    "image_boundary_token": "<fake_token_around_image>",
    "image_break_token": "[IMG_BREAK]",
    "video_token": "<video>",
    "video_start_token": "<video_start>",
    "video_end_token": "<video_end>",
    "audio_token": "<audio>",
    "boa_token": "<boa>",
    "eoa_token": "<eoa>",
    "vision_bos_token": "<vision_bos>",
    "vision_eos_token": "<vision_eos>",
    "audio_bos_token": "<audio_bos>",
    "audio_eos_token": "<audio_eos>",
}
"""Attributes of the tokenizer, as checkpoints name their special tokens in its config."""
_OTHERS = (
    *("[IMG]", "[IMG_END]", "<imgpad>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "<|START_OF_IMG|>"),
    *(
        "<|END_OF_IMG|>",
        "TILE",
        "TILE_GLOBAL",
        "<IMG_START>",
        "<IMG_ATOM>",
        "<IMG_GRID>",
        "<IMG_COL>",
        "<IMG_ROW>",
        "<IMG_END>",
    ),
    *("<global-img>", "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>"),
    *("<|img_row_1_col_1|>", "<|img_row_1_col_2|>", "<|img_row_2_col_1|>", "<|img_row_2_col_2|>"),
    *("<|IMAGE_PAD|>", "<im_start>", "<im_patch>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
)
_SQUARE: dict[str, Any] = {"size": {"height": 28, "width": 28}}
_CROPPED: dict[str, Any] = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
_FLEXIBLE: dict[str, Any] = {"size": {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}}
_TILES: dict[str, Any] = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
_LLAVA: dict[str, Any] = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_PIXTRAL: dict[str, Any] = {"patch_size": 14, "spatial_merge_size": 2}
_OWN_NAMES = {"cohere_compass": {"image_token": "<|IMAGE_PAD|>"}, "step3p7": {"image_token": "<im_patch>"}}
IMAGE_OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("aya_vision", "deepseek_vl", "gemma3", "internvl", "llama4"), _SQUARE),
    **dict.fromkeys(("ovis2", "qianfan_ocr"), _SQUARE),
    "cohere2_vision": _SQUARE | {"patch_size": 1},
    "got_ocr2": {"size": {"height": 64, "width": 64}},
    "paligemma": _SQUARE | {"image_seq_length": 4},
    **dict.fromkeys(("llava", "vipllava", "video_llava"), _CROPPED),
    **dict.fromkeys(("llava_next", "llava_next_video"), _CROPPED | _TILES),
    "llava_onevision": _SQUARE | _TILES,
    **{name: {"patch_size": 14, "pooling_kernel_size": 3, "max_soft_tokens": 70} for name in ("gemma4", "gemma4_unified")},
    "cosmos3_edge": _FLEXIBLE | {"patch_size": 14},
    "hunyuan_vl": _FLEXIBLE | {"patch_size": 14},
    "idefics2": {"size": {"shortest_edge": 28, "longest_edge": 28}},
    **{name: {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}} for name in ("idefics3", "smolvlm")},
    **{name: {"size": {"longest_edge": 56}, "patch_size": 14} for name in ("lighton_ocr", "mistral3")},
    "lfm2_vl": {"encoder_patch_size": 14, "tile_size": 28, "min_image_tokens": 1, "max_image_tokens": 4},
    "step3p7": _SQUARE | {"patch_size": 28, "downsampler_stride": 2},
}
"""What fits the towers of every_type.py. The others have patches in any number."""
PROCESSOR_OPTIONS: dict[str, dict[str, Any]] = {
    "aria": {"size_conversion": {980: 2}},
    "aya_vision": {"patch_size": 14, "img_size": 28, "downsample_factor": 2},
    "deepseek_vl": {"num_image_tokens": 4},
    "gemma3": {"image_seq_length": 4},
    "idefics2": {"image_seq_len": 4},
    "idefics3": {"image_seq_len": 1},
    "smolvlm": {"image_seq_len": 1},
    "internvl": {"image_seq_length": 1},
    "qianfan_ocr": {"image_seq_length": 1},
    "llama4": {"patch_size": 14},
    **dict.fromkeys(("llava", "vipllava", "video_llava", "llava_next", "llava_next_video"), _LLAVA),
    "llava_onevision": {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    "lighton_ocr": _PIXTRAL,
    "mistral3": _PIXTRAL,
    "ovis2": {"image_seq_length": 4},
}
MODEL_CHANGES: dict[str, dict[str, Any]] = {
    "aria": {"vision_config": {"image_size": 980, "patch_size": 490}},  # its processor makes no other pictures
    "got_ocr2": {
        "vision_config": {"image_size": 64, "patch_size": 1},
        "text_config": {"vocab_size": VOCAB, "max_position_embeddings": LONGEST},
    },  # whose pictures have 256 tokens
}
MODEL_TOKENS = {
    "gemma3": "<image>",
    "llama4": "<|patch|>",
    "step3p7": "<im_patch>",
    "ovis2": "<IMG_ATOM>",
    "aya_vision": "<|IMG_PATCH|>",
}
"""The model's image token, where the processor's `image_token` is another one."""
WRAPPED = {"hunyuan_vl": ("<image_start>", "<image_end>")}
"""What a chat template puts around an image, where the processor wants it."""
CLASSES = {
    "cosmos3_omni": "Qwen3VLProcessor",
    "glm_ocr": "Glm46VProcessor",
    "glmga": "Glm46VProcessor",
    "qwen2_5_omni_thinker": "Qwen2_5OmniProcessor",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor",
}
"""Processors that checkpoints of a type name, where the type itself names none."""
IMAGES_OF = {
    **dict.fromkeys(("glm_ocr",), "glm46v"),
    "glm4v_moe": "glm4v",
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "qwen3_vl_moe"), "qwen2_vl"),
}
CALL_OPTIONS = {"cosmos3_edge": {"return_mm_token_type_ids": True}}
"""What `generate` wants of a processor and does not get by default."""
FLAT = ("got_ocr2",)
"""Processors that take no lists of lists of images."""


class ProcessorCase:
    """Processor and model of one type."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tokenizer = make_tokenizer()
        self.tokenizer.add_special_tokens({"additional_special_tokens": [*_NAMES.values(), *_OTHERS]})
        for name, token in (_NAMES | _OWN_NAMES.get(kind, {})).items():
            setattr(self.tokenizer, name, token)
            setattr(self.tokenizer, f"{name}_id", self._id(token))
        self.tokenizer.bos_token = "<image_start>"  # PaliGemma's processor writes it
        self.processor = self._make_processor()

    @cached_property
    def image_token(self) -> int:
        return self._id(MODEL_TOKENS.get(self.kind) or self.processor.image_token)

    @cached_property
    def maker(self) -> PromptMaker:
        return PromptMaker(self.processor, PromptReader(self.tokenizer, VOCAB, LONGEST), self.image_token)

    @cached_property
    def model(self) -> PreTrainedModel:
        token = dict.fromkeys(CHANGES[self.kind], self.image_token)
        own = {"text_config": {"vocab_size": VOCAB}, "vocab_size": VOCAB, "vision_start_token_id": self._id("<vision_bos>")}
        return tiny_model(self.kind, {**token, **own, **MODEL_CHANGES.get(self.kind, {})})

    def text(self, count: int) -> str:
        """A prompt with so many images, of which two stand side by side."""
        before, after = WRAPPED.get(self.kind, ("", ""))
        place = f"{before}{self.maker.image_text}{after}"
        return f"a{place} b" if count == 1 else f"a {place * (count - 1)}c {place}\nd"

    def own_inputs(self, text: str, pictures: Sequence[Any]) -> Any:
        """What `generate` takes, by the processor's own code."""
        images = [*pictures] if self.kind in FLAT else [[*pictures]]
        return self.processor(text=[text], images=images, return_tensors="pt", **CALL_OPTIONS.get(self.kind, {}))

    def _id(self, name: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(name)
        assert isinstance(found, int), name
        return found

    def _make_processor(self) -> Any:
        kind = getattr(transformers, CLASSES.get(self.kind) or PROCESSOR_MAPPING_NAMES[self.kind])
        taken = inspect.signature(kind.__init__).parameters
        parts = {"image_processor": self._make_images(), "tokenizer": self.tokenizer}
        if "video_processor" in taken:
            videos = VIDEO_PROCESSOR_MAPPING_NAMES.get(self.kind) or "Qwen2VLVideoProcessor"
            # later releases name one for each backend
            parts["video_processor"] = getattr(transformers, videos if isinstance(videos, str) else videos["torchvision"])()
        if "feature_extractor" in taken:
            parts["feature_extractor"] = object.__new__(FeatureExtractionMixin)  # of sounds
        return kind(**parts, **PROCESSOR_OPTIONS.get(self.kind, {}))

    def _make_images(self) -> Any:
        names = IMAGE_PROCESSOR_MAPPING_NAMES[IMAGES_OF.get(self.kind, self.kind)]
        name = names["torchvision"] if is_torchvision_available() and "torchvision" in names else names["pil"]
        return getattr(transformers, name)(**IMAGE_OPTIONS.get(self.kind, _FLEXIBLE))


def compare(kind: str) -> dict[str, Any]:
    """What the engine makes of one image and of two, and what transformers makes of them.

    tokens: (ours, those of the processor) for each number of images; answers: (ours, those of generate)
    refused: why two images are refused; empty if they are not
    """
    case = ProcessorCase(kind)
    config = EngineConfig(device="cpu", num_pages=128, page_size=16, max_num_batched_tokens=LONGEST)
    engine = Engine(config, model=case.model)
    found: dict[str, Any] = {"kind": kind, "tokens": [], "answers": [], "refused": ""}
    for count in (1, 2):
        # other sizes lead to other numbers of tokens
        text = case.text(count)
        pictures = [picture(1), picture(2, 60, 34)][:count]
        try:
            prompt = case.maker.prompt(text, pictures)
        except ParameterError as error:
            found["refused"] = error.rule
            break
        inputs = case.own_inputs(text, pictures).to(case.model.dtype)
        length = inputs["input_ids"].shape[1]
        found["tokens"].append((list(prompt.tokens), inputs["input_ids"][0].tolist()))
        options: Any = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            expected = case.model.generate(**inputs, **options)[0, length:].tolist()
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        answer = engine.generate([prompt.tokens], params, images=[prompt.images])[0]
        found["answers"].append((list(answer.token_ids), expected))
    return found


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for kind in sys.argv[1:]:
        print(json.dumps(compare(kind)), flush=True)


if __name__ == "__main__":
    main()
