"""A mailbox keeps one output for each answer, and ends when all answers have ended."""

import asyncio
import contextlib
import gc
import weakref

import pytest

from fa_serve.engine import RequestError, RequestOutput, TokenLogprob
from fa_serve.engine.process.mailbox import Mailbox, ended_output

ERROR = RequestError("step_failed", "broken")


def output(index: int, text: str, *, finished: bool = False) -> RequestOutput:
    scored = [TokenLogprob(1, -0.5, [(1, -0.5), (2, -1.0)])]
    return RequestOutput("a", [], text, [1], scored, finished, "stop" if finished else None, index=index)


async def taken(mailbox: Mailbox) -> list[tuple[int, str]]:
    found = []
    while not mailbox.drained():
        each = await mailbox.get()
        found.append((each.index, each.text))
    return found


def test_outputs_that_wait_are_joined_by_answer() -> None:
    async def run() -> None:
        mailbox = Mailbox(2)
        for each in (output(0, "a"), output(1, "x"), output(0, "b", finished=True)):
            mailbox.put(each)
        assert mailbox.unread == 9  # three outputs, of a token and its two likeliest each
        mailbox.put(output(1, "y", finished=True))
        assert await taken(mailbox) == [(0, "ab"), (1, "xy")]
        assert mailbox.unread == 0

    asyncio.run(run())


def test_a_consumer_that_waits_is_woken_and_a_refusal_is_raised() -> None:
    async def run() -> None:
        mailbox = Mailbox(1)
        waiting = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        mailbox.put(output(0, "a"))
        assert (await waiting).text == "a"
        waiting = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        mailbox.refuse(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await waiting

    asyncio.run(run())


def test_discarded_outputs_end_every_answer_with_the_error() -> None:
    async def run() -> None:
        mailbox = Mailbox(3)
        mailbox.put(output(0, "a", finished=True))
        mailbox.put(output(1, "b"))
        mailbox.discard("a", ERROR)
        assert mailbox.unread == 0
        ends = [await mailbox.get() for _ in range(3)]
        assert [(each.index, each.error, each.text) for each in ends] == [(0, ERROR, ""), (1, ERROR, ""), (2, ERROR, "")]
        assert mailbox.drained()

    asyncio.run(run())


def test_the_last_output_of_an_answer_that_ends_early() -> None:
    end = ended_output("a", 2, "error", ERROR)
    assert (end.request_id, end.index, end.finished, end.finish_reason, end.error) == ("a", 2, True, "error", ERROR)


def test_a_refusal_keeps_neither_the_mailbox_nor_what_it_came_through() -> None:
    """Without a garbage collection. A refused request may have images."""

    class Images:
        """What a request holds."""

    async def refused() -> list[weakref.ref[object]]:
        mailbox = Mailbox(1)
        try:
            images = Images()
            held = [weakref.ref(mailbox), weakref.ref(images)]
            raise ValueError("no")
        except ValueError as error:
            mailbox.refuse(error)
            del images
        with contextlib.suppress(ValueError):
            await mailbox.get()
        return held

    async def run() -> None:
        held = await refused()
        assert [each() for each in held] == [None, None]

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()
