"""Who reads on in which iteration of the event loop."""

import asyncio
import time

import pytest
from fa_serve.server.bounds.read_turns import FairFlow, ReadTurns

pytestmark = pytest.mark.anyio


class Transport:
    """Notes in `log` what it was told."""

    def __init__(self, name, log):
        self.name = name
        self.log = log
        self.closing = False

    def pause_reading(self):
        self.log.append(f"{self.name} stops")

    def resume_reading(self):
        self.log.append(f"{self.name} reads")

    def is_closing(self):
        return self.closing


@pytest.fixture
def flows():
    turns = ReadTurns()
    log = []
    return [FairFlow(Transport(name, log), turns) for name in "abc"], log


async def test_one_connection_reads_on_in_an_iteration_in_the_order_of_asking(flows):
    (a, b, c), log = flows
    for flow in (a, b, c):
        flow.pause_reading()
    log.clear()
    for flow in (b, a, c, b):
        flow.resume_reading()
    read = []
    for _ in range(5):
        await asyncio.sleep(0)
        read.append(list(log))
        log.clear()
    assert read == [["b reads"], ["a reads"], ["c reads"], [], []]
    a.pause_reading()
    a.resume_reading()
    await asyncio.sleep(0)
    assert log == ["a stops", "a reads"]


async def test_a_turn_is_void_when_the_connection_stopped_again_or_is_closing(flows):
    (a, b, c), log = flows
    for flow in (a, b, c):
        flow.pause_reading()
        flow.resume_reading()
    a.pause_reading()
    b._transport.closing = True
    log.clear()
    for _ in range(4):
        await asyncio.sleep(0)
    assert log == ["c reads"]


async def test_a_connection_that_has_not_stopped_needs_no_turn(flows):
    (a, _, _), log = flows
    a.resume_reading()
    await asyncio.sleep(0)
    assert log == []


async def test_pauses_are_measured_until_the_turn(flows):
    (a, b, _), _ = flows
    a.pause_reading()
    await asyncio.sleep(0.05)
    a.resume_reading()
    time.sleep(0.05)  # no turn comes meanwhile
    await asyncio.sleep(0)
    before = a.paused_seconds
    assert before >= 0.1
    await asyncio.sleep(0.05)
    assert (a.paused_seconds, b.paused_seconds) == (before, 0.0)
