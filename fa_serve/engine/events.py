"""Events that the engine reports while it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """One finished part of the engine's start, for example the loading of the weights.

    name:    which part, for example "weights" or "kv cache"
    detail:  the result of this part, for people
    seconds: how long this part took
    """

    name: str
    detail: str
    seconds: float


OnPhase = Callable[[Phase], None]
