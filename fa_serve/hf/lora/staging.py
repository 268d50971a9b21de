"""Copies matrices from the host to places in a GPU's memory, through pinned memory, in pieces.

    staging = Staging(device, num_bytes)
    staging.send([Copy(matrix, [place, next_place]), ...])           # queued on the current stream

A piece goes to the GPU with its matrices as they are on the host, and the GPU puts their numbers in place. The host would take
five times as long for that, because a matrix that lies column by column there is needed row by row.

Allocating pinned memory for each adapter would hold up concurrent steps, because the driver lets no other thread launch kernels
during the allocation: 50 ms for 84 MB. So there are a few buffers that are reused. Threads fill several of them at a time while
others are copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_serve.hf.lora.host_runs import runs_of, viewed

NUM_BUFFERS = 3
"""Buffers that are filled or copied at the same time, and threads that fill them. More would take processors from the steps."""
ALIGNMENT = 16
"""Bytes to which buffers and the beginnings of runs of matrices are aligned."""


class Copy(NamedTuple):
    """A matrix and where it goes.

    source:  (rows, columns) on the host, dense
    targets: on the device, each with as many columns: they get the rows one after the other
    """

    source: Tensor
    targets: Sequence[Tensor]


class Staging:
    """Owner of the buffers. num_bytes: those of the largest matrix, and about those of a piece"""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._on_gpu = device.type == "cuda"
        num_bytes = _aligned(num_bytes) + ALIGNMENT
        self._num_bytes = num_bytes
        count = NUM_BUFFERS if self._on_gpu else 0
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._arrived = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)]
        make_event: Any = torch.cuda.Event
        self._copied = [make_event() for _ in self._buffers]  # end of the last copy from a buffer; a new event is done
        self._threads = ThreadPoolExecutor(NUM_BUFFERS, "fa_serve-fill-adapters")
        self._next = 0

    def send(self, copies: Iterable[Copy]) -> None:
        """Copy matrices to their places. Raises what reading one has raised. All calls are on the same stream."""
        if not self._on_gpu:
            for each in copies:
                _put([each.source], [each])
            return
        filling: deque[tuple[int, list[Copy], Future[tuple[list[int], int]]]] = deque()
        try:
            for piece in _pieces(copies, self._num_bytes):
                if len(filling) == len(self._buffers):
                    self._copy(*filling.popleft())
                number = self._next
                self._next = (number + 1) % len(self._buffers)
                sources = [each.source for each in piece]
                filling.append((number, piece, self._threads.submit(self._fill, number, sources)))
            while filling:
                self._copy(*filling.popleft())
        finally:
            for _, _, filled in filling:  # after an error: no thread may write to a buffer when the next adapter comes
                filled.exception()

    def _fill(self, number: int, sources: Sequence[Tensor]) -> tuple[list[int], int]:
        """Copy matrices into a buffer. Returns the byte at which each begins, and the end of the last one."""
        self._copied[number].synchronize()
        buffer = self._buffers[number].numpy()
        offsets = [0] * len(sources)
        end = 0
        for run in runs_of(sources):
            begin = _aligned(end)
            end = begin + len(run.data)
            buffer[begin:end] = run.data.numpy()
            for index, offset in run.members:
                offsets[index] = begin + offset
        return offsets, end

    def _copy(self, number: int, piece: list[Copy], filled: Future[tuple[list[int], int]]) -> None:
        """Queue the copy of a buffer when it is filled, and what puts its matrices in place.

        The memory on the device may be written to again by the next copy on this stream, which waits for that.
        """
        offsets, end = filled.result()
        arrived = self._arrived[number]
        arrived[:end].copy_(self._buffers[number][:end], non_blocking=True)
        self._copied[number].record()
        _put([viewed(arrived, offset, each.source) for offset, each in zip(offsets, piece, strict=True)], piece)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _put(sources: Sequence[Tensor], copies: Sequence[Copy]) -> None:
    """Copy the sources to the targets of these copies, with one call of PyTorch, because each call needs the interpreter."""
    rows: list[Tensor] = []
    for x, (_, targets) in zip(sources, copies, strict=True):
        rows += [x] if len(targets) == 1 else torch.split(x, [len(target) for target in targets])
    torch._foreach_copy_([target for each in copies for target in each.targets], rows)


def _pieces(copies: Iterable[Copy], num_bytes: int) -> Iterator[list[Copy]]:
    """The copies in groups that fit into a buffer."""
    piece: list[Copy] = []
    length = 0
    for each in copies:
        needed = each.source.nbytes + ALIGNMENT
        if piece and length + needed > num_bytes:
            yield piece
            piece = []
            length = 0
        piece.append(each)
        length += needed
    if piece:
        yield piece
