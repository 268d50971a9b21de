"""Which pages and states sequences hold, and which of them the prefix cache offers to others. Plain Python, no torch.

    prefix = Prefix(pages, states)           # states: None for a model without linear attention
    shared = prefix.shared(sequence)         # cached pages with its first tokens, and the state after them
    prefix.offer(sequence)                   # its full pages are shared from now on, and some of its states
    prefix.withdraw(sequence, start)         # pages from token `start` on are not shared: they are missing or not finite

Pages are offered when the step that fills them is scheduled. This is safe because steps run in order, and within a step every
layer writes all keys and values before it reads any. States are offered at the same time, but a step reads all states before it
writes any: a sequence that wants a state of the step being made waits for the next step.

A model with states can only begin after a page whose state is known, so a shared prefix ends at such a page. Four kinds of
states are kept: after the last page of a prompt, after the newest page of a sequence that ends or is preempted, where a prompt
diverges from pages that others have computed, and every `StateTable.interval` tokens. The first kind serves a prompt that is
sent again; the second kind serves a conversation that continues. Left out: who gets pages and states when (scheduler.py), the
hashes of pages (pages.py), and what is evicted (pages.py and states.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fa_serve.engine.cache.folder_tier import FolderTier, Wanted
from fa_serve.engine.cache.host_tier import HostTier
from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.cache.states import SHORT_CHUNK, StateTable
from fa_serve.engine.scheduler.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Room:
    """Numbers of pages and of states, available or needed."""

    pages: int
    states: int = 0

    def holds(self, *needs: Room) -> bool:
        """Whether all these needs can be met together."""
        return sum(each.pages for each in needs) <= self.pages and sum(each.states for each in needs) <= self.states


NOTHING = Room(0)
MAX_LOADED = 1024
"""How many waiting requests are remembered as having read files. For requests beyond that, files may be read again."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """What a waiting sequence finds in the prefix cache. Nothing of it is held yet.

    pages:   pages with the keys and values of its first tokens
    state:   the state after these pages; -1: none
    branch:  number of tokens that cached pages cover, if `pages` ends earlier because no state is known there; else 0
    awaited: the sequence should wait: the step being made writes a state after more pages, or more is on its way
    missing: hashes of the pages that come next and that only the host has, in order
    missing_state: hash of the state after them, or after `pages`, that only the host has; empty if none is missing
    filed: what comes after all these and only files have: pages in order, and then a state
    """

    pages: list[int]
    state: int = -1
    branch: int = 0
    awaited: bool = False
    missing: Sequence[bytes] = ()
    missing_state: bytes = b""
    filed: Sequence[Wanted] = ()

    @property
    def is_on_device(self) -> bool:
        """Whether nothing has to come from the host, or from files."""
        return not self.missing and not self.missing_state and not self.filed

    @property
    def is_coming(self) -> bool:
        """Whether pages or a state are on their way from the host. They were requested only because there was room for them."""
        return self.awaited and not self.is_on_device


class Prefix:
    """The scheduler's access to the `PageTable`, to the `StateTable` of a model with states, and to the host tier if any."""

    def __init__(self, pages: PageTable, states: StateTable | None = None, tier: HostTier | None = None) -> None:
        self._pages = pages
        self._states = states
        self._tier = tier
        self._fetching: dict[int, SharedPrefix] = {}  # prefixes that are held while the rest of them is on its way
        self._loaded: OrderedDict[str, int] = OrderedDict()  # by request, how many pages were known when files were last read
        self._last_hashed: SequenceState | None = None

    def begin_step(self) -> None:
        """A new step is being made."""
        if self._states is not None:
            self._states.begin_step()
        if self._tier is not None:
            self._tier.begin_step()

    def shared(self, sequence: SequenceState) -> SharedPrefix:
        """What the prefix cache has for the first tokens of a waiting sequence."""
        pages = self._pages
        self._hash_pages(sequence)
        # The last token is always computed, because its logits are needed. For prompt_logprobs all tokens are computed.
        searched = sequence.shares and not sequence.num_prompt_logits(2)
        known = (sequence.num_tokens - 1) // pages.page_size if searched else 0
        hashes = sequence.page_hashes[:known]
        found = pages.match(hashes)
        if self._tier is not None:
            shared = self._shared_with_host(hashes, found)
            folder = self._tier.folder
            return shared if folder is None else self._shared_with_folder(folder, sequence, hashes, shared)
        if self._states is None:
            return SharedPrefix(found)
        return self._shared_with_state(self._states, hashes, found)

    def num_missing(self, sequence: SequenceState) -> int:
        """Known tokens of a waiting sequence that have to be computed: neither the device nor the host nor files have them."""
        shared = self.shared(sequence)
        filed = sum(each.kind == "page" for each in shared.filed)
        return sequence.num_tokens - (len(shared.pages) + len(shared.missing) + filed) * self._pages.page_size

    def num_cached(self, sequence: SequenceState) -> int:
        """Known tokens of a waiting sequence that need not be computed."""
        return sequence.num_tokens - self.num_missing(sequence)

    def _hash_pages(self, sequence: SequenceState) -> None:
        """Compute the hashes that a sequence lacks. A prompt that begins like the one before it takes over its first hashes.

        Comparing tokens is several times as fast as hashing them.
        """
        request = sequence.request
        hashes = sequence.page_hashes
        content = sequence.content
        last = self._last_hashed
        if not hashes and last is not None and last.request.has_chain_of(request):
            count = _num_equal(last.content, content) // self._pages.page_size
            hashes.extend(last.page_hashes[:count])
        self._pages.hash_pages(content, hashes, request.cache_salt, request.adapter_number)
        self._last_hashed = sequence

    def _shared_with_state(self, states: StateTable, hashes: Sequence[bytes], found: list[int]) -> SharedPrefix:
        """What the device has of a prefix, for a model with states. found: pages with these hashes, or the first ones"""
        longest, state = states.match(hashes[: len(found)])
        count = longest
        while count and not states.is_ready(state):
            count, state = states.match(hashes[: count - 1])
        branch = len(found) * self._pages.page_size if len(found) > count else 0
        return SharedPrefix(found[:count], state, branch, awaited=longest > count)

    def _shared_with_host(self, hashes: Sequence[bytes], found: list[int]) -> SharedPrefix:
        """What the device and the host have of a prefix, for a model with or without states."""
        pages = self._pages
        states = self._states
        count = len(found) + pages.reach(hashes[len(found) :])
        state_hash = b""
        if states is not None:
            here = self._shared_with_state(states, hashes, found)
            count = states.reach(hashes[:count])
            if here.awaited or count <= len(here.pages):
                return here
            if not states.has(hashes[count - 1]):
                state_hash = hashes[count - 1]
        missing = [page_hash for page_hash in hashes[len(found) : count] if not pages.has(page_hash)]
        arriving = any(map(pages.is_arriving, missing)) or (states is not None and states.is_arriving(state_hash))
        return SharedPrefix(found[:count], awaited=arriving, missing=missing, missing_state=state_hash)

    def _shared_with_folder(
        self, folder: FolderTier, sequence: SequenceState, hashes: Sequence[bytes], shared: SharedPrefix
    ) -> SharedPrefix:
        """What the device, the host and files have of a prefix. Files count where they reach further than device and host.

        They do not count if files have been read for this sequence before and the known prefix has not grown since.
        """
        count = self._pages.reach(hashes)
        end = count + folder.reach(hashes[count:])
        state = b""
        if self._states is not None:
            end = next((n for n in range(end, 0, -1) if self._has_state(folder, hashes[n - 1])), 0)
            if end and hashes[end - 1] not in self._states:
                state = hashes[end - 1]
        if end <= len(shared.pages) + len(shared.missing):
            return shared
        chain = (b"", *hashes)
        filed = [Wanted("page", chain[n + 1], chain[n]) for n in range(count, end)]
        if state:
            filed.append(Wanted("state", state, chain[end - 1]))
        if any(folder.is_loading(each.kind, each.page_hash) for each in filed):
            return replace(shared, filed=filed, awaited=True)
        return shared if count <= self._loaded.get(sequence.request.request_id, -1) else replace(shared, filed=filed)

    def _has_state(self, folder: FolderTier, page_hash: bytes) -> bool:
        """Whether a state after this page is known anywhere."""
        assert self._states is not None
        return page_hash in self._states or folder.has("state", page_hash)

    def complete(self, sequence: SequenceState, shared: SharedPrefix) -> SharedPrefix:
        """Begin to copy from the host what a waiting sequence, for which there is room, lacks. Returns what is shared now.

        The result is `awaited` unless nothing was missing, or copies ended at once or failed. First the host gets copies of the
        pages that are evicted for the sequence. What only files have is read to the host, and a later step copies it from
        there.
        """
        while self._tier is not None and not shared.awaited:
            if not self._save(self._tier, sequence, shared):
                return replace(shared, awaited=True)
            if shared.missing or shared.missing_state:
                self._hold(shared)
                self._tier.fetch(shared.missing, shared.missing_state, partial(self._let_go, shared))
            elif not shared.filed:
                break
            elif self._load(self._tier, sequence, shared):
                return replace(shared, awaited=True)
            shared = self.shared(sequence)
        return shared

    def _save(self, tier: HostTier, sequence: SequenceState, shared: SharedPrefix) -> bool:
        """Whether the host has copies of the pages that are evicted for a sequence. Copies that the sequence needs are kept."""
        num_pages = self._pages.pages_for(sequence.num_tokens) - len(shared.pages)
        own = sequence.page_hashes[len(shared.pages) : self._pages.reach(sequence.page_hashes)]
        for page_hash in own:
            self._pages.host.protect(page_hash)
        is_saved = tier.save(num_pages, set(shared.pages), sequence)
        for page_hash in reversed(own):
            self._pages.host.expose(page_hash)
        return is_saved

    def _load(self, tier: HostTier, sequence: SequenceState, shared: SharedPrefix) -> bool:
        """Begin to read the files that a sequence waits for. Returns False if nothing can be read."""
        self._loaded[sequence.request.request_id] = self._pages.reach(sequence.page_hashes)
        if len(self._loaded) > MAX_LOADED:  # requests that were aborted have left their entries
            self._loaded.popitem(last=False)
        self._hold(shared)
        kept = {*sequence.page_hashes}
        if not tier.load(shared.filed, kept, partial(self._let_go, shared)):
            self._let_go(shared)
            return False
        return True

    def _hold(self, shared: SharedPrefix) -> None:
        """Hold the pages of a prefix, so that nobody evicts them while the rest is on its way."""
        self._pages.acquire(shared.pages)
        self._fetching[id(shared)] = shared

    def _let_go(self, shared: SharedPrefix) -> None:
        del self._fetching[id(shared)]
        self._pages.release(shared.pages)

    def acquire(self, sequence: SequenceState, shared: SharedPrefix) -> None:
        """The sequence holds these pages and this state from now on."""
        self._pages.acquire(shared.pages)
        if self._states is not None and shared.state >= 0:
            self._states.acquire(shared.state)
        if self._tier is None:
            return
        self._loaded.pop(sequence.request.request_id, None)
        self._tier.note_use(sequence.page_hashes[: len(shared.pages)])
        if not sequence.num_at_start:
            self._tier.note_misses((sequence.num_tokens - 1) // self._pages.page_size - len(shared.pages))

    def available(self, running: Sequence[SequenceState] = ()) -> Room:
        """What can be allocated, now or when the steps in flight of these sequences have been committed."""
        if self._states is None:
            return Room(self._pages.num_available)
        return Room(self._pages.num_available, self._states.num_available + sum(len(x.retired) for x in running))

    def need(self, sequence: SequenceState, shared: SharedPrefix) -> Room:
        """What a waiting sequence takes when it is admitted: pages for all its tokens, and a state if it fills a page."""
        pages = self._pages
        num_pages = pages.pages_for(sequence.num_tokens) - len(shared.pages) + pages.num_evictable(shared.pages)
        if self._states is None:
            return Room(num_pages)
        fills = sequence.num_tokens // pages.page_size > len(shared.pages)
        return Room(num_pages, fills + (self._states.is_evictable(shared.state) or bool(shared.missing_state)))

    def growth(self, running: Sequence[SequenceState]) -> Room:
        """What the running sequences lack for their next tokens. Some have more pages than they need, for drafts.

        Sequences that lack a state can take turns, because each gives one back when its step is committed. So one is enough.
        """
        pages_for = self._pages.pages_for
        growing = [x for x in running if not x.is_last_pending]
        num_pages = sum(max(pages_for(x.num_tokens) - len(x.pages), 0) for x in growing)
        if self._states is None:
            return Room(num_pages)
        return Room(num_pages, any(x.num_tokens - x.state_position >= self._pages.page_size for x in growing))

    def reserve(self, num_running: int) -> Room:
        """What has to be left for the running sequences when another one is admitted, or it might be preempted at once.

        Each may need a page soon. The reserve of states is what two decoding steps take on average, and one for a prompt.
        """
        if self._states is None or not num_running:
            return Room(num_running)
        return Room(num_running, 1 - (-2 * num_running // self._pages.page_size))

    def is_scarce(self, num_running: int) -> bool:
        """Whether running sequences might lack room for their next tokens."""
        if self._pages.num_available < num_running:
            return True
        return self._states is not None and self._states.num_available == 0

    def draft_end(self, sequence: SequenceState, num_running: int) -> int:
        """The largest number of tokens, drafts included, for which there are pages and states for a sequence.

        Drafts preempt no sequence, and leave a page for each running sequence. In a model with states, drafts fill at most one
        page, because a step of few tokens stores one state, and they fill none if states are scarce.
        """
        size = self._pages.page_size
        end = (len(sequence.pages) + max(self._pages.num_available - num_running, 0)) * size
        if self._states is None:
            return end
        fills = len(sequence.tokens) - sequence.state_position >= size
        if not fills and self._states.num_available <= self.reserve(num_running).states:
            return min(end, sequence.state_position + size - 1)
        return min(end, sequence.state_position + 2 * size - 1)

    def can_store(self, sequence: SequenceState, length: int) -> bool:
        """Whether there is a state for the last page that the sequence's next `length` tokens fill."""
        assert self._states is not None
        fills = sequence.num_computed + length - sequence.state_position >= self._pages.page_size
        return not fills or self._states.num_available > 0

    def store(
        self, sequence: SequenceState, start: int, length: int, num_drafts: int, num_running: int
    ) -> Sequence[tuple[int, int]]:
        """Allocate the states that a step writes for `length` tokens from `start` on, and drafts: (position, state), in order.

        The sequence continues from the last one. The states before it are for other sequences, and use only spare states.
        """
        assert self._states is not None
        size = self._pages.page_size
        last = (start + length + num_drafts) // size * size
        if last <= sequence.state_position:
            return ()
        positions = [last]
        if length > SHORT_CHUNK and self._pages.prefix_caching:
            interval = self._states.interval
            inside = {_prompt_end(sequence, size), sequence.branch, *range(start // interval * interval, last, interval)}
            spare = max(self._states.num_available - 1 - self.reserve(num_running).states, 0)
            kept = sorted(position for position in inside if start < position < last)
            positions = [*kept[len(kept) - min(spare, len(kept)) :], last]
        return [(position, self._states.allocate()) for position in positions]

    def offer(self, sequence: SequenceState) -> None:
        """Register the pages that are full, or will be when the launched steps have run, and states after them."""
        pages = self._pages
        if not pages.prefix_caching:
            return
        full = min(sequence.num_computed, len(sequence.tokens)) // pages.page_size
        if full <= sequence.num_offered:
            return
        hashes = sequence.page_hashes
        pages.hash_pages(sequence.content, hashes, sequence.request.cache_salt, sequence.request.adapter_number)
        for index in range(sequence.num_offered, full):
            pages.register(sequence.pages[index], hashes[index], hashes[index - 1] if index else b"")
        if self._states is not None:
            self._offer_states(self._states, sequence, full)
        sequence.offer(full)

    def _offer_states(self, states: StateTable, sequence: SequenceState, full: int) -> None:
        """Register the states after newly full pages, up to page `full`, from which other sequences may want to start."""
        size = self._pages.page_size
        for held in sequence.held_states:
            if sequence.num_offered * size < held.position <= full * size and (
                held.position in (_prompt_end(sequence, size), sequence.branch) or held.position % states.interval == 0
            ):
                states.keep(held.state, sequence.page_hashes[held.position // size - 1])

    def keep_newest(self, sequence: SequenceState, limit: int) -> None:
        """Keep the newest state of a sequence that leaves, so that it or a longer prompt continues from there.

        It replaces the state from which the sequence started and the one at the end of its prompt.

        limit: number of leading tokens whose states are known to be right
        """
        if self._states is None:
            return
        hashes = sequence.page_hashes
        for held in reversed(sequence.held_states):
            count = held.position // self._pages.page_size
            if held.position <= limit and count <= len(hashes) and self._states.keep(held.state, hashes[count - 1]):
                for replaced in {sequence.num_shared, _prompt_end(sequence, self._pages.page_size) // self._pages.page_size}:
                    if 0 < replaced < count and replaced * self._pages.page_size != sequence.branch:
                        self._states.replace(hashes[replaced - 1])
                return

    def release(self, sequence: SequenceState) -> None:
        """A sequence leaves: it does not hold its pages and states any more."""
        if not sequence.finished and self._folder is not None:
            first = self._first_unconfirmed(sequence)
            sequence.leave_unfiled(self._folder.lacking(sequence.page_hashes[first : sequence.num_offered]))
        self._pages.release(sequence.held_pages)
        if self._states is not None:
            for held in sequence.held_states:
                self._states.release(held.state)

    def release_states(self, states: Iterable[int]) -> None:
        """Sequences do not hold these states any more. Nothing is read from `states` for a model without states."""
        if self._states is not None:
            for state in states:
                self._states.release(state)

    def release_before_window(self, sequence: SequenceState, first_key: int) -> None:
        """A sequence releases the pages before `first_key`, the first key of the first tile that it may still attend to."""
        num_pages = first_key // self._pages.page_size
        if num_pages > sequence.num_released:
            self._pages.release(sequence.pages[sequence.num_released : num_pages])
            sequence.release_before(num_pages)

    def withdraw(self, sequence: SequenceState, start: int) -> None:
        """Stop sharing what this sequence was to write from token `start` on: it is missing or not finite."""
        first = max(start // self._pages.page_size, sequence.num_shared)
        if self._states is not None:
            # The registered page may be another sequence's page with the same tokens, so states are found by hash.
            self._states.forget(sequence.page_hashes[first:])
        first = max(first, sequence.num_released)
        if sequence.num_offered > first:
            self._pages.unregister(sequence.pages[first : sequence.num_offered])
            sequence.offer(first)

    def withdraw_all(self, sequence: SequenceState) -> None:
        """Stop sharing all pages of this sequence, including those that others have computed, and their files: some of them are
        not finite."""
        self._pages.withdraw(sequence.page_hashes)
        self._pages.unregister(sequence.held_pages)

    def withdraw_leftovers(self, sequence: SequenceState) -> None:
        """Stop sharing what a preempted sequence has left in the cache, from its first unconfirmed token on.

        Its pages may have been written to files since the preemption. Those files are removed; files from before it stay.
        """
        if sequence.slot >= 0 or not sequence.num_at_start:
            return  # it is running, or has never run
        hashes = sequence.page_hashes[self._first_unconfirmed(sequence) :]
        self._pages.forget(hashes)
        if self._folder is not None:
            unconfirmed = {*hashes}
            self._folder.withdraw_new(each for each in sequence.unfiled if each[1] in unconfirmed)

    @property
    def _folder(self) -> FolderTier | None:
        return None if self._tier is None else self._tier.folder

    def _first_unconfirmed(self, sequence: SequenceState) -> int:
        """The first page of a sequence that it has computed itself and that finite logits have not confirmed."""
        return max(sequence.num_confirmed, sequence.num_cached_tokens) // self._pages.page_size

    def withdraw_everything(self, *, new_weights: bool) -> None:
        """Stop sharing all pages and states of all sequences, and stop using files if the weights have changed."""
        if self._tier is not None:
            if new_weights:
                self._tier.leave_folder()
            self._tier.finish()
        self._pages.forget_all()

    def check_integrity(self, running: Sequence[SequenceState]) -> None:
        """Assert that each page and state is accounted for, and that each sequence has the state after its last full page."""
        fetching = [shared.pages for shared in self._fetching.values()]
        self._pages.check_integrity([*(sequence.held_pages for sequence in running), *fetching])
        if self._states is None:
            return
        self._states.check_integrity([[held.state for held in sequence.held_states] for sequence in running])
        size = self._pages.page_size
        for sequence in running:
            assert sequence.state_position == sequence.num_computed // size * size, "a sequence reads a state that is too old"
            assert (sequence.state >= 0) == (sequence.state_position > 0), "a sequence that has filled a page reads no state"


def _num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many leading tokens agree."""
    count = 0
    step = 4096
    while step:
        end = count + step
        if end <= min(len(tokens), len(others)) and tokens[count:end] == others[count:end]:
            count = end
        else:
            step //= 2
    return count


def _prompt_end(sequence: SequenceState, page_size: int) -> int:
    """The last position from which the same prompt can begin when it is sent again. Its last token is always computed."""
    return (sequence.num_prompt_tokens - 1) // page_size * page_size
