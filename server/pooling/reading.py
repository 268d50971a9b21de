"""Tokenizes the inputs of several requests at once, in a thread.

    reading = SharedReading(DeadlineThread("tokenizer"))
    tokens = await reading.read(reader, inputs, length, client, prompt="", cuts=False)        # EncoderInputs

While the thread works, the requests that arrive wait, and its next call takes all of them, up to CALL_CHARACTERS. A busy event
loop gives a thread the interpreter only once per millisecond, and a thread needs it twice for each call, so a call for each
request would be slower than tokenizing on the event loop. The tokenizer itself releases the interpreter, and takes a processor
for each text. Clients take turns by the processor time of the thread (bounds/costs.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fa_serve.engine.pooling.inputs import EncoderInputs, InputReader, InputText
from fa_serve.spec import ParameterError

from ..bounds.costs import BILL, Bill, CostQueue
from ..bounds.deadline_thread import DeadlineThread

CALL_CHARACTERS = 1 << 16
"""A call takes no more requests once they have this many characters, which take the tokenizer some tens of milliseconds."""


@dataclass(slots=True, eq=False)
class _Reading:
    """The inputs of one request. prompt, cuts: as in `InputReader.read`; bill: of the request, if there is one"""

    reader: InputReader
    inputs: Sequence[InputText]
    length: int
    prompt: str
    cuts: bool
    client: str | None
    bill: Bill | None
    found: asyncio.Future[EncoderInputs | ParameterError]


class SharedReading:
    """Owner of the inputs that wait to be tokenized. Used only on the event loop."""

    def __init__(self, thread: DeadlineThread) -> None:
        self._thread = thread
        self._waiting: CostQueue[_Reading] = CostQueue()
        self._calls: asyncio.Task[None] | None = None

    async def read(
        self,
        reader: InputReader,
        inputs: Sequence[InputText],
        length: int,
        client: str | None,
        *,
        prompt: str,
        cuts: bool,
    ) -> EncoderInputs:
        """What `reader.read` returns, and raises. length: characters of the inputs"""
        loop = asyncio.get_running_loop()
        reading = _Reading(reader, inputs, length, prompt, cuts, client, BILL.get(), loop.create_future())
        self._waiting.put(client, reading)
        if self._calls is None:
            self._calls = loop.create_task(self._call())
        found = await reading.found
        if isinstance(found, ParameterError):
            raise found
        return found

    async def _call(self) -> None:
        """Call the thread until nothing waits."""
        BILL.set(None)  # what a call takes is divided among its requests
        try:
            while call := self._next_call():
                try:
                    found, seconds = await self._thread.run(partial(_read, call))
                except Exception as error:
                    for reading in call:
                        if not reading.found.done():
                            reading.found.set_exception(error)
                    continue
                self._settle(call, found, seconds)
        finally:
            self._calls = None

    def _next_call(self) -> list[_Reading]:
        """The requests to tokenize next. Those that have ended meanwhile are left out."""
        call: list[_Reading] = []
        length = 0
        while length < CALL_CHARACTERS and (reading := self._waiting.get()):
            if not reading.found.done():
                call.append(reading)
                length += reading.length
        return call

    def _settle(self, call: Sequence[_Reading], found: Sequence[EncoderInputs | ParameterError], seconds: float) -> None:
        """Hand out results, and charge each request for its part of the time."""
        total = sum(reading.length for reading in call) or 1
        for reading, result in zip(call, found, strict=True):
            part = seconds * reading.length / total
            self._waiting.charge(reading.client, part)
            if reading.bill is not None:
                reading.bill.seconds += part
            if not reading.found.done():
                reading.found.set_result(result)


def _read(call: Sequence[_Reading]) -> tuple[list[EncoderInputs | ParameterError], float]:
    """The results of all requests, and the processor time of the thread. Requests with equal options are tokenized together."""
    begin = time.thread_time()
    groups: dict[tuple[InputReader, str, bool], list[_Reading]] = {}
    for reading in call:
        groups.setdefault((reading.reader, reading.prompt, reading.cuts), []).append(reading)
    found: dict[_Reading, EncoderInputs | ParameterError] = {}
    for (reader, prompt, cuts), group in groups.items():
        results = reader.read_each([reading.inputs for reading in group], prompt=prompt, truncate=cuts)
        found |= zip(group, results, strict=True)
    return [found[reading] for reading in call], time.thread_time() - begin
