"""Functions run one after another, and one that takes too long or that nobody waits for is interrupted."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from fa_serve.server.bounds.costs import BILL, Bill
from fa_serve.server.bounds.deadline_thread import DeadlineThread

pytestmark = pytest.mark.anyio


def endless() -> None:
    while True:
        pass


async def test_results_and_errors_arrive():
    thread = DeadlineThread("test")
    assert await thread.run(lambda: 3) == 3
    assert await thread.run(lambda: 4, timeout=20) == 4
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 / 0, timeout=20)


async def test_an_endless_loop_is_interrupted_and_the_thread_goes_on():
    thread = DeadlineThread("test")
    begin = time.monotonic()
    with pytest.raises(asyncio.TimeoutError):
        await thread.run(endless, timeout=0.2)
    assert await thread.run(lambda: 5) == 5
    assert time.monotonic() - begin < 10


async def test_what_nobody_waits_for_is_interrupted():
    thread = DeadlineThread("test")
    task = asyncio.create_task(thread.run(endless))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(thread.run(lambda: 6), 20) == 6


LOOKING = """
import asyncio, sys, time
from fa_serve.server.bounds.deadline_thread import DeadlineThread, _absorb_interrupt

async def main():
    thread = DeadlineThread("test")
    await thread.run(int)
    for seconds in (60, 0.1):  # interrupted in the midst, and at the end or not at all
        end = time.monotonic() + seconds
        task = asyncio.create_task(thread.run(lambda: [None for _ in iter(lambda: time.monotonic() < end, False)]))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
    assert await thread.run(lambda: 3) == 3
    assert not thread._running

asyncio.run(main())
_absorb_interrupt()
sys.setprofile(lambda *_: None)
(lambda: None)()  # Python 3.11 stays here while it looks for an exception that no thread has
print("returned")
"""


@pytest.mark.slow
def test_no_thread_looks_for_interrupts_when_they_are_over() -> None:
    """Every call of every thread takes 1.6 times as long while Python 3.11 looks for them."""
    done = subprocess.run([sys.executable, "-c", LOOKING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "returned\n"), done.stderr


async def test_clients_take_turns():
    """One client's many functions delay another client by one of them."""
    thread = DeadlineThread("test")
    order = []
    began = threading.Event()
    gate = threading.Event()

    def first() -> None:
        began.set()
        gate.wait(20)

    waiting = [asyncio.create_task(thread.run(first, "many"))]
    await asyncio.to_thread(began.wait, 20)
    for client in ("many", "many", "many", "other"):
        waiting.append(asyncio.create_task(thread.run(lambda client=client: order.append(client), client)))
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*waiting)
    assert order == ["other", "many", "many", "many"], "the first one was of many"


async def test_a_thread_that_cannot_be_started_is_started_by_the_next_call(monkeypatch):
    """Before: without memory for one moment, every later call waited for ever."""
    thread = DeadlineThread("test")

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            await thread.run(lambda: 1)
    assert await asyncio.wait_for(thread.run(lambda: 2), 20) == 2


class Elsewhere:
    """A trial whose process took so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


async def test_the_time_of_another_process_counts() -> None:
    """A client whose work runs in another process pays for it: its turn comes after that of a client who has cost less."""
    thread = DeadlineThread("test")
    bill = Bill("many")
    token = BILL.set(bill)
    try:
        assert await thread.run(lambda: 3, "many", trial=Elsewhere(5.0)) == 3
    finally:
        BILL.reset(token)
    assert 5.0 <= bill.seconds < 5.5

    def burn() -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    await thread.run(burn, "few")  # more than this thread has done for the other one
    order: list[str] = []
    began = threading.Event()
    gate = threading.Event()

    def first() -> None:
        began.set()
        gate.wait(20)

    waiting = [asyncio.create_task(thread.run(first, "third"))]
    await asyncio.to_thread(began.wait, 20)
    for client in ("many", "few"):
        waiting.append(asyncio.create_task(thread.run(lambda client=client: order.append(client), client)))
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*waiting)
    assert order == ["few", "many"], "many has asked first, and has cost more"


async def test_a_trial_that_nobody_waits_for_is_cancelled() -> None:
    thread = DeadlineThread("test")
    trial = Elsewhere(0.0)
    task = asyncio.create_task(thread.run(lambda: trial.cancelled.wait(20), trial=trial))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert trial.cancelled.wait(5)


async def test_several_threads_take_from_one_queue() -> None:
    """As many functions run at once as there are threads, and each is interrupted in its own."""
    thread = DeadlineThread("test", 2)
    began = threading.Barrier(3, timeout=20)
    gate = threading.Event()

    def wait() -> bool:
        began.wait()
        return gate.wait(20)

    def spin() -> None:
        began.wait()
        while True:
            time.sleep(0.001)

    waiting = asyncio.create_task(thread.run(wait, "one"))
    spinning = asyncio.create_task(thread.run(spin, "other"))
    third = asyncio.create_task(thread.run(lambda: 3, "third"))
    await asyncio.to_thread(began.wait)
    assert not third.done()
    spinning.cancel()
    assert await asyncio.wait_for(third, 20) == 3, "the other function was interrupted, and this one is not waited for"
    assert not waiting.done()
    gate.set()
    assert await waiting


async def test_what_waits_for_one_lane_leaves_threads_to_others() -> None:
    """As many of one lane run as may, lanes take turns, and a lane that has ended is forgotten."""
    thread = DeadlineThread("test", 3, per_lane=2)
    gate = threading.Event()
    running: list[str] = []

    def wait(name: str) -> str:
        running.append(name)
        gate.wait(20)
        return name

    waiting = [asyncio.create_task(thread.run(lambda: wait("slow"), f"client {n}", lane="slow")) for n in range(6)]
    while len(running) < 2:
        await asyncio.sleep(0.001)
    for _ in range(3):
        assert await asyncio.wait_for(thread.run(lambda: "fast", lane="fast"), 20) == "fast"
        assert await asyncio.wait_for(thread.run(lambda: "none"), 20) == "none"
    assert running == ["slow", "slow"]
    waiting[-1].cancel()
    gate.set()
    assert await asyncio.gather(*waiting[:-1]) == ["slow"] * 5
    while set(thread._jobs._lanes) != {None}:
        await asyncio.sleep(0.001)
    assert thread._jobs._lanes[None].running == 0


async def test_clients_of_a_lane_take_turns_by_the_time_that_they_hold_a_thread() -> None:
    """Waiting takes no time of the processor: else the client that computes would wait for all of the other one."""
    thread = DeadlineThread("test", 1)
    order: list[str] = []

    def hold(name: str, seconds: float) -> None:
        time.sleep(seconds)
        end = time.thread_time() + (0.01 if name == "computes" else 0.0)
        while time.thread_time() < end:
            pass
        order.append(name)

    waits = [asyncio.create_task(thread.run(lambda: hold("waits", 0.1), "A", lane="host")) for _ in range(6)]
    await asyncio.sleep(0.05)
    for _ in range(3):
        await thread.run(lambda: hold("computes", 0.0), "B", lane="host")
    assert order.count("waits") <= 4
    await asyncio.gather(*waits)
    assert len(order) == 9


async def test_an_interrupted_function_gives_its_place_in_the_lane_back() -> None:
    thread = DeadlineThread("test", 2, per_lane=1)
    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            await thread.run(endless, timeout=0.05, lane="slow")
    assert await asyncio.wait_for(thread.run(lambda: 7, lane="slow"), 20) == 7
