"""The ranks of tensor parallelism as an engine sees them: N processes, one for each device, which run it in lockstep.

    ranks = open_ranks(config)                   # leader.py: the only rank, or rank 0 of several
    ranks.tell("abort", "request-1")             # the others make the same call
    now = ranks.broadcast("clock", time.monotonic)  # a value that may differ between processes comes from rank 0
    x = ranks.all_reduce(x)                      # tensors are added up on the devices
    ranks.close()

Each rank schedules, computes, samples and commits by itself. Rank 0 sends the calls that it gets, and values that depend on
clocks, random bits or threads, through a link to each follower. It waits for an answer only where all ranks must have done
something, for example at the start and while an adapter is loaded (`gather`). Nothing is sent per token.
Each step begins with a digest of what rank 0 has scheduled and sampled so far, and a follower whose digest differs ends with an
error.

A rank that ends takes the others with it: a follower ends when its link closes, and rank 0 learns from the link that a follower
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
    """What an engine needs to know about its rank and the others.

    local_rank: the number of this rank among the ranks of this machine
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
        """The step that `tell` announced has finished."""

    def broadcast(self, what: str, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0. Every rank asks for the same `what` at the same point."""

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order. Rank 0 waits for them. Every rank calls this at the same point."""

    def add_to_digest(self, numbers: Iterable[int]) -> None:
        """Add numbers that must be the same on every rank to the digest."""

    def escalate(self, error: Exception) -> None:
        """Raise EngineDeadError, because other ranks cannot go on without one that has failed. With one rank, do nothing."""

    def check_lost(self) -> None:
        """Raise EngineDeadError if another rank has ended, because sums that were aborted have undefined values."""

    def starting(self) -> AbstractContextManager[None]:
        """The context of the engine's start. If the start fails, all ranks end."""

    def close(self) -> None:
        """End the other ranks."""


class Alone:
    """The only rank: there are no others to tell or to wait for."""

    rank = 0
    size = 1
    local_rank = 0
    all_reduce: AllReduce | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._closed = False

    def tell(self, call: str, *args: Any) -> None:
        """There are no other ranks to tell. Raises EngineDeadError after `close`."""
        if self._closed:
            raise EngineDeadError("the engine was closed")

    def end_step(self) -> None:
        """Nothing to do: no other rank waits for it."""

    def broadcast(self, what: str, make: Callable[[], T]) -> T:
        """What `make` returns."""
        return make()

    def gather(self, value: T) -> list[T]:
        """This value only."""
        return [value]

    def add_to_digest(self, numbers: Iterable[int]) -> None:
        """Nothing to do: there is no other rank to compare with."""

    def escalate(self, error: Exception) -> None:
        """Nothing to do: the error concerns only this rank."""

    def check_lost(self) -> None:
        """Nothing to do: there is no other rank to lose."""

    def starting(self) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def close(self) -> None:
        """Let later calls of `tell` fail."""
        self._closed = True


def check_devices(config: EngineConfig, num_ranks: int) -> None:
    """Raise ParameterError unless this machine has a device for each of `num_ranks` ranks."""
    device = config.resolve_device()
    if device not in ("cpu", "cuda"):
        rule = "be auto, cpu or cuda with tensor_parallel, which takes the first GPUs of CUDA_VISIBLE_DEVICES"
        raise ParameterError("device", rule, config.device)
    if device == "cuda" and torch.cuda.device_count() < num_ranks:
        rule = f"be at most {torch.cuda.device_count()}, the number of GPUs"
        if num_ranks != config.tensor_parallel:
            rule = f"leave a GPU for each rank on this machine, which has only {torch.cuda.device_count()}"
        raise ParameterError("tensor_parallel", rule, config.tensor_parallel)
