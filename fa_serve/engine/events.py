"""What the engine reports while it starts: one `Phase` for each part of the start-up that has ended.

    engine = Engine(config, on_phase=lambda phase: print(f"{phase.name} {phase.seconds:.2f} s {phase.detail}"))

The phases, in this order: "engine" (an async engine has imported it), "weights" (the model is loaded), "draft" (the draft model
or head is loaded, if there is one), "fusion" (layers are fused), "adapters" (their memory is allocated, if any are served),
"kv cache" (memory is sized and allocated), "graphs" (the first CUDA graph is captured, on a GPU), "sampling" (defaults come
from generation_config.json, if it gives any), and "kernels" and "captures" (what is compiled and captured ahead of requests).
Long phases that count their work, such as "weights", are also reported while they go on: then `done` is below 1, and `detail`
says how much is done. Without a callback the phases are logged when they have ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("fa_serve.engine")

PROGRESS_SECONDS = 0.5
"""A shorter phase is reported only at its end, and the progress of a longer one at most once in this time."""


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
    """Log a phase that has ended. Used if there is no callback."""
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
        """Report how far phase `name` has come, unless it was reported less than PROGRESS_SECONDS ago or has just begun."""
        now = time.perf_counter()
        if now - self._told >= PROGRESS_SECONDS and done < total:
            self._told = now
            self._on_phase(Phase(name, f"{done:.0f} of {total:.0f} {unit}", now - self._last, done / total))
