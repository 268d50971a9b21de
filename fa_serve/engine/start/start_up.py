"""The start of an engine: from its settings to a model that can run steps. Each part of it is reported as a `Phase`.

    loaded = start_up(config, ranks, on_phase, ahead=True)
    loaded.runner.launch(batch)

With `ahead`, all kernels that a step may need exist when this returns: all steps of the warm-up plan run once (warm_up.py),
while threads and processes compile the kernels that they launch. Then CUDA graphs are captured for a few seconds; the other
graphs are captured while there is no request (`ModelRunner.prepare_one`). Without `ahead`, as in offline use, steps compile and
capture what they need. With several ranks, each rank first compiles by itself, with all-reduces that return the rank's own
part. Then all ranks run one step of each size together, which compiles the all-reduce kernels. Left out: how models are loaded
(loading.py).
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.events import OnPhase, PhaseClock
from fa_serve.engine.images.encoder import ImageEncoder
from fa_serve.engine.parallel.ranks import Ranks
from fa_serve.engine.runner.model_runner import ModelRunner
from fa_serve.engine.speculation.drafts import CATCH_UP
from fa_serve.engine.start.loading import Loaded, load
from fa_serve.engine.start.tower_warm_up import Process, find_process, tower_calls
from fa_serve.engine.start.warm_up import empty_steps, plan_warm_up, two_way_steps
from fa_serve.hf import few_layers
from fa_serve.launching.compilations import Compilers, num_compilations, run_compiled, start_compilers, watch

log = logging.getLogger("fa_serve.engine")

MAX_COMPILERS = 16
"""Maximum number of threads that compile kernels. Each has a process, which takes tens of megabytes while the engine starts."""
BUSY_CORES = 2
"""Cores left for loading and running the model meanwhile, and for answering HTTP."""
WARM_UP_SECONDS = 120.0
"""How long the start-up waits for kernels. Kernels that are not compiled by then are compiled when a request needs them."""
CAPTURE_SECONDS = 3.0
"""How long graphs are captured before the engine is ready. The most useful ones come first."""

SILENT = PhaseClock(None)
"""A clock that does not report progress."""


def start_up(
    config: EngineConfig,
    ranks: Ranks,
    on_phase: OnPhase | None = None,
    model: PreTrainedModel | None = None,
    tokenizer: Any = None,
    *,
    ahead: bool = False,
) -> Loaded:
    """Load the model unless it is given, and allocate its cache. Raises as `Engine` does.

    on_phase: called with each phase; None logs the phases
    ahead: compile and capture before the first request, so that no request waits for it. All ranks use the value of rank 0
    """
    clock = PhaseClock(on_phase)
    ahead = ranks.broadcast("ahead", lambda: ahead)
    if ahead:
        watch()
    on_gpu = ahead and config.resolve_device().startswith("cuda")
    with start_compilers(num_compilers(ranks)) if on_gpu else nullcontext(Compilers()) as compilers:
        loaded = load(config, ranks, clock, model, tokenizer)
        if ahead and loaded.runner.device.type == "cuda":
            _prepare(loaded, config, ranks, clock, compilers)
    return loaded


def _prepare(loaded: Loaded, config: EngineConfig, ranks: Ranks, clock: PhaseClock, compilers: Compilers) -> None:
    """Compile and capture ahead of requests."""
    runner = loaded.runner
    try:
        # compilations end in a different order on each rank, so all-reduces must not wait for other ranks here
        with nullcontext() if ranks.all_reduce is None else ranks.all_reduce.paused():
            process = None
            if isinstance(runner.images, ImageEncoder):
                process = find_process(config, runner.vocab_size, loaded.max_model_len)
            warm_up(runner, config, loaded.max_model_len, compilers, clock, process)
        if ranks.size > 1:
            warm_up_sums(runner, config, loaded.max_model_len)
            ranks.check_lost()
        found, compiled = num_compilations()
        clock.end("kernels", f"{found} from the cache, {compiled} compiled")
        clock.end("captures", capture_ahead(runner, ranks, clock))
    except BaseException:
        runner.close()  # ranks cannot be closed while graphs exist
        raise


def num_compilers(ranks: Ranks) -> int:
    """How many threads compile kernels on this rank. All ranks compile at the same time, and may share a machine."""
    return max(1, min(MAX_COMPILERS, (num_cores() - BUSY_CORES) // ranks.size))


def num_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use, by its CPU affinity and its container's limit (cgroup v2: quota and period)."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = cpu_max.read_text().split()
        cores = min(cores, max(int(quota) // int(period), 1))  # without a limit, the quota is "max"
    return cores


def warm_up_sums(runner: ModelRunner, config: EngineConfig, max_model_len: int) -> None:
    """Run one step for each number of tokens in the warm-up plan, on all ranks together. Raises what a step raises."""
    steps = empty_steps(max_num_seqs=config.max_num_seqs, max_tokens=config.max_num_batched_tokens, max_keys=max_model_len)
    with few_layers(runner.model):
        for step in {step.num_tokens: step for step in steps}.values():
            runner.run_warm_up(step)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


def warm_up(
    runner: ModelRunner,
    config: EngineConfig,
    max_model_len: int,
    compilers: Compilers,
    clock: PhaseClock = SILENT,
    process: Process | None = None,
) -> None:
    """Run the warm-up plan of the model, its draft model and its towers. The clock reports the progress.

    process: see `find_process`; None leaves out the towers

    Steps that fail are left out, and the first failure is logged: requests then compile what they need. Raises
    torch.AcceleratorError if the device is lost.
    """
    runners = [(runner, config.max_num_batched_tokens)]
    if runner.draft is not None:
        runners.append((runner.draft, min(config.max_num_batched_tokens, CATCH_UP)))
    with ExitStack() as stack:
        calls = []
        for each, max_tokens in runners:
            stack.enter_context(few_layers(each.model))
            plan = plan_warm_up(config, max_tokens, max_model_len, drafting=each is runner.draft)
            calls += [partial(each.run_warm_up, work) for work in plan]
        encoder = runner.images
        if isinstance(encoder, ImageEncoder) and process is not None:
            calls += [partial(encoder.warm_up, images) for images in tower_calls(encoder.reader, process, max_model_len)]
        progress = partial(clock.progress, "kernels", unit="steps")
        errors = run_compiled(calls, compilers, WARM_UP_SECONDS, progress)
        if isinstance(encoder, ImageEncoder) and encoder.has_blocks:  # known once an image has been encoded
            steps = two_way_steps(config.max_num_batched_tokens, max_model_len)
            later = [partial(runner.run_warm_up, step) for step in steps]
            errors += run_compiled(later, compilers, WARM_UP_SECONDS, progress)
            calls += later
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
    if errors:
        log.warning(
            "requests may wait for kernels to compile, because %s of %s warm-up steps failed: %s",
            len(errors),
            len(calls),
            errors[0],
        )


def capture_ahead(runner: ModelRunner, ranks: Ranks, clock: PhaseClock = SILENT, seconds: float = CAPTURE_SECONDS) -> str:
    """Capture graphs for this many seconds, by rank 0's clock. Returns what was captured, for the report."""
    limit = time.monotonic() + seconds
    complete = False
    while not complete and ranks.broadcast("captures", lambda: time.monotonic() < limit):
        complete = not runner.prepare_one()
        clock.progress("captures", time.monotonic() - limit + seconds, seconds, "seconds")
    return f"{runner.num_captures} graphs" + ("" if complete else ", the rest when the engine is idle")
