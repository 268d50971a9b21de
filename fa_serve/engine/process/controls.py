"""What an operator tells a running engine: other weights, sleep, a pause. One command, which is answered when it is done.

    commands.put(Control(7, "update_weights", {"folder": "/checkpoints/step-100"}))
    result = carry_out(engine, control)      # between two steps, by the engine's loop

Left out: who may tell (fa_serve.server), and who waits for the answer (async_engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fa_serve.spec import ParameterError

if TYPE_CHECKING:
    from torch import Tensor

    from fa_serve.engine.engine import Engine

ControlName = Literal["pause", "resume", "sleep", "wake_up", "update_weights"]
PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests in flight: they end with the tokens that they have, the pause waits for their end, or they stay as
they are, with their pages, and go on after the pause."""
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")


@dataclass(frozen=True, slots=True)
class Control:
    """A call that the loop makes between two steps.

    serial:    names the answer
    arguments: of the engine's method, by name; `_update_weights` says those of "update_weights"
    """

    serial: int
    name: ControlName
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a control.

    error:     what the call has raised, or None
    is_asleep: whether the engine computes nothing afterwards, because memory or weights are missing
    """

    serial: int
    result: Any = None
    error: Exception | None = None
    is_asleep: bool = False


def carry_out(engine: Engine, control: Control) -> Any:
    """Call the engine. Raises what it raises."""
    calls: dict[str, Callable[..., Any]] = {
        "sleep": engine.sleep,
        "wake_up": engine.wake_up,
        "update_weights": lambda **arguments: _update_weights(engine, **arguments),
    }
    return calls[control.name](**control.arguments)


def _update_weights(
    engine: Engine,
    folder: str | None = None,
    segment: str | None = None,
    tensors: Sequence[Mapping[str, Any]] = (),
    keep_pages: bool = False,
) -> int:
    """Take weights from a folder or from shared memory. Returns their version.

    tensors: the fields of `SharedTensor`, of each tensor in the segment
    """
    from fa_serve.engine.start.new_weights import SharedTensor, from_folder, from_shared_memory

    if (folder is None) == (segment is None):
        raise ParameterError("weight_dir", "be given, or shared_memory, and not both", folder)
    weights: Iterator[tuple[str, Tensor]]
    if folder is not None:
        weights = from_folder(engine.model, folder)
    else:
        places = [SharedTensor(**each) for each in tensors]
        weights = from_shared_memory(engine.model, str(segment), places)
    return engine.update_weights(weights, keep_pages=keep_pages)
