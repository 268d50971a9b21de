"""What the engine reports while it starts: one `Phase` for each part of the start-up that has ended.

    engine = Engine(config, on_phase=lambda phase: print(f"{phase.name} {phase.seconds:.2f} s {phase.detail}"))

A phase that takes longer is also reported while it goes on: then `done` is below 1 and `detail` says of what. The phases, in
this order: "engine" (an async engine has imported it), "weights" (the model is loaded), "draft" (and the draft
model, if there is one), "fusion" (its layers are fused, on a GPU), "kv cache" (memory is sized and allocated), "graphs" (the
first CUDA graph is captured, on a GPU), and "kernels" and "captures" (what is compiled and captured ahead of requests). Without
a callback the phases are logged when they have ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("fa_serve.engine")

PROGRESS_SECONDS = 0.5
"""A phase that takes less is reported at its end only, and others no more often."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of the start-up. `seconds` is the time since the phase before it ended.

    done: 1.0 when the phase has ended; while it goes on, the part of it that is done
    """

    name: str
    detail: str
    seconds: float
    done: float = 1.0


OnPhase = Callable[[Phase], None]


def log_phase(phase: Phase) -> None:
    """What happens to a phase if there is no callback."""
    if phase.done == 1.0:
        log.info("%s: %s", phase.name, phase.detail)


class PhaseClock:
    """Measures the phases of one start-up and reports each of them when it ends."""

    def __init__(self, on_phase: OnPhase | None) -> None:
        self._on_phase = on_phase or log_phase
        self.shows_progress = on_phase is not None
        self._last = self._told = time.perf_counter()

    def end(self, name: str, detail: str) -> None:
        """Report that phase `name` has ended just now."""
        now = time.perf_counter()
        phase = Phase(name, detail, now - self._last)
        self._last = self._told = now
        self._on_phase(phase)

    def progress(self, name: str, done: float, total: float, unit: str) -> None:
        """Report how far phase `name` is, unless it was reported less than PROGRESS_SECONDS ago or has just begun."""
        now = time.perf_counter()
        if now - self._told >= PROGRESS_SECONDS and done < total:
            self._told = now
            self._on_phase(Phase(name, f"{done:.0f} of {total:.0f} {unit}", now - self._last, done / total))
