"""Which tokens of which sequences the next step computes. Plain Python, no torch: its tests take microseconds.

    sequence = scheduler.add(request)
    batch = scheduler.schedule()             # chunks of prompts and single tokens, within the token budget
    tokens = run(batch)
    for sequence, token in scheduler.commit(batch, tokens): ...
    scheduler.abort("request-7")             # at any moment; its pages are free when this returns

Clients take turns (fair_queue.py), and the sequences of a client are served in the order of their rank (arrival, shifted by
priority), running ones first. A sequence takes the pages of all its known tokens when it is admitted, so only sampled tokens
can make it run out of pages. Then a sequence is preempted: it loses its pages, goes back to its place in the queue and is
computed again later. It is the one with the last turn, of the client that has the most running sequences. The first sequence is
never preempted by another one, so there is always progress. Ranks never change, so no sequence starves. A client that runs
nothing gets a slot and pages from the client that has the most running sequences, unless no client has two.

Pages are offered to other sequences when the step that fills them is scheduled. This is safe because steps run in order, and
within a step every layer writes all keys and values before it reads any. So sequences that come in one step share their prefix.

`schedule` may run ahead of `commit`, because the device computes step n while the host prepares step n + 1. A sequence whose
sampled token is not known yet is scheduled with a pending token, which the model runner keeps on the device. If a sequence ends
while a step is in flight, the token that this step samples for it is dropped. A sequence that speculates (speculation.py) waits
for its newest token instead, because its drafts begin after it; `needs_results` says when the whole step should wait.

Left out: tensors, text and time. Sources: Orca (Yu et al. 2022), vLLM (Kwon et al. 2023), Sarathi (Agrawal et al. 2023).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from fa_serve.engine.errors import RequestError
from fa_serve.engine.fair_queue import FairQueue
from fa_serve.engine.outputs import FinishReason
from fa_serve.engine.pages import PageTable
from fa_serve.engine.request import Request
from fa_serve.engine.scheduled_batch import NO_TOKEN, Chunk, ScheduledBatch
from fa_serve.engine.sequence import SequenceState
from fa_serve.engine.speculation import Speculation, num_accepted

HELD_SHARE = 4
"""A step waits for the results of the steps in flight if at least one of so many running sequences waits for them.
Waiting leaves the device idle while the host prepares the step, which takes a tenth of a step that decodes few sequences."""
MAX_PROMPT_LOGITS = 256
"""Prompt tokens in one step whose logits are kept for log-probabilities. Logits are large: a row has one for each token."""


class Scheduler:
    """Owner of the queues and of every `SequenceState` in them. `running` is sorted by turn.

    max_num_seqs:           number of slots, which is the limit of running sequences
    max_num_batched_tokens: token budget of a step
    keys_per_tile:          largest number of keys that a kernel reads as one aligned tile
    window:                 number of keys before a token that any layer attends to; None if a layer attends to all.
                            Pages are released when all their tiles lie behind the window
    speculation:            where drafts come from; None without speculation
    """

    def __init__(
        self,
        pages: PageTable,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        keys_per_tile: int,
        window: int | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.pages = pages
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.keys_per_tile = keys_per_tile
        self.window = window
        self.speculation = speculation or Speculation(0)
        self.waiting = FairQueue()
        self.running: list[SequenceState] = []
        self.sequences: dict[str, SequenceState] = {}
        self.num_preemptions = 0
        self._slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> SequenceState:
        """Queue a request."""
        sequence = SequenceState(request)
        self.sequences[request.request_id] = sequence
        self.waiting.add(sequence)
        return sequence

    def schedule(self) -> ScheduledBatch:
        """The next step's tokens. The batch is empty when there is nothing to compute."""
        batch = ScheduledBatch()
        self._reclaim_pages()
        self._make_room()
        self._admit_waiting(batch, self._continue_running(batch, self.max_num_batched_tokens))
        return batch

    def needs_results(self) -> bool:
        """Whether the next step should wait for the results of the steps in flight.

        It should if a share of the running sequences cannot be part of it before. Otherwise they are left out of it.
        """
        held = self.speculation.is_on(len(self.running)) and sum(map(self._is_held_back, self.running))
        return held > 0 and held * HELD_SHARE >= len(self.running)

    def commit(self, batch: ScheduledBatch, tokens: Sequence[int]) -> list[tuple[SequenceState, int | None]]:
        """Take in the sampled tokens of a step, `num_samples` for each chunk, in order.

        Returns the sequences that gained a token, with the token, and those that ended without one, with None. A sequence with
        drafts may have gained several tokens. The `finish_reason` of every sequence that has ended is set.
        """
        changed: list[tuple[SequenceState, int | None]] = []
        first = 0
        for chunk in batch.chunks:
            draws = tokens[first : first + chunk.num_samples]
            first += chunk.num_samples
            sequence = chunk.sequence
            if not draws or chunk.postponed or sequence.finished:
                continue
            accepted = num_accepted(chunk.drafts, draws)
            if chunk.drafts:
                self.speculation.record(sequence, len(chunk.drafts), accepted)
            sequence.receive(accepted)
            for token in draws[: accepted + 1]:
                if token < 0:
                    self._end_without_token(sequence, token)
                    changed.append((sequence, None))
                    break
                sequence.append(token)
                changed.append((sequence, token))
                self._offer_pages(sequence)
                if token in sequence.request.end_ids:
                    self.finish(sequence, "stop")
                elif sequence.num_output_tokens >= sequence.request.max_tokens:
                    self.finish(sequence, "length")
                if sequence.finished:
                    break
        return changed

    def abort(self, request_id: str) -> SequenceState | None:
        """End a sequence now. Returns None if there is none with this id any more."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self.finish(sequence, "abort")
        return sequence

    def stop(self, sequence: SequenceState, num_later: int = 0) -> None:
        """End a sequence because a token completes its text or its grammar. The `num_later` tokens after it are dropped.

        If that token or a later one has ended the sequence already, "stop" replaces the finish reason.
        """
        sequence.drop_last(num_later)
        if sequence.finished:
            sequence.finish("stop")
        else:
            self.finish(sequence, "stop")

    def fail(self, batch: ScheduledBatch, error: RequestError) -> list[SequenceState]:
        """End every sequence of a step that could not be computed."""
        alive = [chunk for chunk in batch.chunks if not chunk.sequence.finished]
        for chunk in alive:
            self.finish(chunk.sequence, "error", error)
        return [chunk.sequence for chunk in alive]

    def rollback(self, batch: ScheduledBatch) -> None:
        """Undo the last `schedule`, however much of its step has been computed.

        Its sequences wait to be admitted again, and start from their tokens then, not from what the device has of them.
        """
        for chunk in batch.chunks:
            sequence = chunk.sequence
            if sequence.finished:
                continue
            self._withdraw(sequence, chunk.start)
            if chunk.samples and not chunk.postponed:
                sequence.receive()
            self._requeue(sequence)

    def postpone(self, chunk: Chunk) -> None:
        """A launched step cannot sample for this chunk, which was to reach the last token. A later step computes that again."""
        chunk.postponed = True
        chunk.sequence.postpone()

    def finish(self, sequence: SequenceState, reason: FinishReason, error: RequestError | None = None) -> None:
        """End a sequence and release what it holds.

        Others do not share what it has written and no finite logits have confirmed.
        """
        sequence.finish(reason, error)
        del self.sequences[sequence.request.request_id]
        self.speculation.forget(sequence)
        if sequence.slot >= 0:
            self._withdraw(sequence, sequence.num_confirmed)
            self.waiting.settle(sequence, len(sequence.tokens) - sequence.num_at_start - sequence.num_expected)
            self._leave(sequence)
        else:
            if sequence.num_at_start:  # it was preempted, and may have left pages that are not confirmed
                confirmed = max(sequence.num_confirmed, sequence.num_cached_tokens)
                self.pages.forget(sequence.page_hashes[confirmed // self.pages.page_size :])
            self.waiting.remove(sequence)

    def abandon(self, sequences: Iterable[SequenceState], error: RequestError) -> None:
        """End sequences without releasing anything: the state of this scheduler is not to be trusted, and it is given up."""
        for sequence in sequences:
            sequence.finish("error", error)

    def check_integrity(self) -> None:
        """Assert that every page, slot and turn is accounted for and that both queues are in order."""
        self.pages.check_integrity([sequence.held_pages for sequence in self.running])
        assert sorted(self._slots + [sequence.slot for sequence in self.running]) == list(range(self.max_num_seqs))
        assert all(sequence.slot == -1 and not sequence.pages for sequence in self.waiting)
        assert sorted(self.sequences) == sorted(sequence.request.request_id for sequence in [*self.waiting, *self.running])
        assert self.running == sorted(self.running, key=SequenceState.place), "the running sequences are out of order"
        self.waiting.check_integrity(self.running)

    def _continue_running(self, batch: ScheduledBatch, budget: int) -> int:
        """Schedule the running sequences, by turn. Returns what is left of the budget."""
        for sequence in self.running:
            if not budget:
                break
            if sequence.is_last_pending or self._is_held_back(sequence):
                continue
            if length := self._length(batch, sequence, budget):
                sequence.grow(self.pages.allocate(self._num_missing_pages(sequence)))
                budget -= self._append(batch, sequence, length, self._drafts(sequence, budget))
        return budget

    def _is_held_back(self, sequence: SequenceState) -> bool:
        """Whether a sequence waits for its newest tokens."""
        return sequence.num_drafts > 0 or self.speculation.waits(sequence, len(self.running))

    def _drafts(self, sequence: SequenceState, budget: int) -> list[int]:
        """The drafts that are verified in this step, and pages for them.

        Drafts preempt no sequence, and leave one page for each running sequence.
        """
        if sequence.num_pending or not self.speculation.is_on(len(self.running)):
            return []
        spare = max(self.pages.num_available - len(self.running), 0)
        room = (len(sequence.pages) + spare) * self.pages.page_size - len(sequence.tokens)
        drafts = self.speculation.draft(sequence, len(self.running), min(room, budget - 1))
        need = self.pages.pages_for(len(sequence.tokens) + len(drafts)) - len(sequence.pages)
        if need > 0 and drafts:
            sequence.grow(self.pages.allocate(need))
        return drafts

    def _admit_waiting(self, batch: ScheduledBatch, budget: int) -> None:
        """Schedule waiting sequences, in turn, until one of them has to wait."""
        while self.waiting and self._slots:
            sequence = self.waiting.first()
            if not self._length(batch, sequence, budget) or not self._admit(sequence):
                break
            cost = sequence.num_tokens - sequence.num_computed + sequence.num_expected
            sequence.pay(cost)
            self._enter(sequence, self.waiting.admit(cost))
            batch.admitted.append(sequence)
            budget -= self._append(batch, sequence, self._length(batch, sequence, budget))

    def _enter(self, sequence: SequenceState, turn: int) -> None:
        """Put an admitted sequence among the running ones. The turns of its client's sequences stay in the order of ranks."""
        client = sequence.request.client
        sequence.take_turn(turn)
        last = next((other for other in reversed(self.running) if other.request.client == client), None)
        if last is not None and (last.request.rank > sequence.request.rank or last.turn > turn):
            own = [sequence, *(other for other in self.running if other.request.client == client)]
            turns = sorted(other.turn for other in own)
            for other, its_turn in zip(sorted(own, key=SequenceState.rank), turns, strict=True):
                other.take_turn(its_turn)
            self.running.sort(key=SequenceState.place)
        insort(self.running, sequence, key=SequenceState.place)

    def _make_room(self) -> None:
        """If `first` has to wait, a client that runs nothing gets a slot and pages from the client with the most sequences."""
        if not self.waiting or self._has_room():
            return
        if self._slots:
            self.waiting.prefer_idle()
        while not self._has_room() and (victim := self.waiting.crowding(self.running)) is not None:
            self.num_preemptions += 1
            self._leave(victim)
            self.waiting.give_way(victim)

    def _has_room(self) -> bool:
        """Whether nothing is to be preempted for `first`. A pending token comes by itself."""
        first = self.waiting.first()
        return first.num_pending > 0 or (bool(self._slots) and self._fits(first, self._growth()))

    def _length(self, batch: ScheduledBatch, sequence: SequenceState, budget: int) -> int:
        """How many tokens of the sequence fit into the step."""
        length = min(sequence.num_tokens - sequence.num_computed, budget)
        if sequence.num_prompt_logits(length):
            length = min(length, MAX_PROMPT_LOGITS - batch.num_prompt_logits)
        return length

    def _append(self, batch: ScheduledBatch, sequence: SequenceState, length: int, drafts: Sequence[int] = ()) -> int:
        """Add the sequence's next `length` tokens and its drafts to the step. Returns how many tokens these are."""
        start = sequence.num_computed
        samples = start + length == sequence.num_tokens
        num_prompt_logits = sequence.num_prompt_logits(length)
        total = length + len(drafts)
        batch.append(Chunk(sequence, sequence.slot, start, total, samples, num_prompt_logits, list(drafts)))
        sequence.advance(length, samples, len(drafts))
        self._offer_pages(sequence)
        if self.window is not None:
            self._release_behind(sequence, start - self.window)
        return total

    def _release_behind(self, sequence: SequenceState, first_key: int) -> None:
        """Release the pages that lie before the tile of `first_key`, the first key that this step attends to.

        Steps run in order, so steps in flight have read these pages before another sequence writes to them.
        """
        first_in_tile = max(first_key, 0) // self.keys_per_tile * self.keys_per_tile
        num_pages = first_in_tile // self.pages.page_size
        if num_pages > sequence.num_released:
            self.pages.release(sequence.pages[sequence.num_released : num_pages])
            sequence.release_before(num_pages)

    def _reclaim_pages(self) -> None:
        """Preempt sequences until the others have pages for their next tokens. Each needs one page at most."""
        while self.pages.num_available < len(self.running) and self._growth() > self.pages.num_available:
            self.num_preemptions += 1
            self._requeue(self.waiting.last_of_largest(self.running))

    def _growth(self) -> int:
        """The number of pages that the running sequences need for their next tokens."""
        return sum(map(self._num_missing_pages, self.running))

    def _num_missing_pages(self, sequence: SequenceState) -> int:
        """For its next tokens; a sequence may have more pages than that, which it took for drafts."""
        if sequence.is_last_pending:
            return 0
        return max(self.pages.pages_for(sequence.num_tokens) - len(sequence.pages), 0)

    def _admit(self, sequence: SequenceState) -> bool:
        """Give a waiting sequence a slot and pages, shared pages first. Returns False if it has to wait."""
        if sequence.num_pending or not self._fits(sequence):
            return False  # a token that was pending when it was preempted is awaited: no token is kept without a slot
        shared = self._shared_pages(sequence)
        self.pages.acquire(shared)
        pages = shared + self.pages.allocate(self.pages.pages_for(sequence.num_tokens) - len(shared))
        sequence.start(self._slots.pop(), pages, len(shared), self.pages.page_size)
        return True

    def _fits(self, sequence: SequenceState, growth: int = 0) -> bool:
        """Whether the pages suffice for a waiting sequence after the running ones have taken `growth` pages.

        One page is left for each running sequence to grow into, or the newcomer might be preempted at once. A client that runs
        nothing does not need this: the client with the most sequences is preempted before it.
        """
        shared = self._shared_pages(sequence)
        need = self.pages.pages_for(sequence.num_tokens) - len(shared) + self.pages.num_evictable(shared)
        reserve = 0 if self.waiting.crowding(self.running) is not None else len(self.running)
        return need + reserve + growth <= self.pages.num_available

    def _shared_pages(self, sequence: SequenceState) -> list[int]:
        """The pages with the first tokens of a waiting sequence that are in the prefix cache."""
        self.pages.hash_pages(sequence.tokens, sequence.page_hashes, sequence.request.cache_salt)
        # The last token is computed in any case, because its logits are wanted. For prompt_logprobs all tokens are.
        known = 0 if sequence.num_prompt_logits(2) else (sequence.num_tokens - 1) // self.pages.page_size
        return self.pages.match(sequence.page_hashes[:known])

    def _offer_pages(self, sequence: SequenceState) -> None:
        """Register the pages that are full, or will be when the launched steps have run."""
        full = min(sequence.num_computed, len(sequence.tokens)) // self.pages.page_size
        if full <= sequence.num_offered or not self.pages.prefix_caching:
            return
        hashes = sequence.page_hashes
        self.pages.hash_pages(sequence.tokens, hashes, sequence.request.cache_salt)
        for index in range(sequence.num_offered, full):
            self.pages.register(sequence.pages[index], hashes[index], hashes[index - 1] if index else b"")
        sequence.offer(full)

    def _end_without_token(self, sequence: SequenceState, token: int) -> None:
        """End a sequence for which the sampler found no token, and say why."""
        if token == NO_TOKEN:
            error = RequestError("no_token_left", "the request's parameters leave no token to choose")
        else:
            # Any of its pages may be where the values that are not finite come from, also pages that others have computed.
            self.pages.unregister(sequence.held_pages)
            self.pages.forget(sequence.page_hashes)
            error = RequestError("not_finite", "the model's logits are not finite")
        self.finish(sequence, "error", error)

    def _withdraw(self, sequence: SequenceState, start: int) -> None:
        """Keep others from sharing what this sequence was to write from token `start` on: it is missing or not finite."""
        first = max(start // self.pages.page_size, sequence.num_shared, sequence.num_released)
        if sequence.num_offered > first:
            self.pages.unregister(sequence.pages[first : sequence.num_offered])
            sequence.offer(first)

    def _requeue(self, sequence: SequenceState) -> None:
        self._leave(sequence)
        self.waiting.give_back(sequence)

    def _leave(self, sequence: SequenceState) -> None:
        """Take a sequence out of the running ones; its pages and its slot are free."""
        self.running.remove(sequence)
        self.pages.release(sequence.held_pages)
        self._slots.append(sequence.slot)
        sequence.pause()
