"""The folder below the host tier: copies on the host are written to files while steps run, and read back when needed.

    folder = FolderTier(files, budget=64 << 30)
    folder.connect({"page": pages_lane})
    folder.begin_step()                      # settle what has ended, and begin to write
    folder.load([Wanted("page", page_hash, parent), ...], (), end)   # read files to the host
    folder.close()

Every copy that the host gets is written once, by one thread. If the host evicts copies faster than they are written, evicted
copies without a file are lost to the folder; nothing waits for the disk. Files that a waiting sequence needs are read by
READERS threads to slots of the host, in the order of the prompt. From there they are copied to the device as all copies are
(host_tier.py). Only the engine's thread changes the tables, in `begin_step`.

Nothing that goes wrong with a file ends a request: what could not be read is computed again. A file whose content is not what
was written is removed. After a write that failed, nothing is written for RETRY_SECONDS. If the disk is full, the folder is
limited to what it holds for FULL_SECONDS. A disk that does not answer for LONGEST_READ seconds is not read until it does.

A file outlives its page in memory, and this process: its hash covers all tokens before it, the salt and the adapter, and the
key of hashes is kept in the folder. When a page is withdrawn because its numbers are not finite, its file is removed, and so
are the files of all that was computed from it. Left out: the files themselves (folder_files.py), which files are worth keeping
(folder_index.py), and the threads (workers.py).
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from fa_serve.engine.cache.folder_files import BadFileError, FileName, FolderFiles, FoundFile
from fa_serve.engine.cache.folder_index import FolderIndex
from fa_serve.engine.cache.kept_items import KeptItems, Move
from fa_serve.engine.cache.workers import Workers

log = logging.getLogger("fa_serve.engine")

QUEUE_BYTES = 64 << 20
"""Bytes of copies that may wait to be written, at most a quarter of the host's memory: these copies are not evicted."""
READERS = 4
RETRY_SECONDS = 30.0
FULL_SECONDS = 600.0
"""How long a full disk limits the folder. After that, other programs may have made room."""
LONGEST_READ = 5.0
"""Seconds that a sequence waits for one file."""
SCAN_SECONDS = 30.0
"""Time after which the folder is scanned again for files of other processes. It is longer for a large folder."""
LAST_FILE_SECONDS = 0.5
FIRST_SCAN_SECONDS = 2.0
"""How long the start waits for the first scan. If the scan takes longer, its files become known later."""


class SlotMemory(Protocol):
    """What the folder needs of `HostCopies`."""

    row_bytes: int

    def slot_bytes(self, slot: int) -> memoryview:
        """The memory of a slot."""


@dataclass(frozen=True, slots=True)
class FolderStats:
    """What the folder has done. All counters start at 0 with the engine.

    num_bytes, num_bytes_used: bytes that files may take, and that they take, including files of other processes
    num_hits:      pages that were read for a sequence
    bytes_in, bytes_out: bytes that were read and written
    num_evictions: files that were evicted
    num_lost:      copies that the host evicted before they were written
    num_bad:       files that were torn, truncated or altered
    num_failures:  reads and writes that failed otherwise
    seconds:       seconds that sequences have waited for files
    """

    num_bytes: int = 0
    num_bytes_used: int = 0
    num_hits: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    num_evictions: int = 0
    num_lost: int = 0
    num_bad: int = 0
    num_failures: int = 0
    seconds: float = 0.0


class FolderLane(NamedTuple):
    """A table of pages or of states, and the memory of its slots."""

    table: KeptItems
    memory: SlotMemory


class Wanted(NamedTuple):
    """A page or a state that a sequence needs. parent: hash of the page before"""

    kind: str
    page_hash: bytes
    parent: bytes


@dataclass(slots=True, eq=False)
class _Write:
    name: FileName
    slot: int
    future: Future[None]
    staged: bool  # the slot holds no copy that the host keeps: it is given back afterwards
    void: bool = False


@dataclass(slots=True, eq=False)
class _Read:
    name: FileName
    slot: int
    future: Future[None]


@dataclass(slots=True, eq=False)
class _Load:
    """Files that one sequence waits for. end: called once, when they have been read or the sequence stops waiting for them"""

    reads: deque[_Read]
    restored: list[FileName]
    end: Callable[[], None]
    begin: float
    since: float  # when the last of its files was read
    broken: bool = False
    is_awaited: bool = True


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    bad: int = 0
    failures: int = 0
    seconds: float = 0.0


class FolderTier:
    """Owner of the files that are on their way, and of the folder's index. All methods belong to the engine's thread.

    budget:  the most bytes that all files of the folder may take
    is_left: whether reading and writing have stopped for good
    """

    def __init__(self, files: FolderFiles, budget: int) -> None:
        self._files = files
        self.index = FolderIndex(budget)
        self._budget = budget
        self._full_until = 0.0
        self._lanes: dict[str, FolderLane] = {}
        self._writes: deque[_Write] = deque()
        self._loads: list[_Load] = []
        self._reading: dict[FileName, _Load] = {}
        self._removals: dict[FileName, Future[None]] = {}  # removed files that a scan may still find
        self.is_left = False
        self._paused_until = 0.0
        self._told: set[str] = set()
        self._counts = _Counts()
        self._writer = Workers(1, "fa-serve-folder-write")
        self._readers = Workers(READERS, "fa-serve-folder-read")
        self._scanner = Workers(1, "fa-serve-folder-scan")
        self._next_scan = 0.0
        self._scan_begin = time.monotonic()
        self._scan: Future[tuple[list[FoundFile], list[FileName]]] | None = self._scanner.submit(files.scan)
        wait([self._scan], timeout=FIRST_SCAN_SECONDS)
        self._take_scan()

    def connect(self, lanes: Mapping[str, FolderLane]) -> None:
        """Serve these tables, by the kind of their files: "page", and "state" for a model with states."""
        self._lanes = dict(lanes)
        for lane in lanes.values():
            lane.table.host.keeps_unsaved = True
        self._pages.on_withdraw = self.withdraw

    def begin_step(self) -> None:
        """Settle reads and writes that have ended, and begin to write the host's new copies."""
        self._settle_writes()
        self._settle_loads()
        self._take_scan()
        now = time.monotonic()
        if now >= self._full_until and not self.is_left:
            self.index.budget = self._budget
        if now >= self._next_scan and self._scan is None and not self.is_left:
            self._start_scan()
        for kind in self._lanes:
            self._start_writes(kind, now)

    def has(self, kind: str, page_hash: bytes) -> bool:
        """Whether there is a file of this kind for a hash, which can be read."""
        return not self._is_stuck and self.index.find(kind, page_hash) is not None

    def reach(self, hashes: Sequence[bytes]) -> int:
        """How many of these pages, from the first one on, have files that can be read."""
        return 0 if self._is_stuck else self.index.reach(hashes)

    def is_loading(self, kind: str, page_hash: bytes) -> bool:
        """Whether a sequence waits for the file of this kind for a hash."""
        name = self.index.find(kind, page_hash)
        load = None if name is None else self._reading.get(name)
        return load is not None and load.is_awaited

    @property
    def is_awaited(self) -> bool:
        """Whether a sequence waits for files."""
        return any(load.is_awaited for load in self._loads)

    def load(self, wanted: Sequence[Wanted], kept: Collection[bytes], end: Callable[[], None]) -> bool:
        """Begin to read files to slots of the host. Returns False if there is no slot for any; `end` is not called then.

        wanted: pages and states that the index has, in order; only the first ones are read if the host lacks slots, or if they
                would take more than half of its slots
        kept:   hashes of what the sequence has on the host already
        end:    called when the sequence need not wait any longer
        """
        reads: deque[_Read] = deque()
        for kind, page_hash, _ in wanted:
            name = self.index.find(kind, page_hash)
            lane = self._lanes[kind]
            if name is None or name in self._reading or len(reads) >= max(lane.table.host.num_slots // 2, 1):
                break
            slot = lane.table.take_slot(kept)
            if slot < 0:
                break
            future = self._readers.submit(partial(self._files.read, name, lane.memory.slot_bytes(slot)))
            reads.append(_Read(name, slot, future))
        if not reads:
            return False
        now = time.monotonic()
        load = _Load(reads, [], end, now, now)
        self._loads.append(load)
        self._reading |= {read.name: load for read in reads}
        return True

    def wait(self, seconds: float) -> None:
        """Wait until a file has been read, for at most `seconds`."""
        heads = [load.reads[0].future for load in self._loads if load.is_awaited]
        if heads:
            wait(heads, timeout=seconds, return_when=FIRST_COMPLETED)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """A sequence uses these pages, in order, wherever they are."""
        self.index.touch(hashes)

    def withdraw(self, page_hash: bytes) -> None:
        """What a page holds is not valid: remove its files, and those of all pages that were computed from it."""
        self._drop(self.index.withdraw(page_hash))

    def lacking(self, hashes: Iterable[bytes]) -> set[tuple[str, bytes]]:
        """The pages and states of these hashes that have no files: (kind, hash)."""
        return {(kind, each) for kind in self._lanes for each in hashes if self.index.find(kind, each) is None}

    def withdraw_new(self, lacked: Iterable[tuple[str, bytes]]) -> None:
        """Remove the files that were written since `lacking` said that there are none: they may not be valid."""
        self._drop([name for each in lacked for name in self.index.withdraw_one(*each)])

    def save_staged(self, kind: str, moves: Sequence[Move]) -> None:
        """Write the content of slots that have been taken. The slots are given back when it is written."""
        for page_hash, _, slot in moves:
            if not self._start_write(FileName(kind, page_hash, self._parent_of(page_hash)), slot, staged=True):
                self._lanes[kind].table.host.give_back(slot)

    def num_that_fit(self, kind: str) -> int:
        """How many files of this kind fit into the folder."""
        return self.index.budget // self._files.size_of(self._lanes[kind].memory.row_bytes)

    @property
    def can_write(self) -> bool:
        """Whether files can be written now: no write has failed in the last RETRY_SECONDS."""
        return not self.is_left and time.monotonic() >= self._paused_until

    @property
    def is_writing(self) -> bool:
        """Whether files are being written, or copies wait to be written."""
        return bool(self._writes) or any(lane.table.host.unsaved for lane in self._lanes.values())

    def wait_for_writes(self, seconds: float) -> None:
        """Wait until all files that are being written now are written, for at most `seconds`."""
        if self._writes:
            wait([self._writes[-1].future], timeout=seconds)
        self._settle_writes()

    def leave(self) -> None:
        """Read and write nothing from now on: the identity of the files no longer says which weights the model has."""
        self.is_left = True
        self.index = FolderIndex(0)
        for lane in self._lanes.values():
            lane.table.host.stop_saving()

    def reconnect(self, lanes: Mapping[str, FolderLane], seconds: float) -> None:
        """Serve other tables, with the same slots. Slots that are still read or written after `seconds` are set aside."""
        wait([future for _, _, future in self._on_their_way()], timeout=seconds)
        for name, slot, future in self._on_their_way():
            if not future.done():
                lanes[name.kind].table.host.set_aside([slot])
        self._writes.clear()
        self._loads.clear()
        self._reading.clear()
        self.connect(lanes)

    def close(self) -> None:
        """End the threads after the file that each of them has begun, and after the removals: they get LAST_FILE_SECONDS."""
        for workers in (self._writer, self._readers, self._scanner):
            workers.close()
        self._writer.join(LAST_FILE_SECONDS)

    def snapshot(self) -> FolderStats:
        counts = self._counts
        return FolderStats(
            num_bytes=self.index.budget,
            num_bytes_used=self.index.num_bytes,
            num_hits=counts.hits,
            bytes_in=counts.bytes_in,
            bytes_out=counts.bytes_out,
            num_evictions=self.index.num_evictions,
            num_lost=sum(lane.table.host.num_unsaved_evictions for lane in self._lanes.values()),
            num_bad=counts.bad,
            num_failures=counts.failures,
            seconds=counts.seconds,
        )

    @property
    def _is_stuck(self) -> bool:
        """Whether the disk has not answered for LONGEST_READ seconds. Then nothing is read from it."""
        return any(not load.is_awaited for load in self._loads)

    def _on_their_way(self) -> Iterator[tuple[FileName, int, Future[None]]]:
        """What is being written and read: name, slot, result."""
        yield from ((write.name, write.slot, write.future) for write in self._writes)
        yield from ((read.name, read.slot, read.future) for load in self._loads for read in load.reads)

    @property
    def _pages(self) -> Any:
        return self._lanes["page"].table

    def _drop(self, names: Sequence[FileName]) -> None:
        """Remove files that the index does not have any more. Those that are being written are removed afterwards."""
        dropped = {*names}
        for write in self._writes:
            write.void |= write.name in dropped
        for name in names:
            self._remove_file(name)

    def _remove_file(self, name: FileName) -> None:
        self._removals[name] = self._writer.submit(partial(self._files.remove, name), is_last=True)

    def _start_writes(self, kind: str, now: float) -> None:
        """Write the oldest copies that have no file, as many as the queue holds."""
        table, memory = self._lanes[kind]
        room = max(min(QUEUE_BYTES // memory.row_bytes, table.host.num_slots // 4), 1)
        while table.host.unsaved and len(self._writes) < room and now >= self._paused_until:
            page_hash, _ = table.host.unsaved.popitem(last=False)
            if self.index.find(kind, page_hash) is not None:
                continue
            slot = table.host.begin_saving(page_hash)
            if not self._start_write(FileName(kind, page_hash, self._parent_of(page_hash)), slot, staged=False):
                table.host.end_saving(page_hash, slot)

    def _parent_of(self, page_hash: bytes) -> bytes:
        parent: bytes = self._pages.parent_of(page_hash)
        return parent

    def _start_write(self, name: FileName, slot: int, *, staged: bool) -> bool:
        memory = self._lanes[name.kind].memory
        size = self._files.size_of(memory.row_bytes)
        evicted = self.index.make_room(size, self._reading)
        if evicted is None:
            return False
        for each in evicted:
            self._remove_file(each)
        self.index.add(name, size)
        future = self._writer.submit(partial(self._files.write, name, memory.slot_bytes(slot)))
        self._writes.append(_Write(name, slot, future, staged))
        return True

    def _settle_writes(self) -> None:
        while self._writes and self._writes[0].future.done():
            write = self._writes.popleft()
            table, memory = self._lanes[write.name.kind]
            if write.staged:
                table.host.give_back(write.slot)
            else:
                table.host.end_saving(write.name.page_hash, write.slot)
            error = write.future.exception()
            if error is None:
                self._counts.bytes_out += memory.row_bytes
                continue
            if not write.void:
                self.index.remove(write.name)
            if write.name.page_hash in table.host and not write.void and not write.staged:
                table.host.unsaved[write.name.page_hash] = None
            self._note_failed_write(error, self._files.size_of(memory.row_bytes))

    def _note_failed_write(self, error: BaseException, size: int) -> None:
        self._counts.failures += 1
        self._paused_until = time.monotonic() + RETRY_SECONDS
        self._tell("write", "could not write a KV cache file; no file is written for the next %g s: %s", RETRY_SECONDS, error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            self.index.budget = min(self.index.budget, max(self.index.num_bytes, size))  # one file is tried in any case
            self._full_until = time.monotonic() + FULL_SECONDS

    def _settle_loads(self) -> None:
        now = time.monotonic()
        for load in [*self._loads]:
            while load.reads and load.reads[0].future.done():
                self._settle_read(load, load.reads.popleft())
                load.since = now
            if load.is_awaited and (not load.reads or now - load.since > LONGEST_READ):
                load.is_awaited = False
                self._counts.seconds += now - load.begin
                load.end()
                if load.reads:
                    self._tell(
                        "stuck",
                        "the KV cache folder has not responded for %g s; it will not be read until it does",
                        LONGEST_READ,
                    )
            if not load.reads:
                self._loads.remove(load)
                for name in reversed(load.restored):  # later pages are evicted before those that they depend on
                    self._lanes[name.kind].table.host.expose(name.page_hash)

    def _settle_read(self, load: _Load, read: _Read) -> None:
        """Make what has been read a copy of the host. If that fails, the files that come after it are useless."""
        name = read.name
        del self._reading[name]
        table, memory = self._lanes[name.kind]
        error = read.future.exception()
        if error is not None:
            self._note_failed_read(name, error)
        elif self.index.find(name.kind, name.page_hash) == name and not load.broken:
            self._counts.bytes_in += memory.row_bytes
            self._counts.hits += name.kind == "page"
            self.index.touch([name.page_hash])
            if table.restore(name.page_hash, read.slot, name.parent):
                load.restored.append(name)
            return
        load.broken = True
        table.host.give_back(read.slot)

    def _note_failed_read(self, name: FileName, error: BaseException) -> None:
        self.index.remove(name)
        if isinstance(error, BadFileError):
            self._counts.bad += 1
            self._tell("bad", "discarded a damaged KV cache file: %s", error)
            self._remove_file(name)
        elif not isinstance(error, FileNotFoundError):  # another process has evicted it
            self._counts.failures += 1
            self._tell("read", "could not read a KV cache file; its contents will be recomputed: %s", error)

    def _tell(self, kind: str, message: str, *values: object) -> None:
        """Warn of the first failure of each kind."""
        if kind not in self._told:
            self._told.add(kind)
            log.warning(message, *values)

    def _start_scan(self) -> None:
        left = {name: future for name, future in self._removals.items() if not future.done() or future.exception()}
        self._removals = left
        self._scan_begin = time.monotonic()
        self._scan = self._scanner.submit(self._files.scan)

    def _take_scan(self) -> None:
        """Take in what a scan has found."""
        if self._scan is None or not self._scan.done():
            return
        scan = self._scan
        self._scan = None
        if self.is_left:
            return
        now = time.monotonic()
        self._next_scan = now + max(SCAN_SECONDS, 100 * (now - self._scan_begin))
        error = scan.exception()
        if error is not None:
            self._counts.failures += 1
            self._tell("scan", "could not scan the KV cache folder: %s", error)
            return
        added, removed = scan.result()
        writing = {write.name for write in self._writes}
        for found in added:
            if found.name not in self._removals:
                self.index.add(found.name, found.num_bytes)
        for name in removed:
            if name not in writing:
                self.index.remove(name)
        for name in self.index.make_room(0, [*self._reading, *writing]) or ():
            self._remove_file(name)
