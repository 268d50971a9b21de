"""The engine: continuous batching over a paged KV cache, on unmodified transformers models. It knows nothing of HTTP."""

from fa_serve.engine.async_engine import AsyncEngine, EngineDeadError
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.engine import Engine, EngineStats
from fa_serve.engine.request import Completion, QueueFullError, RequestOutput, SamplingParams, StructuredOutput, TokenLogprob

__all__ = [
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "QueueFullError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "TokenLogprob",
]
