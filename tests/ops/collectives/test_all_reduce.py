"""The sum over ranks: the same bits everywhere, the order of ranks if it is asked for, and an error when a rank is lost."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
import torch
from warm_processes import warm_program

from fa_serve.ops.collectives.all_reduce import LOOPBACK, AllReduce, AllReduceError, join, listen

SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from fa_serve.ops.collectives.all_reduce import AllReduce, join
from test_all_reduce import part
rank, port = map(int, sys.argv[2:])
all_reduce = AllReduce(join(port, 3), rank, 3, torch.device("cpu"), ordered=True)
totals = all_reduce(part(rank)), all_reduce(part(rank).bfloat16()), all_reduce.gather(part(rank))
sys.stdout.write(" ".join(str(hash(tuple(x.view(-1).tolist()))) for x in totals))
"""


def part(rank: int) -> torch.Tensor:
    return torch.randn(7, 33, generator=torch.Generator().manual_seed(rank))


@pytest.mark.slow
def test_three_ranks_add_in_their_order_and_a_lost_one_is_an_error() -> None:
    """Unordered, the first rank to be added depends on the place in the tensor, and three numbers do not commute."""
    store, port = listen(3)
    others = [warm_program(SCRIPT, str(Path(__file__).parent), str(rank), str(port)) for rank in (1, 2)]
    all_reduce = AllReduce(store, 0, 3, torch.device("cpu"), ordered=True)
    try:
        totals = all_reduce(part(0)), all_reduce(part(0).bfloat16()), all_reduce.gather(part(0))
        assert torch.equal(totals[0], part(0) + part(1) + part(2))
        exact_once = part(0).bfloat16().float() + part(1).bfloat16() + part(2).bfloat16()
        assert torch.equal(totals[1], exact_once.bfloat16())  # rounded once, as the kernel of one shot does
        assert torch.equal(totals[2], torch.cat([part(0), part(1), part(2)], dim=1))
        mine = " ".join(str(hash(tuple(x.view(-1).tolist()))) for x in totals)
        assert [other.stdout.read() for other in others] == [mine, mine]
        assert [other.wait(60) for other in others] == [0, 0]
        for call in (all_reduce, all_reduce.gather):
            with pytest.raises(AllReduceError):
                call(part(0))
    finally:
        all_reduce.close()
        for other in others:
            other.kill()
            other.wait()
            other.stdout.close()


def test_a_group_of_one() -> None:
    store, port = listen(1)
    environment = dict(os.environ)
    all_reduce = AllReduce(store, 0, 1, torch.device("cpu"))
    try:
        assert dict(os.environ) == environment
        x = torch.arange(6.0).view(2, 3)
        assert torch.equal(all_reduce(x), torch.arange(6.0).view(2, 3))
        with pytest.raises(RuntimeError, match=r"already belongs to a process group of torch.distributed"):
            AllReduce(join(port, 1), 0, 1, torch.device("cpu"))
    finally:
        all_reduce.close()
    AllReduce(listen(1)[0], 0, 1, torch.device("cpu")).close()


def test_a_rank_that_cannot_connect_leaves_the_group(monkeypatch) -> None:
    def connect(*_: object) -> None:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr("fa_serve.ops.collectives.all_reduce.PeerSums.connect", connect)
    with pytest.raises(RuntimeError, match="the store is gone"):
        AllReduce(listen(1)[0], 0, 1, torch.device("cpu"))
    assert not torch.distributed.is_initialized()


def test_a_group_that_does_not_end_is_left_to_the_end_of_the_process(monkeypatch, caplog) -> None:
    """NCCL waits for CUDA graphs that refer to it."""
    freed = threading.Event()
    all_reduce = AllReduce(listen(1)[0], 0, 1, torch.device("cpu"))
    end = torch.distributed.destroy_process_group
    monkeypatch.setattr("fa_serve.ops.collectives.all_reduce.CLOSE_SECONDS", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "destroy_process_group", freed.wait)
        all_reduce.close()
    assert "the process group of the ranks did not end within 0.05 s" in caplog.text
    freed.set()
    end()


def test_a_paused_sum_waits_for_nobody() -> None:
    all_reduce = object.__new__(AllReduce)  # without a group, any sum fails
    all_reduce._peer_sums = None
    all_reduce._paused = False
    all_reduce._paused_threads = set()
    all_reduce._ordered = False
    for paused in (all_reduce.paused, all_reduce.paused_in_thread):
        with paused():
            x = torch.ones(3)
            assert all_reduce(x) is x
            all_reduce._size = 2
            assert all_reduce.gather(x[None]).shape == (1, 6)
        with pytest.raises((AllReduceError, ValueError)):
            all_reduce(x)


def test_a_thread_that_is_paused_pauses_no_other() -> None:
    all_reduce = object.__new__(AllReduce)
    all_reduce._peer_sums = None
    all_reduce._paused = all_reduce._ordered = False
    all_reduce._paused_threads = set()
    failed: list[bool] = []

    def add() -> None:
        try:
            all_reduce(torch.ones(3))
        except (AllReduceError, ValueError):  # it waits for the others, and there is no group
            failed.append(True)

    with all_reduce.paused_in_thread():
        other = threading.Thread(target=add)
        other.start()
        other.join()
        assert torch.equal(all_reduce(torch.ones(3)), torch.ones(3))
    assert failed == [True]


def test_only_this_machine_can_reach_the_store() -> None:
    store, port = listen(2)
    addresses = {address[4][0] for address in socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET)}
    for address in addresses - {LOOPBACK}:
        if not address.startswith("127."):
            with socket.socket() as client:
                client.settimeout(1)
                assert client.connect_ex((address, port)) != 0
    del store
