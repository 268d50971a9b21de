"""Estimates the size of an answer before its request is admitted, and writes large answers in small steps.

    AnswerSize(per_prompt_token=1890, once=0, per_token=0).of_prompts(num_tokens=2000, sequences_per_prompt=128)

A request of 8 kB can ask for an answer of 350 MB: 2,000 token ids as a prompt, the 20 most likely tokens at each of them, and
128 sequences. The estimate multiplies the number of tokens by the bytes per token that the requested fields take in JSON. These
bytes are averages over real answers, rounded up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

TEXT = 8  # bytes of a token as text or as an id
PROMPT_LOGPROB = 90  # bytes of one of the most likely tokens in `prompt_logprobs`
COMPLETION_LOGPROB = 45  # bytes of one of the most likely tokens in a completion's `logprobs`
CHAT_LOGPROB = 90  # bytes of one of the most likely tokens in a chat's `logprobs`
SMALL = 1 << 16  # an answer of this many bytes is written within a millisecond
SMALL_TEXT = 1 << 13  # characters of a text in which calls and thoughts are found within a few milliseconds
SLICES_PER_PAUSE = 8
PAUSE_SECONDS = 0.001
SLICE = 32  # items of a list that are written in one go


@dataclass(frozen=True)
class AnswerSize:
    """The bytes that an answer's fields take.

    per_prompt_token: for each token of the prompt in each choice
    once:             for each token of the prompt, once for the whole answer
    per_token:        for each generated token, besides its text
    """

    per_prompt_token: int
    once: int
    per_token: int

    def of_prompts(self, num_tokens: int, sequences_per_prompt: int) -> int:
        return num_tokens * (self.once + self.per_prompt_token * sequences_per_prompt)

    def of_sequences(self, num_tokens: int) -> int:
        return num_tokens * (TEXT + self.per_token)


def written_in_steps(value: Any) -> bytes:
    """The value as JSON. Pauses give the interpreter to other threads, such as that of an engine in this process."""
    slices = []
    for number, piece in enumerate(json_slices(value), start=1):
        slices.append(piece)
        if not number % SLICES_PER_PAUSE:
            time.sleep(PAUSE_SECONDS)
    return b"".join(slices)


def json_slices(value: Any) -> Iterator[bytes]:
    """The value as JSON in pieces. One call for a large value would hold the interpreter's lock for a quarter of a second."""
    if isinstance(value, dict):
        yield b"{"
        for number, (name, field) in enumerate(value.items()):
            yield (b"," if number else b"") + to_json(name) + b":"
            yield from json_slices(field)
        yield b"}"
    elif isinstance(value, list) and any(map(_is_large, value)):
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from json_slices(item)
        yield b"]"
    elif isinstance(value, list) and value:
        for begin in range(0, len(value), SLICE):
            yield (b"," if begin else b"[") + to_json(value[begin : begin + SLICE])[1:-1]
        yield b"]"
    else:
        yield to_json(value)


def _is_large(value: Any) -> bool:
    """Whether the value is a list of more than SLICE items, or contains one."""
    if isinstance(value, dict):
        return any(map(_is_large, value.values()))
    return isinstance(value, list) and (len(value) > SLICE or any(map(_is_large, value)))
