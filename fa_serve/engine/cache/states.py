"""Which sequences hold which states of linear attention, and which states are worth keeping. Plain Python, no torch.

    states = StateTable(64, pages)
    states.begin_step()
    state = states.allocate()                        # the step that is being made writes it
    states.keep(state, page_hash)                    # others may start from it, once that step has been scheduled
    states.release(state)
    count, state = states.match(hashes)              # the longest prefix, in pages, after which a state is known
    states.acquire(state)                            # one more sequence reads it

Layers that keep a recurrent or a convolution state cannot start in the middle of a prompt as attention can: they need the state
after the tokens before. A *state* here is a state page: what all such layers of the model keep of one sequence, after a number
of tokens that is a multiple of the page size. It is written once, in full, and never changed, so that sequences share it like a
page. A later position has another state. The tokens since then are kept apart, by slot, and belong to one sequence.

A state is in exactly one of three conditions:

    free    no sequence holds it and its content is worthless
    cached  no sequence holds it, but it is registered; the least recently used one is evicted first
    held    as many sequences hold it as its reference count says

A state is registered under the hash of the page that it comes after, and only while that page is: `PageTable.on_forget` takes
the state along. Its hash covers every token before it and the salt, so states are isolated as pages are. A state may be evicted
alone. The pages of its prefix then still serve up to an earlier state. A state that a later one replaces, as the end of an
answer replaces the end of its prompt, is evicted before all others: least recently used alone would keep two states or more of
each conversation, and lose all of them when the memory holds one of each.

Left out: which positions get a state (prefix.py), which sequence gets one when (scheduler.py), and the memory (tensors.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fa_serve.engine.cache.pages import PageTable

MIN_STATES = 3
"""What one sequence needs: the state that it reads, the one that the step in flight reads, and the one that it writes."""
FEW_ROWS = 16
"""Rows of a sequence in a step up to which they are computed one after the other: decoding, drafts, short rests of prompts.
They may begin anywhere and store one state. More rows begin at a multiple of the page size and store any number of states."""
STATE_INTERVAL = 2048
"""Tokens of a prompt between states that are kept inside it."""


def chunk_length(start: int, length: int, missing: int, page_size: int) -> int:
    """How many of a sequence's next `length` tokens one chunk may compute, so that long chunks begin at multiples of page_size.

    start: position of the first of them; missing: known tokens that are not computed yet, at least `length`

    A chunk that leaves tokens for later ends at a multiple of page_size. If it does not reach one, it has FEW_ROWS at most.
    """
    if start % page_size:
        length = min(length, FEW_ROWS)
    if length == missing:
        return length
    whole = (start + length) // page_size * page_size - start
    return whole if whole > 0 else min(length, FEW_ROWS)


class StateTable:
    """Reference counts, the free list and the registered states of `num_states` states. Every operation is O(1).

    num_states: number of states that the memory holds
    pages:      the table whose hashes name the states. It tells this one which hashes it forgets
    interval:   tokens of a prompt between states that are kept inside it
    """

    def __init__(self, num_states: int, pages: PageTable, *, interval: int = STATE_INTERVAL) -> None:
        if num_states < MIN_STATES:
            raise ValueError(f"num_states must be at least {MIN_STATES}, got {num_states}")
        self.num_states = num_states
        self.interval = -(-interval // pages.page_size) * pages.page_size
        self._pages = pages
        self._free = list(range(num_states - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._references = [0] * num_states
        self._hash_of: dict[int, bytes] = {}
        self._state_of: dict[bytes, int] = {}
        self._fresh: set[int] = set()  # allocated since `begin_step`
        self._num_uses = [0] * num_states  # sequences that have started from the state
        pages.on_forget = self._forget

    @property
    def num_available(self) -> int:
        """States that `allocate` can hand out: free, or cached and evictable."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """States that sequences hold."""
        return self.num_states - self.num_available

    @property
    def num_kept(self) -> int:
        """States that a sequence could start from: registered ones, whether a sequence holds them or not."""
        return len(self._hash_of)

    def begin_step(self) -> None:
        """A new step is being made. What earlier steps write is there for it, because steps run in order."""
        self._fresh.clear()

    def is_ready(self, state: int) -> bool:
        """Whether the step that is being made may read the state. Within a step, states are read before they are written."""
        return state not in self._fresh

    def allocate(self) -> int:
        """A state that no other sequence holds, for the step that is being made to write. It may be evicted from the cache."""
        if self._free:
            state = self._free.pop()
        elif self._cached:
            state, _ = self._cached.popitem(last=False)
            del self._state_of[self._hash_of.pop(state)]
        else:
            raise RuntimeError(f"cannot allocate a state: all {self.num_states} are held")
        self._references[state] = 1
        self._num_uses[state] = 0
        self._fresh.add(state)
        return state

    def acquire(self, state: int) -> None:
        """One more sequence holds this state, which `match` has found."""
        if self._references[state] == 0:
            del self._cached[state]
        self._references[state] += 1
        self._num_uses[state] += 1

    def release(self, state: int) -> None:
        """One sequence less holds this state."""
        if self._references[state] == 0:
            raise RuntimeError(f"cannot release state {state}: no sequence holds it")
        self._references[state] -= 1
        if self._references[state] == 0:
            if state in self._hash_of:
                self._cached[state] = None
            else:
                self._free.append(state)

    def is_evictable(self, state: int) -> bool:
        """Whether the state is available now and would not be after `acquire`. state: -1 is none"""
        return state >= 0 and self._references[state] == 0

    def keep(self, state: int, page_hash: bytes) -> bool:
        """Others may start from this state, which comes after the page of this hash. A sequence holds it.

        Returns whether they may start from this state or one that is equal. They may not if the page is not registered.
        """
        if page_hash not in self._pages:
            return False
        other = self._state_of.get(page_hash)
        if other is None:
            self._state_of[page_hash] = state
            self._hash_of[state] = page_hash
        elif other in self._cached:
            self._cached.move_to_end(other)
        return True

    def replace(self, page_hash: bytes) -> None:
        """A later state of the same sequence is kept, so that the one after the page of this hash, if any, is evicted first.

        This holds for a state from which no two sequences have started. Others are where conversations part.
        """
        state = self._state_of.get(page_hash, -1)
        if state in self._cached and self._num_uses[state] < 2:
            self._cached.move_to_end(state, last=False)

    def match(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """The number of pages up to the last of these hashes that has a state, and that state; (0, -1) if none has one.

        The state is not held yet: see `acquire`. It may not be ready.
        """
        for count in range(len(hashes), 0, -1):
            state = self._state_of.get(hashes[count - 1])
            if state is not None:
                return count, state
        return 0, -1

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Nobody starts from the states after these pages from now on. Hashes that have no state are skipped."""
        for page_hash in hashes:
            self._forget(page_hash)

    def _forget(self, page_hash: bytes) -> None:
        state = self._state_of.pop(page_hash, None)
        if state is not None:
            del self._hash_of[state]
            if state in self._cached:
                del self._cached[state]
                self._free.append(state)

    def check_integrity(self, holders: Sequence[Sequence[int]] | None = None) -> None:
        """Assert that free + cached + held == total, that the pages of registered states are registered, and that reference
        counts are those of `holders` (states by sequence)."""
        free = set(self._free)
        cached = set(self._cached)
        held = {state for state, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a state is in the free list twice"
        assert len(free) + len(cached) + len(held) == self.num_states, (
            f"free {len(free)} + cached {len(cached)} + held {len(held)} != {self.num_states}"
        )
        assert len(free | cached | held) == self.num_states, "a state is in two conditions"
        assert all(count >= 0 for count in self._references), "a reference count is negative"
        assert self._state_of == {h: s for s, h in self._hash_of.items()}, "hashes and states disagree"
        assert cached <= self._hash_of.keys(), "a cached state has no hash"
        assert not free & self._hash_of.keys(), "a free state has a hash"
        assert all(page_hash in self._pages for page_hash in self._state_of), "a state outlives its page"
        if holders is not None:
            counts = [0] * self.num_states
            for states in holders:
                for state in states:
                    counts[state] += 1
            assert counts == self._references, "reference counts differ from what the sequences hold"
