"""The time of a call that is repeated until it has settled: no compilation and no capture falls into what is timed.

    seconds = steady_seconds(lambda: engine.generate(prompts, params), num_late=lambda: late_work(engine))

The first calls of a shape compile kernels and capture CUDA graphs, and so may the second: a graph is captured when a shape has
come repeatedly. So calls are made until two in a row agree, and a timed call in which something was compiled is made again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

from fa_serve.launching.compilations import num_compilations, watch


class Prepares(Protocol):
    """An engine."""

    def preparations(self) -> tuple[int, int]:
        """Kernels that were compiled or loaded, and CUDA graphs that were captured, up to now."""


MAX_WARM_UPS = 5
AGREEMENT = 0.1
"""How much longer than the other one the longer of two calls in a row may take, as a fraction, to end the warm-up."""


def one_call(call: Callable[[], object]) -> float:
    """Seconds of one call, with what it has queued on the device."""
    synchronise()
    begin = time.perf_counter()
    call()
    synchronise()
    return time.perf_counter() - begin


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def late_work(engine: Prepares | None = None) -> int:
    """How many kernels have been compiled or loaded, and how many CUDA graphs an engine has captured."""
    watch()
    return sum(num_compilations()) + (0 if engine is None else engine.preparations()[1])


def _call_until_two_agree(call: Callable[[], object], measure: Callable[[Callable[[], object]], float]) -> None:
    before = measure(call)
    for _ in range(MAX_WARM_UPS - 1):
        last = measure(call)
        if max(before, last) <= (1 + AGREEMENT) * min(before, last):
            break
        before = last


def steady_seconds(
    call: Callable[[], object],
    num_late: Callable[[], int] = late_work,
    *,
    calls: int = 3,
    budget: float = float("inf"),
    measure: Callable[[Callable[[], object]], float] = one_call,
    warm_up: Callable[[], object] | None = None,
) -> float:
    """The median of several timed calls, after a warm-up until two calls in a row agree, of MAX_WARM_UPS calls at most.

    num_late: counts what must not fall into a timed call
    budget:   seconds after which, the warm-up included, no further timed call begins but the first one

    warm_up:  the whole warm-up, made once, where the timed call is too long to be made until two agree

    Raises RuntimeError if every timed call compiles something.
    """
    num_late()  # from here on it is counted
    begin = time.monotonic()
    if warm_up is None:
        _call_until_two_agree(call, measure)
    else:
        warm_up()
    times: list[float] = []
    for _ in range(calls + MAX_WARM_UPS):
        if len(times) == calls or (times and time.monotonic() - begin > budget):
            break
        count = num_late()
        last = measure(call)
        if num_late() == count:
            times.append(last)
    if not times:
        raise RuntimeError("each timed call has compiled a kernel or captured a graph: nothing was measured")
    return statistics.median(times)
