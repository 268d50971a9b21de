"""Tiny models that keep states, and what transformers' `generate` writes with them."""

from __future__ import annotations

import random
from functools import cache

import torch
from hybrids import BY_NAME
from tiny_models import VOCAB
from transformers import GenerationConfig, PreTrainedModel


def prompts(count: int = 5, longest: int = 45, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]


@cache
def model_of(name: str) -> PreTrainedModel:
    model = BY_NAME[name].build(vocab_size=VOCAB)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=-1)  # no token ends an answer
    return model


@cache
def generated(name: str, prompt: tuple[int, ...], count: int = 14) -> list[int]:
    """The tokens of transformers' own code."""
    ids = torch.tensor([prompt])
    output = model_of(name).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return output[0, len(prompt) :].tolist()


def expected(name: str, given: list[list[int]]) -> list[list[int]]:
    return [generated(name, tuple(prompt)) for prompt in given]
