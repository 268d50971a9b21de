"""Which tokens of which requests the next step computes. Plain Python, no torch: testable in microseconds.

    batch = scheduler.schedule()             # chunks of prompts and single tokens, within the token budget
    tokens = run(batch)
    for request, token in scheduler.commit(batch, tokens): ...
    scheduler.abort("request-7")             # at any moment; its pages are free when this returns

Requests are served in order of rank (arrival, shifted by priority), running ones first. A request takes the pages of its
known tokens when it is admitted, so only growth by sampled tokens can run out of pages. Then the request of the last rank
is preempted: it loses its pages, goes back to its place in the queue and is computed again later. The first of all is never
preempted by another, so there is always progress, and since rank never changes nobody starves.

Pages are offered to other requests as soon as the step that fills them is scheduled, not when it is done: steps run in order,
and within a step every layer writes all keys and values before it reads any. So requests with a common beginning share it even
when they come in the same step.

`schedule` may run ahead of `commit` (the device computes step n while step n + 1 is prepared): a request whose sampled token
is not known yet is scheduled with a pending token, which the model runner keeps on the device. Whatever a request that has
ended meanwhile gets from a step in flight is dropped.

Left out: tensors, text, time. Source of the ideas: Orca (Yu et al. 2022), vLLM (Kwon et al. 2023), Sarathi (Agrawal et al.
2023).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from fa_serve.engine.errors import RequestError
from fa_serve.engine.pages import PageTable
from fa_serve.engine.request import FinishReason, Request

INVALID_TOKEN = -1  # what the sampler returns for logits that are not numbers
WINDOW_TILE = 128  # keys that a kernel may read at once: of a tile with keys in the window, nothing is given away
PROMPT_ROWS = 256  # tokens of prompts in a step whose logits are wanted: logits are large


@dataclass(slots=True)
class Chunk:
    """Tokens start .. start + length of one request. If they reach its last token, the step samples the next one.

    prompt_rows: of how many, from the first on, the log-probability of the token after it is wanted
    """

    request: Request
    slot: int
    start: int
    length: int
    samples: bool
    prompt_rows: int = 0


@dataclass(slots=True)
class ScheduledBatch:
    """One step. `admitted` are the requests that have just been given a slot."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_prompt_rows(self) -> int:
        return sum(chunk.prompt_rows for chunk in self.chunks)

    def __bool__(self) -> bool:
        return bool(self.chunks)


class Scheduler:
    """Owner of the queues. `waiting` and `running` are sorted by rank.

    window: keys before a token that any layer looks at; None if one looks at all. What is behind it is given back
    """

    def __init__(self, pages: PageTable, *, max_num_seqs: int, max_num_batched_tokens: int, window: int | None = None) -> None:
        self.window = window
        self.pages = pages
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self._slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=_rank)

    def schedule(self) -> ScheduledBatch:
        """The next step's tokens; empty when there is nothing to compute."""
        batch = ScheduledBatch()
        budget = self.max_num_batched_tokens
        preemptions = self.num_preemptions
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            length = self._length(batch, request, budget)
            if request.num_output_tokens + request.num_pending >= request.max_tokens:
                length = 0  # its last token is on its way
            if length and not self._grow(request, request.num_computed + length):
                break
            if length:
                budget -= self._append(batch, request, length)
            index += 1
        while self.waiting and self._slots and self.num_preemptions == preemptions:
            request = self.waiting[0]
            if not self._length(batch, request, budget) or not self._admit(request):
                break
            self.waiting.pop(0)
            insort(self.running, request, key=_rank)
            batch.admitted.append(request)
            budget -= self._append(batch, request, self._length(batch, request, budget))
        return batch

    def commit(self, batch: ScheduledBatch, tokens: Sequence[int]) -> list[tuple[Request, int]]:
        """Take in a step's sampled tokens, one for each chunk that samples, in order.

        Returns the requests that gained a token, with the token; those that it ends have their `finish_reason` set.
        """
        sampled = iter(tokens)
        gained = []
        for chunk in batch.chunks:
            token = next(sampled) if chunk.samples else None
            request = chunk.request
            if request.finished or token is None:
                continue
            request.num_pending -= 1
            if token == INVALID_TOKEN:
                if request.params.narrowed:
                    self._withdraw(request, 0)
                else:  # what it shared may hold what is not finite as well
                    self.pages.unregister(request.pages[request.num_released :])
                if request.params.narrowed:
                    error = RequestError("no_token_left", "the request's parameters leave no token to choose from")
                else:
                    error = RequestError("not_finite", "the model's logits are not finite")
                self.finish(request, "error", error)
                continue
            request.tokens.append(token)
            gained.append((request, token))
            self._offer_pages(request)
            if token in request.end_ids:
                self.finish(request, "stop")
            elif request.num_output_tokens >= request.max_tokens:
                self.finish(request, "length")
        return gained

    def abort(self, request_id: str) -> Request | None:
        """End a request now; None if there is no such request any more."""
        request = self.requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def fail(self, batch: ScheduledBatch, error: RequestError) -> list[Request]:
        """End every request of a step that could not be computed."""
        alive = [chunk for chunk in batch.chunks if not chunk.request.finished]
        for chunk in alive:
            self._withdraw(chunk.request, chunk.start)
            self.finish(chunk.request, "error", error)
        return [chunk.request for chunk in alive]

    def rollback(self, batch: ScheduledBatch) -> None:
        """Undo the last `schedule`, however much of its step has been computed: its requests wait to be admitted anew, which
        starts from their tokens and trusts nothing that the device remembers of them."""
        for chunk in batch.chunks:
            if not chunk.request.finished:
                self._withdraw(chunk.request, chunk.start)
                chunk.request.num_pending -= chunk.samples
                self._requeue(chunk.request)

    def finish(self, request: Request, reason: FinishReason, error: RequestError | None = None) -> None:
        """End a request and free what it holds."""
        request.finish_reason = reason
        request.error = error
        del self.requests[request.request_id]
        if request.slot >= 0:
            self._leave(request)
        else:
            self.waiting.remove(request)

    def check_integrity(self) -> None:
        self.pages.check_integrity([request.pages[request.num_released :] for request in self.running])
        assert sorted(self._slots + [request.slot for request in self.running]) == list(range(self.max_num_seqs))
        assert all(request.slot == -1 and not request.pages for request in self.waiting)
        assert sorted(self.requests) == sorted(request.request_id for request in self.waiting + self.running)
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=_rank), "a queue is out of order"

    def _length(self, batch: ScheduledBatch, request: Request, budget: int) -> int:
        """How many tokens of the request fit into the step."""
        length = min(request.num_tokens - request.num_computed, budget)
        if _prompt_rows(request, length):
            length = min(length, PROMPT_ROWS - batch.num_prompt_rows)
        return length

    def _append(self, batch: ScheduledBatch, request: Request, length: int) -> int:
        start = request.num_computed
        samples = start + length == request.num_tokens
        batch.chunks.append(Chunk(request, request.slot, start, length, samples, _prompt_rows(request, length)))
        request.num_computed += length
        request.num_pending += samples
        self._offer_pages(request)
        if self.window is not None:
            # steps run in order: those in flight have read these pages before anybody writes to them
            behind = max(start - self.window, 0) // WINDOW_TILE * WINDOW_TILE // self.pages.page_size
            if behind > request.num_released:
                self.pages.release(request.pages[request.num_released : behind])
                request.num_released = behind
        return length

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give a running request the pages for so many tokens; False if it had to be preempted itself."""
        need = self.pages.pages_for(num_tokens) - len(request.pages)
        while need > self.pages.num_available:
            victim = self.running[-1]
            self.num_preemptions += 1
            self._requeue(victim)
            if victim is request:
                return False
        if need > 0:
            request.pages += self.pages.allocate(need)
        return True

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a slot and pages, shared ones first; False if it has to wait.

        One page is left for each running sequence to grow into, lest the newcomer be preempted at once.
        """
        if request.num_pending:
            return False  # preempted while its token was on the way, which nobody keeps on the device for it
        self.pages.hash_pages(request.tokens, request.page_hashes)
        # the last token is computed in any case: its logits are wanted
        known = 0 if _prompt_rows(request, 2) else (request.num_tokens - 1) // self.pages.page_size
        shared = self.pages.match(request.page_hashes[:known])
        need = self.pages.pages_for(request.num_tokens) - len(shared)
        if need + self.pages.num_evictable(shared) + len(self.running) > self.pages.num_available:
            return False
        self.pages.acquire(shared)
        request.pages = shared + self.pages.allocate(need)
        request.num_computed = len(shared) * self.pages.page_size
        request.num_shared = request.num_offered = len(shared)
        if not request.num_output_tokens:
            request.num_cached_tokens = request.num_computed
        request.slot = self._slots.pop()
        return True

    def _offer_pages(self, request: Request) -> None:
        """Register the pages that are full, or will be when the launched steps have run."""
        full = min(request.num_computed, len(request.tokens)) // self.pages.page_size
        if full <= request.num_offered or not self.pages.prefix_caching:
            return
        self.pages.hash_pages(request.tokens, request.page_hashes)
        for index in range(request.num_offered, full):
            self.pages.register(request.pages[index], request.page_hashes[index])
        request.num_offered = full

    def _withdraw(self, request: Request, start: int) -> None:
        """Nobody may take over what this request was to write from token `start` on: it was not, or it is not finite."""
        first = max(start // self.pages.page_size, request.num_shared, request.num_released)
        self.pages.unregister(request.pages[first:])
        request.num_offered = min(request.num_offered, first)

    def _requeue(self, request: Request) -> None:
        self._leave(request)
        request.num_computed = 0
        insort(self.waiting, request, key=_rank)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.release(request.pages[request.num_released :])
        self._slots.append(request.slot)
        request.pages = []
        request.slot = -1
        request.num_shared = 0
        request.num_offered = 0
        request.num_released = 0


def _prompt_rows(request: Request, length: int) -> int:
    """Of how many of its next tokens the log-probability of the one after is wanted."""
    if request.params.prompt_logprobs is None or request.num_output_tokens + request.num_pending:
        return 0
    return max(min(length, len(request.prompt) - 1 - request.num_computed), 0)


def _rank(request: Request) -> tuple[float, int]:
    return request.rank
