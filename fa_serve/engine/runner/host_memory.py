"""The memory of the host tier, and the copies between it and the device: implements `HostCopies` (cache/host_tier.py).

    memory = HostMemory(lambda: [k_cache, v_cache], num_bytes=64 << 30, device=device)
    copying = memory.to_host(pages, slots)   # returns when the copies are queued
    copying.is_done()

A row (a page or a state in all layers) is one range of bytes on the host. On a GPU one kernel packs rows into a buffer on the
device (`ops.move_rows`), and whole runs of slots are copied from the buffer to pinned memory. Copies back go the reverse way.
Each direction has two streams, so that one buffer is packed while the other one is copied. Copies begin after the steps that
have been launched already. Later steps do not wait for copies, and copies do not wait for later steps. On a CPU, `to_host` and
`to_device` return when the rows have been copied.

A thread pins the host memory, piece by piece, because that takes seconds for each 10 GiB. The tier can use each piece as soon
as it is pinned. If the machine has less memory, the tier stays smaller, with a warning. On a CPU the system provides memory
only when it is first written, so all memory that has been promised counts as taken. This module maps and registers memory
itself, because PyTorch's pinned allocator rounds sizes up to powers of two. The memory is unmapped when the process ends. Left
out: which rows are copied, and when.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fa_serve import ops
from fa_serve.engine.cache.host_tier import CopyError, Copying
from fa_serve.engine.cache.tensors import reclaimable_memory

log = logging.getLogger("fa_serve.engine")

PIECE_BYTES = 256 << 20
"""Bytes of the host's memory that are pinned at once."""
BUFFER_BYTES = 32 << 20
"""Bytes of a buffer on the device, of which there are four."""
SPARE_BYTES = 2 << 30
"""Bytes of the machine's memory that the tier always leaves to others."""


def staging_bytes(row_bytes: int) -> int:
    """Bytes that the buffers for rows of this size take on a GPU, in addition to the cache."""
    return 4 * _buffer_rows(row_bytes) * row_bytes


def _buffer_rows(row_bytes: int) -> int:
    """Rows of a buffer: an even number, so that the part of the row numbers (int64) for each buffer is aligned to 16 bytes."""
    return max(BUFFER_BYTES // row_bytes // 2 * 2, 2)


class HostMemory:
    """Slots on the host for rows of a device's tensors.

    tensors:   returns the tensors, (num_rows, ...) each, which may be reallocated between two copies
    num_bytes: maximum number of bytes of host memory
    name:      what the rows are, for the name of the thread and the warning
    promised:  bytes of host memory that others will write to and may not have written to yet

    Raises ValueError if the layout of the rows does not allow copies (`ops.RowTable`), and torch.OutOfMemoryError if there is
    no room for buffers.
    """

    def __init__(
        self,
        tensors: Callable[[], Sequence[Tensor]],
        num_bytes: int,
        device: torch.device,
        name: str = "rows",
        promised: int = 0,
    ) -> None:
        self._tensors = tensors
        self._name = name
        self._device = device
        self._known: list[tuple[int, int]] = []
        self._table: ops.RowTable | None = None
        self.row_bytes = ops.row_bytes(tensors())
        self.num_slots = 0
        self._slots_of_piece = max(min(PIECE_BYTES, num_bytes) // self.row_bytes, 1)
        self._pieces: list[Tensor] = []  # (slots, words) int64 each, the last one may have fewer slots
        self._maps: list[mmap.mmap] = []
        self._closed = threading.Event()
        self._lanes: dict[bool, _Lane] = {}
        self._row_table()
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._lanes = {to_host: _Lane(_buffer_rows(self.row_bytes), self.row_bytes, device) for to_host in (True, False)}
            self._thread = threading.Thread(target=self._pin, args=(num_bytes,), name=f"fa-serve-pin-{name}", daemon=True)
            self._thread.start()
        else:
            self._allocate(num_bytes, promised)

    def to_host(self, rows: Sequence[int], slots: Sequence[int]) -> Copying:
        """As `HostCopies` says."""
        return self._copy(rows, slots, to_host=True)

    def to_device(self, slots: Sequence[int], rows: Sequence[int]) -> Copying:
        """As `HostCopies` says."""
        return self._copy(rows, slots, to_host=False)

    def slot_bytes(self, slot: int) -> memoryview:
        """As `HostCopies` says."""
        piece, place = divmod(slot, self._slots_of_piece)
        row: Any = self._pieces[piece][place].numpy()
        return memoryview(row).cast("B")

    def wait_until_pinned(self) -> None:
        """Return when all memory has been pinned, or no more of it can be."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Wait for copies, and give the memory back."""
        self._closed.set()
        self.wait_until_pinned()
        if self._device.type == "cuda":
            for lane in self._lanes.values():
                lane.synchronize()
            for piece in self._pieces:
                _cudart().cudaHostUnregister(piece.data_ptr())
        self._lanes = {}
        self._pieces = []

    def _piece_sizes(self, num_bytes: int) -> Iterator[int]:
        """Slots of each piece."""
        left = num_bytes // self.row_bytes
        while left > 0:
            yield min(left, self._slots_of_piece)
            left -= self._slots_of_piece

    def _allocate(self, num_bytes: int, promised: int) -> None:
        """Take the memory on a CPU. promised: bytes that count as taken before it"""
        for size in self._piece_sizes(num_bytes):
            if reason := _room_reason(size * self.row_bytes, promised + self.num_slots * self.row_bytes):
                self._warn(num_bytes, reason)
                return
            self._pieces.append(torch.empty(size, self.row_bytes // 8, dtype=torch.int64))
            self.num_slots += size

    def _pin(self, num_bytes: int) -> None:
        """Map and pin the memory. Runs in a thread."""
        if self._device.index is not None:  # without an index, it is the device that every thread starts with
            torch.cuda.set_device(self._device)
        for size in self._piece_sizes(num_bytes):
            if self._closed.is_set():
                return
            reason = self._pin_piece(size)
            if reason:
                self._warn(num_bytes, reason)
                return

    def _warn(self, num_bytes: int, reason: str) -> None:
        """Say that there is less than `num_bytes`."""
        log.warning(
            "kv_host_memory could not be allocated in full: the host tier of the KV cache has %.4g GiB for %s instead of "
            "%.4g GiB, because %s",
            self.num_slots * self.row_bytes / 2**30,
            self._name,
            num_bytes / 2**30,
            reason,
        )

    def _pin_piece(self, size: int) -> str:
        """Add a piece of `size` slots. Returns why that is not possible, or an empty text."""
        num_bytes = size * self.row_bytes
        if reason := _room_reason(num_bytes):
            return reason
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(AttributeError, OSError):  # large pages are pinned faster
                memory.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, ValueError, MemoryError) as error:
            return f"the memory could not be mapped: {error}"
        piece = torch.frombuffer(memory, dtype=torch.int64).view(size, self.row_bytes // 8)
        status = int(_cudart().cudaHostRegister(piece.data_ptr(), num_bytes, 0))
        if status:
            return f"the driver could not pin the memory (CUDA error {status})"
        self._maps.append(memory)
        self._pieces.append(piece)
        self.num_slots += size
        return ""

    def _copy(self, rows: Sequence[int], slots: Sequence[int], *, to_host: bool) -> Copying:
        try:
            table = self._row_table()
            pairs = sorted(zip(slots, rows, strict=True))
            if self._device.type != "cuda":
                self._copy_at_once(table, pairs, to_host=to_host)
                return _Done()
            return self._lanes[to_host].copy(table, pairs, self._runs, to_host=to_host)
        except torch.AcceleratorError:
            raise  # the device is lost
        except (RuntimeError, MemoryError) as error:
            if self._lanes:
                self._lanes[to_host].synchronize()  # nothing may be written after a failure has been reported
            raise CopyError(f"{type(error).__name__}: {error}") from error

    def _copy_at_once(self, table: ops.RowTable, pairs: Sequence[tuple[int, int]], *, to_host: bool) -> None:
        packed = torch.empty(len(pairs), table.num_words, dtype=torch.int64)
        rows = torch.tensor([row for _, row in pairs])
        if to_host:
            ops.move_rows(table, rows, packed, pack=True)
        for first, last, piece in self._runs([slot for slot, _ in pairs]):
            if to_host:
                piece.copy_(packed[first:last])
            else:
                packed[first:last].copy_(piece)
        if not to_host:
            ops.move_rows(table, rows, packed, pack=False)

    def _runs(self, slots: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
        """(first, last, memory) for each run of consecutive slots in one piece: slots[first:last]. slots: sorted"""
        per_piece = self._slots_of_piece
        first = 0
        for index in range(1, len(slots) + 1):
            if index < len(slots) and slots[index] == slots[index - 1] + 1 and slots[index] % per_piece:
                continue
            start = slots[first] % per_piece
            yield first, index, self._pieces[slots[first] // per_piece][start : start + index - first]
            first = index

    def _row_table(self) -> ops.RowTable:
        """Where the rows are now."""
        tensors = self._tensors()
        known = [(x.data_ptr(), len(x)) for x in tensors]
        if self._table is None or known != self._known:
            self._table = ops.RowTable(tensors)
            self._known = known
        return self._table


def _room_reason(num_bytes: int, promised: int = 0) -> str:
    """Why the machine does not have this many more bytes for the tier; empty if it has. promised: as in `HostMemory`"""
    room = max(reclaimable_memory() - promised, 0)
    if num_bytes + SPARE_BYTES <= room:
        return ""
    spare = f"{SPARE_BYTES / 2**30:.4g} GiB of them must stay free"
    return f"{room / 2**30:.4g} GiB of the machine's memory are available, and {spare}"


def _cudart() -> Any:
    """The functions of CUDA's runtime."""
    load: Any = torch.cuda.cudart
    return load()


class _Done:
    """Copies that have already ended."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""


class _Queued:
    """Copies on a GPU's streams. kept: tensors that the streams use until the copies end"""

    def __init__(self, event: torch.Event, kept: list[Tensor]) -> None:
        self._event = event
        self._kept = kept

    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class _Lane:
    """The streams and buffers of one direction."""

    def __init__(self, buffer_rows: int, row_bytes: int, device: torch.device) -> None:
        self._device = device
        make_stream: Any = torch.cuda.Stream
        self._copies = make_stream(device)
        self._kernels = make_stream(device)
        self._buffers = [torch.empty(buffer_rows, row_bytes // 8, dtype=torch.int64, device=device) for _ in range(2)]
        self._free = [torch.Event("cuda") for _ in range(2)]  # when a buffer may be filled again
        self._turn = count()

    def copy(
        self,
        table: ops.RowTable,
        pairs: Sequence[tuple[int, int]],
        runs: Callable[[Sequence[int]], Iterator[tuple[int, int, Tensor]]],
        *,
        to_host: bool,
    ) -> _Queued:
        """Queue the copies of (slot, row), sorted by slot. runs: `HostMemory._runs`"""
        self._kernels.wait_stream(torch.cuda.current_stream(self._device))
        size = len(self._buffers[0])
        kept: list[Tensor] = []
        done = torch.Event("cuda")
        with torch.cuda.stream(self._kernels):
            numbers = torch.tensor([row for _, row in pairs], pin_memory=True)
            rows = numbers.to(self._device, non_blocking=True)
            kept += [numbers, rows]
        for start in range(0, len(pairs), size):
            part = pairs[start : start + size]
            turn = next(self._turn) % 2
            packed = self._buffers[turn][: len(part)]
            slots = [slot for slot, _ in part]
            part_rows = rows[start : start + len(part)]
            if to_host:
                self._kernels.wait_event(self._free[turn])
                with torch.cuda.stream(self._kernels):
                    ops.move_rows(table, part_rows, packed, pack=True)
                self._copies.wait_stream(self._kernels)
                with torch.cuda.stream(self._copies):
                    for first, last, memory in runs(slots):
                        memory.copy_(packed[first:last], non_blocking=True)
                self._free[turn].record(self._copies)
            else:
                self._copies.wait_event(self._free[turn])
                with torch.cuda.stream(self._copies):
                    for first, last, memory in runs(slots):
                        packed[first:last].copy_(memory, non_blocking=True)
                self._kernels.wait_stream(self._copies)
                with torch.cuda.stream(self._kernels):
                    ops.move_rows(table, part_rows, packed, pack=False)
                self._free[turn].record(self._kernels)
        done.record(self._copies if to_host else self._kernels)
        return _Queued(done, kept)

    def synchronize(self) -> None:
        """Wait until both streams are idle."""
        self._copies.synchronize()
        self._kernels.synchronize()
