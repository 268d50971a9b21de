"""Calls that run a part at a time, in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

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
