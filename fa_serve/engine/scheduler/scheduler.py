"""Which tokens of which sequences the next step computes. Plain Python, no torch: its tests take microseconds.

    sequence = scheduler.add(request)
    batch = scheduler.schedule()             # chunks of prompts and single tokens, within the token budget
    tokens = run(batch)
    for sequence, new_tokens in scheduler.commit(batch, tokens).items(): ...

Clients take turns (fair_queue.py), and the sequences of a client are served by rank (arrival, shifted by priority and by the
cost of the prompt), decoding ones first. A sequence takes the pages of all its known tokens when it is admitted, so only
sampled tokens can make it run out of pages. Then the sequence with the last turn, of the client with the most running
sequences, is preempted: it loses its pages, goes back to its place in the queue and is computed again later. The first sequence
is never preempted for another one, so there is always progress. Ranks never change in the queue, so no sequence starves. A
client that runs nothing gets a slot and pages from the client with the most running sequences, if that one has at least two.

A model with linear attention has states as well as pages (cache/states.py). A chunk that fills a page takes a state for it, and
the sequence's previous state is given back when the step is committed, so a step that fails or is rolled back leaves the state
from which it began. If states are scarce, sequences that fill a page take turns. Pages are offered to others when the step that
fills them is scheduled (cache/prefix.py), so sequences that arrive together share them. While sequences decode, prompts get a
share of each step (prompt_share.py), in the order of prompt_order.py.

`schedule` may run ahead of `commit`: the device computes step n while the host prepares step n + 1. The newest token of a
sequence is then *pending*: only the device knows it. Tokens that are sampled for a sequence that has ended are dropped. A
sequence that speculates may wait for its newest token (step_drafts.py), and one with images for the towers (tower_queue.py).

Left out: tensors, text and the clock. Sources: Orca (Yu et al. 2022), vLLM (Kwon et al. 2023), Sarathi (Agrawal et al. 2023).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from itertools import chain

from fa_serve.engine.cache.host_tier import HostTier
from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.cache.prefix import Prefix
from fa_serve.engine.cache.states import StateTable
from fa_serve.engine.errors import RequestError
from fa_serve.engine.request.outputs import FinishReason
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.adapter_seats import AdapterSeats
from fa_serve.engine.scheduler.admission import Admission
from fa_serve.engine.scheduler.chunk_lengths import next_length
from fa_serve.engine.scheduler.deadlines import LATE, Deadlines
from fa_serve.engine.scheduler.fair_queue import FairQueue, turns_by_rank
from fa_serve.engine.scheduler.prefix_groups import PrefixGroups
from fa_serve.engine.scheduler.prompt_order import PromptOrder
from fa_serve.engine.scheduler.prompt_share import PromptShare
from fa_serve.engine.scheduler.scheduled_batch import INVALID_TOKEN, WITHOUT_TOKEN, Chunk, ScheduledBatch, sharers_of
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.scheduler.step_cost import ImageSeconds
from fa_serve.engine.scheduler.step_drafts import StepDrafts
from fa_serve.engine.scheduler.tower_queue import TowerQueue
from fa_serve.engine.speculation.drafts import Speculation, num_accepted


class Scheduler:
    """Owner of the queues and of every `SequenceState` in them. `running` is sorted by turn.

    pages, states:          what sequences hold; states are None for models without linear attention
    max_num_seqs:           number of slots, which is the limit of running sequences
    max_num_batched_tokens: token budget of a step
    keys_per_tile:          largest number of keys that a kernel reads as one aligned tile
    window:                 most keys before a token that any layer attends to; None: all. Pages before them are released
    speculation:            where drafts come from; None turns speculation off
    prompt_share:           limits prompts while sequences decode; None: no limit
    seats:                  where sequences wait until their adapters are in memory; None for an engine without adapters
    towers:                 where sequences wait until their images are encoded; None for an engine without images
    tier:                   holds copies of pages and states in host memory; None if the engine has no host tier
    groups:                 finds sequences with common leading pages, so that attention reads these once; None: no groups
    """

    def __init__(
        self,
        pages: PageTable,
        states: StateTable | None = None,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        keys_per_tile: int,
        window: int | None = None,
        speculation: Speculation | None = None,
        prompt_share: PromptShare | None = None,
        seats: AdapterSeats | None = None,
        tier: HostTier | None = None,
        groups: PrefixGroups | None = None,
        towers: TowerQueue | None = None,
    ) -> None:
        self.pages = pages
        self.states = states
        self.tier = tier
        self.groups = groups or PrefixGroups(pages.page_size, 0)
        self._prefix = Prefix(pages, states, tier)
        self._state_grid = None if states is None else pages.page_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.keys_per_tile = keys_per_tile
        self.window = window
        self.speculation = speculation or Speculation(0)
        self.prompt_share = prompt_share
        self.waiting: FairQueue[SequenceState] = FairQueue()
        self.seats = AdapterSeats() if seats is None else seats
        self.towers = TowerQueue() if towers is None else towers
        self.running: list[SequenceState] = []
        self._drafts = StepDrafts(self.speculation, self._prefix, self.running, self._grow_to)
        self.sequences: dict[str, SequenceState] = {}
        self.num_preemptions = 0
        self._newest = ScheduledBatch()  # the last one that was scheduled
        self._now = 0.0  # the time on the clock of arrivals, estimated from arrivals and the durations of steps
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._admission = Admission(self.waiting, self.running, self._prefix, self._slots)
        self.deadlines = Deadlines()

    def renewed(self) -> Scheduler:
        """A scheduler with the same settings and no sequences. The state of this one may be inconsistent: see `abandon`."""
        pages = self.pages.renewed()
        states = None if self.states is None else self.states.renewed(pages)
        return Scheduler(
            pages,
            states,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            keys_per_tile=self.keys_per_tile,
            window=self.window,
            speculation=self.speculation,
            prompt_share=None if self.prompt_share is None else self.prompt_share.renewed(),
            seats=self.seats.renewed(),
            tier=None if self.tier is None else self.tier.renewed(pages, states),
            groups=self.groups.renewed(),
            towers=self.towers.renewed(),
        )

    def add(self, request: Request, timeout: float | None = None) -> SequenceState:
        """Queue a request. timeout: seconds after its arrival at which it is ended"""
        sequence = SequenceState(request)
        self.sequences[request.request_id] = sequence
        self._now = max(self._now, request.arrival)
        if self.prompt_share is not None:
            num_cached = self._prefix.num_cached(sequence)
            sequence.move_back(self.prompt_share.delay(sequence.num_tokens - num_cached, num_cached))
        if self.seats.add(sequence):
            self._join(sequence)
        if timeout is not None:
            self.deadlines.add(request.arrival + timeout, sequence)
        return sequence

    def seat(self) -> list[SequenceState]:
        """Queue the sequences whose adapter is in memory now. Returns the sequences that end because loading theirs failed."""
        joined, failed = self.seats.arrivals()
        for sequence in joined:
            self._join(sequence)
        for sequence, error in failed:
            self.finish(sequence, "error", error)
        return [sequence for sequence, _ in failed]

    def expire(self, now: float) -> list[SequenceState]:
        """End the sequences whose time is up. now: the time on the clock of `Request.arrival`"""
        late = self.deadlines.expired(now, len(self.sequences))
        for sequence in late:
            self.finish(sequence, "error", LATE)
        return late

    def schedule(self) -> ScheduledBatch:
        """The next step's tokens. The batch is empty when there is nothing to compute."""
        self._prefix.begin_step()
        self.towers.begin_step()
        self.towers.set_aside(self.waiting, self._prefix.num_cached)
        self._reclaim()
        self._make_room()
        self._newest = batch = ScheduledBatch(number=self._newest.number + 1, max_tokens=self.max_num_batched_tokens)
        self._drafts.prepare()
        prompts, num_decoding = self._continue_decoding(batch)
        for sequence in self.towers.encode(batch, chain(prompts, self.waiting), num_decoding, self.prompt_share, self._now):
            self.waiting.add(sequence)
        if batch.room and (prompts or self.waiting):
            self._compute_prompts(batch, prompts, num_decoding)
        self.groups.arrange(batch)
        return batch

    def needs_results(self) -> bool:
        """Whether the next step should wait for the results of earlier steps, because many sequences need these to join it."""
        return self._drafts.need_results()

    def commit(
        self, batch: ScheduledBatch, tokens: Sequence[int], seconds: float | None = None, images: ImageSeconds | None = None
    ) -> dict[SequenceState, Sequence[int]]:
        """Take in the sampled tokens of a step, `num_samples` for each chunk, in order.

        seconds, images: how long the step, and its images, have delayed decoding; they only decide the sizes of later chunks

        Returns the tokens that sequences gained: several for a sequence whose drafts were right, none for a sequence that ended
        without another token. The `finish_reason` of every sequence that has ended is set.
        """
        if self.prompt_share is not None and seconds is not None:
            self.prompt_share.record(batch.size, seconds, images)
            self._now += seconds
        gained: dict[SequenceState, Sequence[int]] = {}
        first = 0
        for chunk in batch.chunks:
            num_samples = chunk.num_samples
            if not num_samples:
                continue
            draws = tokens[first : first + num_samples]
            first += num_samples
            sequence = chunk.sequence
            if chunk.postponed or sequence.finished:
                continue
            accepted = 0
            if chunk.drafts:
                accepted = num_accepted(chunk.drafts, draws)
                self.speculation.record(sequence, len(chunk.drafts), accepted)
                draws = draws[: accepted + 1]
            new_tokens, end = sequence.up_to_its_end(draws)
            sequence.receive(new_tokens, accepted)
            self._prefix.offer(sequence)
            if end is not None and end < 0:
                self._end_without_token(chunk, end)
            elif end is not None:
                self.finish(sequence, "stop" if end in sequence.request.end_ids else "length")
            if not chunk.postponed:
                gained[sequence] = new_tokens
        spent = chain.from_iterable(chunk.sequence.take_spent(batch.number) for chunk in batch.chunks)
        self._prefix.release_states(spent)  # some had to be kept until this step was committed or undone
        return gained

    def abort(self, request_id: str) -> SequenceState | None:
        """End a sequence now; its pages are free when this returns. Returns None if no sequence has this id any more."""
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
        """End every sequence of a step that could not be computed. If it only encodes images, end those that need them."""
        asked = [chunk.sequence for chunk in batch.chunks] or self.towers.in_need(batch.towers)
        alive = [sequence for sequence in asked if not sequence.finished]
        self._requeue_new(sharers_of(batch.chunks, self.running, self.pages.page_size))
        for sequence in alive:
            self.finish(sequence, "error", error)
        return alive

    def rollback(self, batch: ScheduledBatch) -> None:
        """Undo the last `schedule`, however much of its step has been computed.

        Its sequences wait to be admitted again. Then they go on from the host's copy of their tokens, not from the device's.
        """
        self._requeue_new(sharers_of(batch.chunks, self.running, self.pages.page_size))
        for chunk in batch.chunks:
            self._undo(chunk)

    def fail_images(self, batch: ScheduledBatch) -> list[SequenceState]:
        """End the sequences whose images could not be encoded. What others share with their chunks is computed again."""
        failed = self.towers.failures()
        if not failed:
            return []
        sharers = sharers_of(batch.chunks_of(failed), self.running, self.pages.page_size)
        failed |= self.towers.failures_among(sharers)
        for sequence, error in failed.items():
            self.finish(sequence, "error", error)
        self._requeue_new(sharers)
        for chunk in batch.chunks_of(sharers):
            self._undo(chunk)
        return [*failed]

    def forget_cache(self, *, new_weights: bool = False, keep_pages: bool = False) -> None:
        """Empty the prefix cache: its memory is given away, or the weights are new (`new_weights`). No step may be in flight.

        Nothing computed so far is shared, except files unless the weights are new. Running sequences are admitted again and
        recomputed. With `keep_pages` they go on with the pages that they hold, which no other sequence shares, except for those
        that lack log-probabilities of their prompt.
        """
        self._prefix.withdraw_everything(new_weights=new_weights)
        self.towers.forget()
        for sequence in [*self.running]:
            if keep_pages and not sequence.num_prompt_logits(1):
                sequence.keep_to_itself()
            else:
                self._requeue(sequence, 0)

    def postpone(self, chunk: Chunk) -> None:
        """A launched step cannot sample for this chunk, which ends with the last token. A later step recomputes that token."""
        chunk.postponed = True
        chunk.sequence.postpone(self._newest.number)

    def finish(self, sequence: SequenceState, reason: FinishReason, error: RequestError | None = None) -> None:
        """End a sequence and release what it holds.

        What it has written is withdrawn from the prefix cache, unless finite logits have confirmed it.
        """
        sequence.finish(reason, error)
        del self.sequences[sequence.request.request_id]
        self.speculation.forget(sequence)
        self._prefix.withdraw_leftovers(sequence)
        if sequence.slot >= 0:
            self._prefix.withdraw(sequence, sequence.num_confirmed)
            self.waiting.settle(sequence, len(sequence.tokens) - sequence.num_at_start - sequence.num_expected)
            self._leave(sequence, sequence.num_confirmed)
        elif sequence not in self.seats and sequence not in self.towers:
            self.waiting.remove(sequence)
        self.seats.remove(sequence)
        self.towers.remove(sequence)

    def abandon(self, sequences: Iterable[SequenceState], error: RequestError) -> None:
        """End sequences without releasing anything: this scheduler's state may be inconsistent, and it is given up."""
        for sequence in sequences:
            sequence.finish("error", error)
            self.speculation.forget(sequence)

    def check_integrity(self) -> None:
        """Assert that every page, state, slot and turn is accounted for and that both queues are in order."""
        self._prefix.check_integrity(self.running)
        assert sorted(self._slots + [sequence.slot for sequence in self.running]) == list(range(self.max_num_seqs))
        assert all(sequence.slot == -1 and not sequence.pages and not sequence.held_states for sequence in self.waiting)
        known = [*self.waiting, *self.running, *self.seats, *self.towers]
        assert sorted(self.sequences) == sorted(sequence.request.request_id for sequence in known)
        self.seats.check_integrity()
        self.towers.check_integrity()
        assert self.running == sorted(self.running, key=SequenceState.place), "the running sequences are out of order"
        self.waiting.check_integrity(self.running)

    def _continue_decoding(self, batch: ScheduledBatch) -> tuple[list[SequenceState], int]:
        """Schedule, by turn, the running sequences that have only their last token left to compute, with their drafts.

        Returns the running sequences that lack more than that, and how many decode, including those that wait for a token.
        """
        drafting = self._drafts.is_on  # read once, because this loop decides what a step costs the host
        has_states = self.states is not None
        prompts: list[SequenceState] = []
        num_decoding = 0
        for sequence in self.running:
            if sequence.is_last_pending:
                continue
            num_tokens = sequence.num_tokens
            decodes = sequence.num_computed + 1 >= num_tokens
            num_decoding += decodes
            if sequence.num_pending and (sequence.num_drafts or (drafting and self._drafts.is_held_back(sequence))):
                continue  # it waits for the pending token, or has drafts in flight
            if not decodes:
                prompts.append(sequence)
            elif batch.room and not (has_states and not self._prefix.can_store(sequence, 1)):
                self._grow_to(sequence, num_tokens)
                self._append(batch, sequence, 1, self._drafts.guess(sequence, batch.room) if drafting else ())
        return prompts, num_decoding

    def _compute_prompts(self, batch: ScheduledBatch, prompts: list[SequenceState], num_decoding: int) -> None:
        """Schedule chunks of prompts, in turn. Waiting sequences are admitted until one of them has to wait."""
        order = PromptOrder(prompts, self.waiting, self.pages.page_size, self.prompt_share)
        batch.prompt_limits = order.limits(batch, num_decoding, self._now)
        while batch.room and (sequence := order.first()) is not None:
            if order.is_waiting and batch.completes_another(sequence.request):
                batch.widen(self._prefix.num_missing(sequence), most=self.pages.page_size)
            length = next_length(batch, sequence, self._state_grid, self.towers.barrier(sequence))
            if order.is_waiting:
                if not length or not self._slots or not self._admit(sequence):
                    order.close()
                    continue
                cost = sequence.num_tokens - sequence.num_computed + sequence.num_expected
                sequence.pay(cost)
                self._enter(sequence, self.waiting.admit(cost))
                length = next_length(batch, sequence, self._state_grid, self.towers.barrier(sequence))
            elif self.states is not None and not self._prefix.can_store(sequence, length):
                length = 0
            order.drop()
            if length:
                self._grow_to(sequence, sequence.num_tokens)
                self._append(batch, sequence, length)

    def _grow_to(self, sequence: SequenceState, num_tokens: int) -> None:
        """Give the sequence the pages that it lacks for `num_tokens` tokens."""
        lacking = num_tokens - len(sequence.pages) * self.pages.page_size
        if lacking > 0:
            sequence.grow(self.pages.allocate(self.pages.pages_for(lacking)))

    def _join(self, sequence: SequenceState) -> None:
        """Queue a sequence, unless it has too few tokens to compute before an image that is not encoded."""
        if sequence.request.images is None or self.towers.add(sequence, self._prefix.num_cached(sequence)):
            self.waiting.add(sequence)

    def _enter(self, sequence: SequenceState, turn: int) -> None:
        """Insert an admitted sequence among the running ones. The turns of its client's sequences are in the order of ranks."""
        sequence.take_turn(turn)
        moved = turns_by_rank(sequence, self.running)
        for other, its_turn in moved:
            other.take_turn(its_turn)
        if moved:
            self.running.sort(key=SequenceState.place)
        insort(self.running, sequence, key=SequenceState.place)

    def _make_room(self) -> None:
        """If `first` has to wait, preempt sequences of the client with the most of them for a client that runs nothing."""
        if not self.waiting or self._admission.has_room():
            return
        if self._slots:
            self.waiting.prefer_idle()
        while not self._admission.has_room() and (victim := self.waiting.crowding(self.running)) is not None:
            self.num_preemptions += 1
            self._leave(victim)
            self.waiting.give_way(victim)

    def _append(self, batch: ScheduledBatch, sequence: SequenceState, length: int, drafts: Sequence[int] = ()) -> None:
        """Add the sequence's next `length` tokens and its drafts to the step."""
        start = sequence.num_computed
        samples = start + length == sequence.num_tokens
        num_drafts = len(drafts)
        num_samples = 1 + num_drafts if samples else 0
        num_prompt_logits = sequence.num_prompt_logits(length) if start < sequence.num_prompt_tokens else 0
        chunk = Chunk(sequence, sequence.slot, start, length + num_drafts, num_samples, num_prompt_logits, drafts)
        batch.append(chunk)
        sequence.advance(length, samples, num_drafts)
        if self.states is not None:
            chunk.source = sequence.state
            chunk.stores = self._prefix.store(sequence, start, length, num_drafts, len(self.running))
            sequence.hold(chunk.stores, batch.number)
        self._prefix.offer(sequence)
        if sequence.request.images is not None:
            self.towers.passed(sequence)
        if self.window is not None:
            # whole tiles; steps run in order, so those in flight have read these pages before another sequence writes to them
            first_key = max(start - self.window, 0) // self.keys_per_tile * self.keys_per_tile
            self._prefix.release_before_window(sequence, first_key)

    def _reclaim(self) -> None:
        """Preempt sequences until the others have room for their next tokens. Each needs one page at most."""
        while self._prefix.is_scarce(len(self.running)):
            if self._prefix.available(self.running).holds(self._prefix.growth(self.running)):
                break
            self.num_preemptions += 1
            self._requeue(self.waiting.last_of_largest(self.running))

    def _admit(self, sequence: SequenceState) -> bool:
        """Give a waiting sequence a slot and pages, shared pages first. Returns False if it has to wait."""
        shared = self._admission.prefix_of(sequence)
        if shared is None:
            return False
        self._prefix.acquire(sequence, shared)
        pages = shared.pages + self.pages.allocate(self.pages.pages_for(sequence.num_tokens) - len(shared.pages))
        sequence.start(self._slots.pop(), pages, len(shared.pages), self.pages.page_size, shared.state, shared.branch)
        self.towers.want(sequence, sequence.num_computed)
        return True

    def _end_without_token(self, chunk: Chunk, token: int) -> None:
        """End a sequence for which the sampler found no token, and say why. If pages that others have computed may be the
        cause, because they are not finite, it is computed again without them."""
        sequence = chunk.sequence
        if token == INVALID_TOKEN:
            self._prefix.withdraw_all(sequence)
            if sequence.relies_on_others:
                chunk.postponed = True
                sequence.share_nothing()
                self._requeue(sequence, 0)
                for later in self._newest.chunks_of([sequence]):
                    self._undo(later)
                return
        self.finish(sequence, "error", WITHOUT_TOKEN[token])

    def _undo(self, chunk: Chunk) -> None:
        """Let a later step compute this chunk of the newest step, and sample what it was to sample."""
        sequence = chunk.sequence
        if sequence.finished:
            return
        if chunk.num_samples and not chunk.postponed:
            chunk.postponed = True
            sequence.receive()
        if sequence.slot >= 0:  # else it waits again already
            self._prefix.withdraw(sequence, chunk.start)
            self._requeue(sequence, chunk.start)

    def _requeue_new(self, sequences: Iterable[SequenceState]) -> None:
        """Take back the slots of the sequences for which the step had no room left."""
        for sequence in sequences:
            if sequence.is_new and not sequence.finished:
                self._requeue(sequence, 0)

    def _requeue(self, sequence: SequenceState, num_right: int | None = None) -> None:
        self._leave(sequence, num_right)
        self.waiting.give_back(sequence)

    def _leave(self, sequence: SequenceState, num_right: int | None = None) -> None:
        """Take a sequence out of the running ones; its pages, its states and its slot are free.

        num_right: number of leading tokens whose states are right once all launched steps have run; None: all computed tokens
        """
        self.running.remove(sequence)
        self._prefix.keep_newest(sequence, sequence.num_computed if num_right is None else num_right)
        self._prefix.release(sequence)
        self._slots.append(sequence.slot)
        sequence.pause()
        if sequence.request.images is not None and not sequence.finished:
            self.towers.want(sequence, self._prefix.num_cached(sequence))
