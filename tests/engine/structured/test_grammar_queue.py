"""Clients take turns, and short grammars do not wait for long ones."""

from __future__ import annotations

import threading

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
