"""Ranks as threads of this process: what tests of a divided model need, without processes and process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.collectives.all_reduce import add_and_norm

T = TypeVar("T")


class _Sum:
    """Takes the place of an AllReduce."""

    def __init__(self, rank: int, parts: dict[int, Tensor], barrier: threading.Barrier) -> None:
        self._rank = rank
        self._parts = parts
        self._barrier = barrier
        self._paused = False
        self.calls = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        yield
        self._paused = False

    def __call__(self, x: Tensor) -> Tensor:
        if self._paused:
            return x
        self.calls += 1
        self._parts[self._rank] = x
        self._barrier.wait()
        total = sum((self._parts[rank] for rank in range(1, len(self._parts))), self._parts[0].clone())
        self._barrier.wait()
        return total

    def add(
        self, x: Tensor, y: Tensor, *, alpha: float = 1.0, after: ops.Norm | None = None, before: ops.Norm | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return add_and_norm(x, self(y), alpha, after, before)

    def gather(self, x: Tensor) -> Tensor:
        """The columns of all ranks."""
        if self._paused:
            return x.repeat(1, self._barrier.parties)
        self._parts[self._rank] = x
        self._barrier.wait()
        columns = torch.cat([self._parts[rank] for rank in range(len(self._parts))], dim=1)
        self._barrier.wait()
        return columns

    def __deepcopy__(self, memo: object) -> _Sum:
        return self


def run_ranks(size: int, work: Callable[[int, Any], T]) -> list[T]:
    """The results of `work(rank, all_reduce)` on every rank. Raises the first error that is not due to another rank's."""
    barrier = threading.Barrier(size, timeout=60)
    parts: dict[int, Tensor] = {}
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, _Sum(rank, parts, barrier))
        except Exception as error:
            if "BrokenBarrierError" not in f"{type(error).__name__} {error}":
                errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
