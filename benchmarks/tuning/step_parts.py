"""Where the host's time goes in a step: the parts of a step, on average and in the longest steps of a run.

    with timing_parts() as spent:                    # {"schedule": seconds, ...} of everything inside
        ...
    with LongSteps() as steps:                       # for a percentile that is worse than expected
        ...                                          # calls Engine.step
    print(steps.table(14))

A step is the call of `Engine.step`. The host waits in "waiting"; the rest is its work. What a row leaves over, in addition to
its parts, is other work of Python, the garbage collector ("collecting") included. Left out: what the device computes meanwhile
(profile_engine.py).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple

WAITING = "waiting"
"""The part of a step in which the host waits for results; all other parts are its work."""
COLLECTING = "collecting"


def parts_of_step() -> dict[str, tuple[Any, str]]:
    """What the host does in a step: the name of each part, and the owner and the name of the function that does it.

    If drafts are verified, "schedule" to "launch" come after the results of the step before, and the device is idle meanwhile.
    "rows" comes before "sending" in other steps.
    """
    from fa_serve.engine import Engine
    from fa_serve.engine.runner import model_runner
    from fa_serve.engine.runner.results import PendingResult
    from fa_serve.engine.scheduler.scheduler import Scheduler

    return {
        WAITING: (PendingResult, "read"),
        "schedule": (Scheduler, "schedule"),
        "arrays": (model_runner, "batch_arrays"),
        "sending": (model_runner.ModelRunner, "_prepare"),
        "launch": (model_runner.ModelRunner, "_run"),
        "towers": (model_runner.ModelRunner, "encode"),
        "rows": (model_runner, "sampled_rows"),
        "sampling": (model_runner.ModelRunner, "sample"),
        "outputs": (Engine, "_take_outputs"),
    }


@contextmanager
def timing_parts() -> Iterator[dict[str, float]]:
    """Inside, the seconds of each part of `parts_of_step` are added up."""
    functions = parts_of_step()
    spent = dict.fromkeys(functions, 0.0)
    with ExitStack() as stack:
        for name, (owner, function) in functions.items():
            stack.enter_context(_watching(owner, function, name, spent))
        yield spent


@contextmanager
def replacing(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, a function of a class or module is what `make` returns for it."""
    call = getattr(owner, name)
    setattr(owner, name, wraps(call)(make(call)))
    try:
        yield
    finally:
        setattr(owner, name, call)


def _watching(owner: Any, function: str, name: str, spent: dict[str, float]) -> Any:
    """Inside, the seconds that calls of a function take are added to spent[name]."""

    def watch(call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                spent[name] += time.perf_counter() - start

        return watched

    return replacing(owner, function, watch)


class TimedStep(NamedTuple):
    """number: of the step in the run; seconds: of the call; batch: what it scheduled; parts: seconds by name"""

    number: int
    seconds: float
    batch: str
    parts: dict[str, float]


class LongSteps:
    """A context that times every step of the engines inside."""

    def __init__(self) -> None:
        self.steps: list[TimedStep] = []
        self._stack = ExitStack()
        self._spent: dict[str, float] = {}
        self._batch = ""
        self._collecting = 0.0

    def __enter__(self) -> LongSteps:
        from fa_serve.engine import Engine
        from fa_serve.engine.scheduler.scheduler import Scheduler

        # replaced before the stopwatches are set, so that what `_describe` takes counts as "schedule"
        self._stack.enter_context(replacing(Scheduler, "schedule", self._describe))
        self._spent = self._stack.enter_context(timing_parts())
        self._stack.enter_context(replacing(Engine, "step", self._time))
        gc.callbacks.append(self._collect)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._collect)
        self._stack.close()

    def table(self, count: int) -> str:
        """The longest steps, in the order of the run, with the parts that took 0.1 ms or more."""
        if not self.steps:
            return "no step"
        ordered = sorted(self.steps, key=lambda step: step.seconds)
        median = ordered[len(ordered) // 2].seconds
        rows = [f"{len(ordered)} steps, median {1e3 * median:.2f} ms; the longest, in ms:"]
        for step in sorted(ordered[-count:]):
            parts = ", ".join(f"{name} {1e3 * spent:.1f}" for name, spent in step.parts.items() if spent >= 1e-4)
            rows.append(f"  step {step.number}: {1e3 * step.seconds:.1f} ({step.batch}): {parts}")
        return "\n".join(rows)

    def _describe(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        def scheduled(*args: Any) -> Any:
            batch = schedule(*args)
            prompts = batch.num_prompt_tokens
            self._batch = f"{len(batch.chunks)} sequences, {batch.num_tokens} tokens, {prompts} of prompts"
            if batch.towers is not None:
                self._batch += f", {batch.towers.count} of {len(batch.towers.images)} images"
            return batch

        return scheduled

    def _time(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(engine: Any) -> Any:
            self._spent.update(dict.fromkeys(self._spent, 0.0))
            self._batch = "nothing"
            self._spent[COLLECTING] = 0.0
            start = time.perf_counter()
            try:
                return step(engine)
            finally:
                seconds = time.perf_counter() - start
                self.steps.append(TimedStep(len(self.steps), seconds, self._batch, dict(self._spent)))

        return timed

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self._spent[COLLECTING] = self._spent.get(COLLECTING, 0.0) + time.perf_counter() - self._collecting
