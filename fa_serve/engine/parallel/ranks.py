"""The ranks of tensor parallelism as an engine sees them: N processes, one for each device, which run it in lockstep.

    ranks = open_ranks(config)                   # leader.py: the only rank, or rank 0 of several
    ranks.tell("abort", "request-1")             # the others make the same call
    now = ranks.broadcast("clock", time.monotonic)  # a value that may differ between processes comes from rank 0
    x = ranks.all_reduce(x)                      # tensors are added up on the devices
    ranks.close()

Each rank schedules, computes, samples and commits by itself. Rank 0 sends the calls that it is given, and what depends on
clocks, random bits or threads, through a link to each follower. It waits for an answer only where all ranks must have done
something, as at the start and while an adapter is loaded (`gather`). Nothing is sent for a token.
Each step begins with a digest of what rank 0 has scheduled and sampled before, and a follower whose digest differs ends with an
error.

A rank that ends takes the others with it: a follower ends when its link does, and rank 0 learns from the link that a follower
has ended. Left out: how the ranks talk (leader.py, follower.py), what is divided (fa_serve.hf.surgery.divide.plan), and the
sums themselves (fa_serve.ops.collectives.all_reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.errors import EngineDeadError
from fa_serve.ops.collectives.all_reduce import AllReduce
from fa_serve.spec import ParameterError

T = TypeVar("T")
OnLost = Callable[[EngineDeadError], None]


class Ranks(Protocol):
    """What an engine needs to know of its rank and of the others.

    local_rank: among the ranks of this machine
    all_reduce: adds a tensor up over the ranks; None with one rank
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    all_reduce: AllReduce | None

    def tell(self, call: str, *args: Any) -> None:
        """Rank 0 lets the followers make a call of the engine. Raises EngineDeadError if that is not possible any more."""

    def end_step(self) -> None:
        """The step that was told has come to its end."""

    def broadcast(self, what: str, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0. Every rank asks for the same at the same point."""

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, for which rank 0 waits. Every rank asks for the same at the same point."""

    def add_to_digest(self, numbers: Iterable[int]) -> None:
        """Take numbers that must be the same on every rank into the digest."""

    def escalate(self, error: Exception) -> None:
        """Raise EngineDeadError, because an error of one rank leaves the others without it. With one rank, do nothing."""

    def check_lost(self) -> None:
        """Raise EngineDeadError if another rank has ended, because sums that were aborted have undefined values."""

    def starting(self) -> AbstractContextManager[None]:
        """Around the start of the engine, whose failure ends all ranks."""

    def close(self) -> None:
        """End the other ranks."""


class Alone:
    """The only rank: there is nobody to tell and to wait for."""

    rank = 0
    size = 1
    local_rank = 0
    all_reduce: AllReduce | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._closed = False

    def tell(self, call: str, *args: Any) -> None:
        """Nobody is told. Raises EngineDeadError after `close`."""
        if self._closed:
            raise EngineDeadError("the engine was closed")

    def end_step(self) -> None:
        """Nobody waits for it."""

    def broadcast(self, what: str, make: Callable[[], T]) -> T:
        """What `make` returns."""
        return make()

    def gather(self, value: T) -> list[T]:
        """The value alone."""
        return [value]

    def add_to_digest(self, numbers: Iterable[int]) -> None:
        """There is nobody to compare with, so the numbers are not even counted."""

    def escalate(self, error: Exception) -> None:
        """The error concerns this rank alone."""

    def check_lost(self) -> None:
        """There is nobody to lose."""

    def starting(self) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def close(self) -> None:
        """Later calls fail."""
        self._closed = True


def check_devices(config: EngineConfig, num_ranks: int) -> None:
    """Raise ParameterError unless this machine has a device for each of so many ranks."""
    device = config.resolve_device()
    if device not in ("cpu", "cuda"):
        rule = "be auto, cpu or cuda with tensor_parallel, which takes the first GPUs of CUDA_VISIBLE_DEVICES"
        raise ParameterError("device", rule, config.device)
    if device == "cuda" and torch.cuda.device_count() < num_ranks:
        rule = f"be at most {torch.cuda.device_count()}, the number of GPUs"
        if num_ranks != config.tensor_parallel:
            rule = f"have a GPU for each rank of a machine, and this one has {torch.cuda.device_count()}"
        raise ParameterError("tensor_parallel", rule, config.tensor_parallel)
