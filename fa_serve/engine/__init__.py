"""The engine: continuous batching over a paged KV cache, on unmodified transformers models. It does not know HTTP.

    from fa_serve.engine import Engine, EngineConfig, SamplingParams

    engine = Engine(EngineConfig(model="Qwen/Qwen3-0.6B"))
    print(engine.generate(["Once upon a time"], SamplingParams(max_tokens=32))[0].text)

    request/      from a prompt to its text: checks, `Request`, `RequestOutput`
    scheduler/    which tokens the next step computes: `SequenceState`
    cache/        the pages of the KV cache
    runner/       the model and everything on the device
    speculation/  drafts: guesses of the next tokens
    structured/   grammars, and the tokens that they allow
    pooling/      encoders: vectors, scores and classes of texts
    parallel/     the ranks that a model is divided between
    start/        loading, sizes, compiling ahead
    rollout/      an engine over a model that is being trained
    process/      an engine in a thread or a process, and `AsyncEngine`, which gives each request a stream

`Engine` runs them step by step. Left out: HTTP, chat templates and metrics (server).

A name is imported when it is first used. So a server whose engine runs in another process starts that process before it imports
the models of transformers itself, and both processes import them at the same time.
"""

from __future__ import annotations

import typing as _typing
from importlib import import_module as _import_module

if _typing.TYPE_CHECKING:
    from fa_serve.engine.config import EngineConfig
    from fa_serve.engine.engine import Engine
    from fa_serve.engine.errors import (
        EncoderError,
        EngineAsleepError,
        EngineDeadError,
        QueueFullError,
        RequestError,
        WeightTransferError,
    )
    from fa_serve.engine.events import Phase
    from fa_serve.engine.parallel.follower_main import open_engine
    from fa_serve.engine.pooling.encoder import Encoder
    from fa_serve.engine.pooling.params import EncoderCard, Pooled, PoolingParams
    from fa_serve.engine.process.async_engine import AsyncEngine
    from fa_serve.engine.request.outputs import Completion, RequestOutput, TokenLogprob
    from fa_serve.engine.request.params import SamplingParams, StructuredOutput
    from fa_serve.engine.rollout.rollout_engine import RolloutEngine
    from fa_serve.engine.rollout.rollouts import Rollout, RolloutError, RolloutGroup
    from fa_serve.engine.rollout.weight_sender import WeightSender
    from fa_serve.engine.scheduler.sequence_times import SequenceTimes
    from fa_serve.engine.stats import EngineStats

__all__ = [
    "AsyncEngine",
    "Completion",
    "Encoder",
    "EncoderCard",
    "EncoderError",
    "Engine",
    "EngineAsleepError",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "Phase",
    "Pooled",
    "PoolingParams",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "Rollout",
    "RolloutEngine",
    "RolloutError",
    "RolloutGroup",
    "SamplingParams",
    "SequenceTimes",
    "StructuredOutput",
    "TokenLogprob",
    "WeightSender",
    "WeightTransferError",
    "open_engine",
]

_HOMES = {
    "AsyncEngine": "process.async_engine",
    "Completion": "request.outputs",
    "Encoder": "pooling.encoder",
    "EncoderCard": "pooling.params",
    "EncoderError": "errors",
    "Engine": "engine",
    "EngineAsleepError": "errors",
    "EngineConfig": "config",
    "EngineDeadError": "errors",
    "EngineStats": "stats",
    "Phase": "events",
    "Pooled": "pooling.params",
    "PoolingParams": "pooling.params",
    "QueueFullError": "errors",
    "RequestError": "errors",
    "RequestOutput": "request.outputs",
    "Rollout": "rollout.rollouts",
    "RolloutEngine": "rollout.rollout_engine",
    "RolloutError": "rollout.rollouts",
    "RolloutGroup": "rollout.rollouts",
    "SamplingParams": "request.params",
    "SequenceTimes": "scheduler.sequence_times",
    "StructuredOutput": "request.params",
    "TokenLogprob": "request.outputs",
    "WeightSender": "rollout.weight_sender",
    "WeightTransferError": "errors",
    "open_engine": "parallel.follower_main",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
