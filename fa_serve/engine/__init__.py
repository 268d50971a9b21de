"""The engine: continuous batching over a paged KV cache, on unmodified transformers models. It knows nothing of HTTP."""

from fa_serve.engine.async_engine import AsyncEngine
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.engine import Engine, EngineStats
from fa_serve.engine.errors import EngineDeadError, QueueFullError, RequestError
from fa_serve.engine.events import Phase
from fa_serve.engine.request import Completion, RequestOutput, SamplingParams, StructuredOutput, TokenLogprob

__all__ = [
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "Phase",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "TokenLogprob",
]
