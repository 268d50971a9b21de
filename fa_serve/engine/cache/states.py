"""Which sequences hold which states of linear attention, and which states are worth keeping. Plain Python, no torch.

    states = StateTable(64, pages)
    states.begin_step()
    state = states.allocate()                        # the step that is being made writes it
    states.keep(state, page_hash)                    # others may start from it, once that step has been scheduled
    states.release(state)
    count, state = states.match(hashes)              # the longest prefix, in pages, after which a state is known
    states.acquire(state)                            # one more sequence reads it

Layers that keep a recurrent or a convolution state cannot start in the middle of a prompt as attention can: they need the state
after the preceding tokens. A *state* here is a state page: what all such layers of the model keep of one sequence, after a
number of tokens that is a multiple of the page size. It is written once, in full, and never changed, so that sequences share it
like a page. A later position has another state. What the tokens since then contribute (the tail) is kept in the sequence's slot
and is not shared.

Like a page, a state is free, cached or held, and the host may have a copy of it (kept_items.py).

A state is registered under the hash of the page that it comes after, and only while that page is registered:
`PageTable.on_forget` drops the state with the page. The hash covers every token before it and the salt, so states are isolated
as pages are. A state may be evicted while its page stays. The pages of its prefix then still serve up to an earlier state. A
state that a later state replaces, as the end of an answer replaces the end of its prompt, is evicted before all others. Plain
least-recently-used eviction would keep two or more states of each conversation, and would lose all of them when the memory
holds only one per conversation.

Left out: which positions get a state (prefix.py), which sequence gets one when (scheduler.py), and the memory (tensors.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from fa_serve.engine.cache.kept_items import KeptItems
from fa_serve.engine.cache.pages import PageTable

MIN_STATES = 3
"""What one sequence needs: the state that it reads, the one that the step in flight reads, and the one that it writes."""
SHORT_CHUNK = 16
"""The rows of a chunk of up to this length are computed one after the other: decoding, drafts, short rests of prompts. It may
begin anywhere and stores one state. A longer one begins at a multiple of the page size and stores any number of states."""
STATE_INTERVAL = 2048
"""Tokens of a prompt between states that are kept inside it."""


def chunk_length(start: int, length: int, missing: int, page_size: int) -> int:
    """How many of a sequence's next `length` tokens one chunk may compute, so that long chunks begin at multiples of page_size.

    start: position of the first of them; missing: known tokens that are not computed yet, at least `length`

    A chunk that leaves tokens for later ends at a multiple of page_size. If it does not reach one, it has at most SHORT_CHUNK
    tokens.
    """
    if start % page_size:
        length = min(length, SHORT_CHUNK)
    if length == missing:
        return length
    whole = (start + length) // page_size * page_size - start
    return whole if whole > 0 else min(length, SHORT_CHUNK)


class StateTable(KeptItems):
    """Reference counts, the free list and the registered states of `num_states` states. Every operation is O(1).

    num_states: number of states that the memory holds
    pages:      the table whose hashes name the states. It calls this table for each hash that it forgets
    interval:   tokens of a prompt between states that are kept inside it
    """

    def __init__(self, num_states: int, pages: PageTable, *, interval: int = STATE_INTERVAL) -> None:
        if num_states < MIN_STATES:
            raise ValueError(f"num_states must be at least {MIN_STATES}, got {num_states}")
        super().__init__(num_states, "state")
        self.num_states = num_states
        self.interval = -(-interval // pages.page_size) * pages.page_size
        self._pages = pages
        self._fresh: set[int] = set()  # allocated since `begin_step`
        self._num_uses = [0] * num_states  # sequences that have started from the state
        pages.on_forget = self._forget
        pages.on_forget_all = self.forget_all

    def renewed(self, pages: PageTable) -> StateTable:
        """An empty table of as many states, for another `PageTable`."""
        return StateTable(self.num_states, pages, interval=self.interval)

    @property
    def num_kept(self) -> int:
        """States that a sequence could start from: registered ones, whether a sequence holds them or not."""
        return len(self._hash_of)

    def begin_step(self) -> None:
        """A new step is being made. It may read what earlier steps write, because steps run in order."""
        self._fresh.clear()

    def is_ready(self, state: int) -> bool:
        """Whether the step that is being made may read the state. Within a step, states are read before they are written."""
        return state not in self._fresh

    def allocate(self) -> int:
        """A state that no other sequence holds, for the step that is being made to write. It may be evicted from the cache."""
        if not self.num_available:
            raise RuntimeError(f"cannot allocate a state: all {self.num_states} are held")
        state = self.take()
        self._references[state] = 1
        self._fresh.add(state)
        return state

    def take(self) -> int:
        """A state that nobody holds: see `KeptItems.take`. No sequence counts as having started from it yet."""
        state = super().take()
        self._num_uses[state] = 0
        return state

    def acquire(self, state: int) -> None:
        """One more sequence holds this state, which `match` has found."""
        self.acquire_one(state)
        self._num_uses[state] += 1

    def release(self, state: int) -> None:
        """One sequence less holds this state."""
        self.release_one(state)

    def is_evictable(self, state: int) -> bool:
        """Whether the state is available now and would not be after `acquire`. state: -1 is none"""
        return state >= 0 and self._references[state] == 0

    def keep(self, state: int, page_hash: bytes) -> bool:
        """Let others start from this state, which comes after the page of this hash. A sequence holds it.

        Returns whether they may start from this state or from an equal one. They may not if the page is not registered.
        """
        if page_hash not in self._pages:
            return False
        other = self._item_of.get(page_hash)
        if other is None:
            self._item_of[page_hash] = state
            self._hash_of[state] = page_hash
        elif other in self._cached:
            self._cached.move_to_end(other)
        return True

    def replace(self, page_hash: bytes) -> None:
        """Evict the state after the page of this hash, if any, before all others: a later state of its sequence is kept.

        States from which two or more sequences have started are exempt, because conversations branch there.
        """
        state = self._item_of.get(page_hash, -1)
        if state in self._cached and self._num_uses[state] < 2:
            self._cached.move_to_end(state, last=False)

    def match(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """The number of pages up to the last of these hashes that has a state, and that state; (0, -1) if none has one.

        The state is not held yet: see `acquire`. It may not be ready.
        """
        for count in range(len(hashes), 0, -1):
            state = self._item_of.get(hashes[count - 1])
            if state is not None:
                return count, state
        return 0, -1

    def reach(self, hashes: Sequence[bytes]) -> int:
        """The number of pages up to the last of these hashes that has a state, on the device or on the host."""
        return next((n for n in range(len(hashes), 0, -1) if hashes[n - 1] in self), 0)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Let nobody start from the states after these pages any more. Hashes that have no state are skipped."""
        for page_hash in hashes:
            self._forget(page_hash)

    def _register_restored(self, page_hash: bytes, parent: bytes) -> bool:
        return page_hash in self._pages

    def _lose(self, page_hash: bytes) -> None:
        del self._hash_of[self._item_of.pop(page_hash)]

    def _forget(self, page_hash: bytes) -> None:
        self._cancel(page_hash)
        state = self._item_of.pop(page_hash, None)
        if state is not None:
            del self._hash_of[state]
            if state in self._cached:
                del self._cached[state]
                self._free.append(state)

    def check_integrity(self, holders: Sequence[Sequence[int]] | None = None) -> None:
        """Assert that free + cached + held == total, that the pages of registered states are registered, and that reference
        counts are those of `holders` (states by sequence)."""
        self.check_conditions(holders)
        assert all(page_hash in self._pages for page_hash in (*self._item_of, *self.host)), "a state outlives its page"
