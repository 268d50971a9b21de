"""What can go wrong with a request: an exception when it is submitted, plain data when it ends with an error.

    FaServeError               the base of all exceptions of this package, in fa_serve.spec
    ├── ParameterError         a parameter of a request or a setting is not valid, in fa_serve.spec
    ├── QueueFullError         the queue is full; the client may try again later
    ├── EngineAsleepError      the engine has freed its memory, or its weights have no values
    ├── WeightTransferError    a trainer and an engine have not connected, or weights have not arrived
    ├── EncoderError           an input of `Encoder.encode` ended with a RequestError
    ├── RolloutError           an answer of a `RolloutEngine` ended with one, in fa_serve.engine.rollout.rollouts
    └── EngineDeadError        the engine has ended and computes nothing any more
    RequestError               not an exception: why a request that had been accepted ended with finish_reason "error"

Programs read `ParameterError.field`, `ParameterError.code`, `RequestError.code` and `EngineDeadError.cause`. Messages are for
people, and rewording one changes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fa_serve.spec import FaServeError

RequestErrorCode = Literal[
    "timeout",
    "not_finite",
    "no_token_left",
    "grammar",
    "step_failed",
    "scheduler_failed",
    "engine_dead",
    "unread",
    "adapter_failed",
    "image_failed",
    "replica_lost",
]


class QueueFullError(FaServeError, RuntimeError):
    """The queue is full. The same request may succeed later."""


class EngineAsleepError(FaServeError, RuntimeError):
    """The engine sleeps. The message says what wakes it up."""


class WeightTransferError(FaServeError, RuntimeError):
    """A trainer and an engine have not connected in time, or one of them has left before all weights had arrived."""


class EngineDeadError(FaServeError, RuntimeError):
    """The engine has ended. The message says why.

    cause: shown to everybody who can reach the server, so it holds nothing from a request, only exit codes and the names of
           classes. Empty if the engine did not die
    """

    def __init__(self, message: str = "", cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


def cause_of(error: BaseException) -> str:
    """The `cause` for an engine that this error has ended."""
    if not isinstance(error, EngineDeadError):
        return f"it raised {type(error).__name__}"
    return error.cause or "one of its ranks has failed"


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why a request ended with finish_reason "error".

    code:
        timeout           the request was not finished within its timeout
        not_finite        the model computed logits that are NaN or infinite
        no_token_left     the request's own parameters exclude every token
        grammar           the matcher of the structured output gave up
        step_failed       an exception in the step that computed the request
        scheduler_failed  an exception in the scheduler, which ends all requests
        engine_dead       the engine was shut down or died
        unread            too many of its outputs waited to be read
        adapter_failed    the request's adapter could not be loaded
        image_failed      the model's towers could not encode an image of the request
        replica_lost      the replica that computed the request died; the others go on
    message: one sentence for people
    """

    code: RequestErrorCode
    message: str

    def __str__(self) -> str:
        return self.message


class EncoderError(FaServeError, RuntimeError):
    """An input of `Encoder.encode` or a similar method could not be computed. `error` says why."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error

    def __reduce__(self) -> tuple[type[EncoderError], tuple[RequestError]]:
        return type(self), (self.error,)
