"""The operator's routes for rollouts: other weights, a pause, sleep. They take the administrator's key alone.

    POST /pause?mode=keep                    {"mode": "abort" | "wait" | "keep"} in the body counts as well
    POST /update_weights                     {"weight_dir": "/checkpoints/step-100"}
    POST /resume
    POST /sleep?level=1, POST /wake_up?tags=weights&tags=kv_cache
    GET /is_paused

Names, queries and bodies are those that trainers send to vLLM (prime-rl, TRL). A body may be left out where nothing in it is
required. Every response of the server has the version of the weights in its header `x-weight-version` (bounds/guard.py).

Left out: weights over NCCL and from the memory of another process's GPU, and several ranks or replicas, which are refused.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fa_serve.engine.errors import EngineAsleepError
from fa_serve.spec import ParameterError

from .adapters import ADMINISTRATION, require_administrator
from .errors import BadRequest, HttpError, parameter_refused
from .replies import WeightReply
from .routes import ERRORS
from .service import Service
from .strict import StrictModel

MAX_TENSORS = 100_000


class OperatorRequest(StrictModel):
    """A body that may be left out."""

    @model_validator(mode="before")
    @classmethod
    def _accept_nothing(cls, data: Any) -> Any:
        return {} if data is None else data


class PauseRequest(OperatorRequest):
    mode: Literal["abort", "wait", "keep"] | None = None


class SleepRequest(OperatorRequest):
    level: int | None = Field(None, ge=0, le=2)


class WakeUpRequest(OperatorRequest):
    tags: list[Literal["weights", "kv_cache"]] | None = None


class ResumeRequest(OperatorRequest):
    pass


class TensorPlace(StrictModel):
    """Where a tensor is in shared memory, contiguous, from the byte `offset` on."""

    name: str
    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    shape: list[int] = Field(max_length=8)
    offset: int = Field(ge=0)


class SharedMemoryWeights(StrictModel):
    """A segment of this machine, as Python's `SharedMemory` names it, and what is in it."""

    name: str = Field(max_length=255)
    tensors: list[TensorPlace] = Field(max_length=MAX_TENSORS)


class UpdateWeightsRequest(StrictModel):
    weight_dir: str | None = Field(None, max_length=4096)
    shared_memory: SharedMemoryWeights | None = None
    keep_pages: bool = False

    @model_validator(mode="after")
    def _require_one(self) -> UpdateWeightsRequest:
        if (self.weight_dir is None) == (self.shared_memory is None):
            raise PydanticCustomError("field", "{field} {rule}", {"field": "weight_dir", "rule": RULE})
        return self


RULE = "must be given, or shared_memory, and not both: weights come from a folder or from shared memory of this machine"


operation = APIRouter(responses=ERRORS, tags=[ADMINISTRATION])


@operation.post("/pause", response_model=WeightReply)
async def pause(body: PauseRequest, request: Request) -> JSONResponse:
    """Compute nothing until /resume: requests in flight are aborted, awaited or kept as they are. Requests that come wait."""
    mode: Any = request.query_params.get("mode") or body.mode or "abort"
    return await _tell(request, "pause", mode=mode)


@operation.post("/resume", response_model=WeightReply)
async def resume(body: ResumeRequest, request: Request) -> JSONResponse:
    """End a pause."""
    return await _tell(request, "resume")


@operation.post("/sleep", response_model=WeightReply)
async def sleep(body: SleepRequest, request: Request) -> JSONResponse:
    """Free the KV cache. Level 1 moves the weights to the host's memory as well, and level 2 frees them."""
    level = _integer(request, "level", 1 if body.level is None else body.level)
    return await _tell(request, "sleep", level=level)


@operation.post("/wake_up", response_model=WeightReply)
async def wake_up(body: WakeUpRequest, request: Request) -> JSONResponse:
    """Allocate what /sleep has freed: all of it, or what the tags name."""
    tags = request.query_params.getlist("tags") or body.tags
    return await _tell(request, "wake_up", tags=tags)


@operation.post("/update_weights", response_model=WeightReply)
async def update_weights(body: UpdateWeightsRequest, request: Request) -> JSONResponse:
    """Take other weights, between two steps. The prefix cache is emptied, and unfinished answers go on with the new weights."""
    arguments: dict[str, Any] = {"keep_pages": body.keep_pages}
    if body.shared_memory is None:
        arguments["folder"] = body.weight_dir
    else:
        arguments["segment"] = body.shared_memory.name
        arguments["tensors"] = [each.model_dump() for each in body.shared_memory.tensors]
    return await _tell(request, "update_weights", **arguments)


@operation.get("/is_paused", response_model=WeightReply)
async def is_paused(request: Request) -> JSONResponse:
    """Whether requests wait for /resume or /wake_up."""
    service: Service = request.app.state.service
    require_administrator(request, service.settings)
    service.require_ready()
    return _reply(service)


async def _tell(request: Request, name: str, **arguments: Any) -> JSONResponse:
    """Call a method of the engine, and answer when it has ended. A client that leaves does not stop it."""
    service: Service = request.app.state.service
    service.require_ready()
    try:
        await asyncio.shield(asyncio.ensure_future(getattr(service.engine, name)(**arguments)))
    except ParameterError as error:
        raise parameter_refused(error, error.field) from None
    except EngineAsleepError as error:
        raise HttpError(409, f"{error}.", code="engine_asleep") from None
    return _reply(service)


def _reply(service: Service) -> JSONResponse:
    engine = service.engine
    body: WeightReply = {"is_paused": engine.is_paused, "weight_version": engine.weight_version}
    return JSONResponse(body)


def _integer(request: Request, name: str, default: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not given.isdecimal() or len(given) > 4:
        raise BadRequest(f"{name} must be a number, got {given[:80]!r}.", param=name)
    return int(given)
