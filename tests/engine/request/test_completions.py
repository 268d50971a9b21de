"""A list of prompts is answered in order, however few requests the engine takes at a time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fa_serve.engine.request.completions import complete
from fa_serve.engine.request.outputs import RequestOutput
from fa_serve.engine.request.params import SamplingParams


class Few:
    """Takes `size` requests at a time, and ends the newest one in each step."""

    def __init__(self, size: int, fails_at: int = -1) -> None:
        self.size = size
        self.steps = itertools.count()
        self.fails_at = fails_at
        self.running: list[tuple[str, int]] = []
        self.most = 0
        self.aborted: list[str] = []

    @property
    def room(self) -> int:
        return self.size - len(self.running)

    def submit(self, request_id: str, params: SamplingParams, requests: list[Any]) -> None:
        self.running += [(request_id, index) for index in range(len(requests))]
        self.most = max(self.most, len(self.running))

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def step(self) -> list[RequestOutput]:
        if next(self.steps) == self.fails_at:
            raise KeyboardInterrupt
        name, index = self.running.pop()
        ids = [int(name), index]
        return [RequestOutput(name, [], index=index, token_ids=ids, finished=True, finish_reason="length")]

    def abort(self, request_id: str) -> list[RequestOutput]:
        self.aborted.append(request_id)
        return []


def prompts(*counts: int) -> list[tuple[str, SamplingParams, list[Any]]]:
    return [(str(name), SamplingParams(n=n, max_tokens=1), [None] * n) for name, n in enumerate(counts)]


def test_answers_are_in_the_order_of_the_prompts() -> None:
    engine = Few(3)
    ended: list[int] = []
    found = complete(engine, prompts(1, 3, 2, 1), ended.append)
    assert ended == [1] * 7
    assert [each.token_ids for each in found] == [[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [3, 0]]
    assert engine.most == 3


def test_an_interrupt_aborts_what_is_left() -> None:
    engine = Few(2, fails_at=1)
    with pytest.raises(KeyboardInterrupt):
        complete(engine, prompts(1, 1, 1), int)
    assert engine.aborted == ["0", "1", "2"]
