"""What the engine reports while it starts: one `Phase` for each part of the start-up that has ended.

    engine = Engine(config, on_phase=lambda phase: print(f"{phase.name} {phase.seconds:.2f} s {phase.detail}"))

The phases, in this order: "engine" (an async engine has imported it), "weights" (the model is loaded), "draft" (and the draft
model, if there is one), "fusion" (its layers are fused, on a GPU), "kv cache" (memory is sized and allocated), "graphs" (the
first CUDA graph is captured, on a GPU). Without a callback the phases are logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("fa_serve.engine")


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of the start-up that has ended. `seconds` is the time since the phase before it ended."""

    name: str
    detail: str
    seconds: float


OnPhase = Callable[[Phase], None]


def log_phase(phase: Phase) -> None:
    """What happens to a phase if there is no callback."""
    log.info("%s: %s", phase.name, phase.detail)


class PhaseClock:
    """Measures the phases of one start-up and reports each of them when it ends."""

    def __init__(self, on_phase: OnPhase | None) -> None:
        self._on_phase = on_phase or log_phase
        self._last = time.perf_counter()

    def end(self, name: str, detail: str) -> None:
        """Report that phase `name` has ended just now."""
        now = time.perf_counter()
        phase = Phase(name, detail, now - self._last)
        self._last = now
        self._on_phase(phase)
