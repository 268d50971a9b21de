"""Turns a text and images into token ids and inputs of the towers, with the model's own processor.

    maker = PromptMaker.of_model(config, reader)
    prompt = maker.prompt("<image>What is this?", [image])       # -> ImagePrompt

The processor defines the text that stands for an image, and writes the prompt: the image tokens, and whatever the model wants
around them and around the question. Each image is processed by itself, so that its inputs and its key do not depend on the
prompt. To prove that this gives the same tokens as processing all images at once, they are compared with the processor's own
tokens: for one image when a processor is loaded, and for two when the first prompt with several images arrives.

Left out: where pictures come from, and whether they can be trusted. This module gets images that are decoded already, or that
were processed where they were decoded (processed.py).
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.images.processed import PixelProcessor, ProcessedImage
from fa_serve.engine.images.prompt import ImageInput, ImagePrompt
from fa_serve.engine.request.prompts import PromptReader, find_mark
from fa_serve.kept_values import KeptValues
from fa_serve.spec import ParameterError

MAX_KEPT = 1024
"""Processed images whose `ImageInput` is kept, for as long as the processed image itself exists."""
PROBES = ((64, 64), (96, 160))
"""Height and width of the pictures with which a processor is tried."""


class PromptMaker:
    """Makes prompts of one model. Safe to use from any thread.

    reader:      turns texts into token ids
    image_token: the token that the model replaces with an embedding of an image

    Raises ParameterError, with the reason, for a processor whose own tokens for an image differ from those made here.
    """

    def __init__(self, processor: Any, reader: PromptReader, image_token: int) -> None:
        from fa_serve.hf.processors import find_image_text, processor_identity  # imports transformers

        self.image_text = find_image_text(processor)
        self._processor = processor
        self._pixels = PixelProcessor(processor)
        self._image_token = image_token
        self._reader = reader
        defaults = getattr(type(processor).valid_processor_kwargs, "_defaults", {}).get("text_kwargs", {})
        self._marks_images = bool(defaults.get("return_mm_token_type_ids"))
        self._identity = processor_identity(processor)
        self._inputs: KeptValues[ImageInput] = KeptValues(MAX_KEPT)
        reason = self._difference(1)
        if reason:
            name = type(processor).__name__
            raise ParameterError("images", f"be empty, because {name} cannot be used for one image at a time ({reason})", name)

    @classmethod
    def of_model(cls, config: EngineConfig, reader: PromptReader) -> PromptMaker:
        """Load the processor of the model. Raises ParameterError, with the reason, for a model without one."""
        processor, image_token = load_processor_of(config)
        return cls(processor, reader, image_token)

    def prompt(
        self, text: str, images: Sequence[Any], *, special_tokens: bool = True, plain: Sequence[tuple[int, int]] = ()
    ) -> ImagePrompt:
        """special_tokens, plain: as `PromptReader.encode` takes them
        images: PIL images, arrays (height, width, 3) uint8, or `ProcessedImage`, in the order of their places in the text

        Raises ParameterError if the text does not have exactly one place for each image, for an image that is refused, and for
        several images if the processor writes other tokens for an image when there are several.
        """
        places = self.num_places(text, plain)
        if places != len(images):
            rule = f"contain {self.image_text} once for each of its {len(images)} images"
            raise ParameterError("prompt", rule, f"{places} of them")
        if len(images) > 1 and self._reason_against_two:
            name = type(self._processor).__name__
            rule = f"hold at most one image, because {name} treats several images differently ({self._reason_against_two})"
            raise ParameterError("images", rule, len(images))
        made = [image if isinstance(image, ProcessedImage) else self._pixels.process(image) for image in images]
        tokens = self._write(text, made, special_tokens, plain)
        return ImagePrompt(tokens, tuple(self._input(each) for each in made))

    def input_of(self, image: Any) -> ImageInput:
        """The towers' inputs for a PIL image or a (height, width, 3) uint8 array. Raises ParameterError if it is refused."""
        return self._input(self._pixels.process(image))

    def num_places(self, text: str, plain: Sequence[tuple[int, int]] = ()) -> int:
        """How many places for images the text has. Ranges in `plain` do not count: a client has written them."""
        begins = (found.start() for found in re.finditer(re.escape(self.image_text), text))
        return sum(not any(first <= begin < last for first, last in plain) for begin in begins)

    def _write(
        self, text: str, images: Sequence[ProcessedImage], special_tokens: bool, plain: Sequence[tuple[int, int]]
    ) -> list[int]:
        """The tokens of a text as the processor writes it. A mark between all characters of `plain` ranges hides special names
        in them from the processor."""
        from fa_serve.hf.processors import write_prompt

        if not images:
            return self._reader.encode(text, special_tokens, plain)
        mark = find_mark(text) if plain else ""
        pieces = []
        position = 0
        for begin, end in plain:
            pieces += [text[position:begin], mark.join(text[begin:end])]
            position = end
        try:
            written = write_prompt(self._processor, "".join([*pieces, text[position:]]), [each.text for each in images])
        except Exception as error:  # a processor's code may raise anything for the order of tokens
            told = f"{type(error).__name__}: {str(error)[:200]}"
            raise ParameterError("prompt", f"be a text that the model's processor accepts ({told})", text) from error
        parts = [written.text]
        moved = []
        if plain:
            parts = re.split(f"((?s:.)(?:{mark}(?s:.))+)", written.text)
            parts[1::2] = [part.replace(mark, "") for part in parts[1::2]]
            ends = np.cumsum([len(part) for part in parts]).tolist()
            moved = list(zip(ends[0::2], ends[1::2], strict=False))
        return self._reader.encode("".join(parts), special_tokens and written.special_tokens, moved)

    def _input(self, image: ProcessedImage) -> ImageInput:
        """One image for the towers. The pixels of a picture that came as a file are not hashed: its key identifies them."""
        found = self._inputs.find(image, None)
        if found is not None:
            return found
        # the text that stands for an image in a prompt may surround the image tokens with other tokens, which do not count
        count = self._reader.encode(image.text, False).count(self._image_token)
        ids = torch.full((1, count), self._image_token)
        marks = torch.full_like(ids, int(self._marks_images), dtype=torch.int32)
        tokens = {"input_ids": ids, "mm_token_type_ids": marks, "token_type_ids": marks}
        if not image.key:
            return ImageInput.of({**image.inputs, **tokens})
        key = blake2b(image.key, digest_size=16, key=self._identity).digest()
        return self._inputs.keep(image, None, ImageInput(key, ChainMap(tokens, cast(Any, image.inputs))))

    @cached_property
    def _reason_against_two(self) -> str:
        """Why a prompt may have only one image; empty if it may have more."""
        return self._difference(2)

    def _difference(self, count: int) -> str:
        """How the processor's own prompt for `count` images differs from the prompt made here; empty if they are equal."""
        from fa_serve.hf.processors import own_tokens, write_prompt

        pictures = [np.zeros((*size, 3), dtype=np.uint8) for size in PROBES[:count]]
        text = f"a{self.image_text} b" * count
        try:
            expected = own_tokens(self._processor, text, pictures)
        except Exception as error:  # a processor's code may raise anything
            return f"it raises {type(error).__name__}: {str(error)[:200]}"
        texts = [self._pixels.process(picture).text for picture in pictures]
        written = write_prompt(self._processor, text, texts, checked=False)
        made = self._reader.encode(written.text, written.special_tokens)
        plural = "s" if count > 1 else ""
        told = f"{len(expected)} tokens for {count} image{plural}, but {len(made)} when each image is processed separately"
        return "" if made == expected else told


def load_processor_of(config: EngineConfig) -> tuple[Any, int]:
    """The processor of a model, and the token that its embeddings of images replace.

    Raises ParameterError, with the reason, for a model without them.
    """
    from fa_serve.hf.processors import (
        load_image_token,
        load_processor,
    )  # this imports transformers, which a server has not imported yet

    path = config.model_path()
    processor = load_processor(path, trust_remote_code=config.trust_remote_code)
    return processor, load_image_token(path, trust_remote_code=config.trust_remote_code)


def prepare_prompts(
    prompts: Sequence[str | Sequence[int]], images: Sequence[Sequence[Any]] | None, config: EngineConfig, reader: PromptReader
) -> tuple[list[str | Sequence[int]], list[Sequence[ImageInput]]]:
    """Prompts as `Engine.add_request` takes them, and the images of each. Loads the processor only if a text has images."""
    if images is None:
        return list(prompts), [()] * len(prompts)
    for each in (images, *images) if isinstance(images, Sequence) else (images,):
        if each is not None and (isinstance(each, str) or not isinstance(each, Sequence)):
            rule = "be a list with a list of images for each prompt, such as [[image]] for one prompt with one image"
            raise ParameterError("images", rule, each)
    if len(images) != len(prompts):
        raise ParameterError("images", f"have an entry for each of the {len(prompts)} prompts", len(images))
    maker = None
    texts: list[str | Sequence[int]] = []
    inputs: list[Sequence[ImageInput]] = []
    for prompt, own in zip(prompts, images, strict=True):
        if not own or not isinstance(prompt, str):
            texts.append(prompt)
            inputs.append(own)
            continue
        if maker is None:
            maker = PromptMaker.of_model(config, reader)
        made = maker.prompt(prompt, own)
        texts.append(made.tokens)
        inputs.append(made.images)
    return texts, inputs
