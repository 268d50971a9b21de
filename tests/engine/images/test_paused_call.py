"""Calls that run a part at a time, in another thread."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from fa_serve.engine.images import paused_call
from fa_serve.engine.images.paused_call import PausedCall


def count_to(number: int, seen: list[int]) -> Callable[[Callable[[], None]], int]:
    def function(pause: Callable[[], None]) -> int:
        for n in range(number):
            seen.append(n)
            pause()
        return number

    return function


def test_a_call_runs_a_part_at_a_time() -> None:
    seen: list[int] = []
    call = PausedCall(count_to(7, seen))
    assert not call.run(2)
    assert seen == [0, 1]
    assert not call.run(0), "at least up to the next pause"
    assert seen == [0, 1, 2]
    assert call.run(None)
    assert (seen, call.result(), call.num_pauses) == ([*range(7)], 7, 7)
    assert call.run(1)


def test_what_a_call_raises() -> None:
    def fail(pause: Callable[[], None]) -> None:
        pause()
        raise ValueError("in the midst")

    call = PausedCall(fail)
    assert not call.run(1)
    with pytest.raises(ValueError, match="in the midst"):
        call.run(1)
    assert call.has_ended


def test_a_call_that_is_given_up_leaves_its_contexts() -> None:
    left: list[str] = []

    def function(pause: Callable[[], None]) -> None:
        try:
            pause()
            left.append("went on")
        except Exception:
            left.append("swallowed")
        finally:
            left.append("left")

    call = PausedCall(function)
    call.run(1)
    call.close()
    assert left == ["left"]
    call.close()
    PausedCall(function).close()
    assert left == ["left"]


def test_a_call_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system at its limit starts no thread. Giving the call up waits for nobody, and the next attempt starts one."""
    call = PausedCall(lambda pause: 5)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            call.run(None)
    assert call.run(None)
    assert call.result() == 5
    call = PausedCall(lambda pause: 6)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            call.run(None)
    call.close()
    assert call.has_ended


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, which a shell turns off for what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_a_caller_that_is_interrupted_leaves_no_thread() -> None:
    """The interrupt does not wait: the function ends at its next pause, whatever it was to pass, and the call has ended."""
    went_on: list[str] = []
    may_go_on = threading.Event()
    waiting = (paused_call.__file__, threading.__file__)

    def function(pause: Callable[[], None]) -> None:
        pause()
        # the caller is to stand still by then: Python may notice the signal of one that is about to much later
        while sys._current_frames()[threading.main_thread().ident or 0].f_code.co_filename not in waiting:
            time.sleep(0.01)
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        may_go_on.wait(20)
        pause()
        went_on.append("went on")

    for pauses in (1, None):
        may_go_on.clear()
        call = PausedCall(function)
        call.run(1)
        with pytest.raises(KeyboardInterrupt):
            call.run(pauses)
        assert call.has_ended
        call.close()
        may_go_on.set()
        assert call._thread is not None
        call._thread.join(20)
        assert not call._thread.is_alive()
    assert went_on == []


def test_a_caller_that_is_interrupted_before_the_function_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []
    threads: list[threading.Thread] = []
    own = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        own(thread)
        threads.append(thread)
        raise KeyboardInterrupt

    call = PausedCall(lambda pause: began.append("began"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            call.run(None)
    threads[0].join(20)
    assert (began, threads[0].is_alive(), call.has_ended) == ([], False, True)


@pytest.fixture
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Memory:
    """What a function holds."""


@pytest.mark.slow
@pytest.mark.usefixtures("without_gc")
@pytest.mark.parametrize("end", ["error", "given-up", "value"])
def test_what_a_call_held_is_free_when_it_has_ended(end: str) -> None:
    """Also while the call is kept, and without a garbage collection, for which tensors are a few small objects."""
    held: list[weakref.ref[Memory]] = []

    def function(pause: Callable[[], None]) -> int:
        memory = Memory()
        held.append(weakref.ref(memory))
        pause()
        if end == "error":
            raise ValueError("in the midst")
        return id(memory)

    call = PausedCall(function)
    call.run(1)
    assert held[0]() is not None
    try:
        if end == "given-up":
            call.close()
        else:
            call.run(None)
    except ValueError:
        pass
    assert call._thread is not None
    call._thread.join(20)
    assert held[0]() is None
