"""The start of an engine: from its settings to a model that can run steps. Each part of it is reported as a `Phase`.

    started = start_up(config, on_phase=print, ahead=True)
    started.runner.launch(batch)

With `ahead`, everything that a step may need exists when this returns: all steps of the warm-up plan run once (warm_up.py),
while threads compile the kernels that they launch, and CUDA graphs are captured for a few seconds. The other graphs are
captured when there is no request (`ModelRunner.prepare_one`). Without `ahead`, as in offline use, steps compile and capture
what they need. Left out: the scheduler and all that belongs to requests (engine.py).
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.events import OnPhase, PhaseClock
from fa_serve.engine.loading import load_model, load_tokenizer, sizes
from fa_serve.engine.model_runner import ModelRunner
from fa_serve.engine.warm_up import EmptyStep, SamplingVariant, empty_steps, sampling_variants
from fa_serve.hf import few_layers, patch
from fa_serve.ops.compilations import num_compilations, run_compiled, watch

log = logging.getLogger("fa_serve.engine")

MAX_THREADS = 8
"""Threads that compile kernels. With more of them, Python's lock is what they wait for."""
CAPTURE_SECONDS = 5.0
"""How long graphs are captured before the engine is ready. The most useful ones come first."""


@dataclass(frozen=True, slots=True)
class Started:
    """A model that can run steps. config: `None` and "auto" are replaced by what was decided."""

    config: EngineConfig
    tokenizer: Any
    runner: ModelRunner


def start_up(
    config: EngineConfig,
    model: PreTrainedModel | None = None,
    tokenizer: Any = None,
    on_phase: OnPhase | None = None,
    *,
    ahead: bool = False,
) -> Started:
    """Load the model unless it is given, and make room for its cache. Raises as `Engine` does.

    ahead: compile and capture ahead of requests, so that none of them waits for it
    """
    clock = PhaseClock(on_phase)
    if ahead:
        watch()
    if model is None:
        tokenizer = load_tokenizer(config)
        model = load_model(config)
        clock.end("weights", f"{config.model_name} on {model.device}")
    else:
        patch(model)
    runner = ModelRunner(model, config)
    if runner.fuses:
        clock.end("fusion", f"{runner.fuse()} of {len(runner.layers)} layers are fused")
    num_pages, max_model_len = sizes(config, runner)
    runner.allocate(num_pages, max_model_len)
    clock.end("kv cache", f"{num_pages} pages of {config.page_size} tokens, max_model_len {max_model_len}")
    if not runner.eager:
        captured = runner.make_graphs()
        clock.end("graphs", "the largest decoding step is captured" if captured else "this model cannot be captured")
    if ahead and runner.device.type == "cuda":
        warm_up(runner, config, max_model_len)
        loaded, compiled = num_compilations()
        clock.end("kernels", f"{loaded} from the cache, {compiled} compiled")
        detail = capture_ahead(runner)
        clock.end("captures", detail)
    decided = replace(
        config, dtype=str(model.dtype)[6:], device=str(model.device), num_pages=num_pages, max_model_len=max_model_len
    )
    return Started(decided, tokenizer, runner)


def warm_up(runner: ModelRunner, config: EngineConfig, max_model_len: int) -> None:
    """Run the warm-up plan. A failure is logged and ends it: requests then compile what they need."""
    plan: list[EmptyStep | SamplingVariant] = [
        *empty_steps(max_num_seqs=config.max_num_seqs, max_tokens=config.max_num_batched_tokens, max_keys=max_model_len),
        *sampling_variants(),
    ]
    num_threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
    try:
        with few_layers(runner.model):
            run_compiled([partial(runner.run_warm_up, work) for work in plan], num_threads)
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
    except torch.AcceleratorError:
        raise  # the device is lost: nothing more can be computed in this process
    except Exception as error:
        log.warning("requests may wait for compilations, because a step of the warm-up failed: %s", error)


def capture_ahead(runner: ModelRunner, seconds: float = CAPTURE_SECONDS) -> str:
    """Capture graphs for so many seconds. Returns what was captured, for the report."""
    limit = time.monotonic() + seconds
    complete = False
    while not complete and time.monotonic() < limit:
        complete = not runner.prepare_one()
    return f"{runner.num_captures} graphs" + ("" if complete else ", the others when there is no request")
