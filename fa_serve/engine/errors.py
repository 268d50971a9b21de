"""Errors that the engine raises or hands out. No other module of the engine defines one.

    FaServeError
    ├── ParameterError   (fa_serve.spec) a parameter of a request is wrong
    ├── QueueFullError   too many requests wait already
    └── EngineDeadError  the engine has ended

A request that fails after it has been queued raises nothing: its last output carries a `RequestError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fa_serve.spec import FaServeError

RequestErrorCode = Literal[
    "timeout", "not_finite", "no_token_left", "grammar", "step_failed", "scheduler_failed", "engine_dead"
]


class QueueFullError(FaServeError, RuntimeError):
    """No more requests can wait. Try again later."""


class EngineDeadError(FaServeError, RuntimeError):
    """The engine has ended. The text says why."""


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why a request ended with `finish_reason == "error"`. Programs read `code`; `message` is for people."""

    code: RequestErrorCode
    message: str
