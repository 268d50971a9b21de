"""Ranks exchange handles: a process that connects for the second time and a new one, through torch's own process groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from warm_processes import warm_program

from fa_serve.ops.collectives import exchange_group as module
from fa_serve.ops.collectives.all_reduce import AllReduce, listen
from fa_serve.ops.collectives.exchange_group import TIMEOUT, ExchangeStore, can_exchange, exchange_group


def exchange(rank: int, first: int) -> list[str]:
    """What two ranks tell each other through the group's store, as torch 2.11 and 2.13 do. first: the number of an exchange"""
    received = []
    with exchange_group(rank, 2) as name:
        group = _resolve_process_group(name)
        assert (group.rank(), group.size()) == (rank, 2)
        store = group.get_group_store()
        for number in range(2):
            keys = [f"symmetric/{first + number}/{other}" for other in range(2)]
            store.set(keys[rank], f"{number} of {rank}")
            store.wait([keys[1 - rank]], TIMEOUT)
            received.append(store.get(keys[1 - rank]).decode())
            assert store.multi_get(keys) == [f"{number} of {other}".encode() for other in range(2)]
        if hasattr(store, "barrier"):
            store.barrier(f"symmetric/{first + 2}", 2)
    return received


FOLLOWER = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from fa_serve.ops.collectives.all_reduce import AllReduce, join
from test_exchange_group import exchange
all_reduce = AllReduce(join(int(sys.argv[2]), 2), 1, 2, torch.device("cpu"))
assert exchange(1, 0) == ["0 of 0", "1 of 0"]
"""


def test_a_process_that_connects_again_meets_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two engines, one after the other, whose followers are new processes and begin with exchange 0."""
    monkeypatch.setattr(module, "_count", 0)
    for first in (0, 3):
        store, port = listen(2)
        follower = warm_program(FOLLOWER, str(Path(__file__).parent), str(port))
        all_reduce = AllReduce(store, 0, 2, torch.device("cpu"))
        try:
            assert exchange(0, first) == ["0 of 1", "1 of 1"]
            assert follower.wait(60) == 0
        finally:
            all_reduce.close()
            follower.kill()
            follower.wait()
            follower.stdout.close()


def test_the_group_of_a_later_exchange_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_count", 1)
    store, _ = listen(1)
    all_reduce = AllReduce(store, 0, 1, torch.device("cpu"))
    try:
        with exchange_group(0, 1) as name:
            assert name != dist.group.WORLD.group_name
        with pytest.raises(RuntimeError, match=name):
            _resolve_process_group(name)
    finally:
        all_reduce.close()


def test_a_rank_that_does_not_come_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the store's own timeout, which is that of the ranks that wait to hear of it."""
    store = ExchangeStore(dist.HashStore())
    monkeypatch.setattr(ExchangeStore.wait, "__defaults__", (TIMEOUT / 600,))
    store.set("symmetric/4/0", "here")
    assert store.get("symmetric/4/0") == b"here"
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
        store.get("symmetric/4/1")


def test_torch_2_10_exchanges_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu130")
    monkeypatch.setattr(module, "_count", 0)
    assert can_exchange()
    monkeypatch.setattr(module, "_count", 1)
    assert not can_exchange()
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert can_exchange()
