"""Pinned memory through which one thread fills memory of a GPU, piece by piece.

    staging = Staging(device, dtype, elements)
    staging.send(target, write)              # write(view) fills a view of zeros; the copy is queued on the current stream

Allocating pinned memory for each adapter would hold up concurrent steps, because the driver lets no other thread launch kernels
during the allocation: 50 ms for 84 MB. With two buffers, one is filled while the other is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Staging:
    """Owner of the buffers. elements: size of the largest piece"""

    def __init__(self, device: torch.device, dtype: torch.dtype, elements: int) -> None:
        self._on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(elements, dtype=dtype, pin_memory=True) for _ in range(2)] if self._on_gpu else []
        make_event: Any = torch.cuda.Event
        self._copied = [make_event() for _ in self._buffers]  # end of the last copy from a buffer; a new event is done
        self._next = 0

    def send(self, target: Tensor, write: Callable[[Tensor], None]) -> None:
        """Fill a piece of the device's memory. target: (n,), contiguous; write: see above"""
        if not self._on_gpu:
            write(target.zero_())
            return
        buffer = self._buffers[self._next][: len(target)]
        copied = self._copied[self._next]
        self._next = 1 - self._next
        copied.synchronize()
        write(buffer.zero_())
        target.copy_(buffer, non_blocking=True)
        copied.record()
