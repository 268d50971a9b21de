"""A text and images as token ids and inputs of towers, by the model's own processor.

    maker = PromptMaker.of_model(config, reader)
    prompt = maker.prompt("<image>What is this?", [image])       # -> ImagePrompt

The processor says what stands in the text in the place of an image, and by which text it is replaced: image tokens, and what
the model wants around them. An image is processed alone, so that its inputs and its key do not depend on the prompt.

Left out: where pictures come from, and whether they can be trusted: they are decoded images here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.images.prompt import ImageInput, ImagePrompt
from fa_serve.engine.request.prompts import PromptReader
from fa_serve.spec import ParameterError


class PromptMaker:
    """Makes prompts of one model. Safe to use from any thread.

    reader: turns texts into token ids
    """

    def __init__(self, processor: Any, reader: PromptReader) -> None:
        self.image_text: str = processor.image_token
        self._processor = processor
        self._reader = reader
        defaults = type(processor).valid_processor_kwargs._defaults.get("text_kwargs", {})
        self._marks_images = bool(defaults.get("return_mm_token_type_ids"))

    @classmethod
    def of_model(cls, config: EngineConfig, reader: PromptReader) -> PromptMaker:
        """With the processor of the model. Raises ParameterError, with the reason, for a model without one."""
        from fa_serve.hf.images import load_processor  # with transformers, which a server has not imported before its engine

        return cls(load_processor(config.model_path(), trust_remote_code=config.trust_remote_code), reader)

    def prompt(
        self, text: str, images: Sequence[Any], *, special_tokens: bool = True, plain: Sequence[tuple[int, int]] = ()
    ) -> ImagePrompt:
        """special_tokens, plain: as `PromptReader.encode` takes them. images: PIL images, in the order of their places

        Raises ParameterError if the text has not as many places as there are images, and for an image that is refused.
        """
        places = self._places(text, plain)
        if len(places) != len(images):
            rule = f"have {self.image_text} in the place of each of its {len(images)} images"
            raise ParameterError("prompt", rule, f"{len(places)} of them")
        made = [self._process(image) for image in images]
        pieces = []
        moved = []
        position = length = 0
        marks = sorted([*((begin, None) for begin in places), *((begin, end) for begin, end in plain)])
        number = 0
        for begin, end in marks:
            pieces.append(text[position:begin])
            length += begin - position
            if end is None:
                piece = made[number][1]
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
        return ImagePrompt(tokens, tuple(self._input(*each) for each in made))

    def _places(self, text: str, plain: Sequence[tuple[int, int]]) -> list[int]:
        """Where images stand. What a client has written is no place."""
        found = []
        begin = text.find(self.image_text)
        while begin >= 0:
            if not any(first <= begin < last for first, last in plain):
                found.append(begin)
            begin = text.find(self.image_text, begin + len(self.image_text))
        return found

    def _process(self, image: Any) -> tuple[dict[str, Any], str]:
        """The inputs of the towers, and the text that stands for the image."""
        processor = self._processor
        merged = processor._merge_kwargs(
            processor.valid_processor_kwargs, tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="pt"
        )
        try:
            [images, *_] = processor.prepare_inputs_layout(images=[image], text=[self.image_text])
            inputs, [text] = processor._process_images(images, **merged["images_kwargs"])
        except Exception as error:  # whatever the code of a processor can raise for the shape of an image
            told = f"{type(error).__name__}: {str(error)[:200]}"
            raise ParameterError("images", f"hold images that the model's processor takes ({told})", "another one") from error
        return {name: x for name, x in inputs.items() if name not in processor.unused_input_names}, text

    def _input(self, inputs: dict[str, Any], text: str) -> ImageInput:
        known = set(self._processor.image_token_ids)
        count = sum(token in known for token in self._reader.encode(text, False))
        ids = torch.full((1, count), next(token for token in known if token is not None))
        given = {"input_ids": ids, **{name: torch.as_tensor(x) for name, x in inputs.items()}}
        marks = torch.full_like(ids, int(self._marks_images), dtype=torch.int32)
        return ImageInput.of(given | {"mm_token_type_ids": marks, "token_type_ids": marks})


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
