"""The operator's routes for rollouts: new weights, a pause, sleep. They accept only the administrator's key.

    POST /pause?mode=keep                    or with {"mode": "abort" | "wait" | "keep"} in the body
    POST /update_weights                     {"weight_dir": "/checkpoints/step-100"}
    POST /init_weight_transfer_engine        {"init_info": {"master_address": "10.0.0.7", "master_port": 29500, ...}}
    POST /update_weights                     {"update_info": {"names": [...], "dtype_names": [...], "shapes": [...]}}
    POST /shutdown_weight_transfer_engine
    POST /resume
    POST /sleep?level=1, POST /wake_up?tags=weights&tags=kv_cache
    GET /is_paused, GET /is_sleeping, GET /get_world_size

Names, queries and bodies are those that trainers (prime-rl, TRL) send to vLLM. A body may be left out if none of its fields is
required. Every response of the server has the version of the weights in its header `x-weight-version` (bounds/guard.py).

Left out: weights from another process's GPU memory, and servers with several ranks or replicas, where these routes are refused.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fa_serve.engine.errors import EngineAsleepError, WeightTransferError
from fa_serve.engine.process.controls import TRANSFER_SECONDS
from fa_serve.spec import ParameterError

from .adapters import ADMINISTRATION, require_administrator
from .errors import BadRequest, HttpError, parameter_refused
from .replies import WeightReply, WorldSizeReply
from .routes import ERRORS
from .service import Service
from .strict import StrictModel, Unsupported

MAX_TENSORS = 100_000
MAX_TRANSFER_SECONDS = 3600.0
DType = Literal["float64", "float32", "bfloat16", "float16"]
Shape = Annotated[list[int], Field(max_length=8)]


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
    """Where a contiguous tensor is in shared memory. offset: its first byte"""

    name: str
    dtype: DType
    shape: Shape
    offset: int = Field(ge=0)


class SharedMemoryWeights(StrictModel):
    """A segment of shared memory on this machine, by its name in Python's `SharedMemory`, and the tensors in it."""

    name: str = Field(max_length=255)
    tensors: list[TensorPlace] = Field(max_length=MAX_TENSORS)


class UpdateInfo(StrictModel):
    """What the trainer broadcasts: the name, the dtype and the shape of each tensor, in the order of the broadcasts."""

    names: list[str] = Field(min_length=1, max_length=MAX_TENSORS)
    dtype_names: list[DType] = Field(max_length=MAX_TENSORS)
    shapes: list[Shape] = Field(max_length=MAX_TENSORS)

    UNSUPPORTED: ClassVar[Unsupported] = {"packed": (False,)}

    @model_validator(mode="after")
    def _require_equal_lengths(self) -> UpdateInfo:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise _wrong("names", "must have as many entries as dtype_names and shapes")
        return self

    def tensors(self) -> list[dict[str, Any]]:
        columns = zip(self.names, self.dtype_names, self.shapes, strict=True)
        return [{"name": name, "dtype": dtype, "shape": tuple(shape)} for name, dtype, shape in columns]


class UpdateWeightsRequest(StrictModel):
    """The new weights, from exactly one of weight_dir, shared_memory and update_info.

    keep_pages: unfinished requests keep the KV cache that the old weights have computed; otherwise the new weights recompute it
    dry_run:    check update_info, and receive nothing
    """

    weight_dir: str | None = Field(None, max_length=4096)
    shared_memory: SharedMemoryWeights | None = None
    update_info: UpdateInfo | None = None
    keep_pages: bool = False
    dry_run: bool = False

    @model_validator(mode="after")
    def _require_one(self) -> UpdateWeightsRequest:
        if [self.weight_dir, self.shared_memory, self.update_info].count(None) != 2:
            raise _wrong("weight_dir", "must be given, or else shared_memory or update_info, and only one of the three")
        return self


class InitInfo(StrictModel):
    """A trainer's group, and the address where the trainer listens. The trainer is rank 0.

    rank_offset: the rank of this engine
    backend:     nccl or gloo; by default nccl for an engine on a GPU, else gloo
    timeout:     seconds within which all ranks must join, and within which each tensor must arrive
    """

    master_address: str = Field(min_length=1, max_length=255)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(1, ge=1)
    world_size: int = Field(2, ge=2, le=1024)
    backend: Literal["nccl", "gloo"] | None = None
    timeout: float = Field(TRANSFER_SECONDS, gt=0, le=MAX_TRANSFER_SECONDS)

    @model_validator(mode="after")
    def _require_rank(self) -> InitInfo:
        if self.rank_offset >= self.world_size:
            raise _wrong("rank_offset", "must be below world_size")
        return self


class InitWeightTransferRequest(StrictModel):
    init_info: InitInfo


class ShutdownWeightTransferRequest(OperatorRequest):
    pass


def _wrong(field: str, rule: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{field} {rule}", {"field": field, "rule": rule})


operation = APIRouter(responses=ERRORS, tags=[ADMINISTRATION])


@operation.post("/pause", response_model=WeightReply)
async def pause(body: PauseRequest, request: Request) -> JSONResponse:
    """Compute nothing until /resume. Requests in flight are aborted (the default), finished first (wait) or kept and continued
    after the pause. Requests that arrive meanwhile wait."""
    mode: Any = request.query_params.get("mode") or body.mode or "abort"
    return await _tell(request, "pause", mode=mode)


@operation.post("/resume", response_model=WeightReply)
async def resume(body: ResumeRequest, request: Request) -> JSONResponse:
    """End a pause."""
    return await _tell(request, "resume")


@operation.post("/sleep", response_model=WeightReply)
async def sleep(body: SleepRequest, request: Request) -> JSONResponse:
    """Free the memory of the KV cache. Level 0 keeps the weights on the device, level 1 (the default) moves them to host
    memory, and level 2 frees them."""
    level = _integer(request, "level", 1 if body.level is None else body.level)
    return await _tell(request, "sleep", level=level)


@operation.post("/wake_up", response_model=WeightReply)
async def wake_up(body: WakeUpRequest, request: Request) -> JSONResponse:
    """Allocate the memory that /sleep has freed: all of it, or only for the tags."""
    tags = request.query_params.getlist("tags") or body.tags
    return await _tell(request, "wake_up", tags=tags)


@operation.post("/update_weights", response_model=WeightReply)
async def update_weights(body: UpdateWeightsRequest, request: Request) -> JSONResponse:
    """Replace the weights between two steps. The prefix cache is emptied. Unfinished answers continue with the new weights."""
    arguments: dict[str, Any] = {"keep_pages": body.keep_pages}
    if body.dry_run:
        arguments["dry_run"] = True
    if body.update_info is not None:
        arguments["announced"] = body.update_info.tensors()
    elif body.shared_memory is not None:
        arguments["segment"] = body.shared_memory.name
        arguments["tensors"] = [each.model_dump() for each in body.shared_memory.tensors]
    else:
        arguments["folder"] = body.weight_dir
    return await _tell(request, "update_weights", **arguments)


@operation.post("/init_weight_transfer_engine", response_model=WeightReply)
async def init_weight_transfer_engine(body: InitWeightTransferRequest, request: Request) -> JSONResponse:
    """Join the group of the trainer that listens at this address, and leave any earlier group. After that, /update_weights
    receives the weights that the trainer broadcasts."""
    info = body.init_info
    place = {"host": info.master_address, "port": info.master_port, "rank": info.rank_offset, "world_size": info.world_size}
    return await _tell(request, "join_weight_group", **place, backend=info.backend, timeout=info.timeout)


@operation.post("/shutdown_weight_transfer_engine", response_model=WeightReply)
async def shutdown_weight_transfer_engine(body: ShutdownWeightTransferRequest, request: Request) -> JSONResponse:
    """Leave the trainer's group."""
    return await _tell(request, "join_weight_group")


@operation.get("/get_world_size", response_model=WorldSizeReply)
async def get_world_size(request: Request) -> JSONResponse:
    """How many ranks of this server take part in a trainer's group: one, because several ranks or replicas are refused."""
    _administrators_service(request)
    world_size: WorldSizeReply = {"world_size": 1}
    return JSONResponse(world_size)


@operation.get("/is_paused", response_model=WeightReply)
@operation.get("/is_sleeping", response_model=WeightReply)
async def is_paused(request: Request) -> JSONResponse:
    """Whether requests wait for /resume or /wake_up, and whether the engine sleeps."""
    return _reply(_administrators_service(request))


def _administrators_service(request: Request) -> Service:
    """Check the administrator's key for a GET. For a POST, bodies.py has checked it."""
    service: Service = request.app.state.service
    require_administrator(request, service.settings)
    service.require_ready()
    return service


async def _tell(request: Request, name: str, **arguments: Any) -> JSONResponse:
    """Call a method of the engine, and answer when the call has ended. A client that disconnects does not stop the call."""
    service: Service = request.app.state.service
    service.require_ready()
    try:
        await asyncio.shield(asyncio.ensure_future(getattr(service.engine, name)(**arguments)))
    except ParameterError as error:
        raise parameter_refused(error, error.field) from None
    except EngineAsleepError as error:
        raise HttpError(409, f"{error}.", code="engine_asleep") from None
    except WeightTransferError as error:
        raise HttpError(504, f"{error}.", code="weight_transfer_failed") from None
    return _reply(service)


def _reply(service: Service) -> JSONResponse:
    engine = service.engine
    body: WeightReply = {
        "is_paused": engine.is_paused,
        "is_sleeping": engine.is_asleep,
        "weight_version": engine.weight_version,
    }
    return JSONResponse(body)


def _integer(request: Request, name: str, default: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not given.isdecimal() or len(given) > 4:
        raise BadRequest(f"{name} must be an integer from 0 to 9999, got {given[:80]!r}.", param=name)
    return int(given)
