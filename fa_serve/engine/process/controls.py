"""What an operator asks of a running engine: new weights, sleep, a pause. Each is a `Control`, and is answered when it is done.

    commands.put(Control(7, "update_weights", {"folder": "/checkpoints/step-100"}))
    controls = Controls(engine)
    result = controls.carry_out(control)     # between two steps, by the engine's loop

Left out: who may send controls (fa_serve.server), and who waits for the answer (async_engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fa_serve.spec import ParameterError

if TYPE_CHECKING:
    from torch import Tensor

    from fa_serve.engine.engine import Engine
    from fa_serve.engine.rollout.weight_group import TransferBackend, WeightGroup

ControlName = Literal["pause", "resume", "sleep", "wake_up", "update_weights", "join_weight_group"]
PauseMode = Literal["abort", "wait", "keep"]
"""What happens to requests in flight: they end with the tokens that they have, the pause waits for their end, or they stay as
they are, with their pages, and go on after the pause."""
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
TRANSFER_SECONDS = 30.0
"""How long a trainer and an engine wait for each other by default. The engine computes nothing else meanwhile."""


@dataclass(frozen=True, slots=True)
class Control:
    """A call that the loop makes between two steps.

    serial:    identifies the answer
    arguments: keyword arguments of the engine's method, or of a method of `Controls`
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

    def value(self) -> Any:
        """The result. Raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.result


class Controls:
    """Carries out controls. Owner of the group through which a trainer gives weights to the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group: WeightGroup | None = None

    def carry_out(self, control: Control) -> Any:
        """Call the engine. Raises what it raises."""
        calls: dict[str, Callable[..., Any]] = {
            "sleep": self._engine.sleep,
            "wake_up": self._engine.wake_up,
            "update_weights": self._update_weights,
            "join_weight_group": self._join_weight_group,
        }
        return calls[control.name](**control.arguments)

    def close(self) -> None:
        """Leave the trainer's group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _join_weight_group(
        self,
        host: str | None = None,
        port: int = 0,
        rank: int = 1,
        world_size: int = 2,
        backend: TransferBackend | None = None,
        timeout: float = TRANSFER_SECONDS,
    ) -> None:
        """Leave any earlier group, and join the group of a trainer that listens at host and port; without a host, only leave.

        backend: by default NCCL for an engine on a GPU, else gloo
        """
        from fa_serve.engine.rollout.weight_group import WeightGroup

        size = self._engine.config.tensor_parallel
        if size > 1:
            rule = "be 1 to receive weights from a group, which does not support several ranks"
            raise ParameterError("tensor_parallel", rule, size)
        self.close()
        if host is not None:
            device = self._engine.model.device
            backend = backend or ("nccl" if device.type == "cuda" else "gloo")
            self._group = WeightGroup(
                host, port, rank=rank, world_size=world_size, backend=backend, device=device, timeout=timeout
            )

    def _update_weights(
        self,
        folder: str | None = None,
        segment: str | None = None,
        tensors: Sequence[Mapping[str, Any]] = (),
        announced: Sequence[Mapping[str, Any]] | None = None,
        keep_pages: bool = False,
        dry_run: bool = False,
    ) -> int:
        """Take weights from a folder, from shared memory or from the trainer's group. Returns their version.

        tensors:   the fields of `SharedTensor`, for each tensor in the segment
        announced: the fields of `AnnouncedTensor`, for each tensor that the trainer broadcasts
        dry_run:   only check the arguments: raise the errors that would be raised before any weight changes, and take nothing
        """
        from fa_serve.engine.start import new_weights

        model = self._engine.model
        weights: Iterator[tuple[str, Tensor]]
        if [folder, segment, announced].count(None) != 2:
            raise ParameterError("weight_dir", "be given, or shared_memory, or update_info, and only one of them", folder)
        if dry_run and announced is None:
            raise ParameterError("dry_run", "be False unless update_info is given", dry_run)
        if folder is not None:
            weights = new_weights.from_folder(model, folder)
        elif segment is not None:
            weights = new_weights.from_shared_memory(model, segment, [new_weights.SharedTensor(**each) for each in tensors])
        elif self._group is None:
            raise ParameterError(
                "update_info", "come after init_weight_transfer_engine, because trainer and engine share no group", None
            )
        else:
            expected = [new_weights.AnnouncedTensor(**each) for each in announced or ()]
            weights = new_weights.from_group(model, self._group, expected, dry_run=dry_run)
        try:
            return self._engine.update_weights(weights, keep_pages=keep_pages)
        except new_weights.DryRunEnded:
            return self._engine.weight_version
        except BaseException:
            if announced is not None and not dry_run:
                self.close()  # the trainer may still be sending, so what the group receives next is unknown
            raise
