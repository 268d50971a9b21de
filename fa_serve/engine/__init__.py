"""The engine: continuous batching over a paged KV cache, on unmodified transformers models. It does not know HTTP.

    from fa_serve.engine import Engine, EngineConfig, SamplingParams

    engine = Engine(EngineConfig(model="Qwen/Qwen3-0.6B"))
    print(engine.generate(["Once upon a time"], SamplingParams(max_tokens=32))[0].text)

A request passes these modules: input_processor (checks, `Request`), scheduler and pages (`SequenceState`), model_runner
(batch_arrays, block_table, cuda_graphs, sampler, results), and output_state (text, `RequestOutput`). `Engine` runs them step by
step; engine_loop and worker run an engine in a thread or a process; `AsyncEngine` gives each request a stream. Left out: HTTP,
chat templates and metrics (fa_serve.server).
"""

from fa_serve.engine.async_engine import AsyncEngine
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.engine import Engine
from fa_serve.engine.errors import EngineDeadError, QueueFullError, RequestError
from fa_serve.engine.events import Phase
from fa_serve.engine.outputs import Completion, RequestOutput, TokenLogprob
from fa_serve.engine.sampling_params import SamplingParams, StructuredOutput
from fa_serve.engine.sequence_times import SequenceTimes
from fa_serve.engine.stats import EngineStats

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
    "SequenceTimes",
    "StructuredOutput",
    "TokenLogprob",
]
