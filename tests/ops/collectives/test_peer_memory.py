"""Which ranks connect for the one-shot all-reduce, and what they tell each other.

Sums are in test_all_reduce_kernel_interpreted.py.
"""

from __future__ import annotations

import logging
import os
import threading

import pytest
import torch
import torch.distributed as dist

from fa_serve.ops.collectives import peer_memory
from fa_serve.ops.collectives.peer_buffers import MAX_BYTES, MAX_PROGRAMS, MAX_RANKS, MAX_WIDTH, Peers
from fa_serve.ops.collectives.peer_memory import Facts, PeerSums, environment, peer_refusal


def facts(device: int, size: int = 2, **changes: object) -> Facts:
    """A rank that can reach all GPUs of its machine."""
    return Facts("", "host", device, [n for n in range(size) if n != device], 132)._replace(**changes)


def test_ranks_of_one_machine_with_access_connect() -> None:
    assert peer_refusal([facts(0), facts(1)]) is None
    assert peer_refusal([facts(n, MAX_RANKS) for n in range(MAX_RANKS)]) is None
    assert peer_refusal([facts(3, 8), facts(5, 8)]) is None  # other GPUs of the machine do not matter


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([facts(0), facts(1, obstacle="torch 2.0 has no symmetric memory")], "rank 1: torch 2.0 has no symmetric memory"),
        ([facts(0), facts(1, host="other")], "the ranks are on several machines"),
        ([facts(0), facts(0)], "several ranks report the same GPU number"),
        ([facts(0, 3), facts(1, reached=[0]), facts(2, 3)], "cuda:1 of rank 1 has no access to the memory of cuda:2"),
        ([facts(n, 9) for n in range(9)], "there are 9 ranks, but at most 8 can access each other's memory"),
    ],
)
def test_other_ranks_do_not(ranks: list[Facts], reason: str) -> None:
    assert peer_refusal(ranks) == reason


def connect_ranks(monkeypatch: pytest.MonkeyPatch, own: list[Facts], failing: int | None) -> list[object]:
    """What `connect` returns on each rank, threads that believe to have GPUs."""
    store = dist.HashStore()
    results: dict[int, object] = {}

    def facts_of(device: torch.device) -> Facts:
        return own[device.index]

    def rendezvous(rank: int, size: int, device: torch.device, processors: int) -> object:
        if rank == failing:
            raise RuntimeError("no driver\nfor this")
        return rank, size, processors

    monkeypatch.setattr(peer_memory, "_facts_of", facts_of)
    monkeypatch.setattr(peer_memory, "_rendezvous", rendezvous)

    def run(rank: int) -> None:
        results[rank] = PeerSums.connect(store, rank, len(own), torch.device("cuda", rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(own))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[rank] for rank in range(len(own))]


def test_all_ranks_connect_with_the_least_number_of_processors(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, logger="fa_serve.ops")
    assert connect_ranks(monkeypatch, [facts(0), facts(1, processors=114)], None) == [(0, 2, 114), (1, 2, 114)]
    assert caplog.messages == ["sums of any size over 2 ranks use one kernel"] * 2
    caplog.clear()
    assert connect_ranks(monkeypatch, [facts(n, 3) for n in range(3)], None) == [(n, 3, 132) for n in range(3)]
    assert caplog.messages == ["sums over 3 ranks use one shot up to 2048 KB and NCCL above"] * 3


def test_no_rank_connects_if_one_cannot(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, logger="fa_serve.ops")
    assert connect_ranks(monkeypatch, [facts(0), facts(1)], failing=1) == [None, None]
    reason = "rank 1 got no symmetric memory: RuntimeError: no driver"
    assert caplog.messages == [f"sums over 2 ranks use NCCL: {reason}"] * 2
    caplog.clear()
    assert connect_ranks(monkeypatch, [facts(0, reached=[]), facts(1)], None) == [None, None]
    reason = "cuda:0 of rank 0 has no access to the memory of cuda:1"
    assert caplog.messages == [f"sums over 2 ranks use NCCL: {reason}"] * 2


def test_ranks_on_cpus_and_a_single_rank_do_not_ask() -> None:
    store = dist.HashStore()
    assert PeerSums.connect(store, 0, 2, torch.device("cpu")) is None
    assert PeerSums.connect(store, 0, 1, torch.device("cuda", 0)) is None
    assert store.num_keys() == 0


def made(size: int) -> PeerSums:
    """Of rank 0, without the buffers of the others."""
    addresses = torch.zeros(size, dtype=torch.int64)
    return PeerSums(Peers(0, size, addresses, torch.zeros(1 + MAX_PROGRAMS, dtype=torch.int64), 132), torch.empty(0))


@pytest.mark.parametrize("size", [2, 3])
def test_messages_that_a_kernel_takes(size: int) -> None:
    """Of two ranks any size, of more ranks up to 2 MB."""
    half = torch.bfloat16
    peer_sums = made(size)
    assert peer_sums.takes(torch.empty(1, 4096, dtype=half))
    assert peer_sums.takes(torch.empty(1, MAX_BYTES // 2048, 1024, dtype=half))
    assert peer_sums.takes(torch.empty(2, MAX_WIDTH))
    assert peer_sums.takes(torch.empty(1 + MAX_BYTES // 2048, 1024, dtype=half)) == (size == 2)
    assert peer_sums.takes(torch.empty(8192, 4096, dtype=half, device="meta")) == (size == 2)
    assert not peer_sums.takes(torch.empty(1, MAX_WIDTH + 1))
    assert not peer_sums.takes(torch.empty(0, 8))
    assert not peer_sums.takes(torch.empty(4, 8, dtype=torch.float64))
    assert not peer_sums.takes(torch.empty(4, 8).t())


def test_messages_without_room_in_the_buffer_of_one_shot_are_pushed(monkeypatch) -> None:
    launched: list[bool] = []
    peer_sums = made(2)
    monkeypatch.setattr(peer_sums, "_launch", lambda *_, pushed, **options: launched.append(pushed))
    for rows, kernel in ((MAX_BYTES // 2048, "one shot"), (1 + MAX_BYTES // 2048, "pushed")):
        x = torch.empty(rows, 1024, dtype=torch.bfloat16)
        peer_sums.sum(x)
        peer_sums.add(x, x, 1.0, None, None)
        assert peer_sums.kernel_of(x) == kernel
    assert launched == [False, False, True, True]


def test_variables_are_set_and_taken_back(monkeypatch) -> None:
    monkeypatch.setenv("FA_SERVE_TEST_OLD", "before")
    monkeypatch.delenv("FA_SERVE_TEST_NEW", raising=False)
    with environment({"FA_SERVE_TEST_OLD": "1", "FA_SERVE_TEST_NEW": "2"}):
        assert os.environ["FA_SERVE_TEST_OLD"] + os.environ["FA_SERVE_TEST_NEW"] == "12"
    assert os.environ["FA_SERVE_TEST_OLD"] == "before"
    assert "FA_SERVE_TEST_NEW" not in os.environ
    assert peer_memory.NO_MULTICAST == {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
