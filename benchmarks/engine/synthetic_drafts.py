"""Drafts with a set acceptance, to time speculation on random weights, whose answers repeat nothing.

    with accepting(engine, 3): ...           # each sequence drafts as many tokens as it may; the first 3 count as right

What is timed is the work of an engine with such an acceptance. The tokens are not those of an engine without speculation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fa_serve.engine.scheduler import scheduler


@contextmanager
def accepting(engine: Any, count: int) -> Iterator[None]:
    """engine: an Engine with speculation; count: drafts that are accepted in each step"""

    def propose(sequence: Any, most: int) -> list[int]:
        return (sequence.tokens[-16:] * 2)[:most]

    def accepted(drafts: Sequence[int], draws: Sequence[int]) -> int:
        del draws
        return min(count, len(drafts))

    with (
        patch.object(engine._scheduler.speculation.drafter, "propose", propose),
        patch.object(scheduler, "num_accepted", accepted),
    ):
        yield


@contextmanager
def no_drafts(engine: Any) -> Iterator[None]:
    """The same engine without speculation."""
    with patch.object(engine._scheduler.speculation, "num_tokens", 0):
        yield
