"""Pinned memory through which one thread fills memory of a GPU, piece by piece.

    staging = Staging(device, dtype, elements)
    staging.send([(target, write), ...])     # each write(view) fills all of a view; copies are queued on the current stream

Allocating pinned memory for each adapter would hold up concurrent steps, because the driver lets no other thread launch kernels
during the allocation: 50 ms for 84 MB. So there are a few buffers that are reused. Threads fill several of them at a time while
others are copied: a buffer is filled by NumPy, which needs the interpreter only between two of its copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

Piece = tuple[Tensor, Callable[[Tensor], None]]
"""A contiguous target (n,) on the device, and a function that fills a view (n,), which holds anything before."""
NUM_BUFFERS = 3
"""Buffers that are filled or copied at the same time, and threads that fill them. More would take processors from the steps."""


class Staging:
    """Owner of the buffers. elements: size of the largest piece"""

    def __init__(self, device: torch.device, dtype: torch.dtype, elements: int) -> None:
        self._on_gpu = device.type == "cuda"
        count = NUM_BUFFERS if self._on_gpu else 0
        self._buffers = [torch.empty(elements, dtype=dtype, pin_memory=True) for _ in range(count)]
        make_event: Any = torch.cuda.Event
        self._copied = [make_event() for _ in self._buffers]  # end of the last copy from a buffer; a new event is done
        self._threads = ThreadPoolExecutor(NUM_BUFFERS, "fa_serve-fill-adapters")
        self._next = 0

    def send(self, pieces: Iterable[Piece]) -> None:
        """Fill pieces of the device's memory. Raises what filling one has raised."""
        if not self._on_gpu:
            for target, write in pieces:
                write(target)
            return
        filling: deque[tuple[int, Tensor, Future[None]]] = deque()
        try:
            for target, write in pieces:
                if len(filling) == len(self._buffers):
                    self._copy(*filling.popleft())
                number = self._next
                self._next = (number + 1) % len(self._buffers)
                filling.append((number, target, self._threads.submit(self._fill, number, len(target), write)))
            while filling:
                self._copy(*filling.popleft())
        finally:
            for _, _, filled in filling:  # after an error: no thread may write to a buffer when the next adapter comes
                filled.exception()

    def _fill(self, number: int, elements: int, write: Callable[[Tensor], None]) -> None:
        self._copied[number].synchronize()
        write(self._buffers[number][:elements])

    def _copy(self, number: int, target: Tensor, filled: Future[None]) -> None:
        """Queue the copy of a buffer when it is filled."""
        filled.result()
        target.copy_(self._buffers[number][: len(target)], non_blocking=True)
        self._copied[number].record()
