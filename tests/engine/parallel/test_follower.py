"""A follower at the end of a pipe: what it is told, what it answers, and when it stops."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
import torch

from fa_serve.engine import EngineConfig, EngineDeadError
from fa_serve.engine.parallel.follower import Follower
from fa_serve.engine.parallel.leader import Leader
from fa_serve.engine.parallel.links import Hello

CONFIG = EngineConfig(device="cpu", tensor_parallel=3)
HELLO = Hello(CONFIG, rank=2, host="127.0.0.1", port=1, num_threads=torch.get_num_threads())


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Connection, Follower]]:
    """Rank 0's end of a pipe and the follower at the other one. The process outlives the loss of rank 0."""
    lost = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda _: lost.set())
    ours, theirs = Pipe()
    ours.send(HELLO)
    yield ours, Follower(theirs)
    ours.close()
    assert lost.wait(10), "a follower ends when its link does"


def test_it_takes_its_place_from_rank_0(ends: tuple[Connection, Follower]) -> None:
    _, follower = ends
    assert (follower.rank, follower.size, follower.local_rank, follower.config) == (2, 3, 2, CONFIG)


def test_decisions_come_from_rank_0_in_the_same_order(ends: tuple[Connection, Follower]) -> None:
    ours, follower = ends
    ours.send(("clock", 2.5))
    assert follower.broadcast("clock", lambda: pytest.fail("only rank 0 makes it")) == 2.5
    ours.send(("gather", [4, 9]))
    assert follower.gather(9) == [4, 9]
    assert ours.recv() == 9
    ours.send(("masks", None))
    with pytest.raises(EngineDeadError, match=r"it expected 'salt' from rank 0, which sent 'masks'.*out of step"):
        follower.broadcast("salt", lambda: 0)


def test_calls_come_until_rank_0_stops_and_a_step_compares_digests(ends: tuple[Connection, Follower]) -> None:
    ours, follower = ends
    leader = Leader(CONFIG)
    sent: list[tuple[str, object]] = []
    leader._send = lambda what, value: sent.append((what, value))  # type: ignore[method-assign]
    leader.add_to_digest([4, 5])
    leader.tell("submit", "a", 1)
    leader.tell("step")
    for message in [*sent, ("stop", None)]:
        ours.send(message)
    follower.add_to_digest([4, 5])
    assert list(follower.calls()) == [("submit", ("a", 1)), ("step", ())]
    follower.add_to_digest([6])
    ours.send(sent[-1])
    with pytest.raises(
        EngineDeadError, match="its scheduling or sampling differed from rank 0's before step 2: the ranks are out of step"
    ):
        next(follower.calls())


def test_an_error_ends_it_and_is_told(ends: tuple[Connection, Follower]) -> None:
    ours, follower = ends
    with pytest.raises(EngineDeadError, match="ValueError: of a step"):
        follower.escalate(ValueError("of a step"))
    follower.fail(OSError("no port"))
    assert str(ours.recv()) == "rank 2 of 3 failed: OSError: no port"


def test_another_release_does_not_join(ends: tuple[Connection, Follower]) -> None:
    _, follower = ends
    follower._hello = replace(HELLO, version="0.0.1")
    with pytest.raises(EngineDeadError, match=r"it runs fa_serve .*, but rank 0 runs 0\.0\.1"):
        follower.start()
