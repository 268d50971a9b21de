"""Gets the two parts of a prompt with images from a model's own processor: inputs of the towers, and the text of the prompt.

    processor = load_processor(path, trust_remote_code=False)      # raises ParameterError, with the reason
    inputs, text = process_image(processor, image)                 # for the towers, and the text of the image in a prompt
    written = write_prompt(processor, "<image>What is this?", [text])       # the text that the processor gives its tokenizer

Both functions run the processor's own `__call__`, on a copy with some parts replaced, and stop where it calls its tokenizer. So
the type's own code merges arguments, lays out images and writes prompts: PaliGemma's processor puts a token and a line break
around the question, and Idefics 2's joins neighbouring images. Images are processed one at a time, in another process, and
before the prompt is known. The result is compared with `own_tokens`, the tokens of the processor for the whole prompt
(fa_serve.engine.images.processor).

Left out: tokenization, and what the inputs are used for (fa_serve.engine.images).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoProcessor
from transformers.image_transforms import to_pil_image
from transformers.image_utils import ChannelDimension

from fa_serve.hf.adapter.composites import IMAGE_TOKEN_NAMES
from fa_serve.spec import ParameterError


@dataclass(frozen=True, slots=True)
class WrittenPrompt:
    """text: with images expanded; special_tokens: whether the tokenizer is to add its usual special tokens"""

    text: str
    special_tokens: bool


class _TokenizerReachedError(Exception):
    """The processor has called its tokenizer. text, special_tokens: the arguments of the call"""

    def __init__(self, text: str, special_tokens: bool) -> None:
        self.text = text
        self.special_tokens = special_tokens


class _ImagesReachedError(Exception):
    """The processor has called its image processor directly."""


class _StandIn:
    """Replaces a part of a processor: calls go to `call`, and attributes come from the part."""

    def __init__(self, part: Any, call: Callable[..., Any]) -> None:
        self._part = part
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def load_processor(path: str, *, trust_remote_code: bool) -> Any:
    """The processor of a model. Raises ParameterError, with the reason, for a model without a processor that takes images."""
    try:
        processor = cast(Any, AutoProcessor).from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a processor's code may raise anything, such as for a missing package
        told = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise ParameterError("images", f"be empty, because the model's processor cannot be loaded ({told})", path) from error
    if getattr(processor, "image_processor", None) is None:
        raise ParameterError("images", "be empty, because the model has no processor for images", path)
    find_image_text(processor)
    return processor


def load_image_token(path: str, *, trust_remote_code: bool) -> int:
    """The token that a model replaces by embeddings of images, from its config. Raises ParameterError if it names none."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    token = find_image_token(config)
    if token is None:
        raise ParameterError("images", "be empty, because the model's config names no image token", path)
    return token


def find_image_token(config: Any) -> int | None:
    """The token that a model replaces by embeddings of images; None for a model without such a token.

    A processor puts other tokens around it, for the beginning, the end and the lines of an image.
    """
    tokens = [getattr(config, name, None) for name in IMAGE_TOKEN_NAMES]
    return next((token for token in tokens if isinstance(token, int)), None)


def find_image_text(processor: Any) -> str:
    """The text that stands for an image before the processor expands it.

    Most often this is the name of the image token. Raises ParameterError for a processor that replaces nothing.
    """
    names = ["image_token", *(name for name in vars(processor) if name.startswith("image_") and name.endswith("_token"))]
    for name in names:
        text = getattr(processor, name, None)
        if isinstance(text, str) and text and processor.get_text_with_replacements([text], ["+"])[0] == ["+"]:
            return text
    kind = type(processor).__name__
    raise ParameterError("images", f"be empty, because {kind} does not expand any text into image tokens", kind)


def processor_identity(processor: Any) -> bytes:
    """A hash of what a processor does to pixels: its type, its options, and the version of the code that reads them."""
    images = processor.image_processor
    told = f"{type(images).__module__} {type(images).__qualname__} {transformers.__version__} {images.to_json_string()}"
    return blake2b(told.encode(), digest_size=16).digest()


def process_image(processor: Any, image: Any) -> tuple[Mapping[str, Tensor], str]:
    """The inputs of the towers for an image, and the text that stands for it in a prompt. Raises what the processor raises.

    image: a PIL image, or (height, width, 3) uint8
    """
    worker = _unchecked(processor)
    own_process = worker._process_images
    own_read = worker.image_processor
    made: list[Mapping[str, Any]] = []
    texts: list[str] = []

    def process(*args: Any, **kwargs: Any) -> Any:
        inputs, replacements = own_process(*args, **kwargs)
        made.append(inputs)
        texts[:] = replacements
        return inputs, replacements

    def read(*args: Any, **kwargs: Any) -> Any:
        made.append(own_read(*args, **kwargs))
        return made[-1]

    def tokenize(text: Any, *_: Any, **__: Any) -> Any:
        texts.append(text[0])
        if made:
            raise _TokenizerReachedError(text[0], False)
        return {"input_ids": []}  # this processor reads its images only after it tokenizes (Idefics 2)

    worker._process_images = process
    worker.image_processor = _StandIn(own_read, read)
    worker.tokenizer = _StandIn(worker.tokenizer, tokenize)
    with suppress(_TokenizerReachedError):
        worker(text=[find_image_text(processor)], images=[_as_picture(image)], return_tensors="pt")
    unused = {*worker.unused_input_names}
    return {name: torch.as_tensor(x) for name, x in made[-1].items() if name not in unused}, texts[0]


def write_prompt(processor: Any, text: str, replacements: Sequence[str], *, checked: bool = True) -> WrittenPrompt:
    """The text that the processor gives its tokenizer for a prompt. Raises what the processor's code raises.

    replacements: the text that stands for each image, as `process_image` returned it
    checked:      whether the processor refuses a text in which an image lacks the tokens that a chat template puts around it
    """
    worker = copy.copy(processor) if checked else _unchecked(processor)

    def read(*_: Any, **__: Any) -> Any:
        raise _ImagesReachedError

    def tokenize(text: Any, *_: Any, **kwargs: Any) -> Any:
        raise _TokenizerReachedError(text[0], kwargs.get("add_special_tokens", True))

    worker._process_images = lambda *_, **__: ({}, list(replacements))
    worker.image_processor = _StandIn(worker.image_processor, read)
    worker.tokenizer = _StandIn(worker.tokenizer, tokenize)
    # the tokenizer of a processor may be configured to add no special tokens
    adds = processor.tokenizer.num_special_tokens_to_add() > 0
    try:
        worker(text=[text], images=[torch.zeros(3, 1, 1, dtype=torch.uint8)] * len(replacements))
    except _TokenizerReachedError as reached:
        return WrittenPrompt(reached.text, adds and reached.special_tokens)
    except _ImagesReachedError:  # this processor needs pixels to write the text (Qwen-Omni)
        return WrittenPrompt(processor.get_text_with_replacements([text], list(replacements))[0][0], adds)
    raise NotImplementedError(f"{type(processor).__name__} has not called its tokenizer")


def own_tokens(processor: Any, text: str, images: Sequence[Any]) -> list[int]:
    """The tokens that the processor itself makes from a text and its images. Raises what the processor's code raises."""
    worker = _unchecked(processor)
    pictures = [_as_picture(image) for image in images]
    try:
        found = worker(text=[text], images=[pictures], return_tensors="pt")
    except Exception:  # this processor takes no lists of lists of images (GOT-OCR 2)
        found = worker(text=[text], images=pictures, return_tensors="pt")
    return cast("list[int]", found["input_ids"][0].tolist())


def _as_picture(image: Any) -> Any:
    """An image in a form that every processor takes (Idefics 2 takes only PIL images)."""
    if not isinstance(image, np.ndarray):
        return image
    return to_pil_image(image, do_rescale=False, input_data_format=ChannelDimension.LAST)


def _unchecked(processor: Any) -> Any:
    """A copy of the processor that takes an image token without the tokens that a chat template puts around it."""
    worker = copy.copy(processor)
    worker.validate_inputs = lambda *_, **__: None
    worker._check_special_mm_tokens = lambda *_, **__: None
    return worker
