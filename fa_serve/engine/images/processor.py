"""A text and images as token ids and inputs of towers, by the model's own processor.

    maker = PromptMaker.of_model(config, reader)
    prompt = maker.prompt("<image>What is this?", [image])       # -> ImagePrompt

The processor says what stands in the text in the place of an image, and by which text it is replaced: image tokens, and what
the model wants around them. An image is processed alone, so that its inputs and its key do not depend on the prompt.

Left out: where pictures come from, and whether they can be trusted: they are decoded images here, or have been processed where
they were decoded (processed.py).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, cast

import torch

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.images.processed import PixelProcessor, ProcessedImage
from fa_serve.engine.images.prompt import ImageInput, ImagePrompt
from fa_serve.engine.request.prompts import PromptReader
from fa_serve.kept_values import KeptValues
from fa_serve.spec import ParameterError

MAX_KEPT = 1024
"""Processed images whose inputs are kept for as long as they are."""


class PromptMaker:
    """Makes prompts of one model. Safe to use from any thread.

    reader: turns texts into token ids
    """

    def __init__(self, processor: Any, reader: PromptReader) -> None:
        from fa_serve.hf.images import processor_identity  # with transformers, as in `of_model`

        self.image_text: str = processor.image_token
        self._pixels = PixelProcessor(processor)
        self._image_tokens = {token for token in processor.image_token_ids if token is not None}
        self._reader = reader
        defaults = type(processor).valid_processor_kwargs._defaults.get("text_kwargs", {})
        self._marks_images = bool(defaults.get("return_mm_token_type_ids"))
        self._identity = processor_identity(processor)
        self._inputs: KeptValues[ImageInput] = KeptValues(MAX_KEPT)

    @classmethod
    def of_model(cls, config: EngineConfig, reader: PromptReader) -> PromptMaker:
        """With the processor of the model. Raises ParameterError, with the reason, for a model without one."""
        from fa_serve.hf.images import load_processor  # with transformers, which a server has not imported before its engine

        return cls(load_processor(config.model_path(), trust_remote_code=config.trust_remote_code), reader)

    def prompt(
        self, text: str, images: Sequence[Any], *, special_tokens: bool = True, plain: Sequence[tuple[int, int]] = ()
    ) -> ImagePrompt:
        """special_tokens, plain: as `PromptReader.encode` takes them
        images: PIL images, or what became of them, in the order of their places

        Raises ParameterError if the text has not as many places as there are images, and for an image that is refused.
        """
        places = self._places(text, plain)
        if len(places) != len(images):
            rule = f"have {self.image_text} in the place of each of its {len(images)} images"
            raise ParameterError("prompt", rule, f"{len(places)} of them")
        made = [image if isinstance(image, ProcessedImage) else self._pixels.process(image) for image in images]
        pieces = []
        moved = []
        position = length = 0
        marks = sorted([*((begin, None) for begin in places), *((begin, end) for begin, end in plain)])
        number = 0
        for begin, end in marks:
            pieces.append(text[position:begin])
            length += begin - position
            if end is None:
                piece = made[number].text
                position = begin + len(self.image_text)
                number += 1
            else:
                piece = text[begin:end]
                moved.append((length, length + len(piece)))
                position = end
            pieces.append(piece)
            length += len(piece)
        whole = "".join([*pieces, text[position:]])
        tokens = self._reader.encode(whole, special_tokens, moved)
        return ImagePrompt(tokens, tuple(self._input(each) for each in made))

    def _places(self, text: str, plain: Sequence[tuple[int, int]]) -> list[int]:
        """Where images stand. What a client has written is no place."""
        found = []
        begin = text.find(self.image_text)
        while begin >= 0:
            if not any(first <= begin < last for first, last in plain):
                found.append(begin)
            begin = text.find(self.image_text, begin + len(self.image_text))
        return found

    def _input(self, image: ProcessedImage) -> ImageInput:
        """One image for the towers. The pixels of a picture that came as a file are not hashed: its key tells what they are."""
        found = self._inputs.find(image, None)
        if found is not None:
            return found
        count = sum(token in self._image_tokens for token in self._reader.encode(image.text, False))
        ids = torch.full((1, count), next(iter(self._image_tokens)))
        marks = torch.full_like(ids, int(self._marks_images), dtype=torch.int32)
        tokens = {"input_ids": ids, "mm_token_type_ids": marks, "token_type_ids": marks}
        if not image.key:
            return ImageInput.of({**image.inputs, **tokens})
        key = blake2b(image.key, digest_size=16, key=self._identity).digest()
        return self._inputs.keep(image, None, ImageInput(key, ChainMap(tokens, cast(Any, image.inputs))))


def prepare_prompts(
    prompts: Sequence[str | Sequence[int]], images: Sequence[Sequence[Any]] | None, config: EngineConfig, reader: PromptReader
) -> tuple[list[str | Sequence[int]], list[Sequence[ImageInput]]]:
    """Prompts as `Engine.add_request` takes them, and the images of each. The processor is loaded if a text has images."""
    if images is None:
        return list(prompts), [()] * len(prompts)
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
