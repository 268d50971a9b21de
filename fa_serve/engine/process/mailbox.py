"""The mailbox between the worker and a stream: what the answers to one request have gained since their consumer looked last.

    mailbox = Mailbox(num_answers=2)
    mailbox.put(output)                      # of a step; wakes the consumer
    output = await mailbox.get()

A mailbox holds at most one output for each answer: an output that arrives before the consumer is back is appended to the output
that waits. Used only on the event loop, by async_engine.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from fa_serve.engine.errors import RequestError
from fa_serve.engine.request.outputs import FinishReason, RequestOutput, TokenLogprob

MAX_UNREAD = 1 << 21
"""Log-probabilities that may wait in all mailboxes together. Each takes about 110 bytes."""
UNREAD = RequestError("unread", "its outputs were not read in time, and too many unread log-probabilities had accumulated")


class Mailbox:
    """What the answers to a request have gained since their consumer looked last. Used only on the event loop.

    unfinished: indices of the answers that have not ended
    sent:       whether the request has been sent to the worker
    unread:     log-probabilities that wait here
    """

    def __init__(self, num_answers: int) -> None:
        self.unfinished = set(range(num_answers))
        self.sent = False
        self.unread = 0
        self._content: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        # wakes the only consumer; an asyncio.Event would cost more
        self._waiting: asyncio.Future[None] | None = None

    @property
    def in_flight(self) -> bool:
        """Whether the worker has the request, and has not ended all of its answers."""
        return self.sent and bool(self.unfinished)

    def put(self, output: RequestOutput) -> None:
        """Add an output and wake the consumer."""
        if output.logprobs:
            self.unread += _num_logprobs(output.logprobs)
        if output.index in self._content:
            self._content[output.index].absorb(output)
        else:
            self._content[output.index] = output
        if output.finished:
            self.unfinished.difference_update(output.answers)
        self._wake()

    def refuse(self, error: Exception) -> None:
        """Let `get` raise an error."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def drained(self) -> bool:
        """Whether there will be no more outputs."""
        return not self.unfinished and not self._content

    async def get(self) -> RequestOutput:
        """The next output. Waits until there is one. Raises what `refuse` was given, once."""
        if not self._content and self._error is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        error = self._error
        self._error = None
        try:
            if error is not None:
                raise error
        finally:  # the error refers to this frame: if the frame kept the error, this cycle would keep both alive
            del error
        output = self._content.pop(next(iter(self._content)))
        if output.logprobs:
            self.unread -= _num_logprobs(output.logprobs)
        return output

    def end(self, name: str, reason: FinishReason, error: RequestError | None) -> None:
        """Give each unfinished answer its last output."""
        for index in sorted(self.unfinished):
            self.put(ended_output(name, index, reason, error))

    def discard(self, name: str, error: RequestError) -> None:
        """End every answer with this error. Outputs that wait, and outputs that arrive later, are dropped."""
        ended = self.unfinished | self._content.keys()
        self._content = {index: ended_output(name, index, "error", error) for index in sorted(ended)}
        self.unread = 0
        self.unfinished = set()
        self._wake()


def discard_unread(mailboxes: Mapping[str, Mailbox]) -> list[str]:
    """End the requests with the most log-probabilities that wait, while there are too many of them.

    mailboxes: of all requests, by name. Returns the names of those that the worker still computes.
    """
    unfinished = []
    total = sum(mailbox.unread for mailbox in mailboxes.values())
    while total > MAX_UNREAD:
        name, largest = max(mailboxes.items(), key=lambda item: item[1].unread)
        total -= largest.unread
        if largest.unfinished:
            unfinished.append(name)
        largest.discard(name, UNREAD)
    return unfinished


def ended_output(name: str, index: int, reason: FinishReason, error: RequestError | None) -> RequestOutput:
    """The last output of an answer that ends early."""
    return RequestOutput(name, [], finished=True, finish_reason=reason, error=error, index=index)


def _num_logprobs(entries: Sequence[TokenLogprob]) -> int:
    return sum(1 + len(entry.top) for entry in entries)
