"""The engine: continuous batching over a paged KV cache, on unmodified transformers models. It knows nothing of HTTP."""

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.request import Completion, RequestOutput, SamplingParams

__all__ = ["Completion", "EngineConfig", "RequestOutput", "SamplingParams"]
