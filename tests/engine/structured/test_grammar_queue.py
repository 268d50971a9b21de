"""Clients take turns, and short grammars do not wait for long ones."""

from __future__ import annotations

import threading

import pytest

from fa_serve.engine.structured.grammar_queue import LONG, GrammarQueue

SECONDS = 20


def test_a_client_with_many_long_grammars_holds_up_neither_others_nor_its_short_ones() -> None:
    queue = GrammarQueue(lambda: None)
    gate = threading.Event()
    started: list[str] = []
    done = threading.Semaphore(0)

    def blocked(name: str) -> None:
        started.append(name)
        gate.wait(SECONDS)

    def quick(name: str) -> None:
        started.append(name)
        done.release()

    for number in range(10):
        queue.submit(f"long-{number}", "attacker", LONG, lambda number=number: blocked(f"long-{number}"))
    queue.submit("own", "attacker", 10, lambda: quick("own"))
    queue.submit("other", "victim", 10, lambda: quick("other"))
    queue.submit("other long", "victim", LONG, lambda: quick("other long"))
    for _ in range(3):
        assert done.acquire(timeout=SECONDS)
    assert [name for name in started if name.startswith("long-")] == ["long-0"]
    queue.cancel("long-1")
    last = threading.Event()
    queue.submit("last", "attacker", LONG, last.set)
    gate.set()
    assert last.wait(SECONDS)
    assert "long-1" not in started
    queue.close()


def test_a_thread_that_cannot_be_started_is_started_by_the_next_job(monkeypatch) -> None:
    queue = GrammarQueue(lambda: None)
    done = threading.Event()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            queue.submit("refused", None, 10, done.set)
    assert not done.wait(0.2), "what is refused does not run later"
    queue.submit("taken", None, 10, done.set)
    assert done.wait(SECONDS)
