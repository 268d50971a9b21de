"""Requests that wait for the tokenizer's thread share its next call."""

import asyncio
from typing import Any

import pytest
from fa_serve.server.bounds.costs import BILL, Bill
from fa_serve.server.bounds.deadline_thread import DeadlineThread
from fa_serve.server.pooling import reading
from fa_serve.server.pooling.reading import SharedReading

from fa_serve.spec import ParameterError

pytestmark = pytest.mark.anyio


class Reader:
    """Results are the inputs themselves. `calls` has the inputs of each call."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def read_each(self, calls: Any, *, prompt: str, truncate: bool) -> list[Any]:
        self.calls.append([*calls])
        if ["fail"] in calls:
            raise RuntimeError("failed")
        return [ParameterError("input", "be good", each) if each == ["bad"] else (prompt, *each) for each in calls]


@pytest.fixture
def shared() -> SharedReading:
    return SharedReading(DeadlineThread("tokenizer"))


def read(shared: SharedReading, reader: Any, text: str, client: str | None = None, prompt: str = "") -> asyncio.Task[Any]:
    return asyncio.ensure_future(shared.read(reader, [text], len(text), client, prompt=prompt, cuts=False))


async def test_requests_that_wait_are_read_together(shared: SharedReading) -> None:
    reader = Reader()
    assert await asyncio.gather(*(read(shared, reader, text) for text in "abc")) == [("", "a"), ("", "b"), ("", "c")]
    assert reader.calls == [[["a"], ["b"], ["c"]]]
    assert await read(shared, reader, "d") == ("", "d")


async def test_options_divide_a_call(shared: SharedReading) -> None:
    reader = Reader()
    found = await asyncio.gather(*(read(shared, reader, text, prompt=text) for text in "aba"))
    assert found == [("a", "a"), ("b", "b"), ("a", "a")]
    assert reader.calls == [[["a"], ["a"]], [["b"]]]


async def test_clients_take_turns_and_calls_have_a_bound(shared: SharedReading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CALL_CHARACTERS", 2)
    reader = Reader()
    await asyncio.gather(*(read(shared, reader, text, "first") for text in "abcd"), read(shared, reader, "z", "second"))
    assert len(reader.calls) == 3
    assert ["z"] in reader.calls[0] or ["z"] in reader.calls[1]


async def test_a_request_that_has_ended_is_left_out(shared: SharedReading) -> None:
    reader = Reader()
    gone = read(shared, reader, "a")
    stays = read(shared, reader, "b")
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays == ("", "b")
    assert gone.cancelled()
    assert reader.calls == [[["b"]]]


async def test_errors_reach_their_requests(shared: SharedReading) -> None:
    reader = Reader()
    bad, good = await asyncio.gather(read(shared, reader, "bad"), read(shared, reader, "good"), return_exceptions=True)
    assert isinstance(bad, ParameterError)
    assert good == ("", "good")
    failed = await asyncio.gather(read(shared, reader, "fail"), read(shared, reader, "good"), return_exceptions=True)
    assert [type(each) for each in failed] == [RuntimeError, RuntimeError]
    assert await read(shared, reader, "good") == ("", "good")


async def test_each_bill_gets_its_part_of_the_time(shared: SharedReading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_read", lambda call: ([("",)] * len(call), 0.4))
    bills = [Bill("client", 0.0) for _ in range(2)]

    async def work(bill: Bill, text: str) -> None:
        BILL.set(bill)
        await read(shared, Reader(), text)

    await asyncio.gather(work(bills[0], "a"), work(bills[1], "aaa"))
    assert [round(bill.seconds, 6) for bill in bills] == [0.1, 0.3]
