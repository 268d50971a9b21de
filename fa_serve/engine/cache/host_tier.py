"""The host tier of the KV cache: copies pages and states to the host before they are evicted, and back when they are needed.

    tier = HostTier(Lane(pages, page_copies, depth=64))
    tier.begin_step()                        # before each step: settle copies that have ended, and begin new ones to the host
    tier.fetch(hashes, b"", end)             # a sequence waits, and a later step finds these pages on the device

An evicted page is demoted, not dropped: `PageTable` keeps its hash, under which the copy on the host is found. Copies run while
steps run. The next `depth` items to be evicted are copied ahead of time, so that an eviction does not wait. A long prompt takes
many pages at once when it is admitted, so it first waits for the copies that are missing (`save`), for at most LONGEST_WAIT.
Items that are evicted before their copy has ended are lost, as they would be without the tier. What a waiting sequence needs is
copied back to pages of the device, which join the prefix cache when the copy has ended. Then the sequence is admitted and
shares them like any other pages. Copies are isolated as pages are, by salt and adapter: a copy is found only under the hash of
its page, and is dropped when the hash is forgotten.

With a folder, copies on the host are written to files, and a sequence waits until the files that it needs have been read to the
host (folder_tier.py). While there is no request, `save_one` also writes what only the device has; `close` does so for at most
FLUSH_SECONDS.

A copy that fails ends no request: an item that was to leave is lost when it is evicted, and an item that was to come back is
computed again. Left out: which items are evicted next (kept_items.py), and the copies themselves (`HostCopies`, implemented in
runner/host_memory.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from fa_serve.engine.cache.folder_tier import FolderLane, FolderStats, FolderTier, Wanted
from fa_serve.engine.cache.kept_items import KeptItems, Move

log = logging.getLogger("fa_serve.engine")

BATCH_BYTES = 256 << 20
"""Bytes that are on their way to the host at once: what a PCIe 5.0 link copies in 5 milliseconds. The limit is higher if one
step takes more pages (`Lane.batch`)."""
LONGEST_WAIT = 0.5
"""Seconds that a prompt waits for copies of the pages that are evicted for it. A PCIe 4.0 link copies 10 GB in that time."""
STAGED_BYTES = 32 << 20
"""Bytes of one copy to the host for files that are written while there is no request. A request that arrives waits for it."""
IDLE_SECONDS = 0.02
FLUSH_SECONDS = 1.0
"""Seconds that a closing engine spends on writing what only the device has. Servers end an engine that takes more than two."""
SETTLE_SECONDS = 5.0
KINDS = ("page", "state")
"""The kind of the files of each lane, in the order of `HostTier.lanes`."""


class CopyError(Exception):
    """A copy between the device and the host has failed, but the device still works."""


class Copying(Protocol):
    """Copies on their way."""

    def is_done(self) -> bool:
        """Whether they have ended. Raises CopyError if they have failed, after which nothing is written any more."""

    def wait(self) -> None:
        """Return when they have ended."""


class HostCopies(Protocol):
    """Slots in host memory for copies of rows of the device: pages, or states. num_slots: how many slots exist so far

    `to_host` and `to_device` return when the copies are queued, and raise CopyError. A copy begins after the steps that were
    launched before it have read and written their rows. Until a copy has ended, nothing else writes to the slots that it reads
    or to the rows that it writes. The rows that it reads may be overwritten; the copy is then worthless.
    """

    num_slots: int
    row_bytes: int

    def to_host(self, rows: Sequence[int], slots: Sequence[int]) -> Copying: ...

    def to_device(self, slots: Sequence[int], rows: Sequence[int]) -> Copying: ...

    def slot_bytes(self, slot: int) -> memoryview:
        """The memory of a slot, to be written to a file or filled from one, by any thread."""

    def close(self) -> None:
        """Give the memory back. No copy may be on its way."""


@dataclass(frozen=True, slots=True)
class HostTierStats:
    """What the host tier has done. All counters start at 0 with the engine.

    num_bytes, num_bytes_used: bytes of host memory that exist so far, and bytes that hold copies
    num_hits, num_misses: pages that were copied back for a sequence, and full pages of prompts that neither device nor host had
    bytes_in, bytes_out: copied from the host to the device, and from the device to the host
    num_evictions: copies that were evicted from the host
    num_lost:      pages and states that were evicted from the device before they could be copied
    num_failures:  copies that failed
    seconds:       seconds that sequences have waited for copies to the device
    folder:        counters of the folder; None if the engine has no folder
    """

    num_bytes: int = 0
    num_bytes_used: int = 0
    num_hits: int = 0
    num_misses: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    num_evictions: int = 0
    num_lost: int = 0
    num_failures: int = 0
    seconds: float = 0.0
    folder: FolderStats | None = None


@dataclass(slots=True, eq=False)
class Lane:
    """A table of pages or of states, and the copies of its items.

    depth: number of items, of those handed out next, that the host should have copies of
    batch: number of items that one step hands out; at least this many may be copied at once, even beyond BATCH_BYTES
    """

    table: KeptItems
    copies: HostCopies
    depth: int
    batch: int = 1
    leaving: int = 0  # batches of copies to the host that are on their way
    seen: int = -1  # `table.num_changes` when all of the next items had copies

    @property
    def slack(self) -> int:
        """How many of the next items may lack copies before the lane looks for them."""
        return max(self.depth // 8, 1)

    def is_due(self) -> bool:
        """Whether it is time to look for items that lack copies. Looking costs time, so it is done every `slack` changes."""
        return not self.leaving and (self.seen < 0 or self.table.num_changes - self.seen >= self.slack)


@dataclass(slots=True, eq=False)
class _Job:
    lane: Lane
    moves: list[Move]
    copying: Copying
    to_host: bool
    begin: float
    end: Callable[[], None]


class HostTier:
    """Owner of the copies that are on their way. The tables know which items and slots hold what.

    pages, states: the lanes; states is None for a model without states
    folder:        keeps copies in files; None if the engine has no folder
    """

    def __init__(self, pages: Lane, states: Lane | None = None, folder: FolderTier | None = None) -> None:
        self._pages = pages
        self.lanes = [pages] if states is None else [pages, states]
        self._states = states
        self.folder = folder
        self._unsaved: deque[tuple[str, bytes]] = deque()  # what the device has and `save_one` has not looked at yet
        self._seen_saved = -1  # `num_changes` of the tables when `_unsaved` was listed
        if folder is not None:
            folder.connect(_folder_lanes(self.lanes))
        self._jobs: deque[_Job] = deque()
        self._is_saving = False  # a sequence waits for copies to the host
        self._waits_since: float | None = None
        self._waiter: object = None
        self._hits = 0
        self._misses = 0
        self._bytes_in = 0
        self._bytes_out = 0
        self._failures = 0
        self._seconds = 0.0

    def begin_step(self) -> None:
        """Settle the copies that have ended, and begin to copy what is evicted next."""
        self._is_saving = False
        if self._jobs:
            self._take_in()
        for lane in self.lanes:
            if (count := lane.copies.num_slots - lane.table.host.num_slots) > 0:
                lane.table.host.grow(count)
                lane.seen = -1
            room = max(BATCH_BYTES // lane.copies.row_bytes, lane.batch)
            while room > 0 and lane.is_due():
                room -= self._demote(lane, lane.depth, room)
        if (
            self.folder is not None
        ):  # last, so that no copy that has arrived for a sequence is evicted before the sequence is served
            self.folder.begin_step()

    def save(self, count: int, kept: Collection[int], waiter: object = None) -> bool:
        """Whether `count` pages may be taken now, because the host has copies of the pages that are evicted for them.

        The host then has copies of a few more pages, because answers grow while copies are made.

        If the result is False, copies are on their way. It is also True if the host has no room for copies, if they fail, and
        after LONGEST_WAIT: then some pages are lost.

        kept:   pages that are not evicted
        waiter: the sequence that takes the pages; the wait begins anew when another sequence asks
        """
        lane = self._pages
        if lane.table.lacks_copies(count + lane.slack, kept):
            if not lane.leaving:
                depth = count + len(kept) + lane.depth
                self._demote(lane, depth, depth)
            now = time.monotonic()
            if self._waits_since is None or self._waiter is not waiter:
                self._waits_since = now
                self._waiter = waiter
            if lane.leaving and now - self._waits_since <= LONGEST_WAIT:
                self._is_saving = True
                return False
        self._waits_since = None
        self._waiter = None
        return True

    def fetch(self, pages: Sequence[bytes], state: bytes, end: Callable[[], None]) -> bool:
        """Begin to copy these pages, and the state, from the host. Returns False if that fails; they are forgotten then.

        pages: hashes of pages that the host has, in order; state: the hash of a state that it has, or empty
        end:   called when the copies have ended, successfully or not
        """
        wanted = [(self._pages, list(pages))]
        if state and self._states is not None:
            wanted.append((self._states, [state]))
        started = []
        for lane, hashes in wanted:
            moves = lane.table.start_arriving(hashes)
            if not moves:
                continue
            try:
                copying = lane.copies.to_device([move.slot for move in moves], [move.item for move in moves])
            except CopyError as error:
                self._note_failure(error)
                lane.table.end_arriving(moves, False)
                continue
            started.append((lane, moves, copying))
        for number, (lane, moves, copying) in enumerate(started, 1):
            last = number == len(started)
            self._jobs.append(_Job(lane, moves, copying, False, time.monotonic(), end if last else _nothing))
        if not started:
            end()
        self._take_in()
        return bool(started)

    def load(self, wanted: Sequence[Wanted], kept: Collection[bytes], end: Callable[[], None]) -> bool:
        """Begin to read files to the host. Returns False if that is not possible. See `FolderTier.load`."""
        return self.folder is not None and self.folder.load(wanted, kept, end)

    def note_use(self, hashes: Sequence[bytes]) -> None:
        """A sequence uses these pages of the device, in order."""
        if self.folder is not None:
            self.folder.touch(hashes)

    def note_misses(self, count: int) -> None:
        """`count` full pages of a prompt were found neither on the device nor on the host."""
        self._misses += count

    @property
    def is_fetching(self) -> bool:
        """Whether anything is on its way from the host."""
        return any(not job.to_host for job in self._jobs)

    @property
    def is_awaited(self) -> bool:
        """Whether a sequence waits for copies, from the host or to it."""
        return self._is_saving or self.is_fetching or (self.folder is not None and self.folder.is_awaited)

    def wait(self) -> None:
        """Wait for the oldest copies or files that a sequence waits for. Call this when there is nothing else to do."""
        job = next((job for job in self._jobs if self._is_saving or not job.to_host), None)
        if job is not None:
            job.copying.wait()
        elif self.folder is not None:
            self.folder.wait(IDLE_SECONDS)

    def save_one(self) -> bool:
        """Write some of the items that have no file, the most recently used first. Returns whether anything is left.

        Call this when there is no request. Each item is written once, and no more items than the folder can hold.
        """
        folder = self.folder
        if folder is None or not folder.can_write:
            return False
        self.begin_step()
        self._list_unsaved(folder)
        for kind, lane in zip(KINDS, self.lanes, strict=False):
            room = max(min(STAGED_BYTES // lane.copies.row_bytes, lane.copies.num_slots // 8), 1)
            hashes: list[bytes] = []
            while self._unsaved and self._unsaved[0][0] == kind and len(hashes) < room:
                _, page_hash = self._unsaved.popleft()
                if not folder.has(kind, page_hash):
                    hashes.append(page_hash)
            self._save(folder, kind, lane, hashes)
        folder.wait_for_writes(IDLE_SECONDS)
        return bool(self._unsaved) or folder.is_writing

    def _list_unsaved(self, folder: FolderTier) -> None:
        """List the cached items of the device, if they have changed since the last time."""
        changes = sum(lane.table.num_changes for lane in self.lanes)
        if changes == self._seen_saved:
            return
        self._seen_saved = changes
        self._unsaved.clear()
        for kind, lane in zip(KINDS, self.lanes, strict=False):
            hashes = lane.table.cached_hashes(folder.num_that_fit(kind) // len(self.lanes))
            folder.touch(hashes)
            self._unsaved.extend((kind, page_hash) for page_hash in hashes)

    def _save(self, folder: FolderTier, kind: str, lane: Lane, hashes: Sequence[bytes]) -> None:
        """Copy these items to slots of the host, and write them to files."""
        moves = lane.table.start_saving(hashes)
        if not moves:
            return
        try:
            copying = lane.copies.to_host([move.item for move in moves], [move.slot for move in moves])
            copying.wait()
            copying.is_done()
        except CopyError as error:
            self._note_failure(error)
            for move in moves:
                lane.table.host.give_back(move.slot)
            return
        folder.save_staged(kind, moves)

    def finish(self) -> None:
        """Wait for all copies, and settle them."""
        self.drain()
        self._take_in()
        assert not self._jobs

    def drain(self) -> None:
        """Wait for all copies without settling them: the state of the tables may be inconsistent."""
        for job in self._jobs:
            job.copying.wait()

    def renewed(self, pages: KeptItems, states: KeptItems | None) -> HostTier:
        """A tier with the same memory for new tables. The copies in this memory are lost."""
        self.drain()
        lanes = [
            Lane(table, lane.copies, lane.depth, lane.batch)
            for lane, table in zip(self.lanes, (pages, states), strict=False)
            if table is not None
        ]
        folder = self.folder
        if folder is not None:
            folder.reconnect(_folder_lanes(lanes), SETTLE_SECONDS)
        return HostTier(lanes[0], lanes[1] if states is not None else None, folder)

    def leave_folder(self) -> None:
        """The weights have changed, so files are neither read nor written from now on."""
        if self.folder is not None and not self.folder.is_left:
            log.warning("the KV cache folder is no longer used, because the weights have changed")
            self.folder.leave()

    def close(self) -> None:
        """Write files for FLUSH_SECONDS at most, then wait for all copies and give the host's memory back."""
        if self.folder is not None:
            end = time.monotonic() + FLUSH_SECONDS
            with suppress(RuntimeError):  # the device may be lost
                while self.save_one() and time.monotonic() < end:
                    pass
            self.folder.close()
        self.drain()
        for lane in self.lanes:
            lane.copies.close()

    def snapshot(self) -> HostTierStats:
        hosts = [(lane.table.host, lane.copies.row_bytes) for lane in self.lanes]
        return HostTierStats(
            num_bytes=sum(host.num_slots * size for host, size in hosts),
            num_bytes_used=sum(len(host) * size for host, size in hosts),
            num_hits=self._hits,
            num_misses=self._misses,
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
            num_evictions=sum(host.num_evictions for host, _ in hosts),
            num_lost=sum(lane.table.num_lost for lane in self.lanes),
            num_failures=self._failures,
            seconds=self._seconds,
            folder=None if self.folder is None else self.folder.snapshot(),
        )

    def _demote(self, lane: Lane, depth: int, room: int) -> int:
        """Begin to copy those of the next `depth` items that lack copies, `room` at most. Returns what it uses of `room`."""
        changes = lane.table.num_changes
        moves = lane.table.start_leaving(depth, room)
        if len(moves) < room and depth >= lane.depth:
            lane.seen = changes  # no other item lacks a copy, or there is no room on the host
        if not moves:
            return 0
        try:
            copying = lane.copies.to_host([move.item for move in moves], [move.slot for move in moves])
        except CopyError as error:
            self._note_failure(error)
            lane.table.end_leaving(moves, False)
            return room
        lane.leaving += 1
        self._jobs.append(_Job(lane, moves, copying, True, time.monotonic(), _nothing))
        self._take_in()
        return len(moves)

    def _take_in(self) -> None:
        """Settle the copies that have ended."""
        for _ in range(len(self._jobs)):
            job = self._jobs.popleft()
            try:
                if not job.copying.is_done():
                    self._jobs.append(job)
                    continue
                copied = True
            except CopyError as error:
                self._note_failure(error)
                copied = False
            self._settle(job, copied)

    def _settle(self, job: _Job, copied: bool) -> None:
        num_bytes = len(job.moves) * job.lane.copies.row_bytes if copied else 0
        if job.to_host:
            job.lane.leaving -= 1
            job.lane.table.end_leaving(job.moves, copied)
            self._bytes_out += num_bytes
        else:
            job.lane.table.end_arriving(job.moves, copied)
            self._bytes_in += num_bytes
            if copied and job.lane is self._pages:
                self._hits += len(job.moves)
            self._seconds += time.monotonic() - job.begin
        job.end()

    def _note_failure(self, error: CopyError) -> None:
        if not self._failures:
            log.warning("copying part of the KV cache to or from the host failed; it will be recomputed when needed: %s", error)
        self._failures += 1


def _folder_lanes(lanes: Sequence[Lane]) -> dict[str, FolderLane]:
    return {kind: FolderLane(lane.table, lane.copies) for kind, lane in zip(KINDS, lanes, strict=False)}


def _nothing() -> None:
    """Nothing is to be done when copies to the host have ended."""
