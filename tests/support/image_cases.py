"""A tiny model that sees images, with two of them, an engine of it, and what transformers generates.

case = Case("llava")
ids = case.prompt(0, 1)                              # both images, with text around them
assert answer(case.engine(), ids, *case.images) == case.generate(ids, 0, 1)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from every_type import tiny_model
from image_inputs import CHANGES, IMAGE, one_image, whole_prompt
from transformers import PreTrainedModel

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.images.prompt import ImageInput

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@cache
def _made(name: str, changes: str) -> tuple[PreTrainedModel, list[dict[str, Any]], dict[tuple[int | None, ...], list[int]]]:
    """The model, the inputs of two images, and what transformers has generated so far. changes: as JSON"""
    model = tiny_model(name, {**CHANGES[name], **json.loads(changes)})
    return model, [one_image(name, model, seed) for seed in (1, 2)], {}


class Case:
    """A tiny model with two images, and what transformers generates. changes: of its config"""

    def __init__(self, name: str, changes: Mapping[str, Any] | None = None) -> None:
        self.name = name
        made, self.inputs, self._generated = _made(name, json.dumps(changes or {}))
        self.model = copy.deepcopy(made)
        self.images = [ImageInput.of(inputs) for inputs in self.inputs]
        self.count = self.inputs[0]["input_ids"].shape[1]

    def prompt(self, *numbers: int, text: int = 5) -> list[int]:
        tokens = list(range(10, 10 + text))
        for number in numbers:
            tokens += [IMAGE] * self.count + [20 + number]
        return tokens

    def generate(self, ids: list[int], *numbers: int) -> list[int]:
        if (*ids, None, *numbers) not in self._generated:
            self._generated[*ids, None, *numbers] = self._generate(ids, *numbers)
        return [*self._generated[*ids, None, *numbers]]

    def _generate(self, ids: list[int], *numbers: int) -> list[int]:
        inputs = whole_prompt(self.name, self.model, ids, [self.inputs[n] for n in numbers])
        options: Any = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.no_grad():
            return self.model.generate(**inputs, **options)[0, len(ids) :].tolist()

    def engine(self, **settings: Any) -> Engine:
        given = {"device": "cpu", "num_pages": 64, "max_model_len": 128, "page_size": 4} | settings
        return Engine(EngineConfig(**given), model=copy.deepcopy(self.model))


def answer(engine: Engine, ids: list[int], *images: ImageInput, params: SamplingParams = GREEDY) -> list[int]:
    return list(engine.generate([ids], params, images=[images])[0].token_ids)
