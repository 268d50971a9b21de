"""Ranks that meet at a trainer's store, send and receive, and do not wait for ever."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fa_serve.engine import WeightTransferError
from fa_serve.engine.rollout.weight_group import WeightGroup, has_arrived
from fa_serve.ops.collectives.all_reduce import LOOPBACK, listen
from fa_serve.spec import ParameterError

CPU = torch.device("cpu")


def make_group(port: int, rank: int, size: int = 2, timeout: float = 20.0, **options: Any) -> WeightGroup:
    told = {"backend": "gloo", "device": CPU} | options
    return WeightGroup(LOOPBACK, port, rank=rank, world_size=size, timeout=timeout, **told)


def make_ranks(size: int, timeout: float = 20.0) -> list[WeightGroup]:
    """All ends of a group. The store is gone when this returns."""
    store, port = listen(size)
    with ThreadPoolExecutor(size) as pool:
        ends = pool.map(lambda rank: make_group(port, rank, size, timeout), range(size))
        groups = list(ends)
    del store
    return groups


def broadcast(groups: list[WeightGroup], sent: Tensor) -> list[Tensor]:
    tensors = [sent, *(torch.empty_like(sent) for _ in groups[1:])]
    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(WeightGroup.broadcast, groups, tensors))
    return tensors[1:]


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_every_bit(size: int) -> None:
    groups = make_ranks(size)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for shape in ((), (1,), (7, 33)):
            sent = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
            for received in broadcast(groups, sent):
                assert torch.equal(received, sent), (dtype, shape)
    for group in groups:
        group.close()
        with pytest.raises(WeightTransferError, match="is closed"):
            group.broadcast(torch.zeros(1))


def test_a_trainer_keeps_its_default_group_and_its_environment() -> None:
    before = dict(os.environ)
    groups = make_ranks(2)
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    for group in groups:
        group.close()


def test_a_rank_that_leaves_ends_those_who_wait() -> None:
    trainer, engine = make_ranks(2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(engine.broadcast, torch.zeros(1000))
        time.sleep(0.2)
        assert not waits.done()
        trainer.close()
        with pytest.raises(WeightTransferError, match="has left the group"):
            waits.result(5)
    engine.close()


@pytest.mark.slow
def test_a_rank_that_is_late_ends_those_who_wait() -> None:
    trainer, engine = make_ranks(2, timeout=1.0)
    since = time.monotonic()
    with pytest.raises(WeightTransferError, match="or did not respond in time"):
        engine.broadcast(torch.zeros(1000))
    assert 0.9 < time.monotonic() - since < 5
    trainer.close()
    engine.close()


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_not_awaited_for_ever() -> None:
    store, port = listen(2)
    since = time.monotonic()
    with pytest.raises(
        WeightTransferError, match=f"the 2 ranks did not connect to each other at {LOOPBACK}, port {port}, within 1 s"
    ):
        make_group(port, rank=1, timeout=1.0)
    assert time.monotonic() - since < 5
    assert has_arrived(store, 1)
    assert not has_arrived(store, 0)


def test_an_address_where_nobody_listens_is_told_at_once() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    since = time.monotonic()
    with pytest.raises(WeightTransferError, match="did not connect to each other"):
        make_group(port, rank=1, timeout=60.0)
    assert time.monotonic() - since < 5


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "nobody.invalid"])
def test_a_host_that_can_be_no_name_is_told(host: str) -> None:
    with pytest.raises(WeightTransferError, match=f"did not connect to each other at {host}"):
        WeightGroup(host, 1, rank=1, world_size=2, backend="gloo", device=CPU, timeout=1.0)


def test_nccl_needs_a_gpu() -> None:
    with pytest.raises(ParameterError, match="backend must be gloo for weights that are not on a GPU"):
        make_group(1, rank=1, backend="nccl")


def test_nccl_does_not_end_the_process_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group waits in the caller, which gets an error; otherwise a thread of it ends the process after a timeout."""
    seen: list[tuple[str | None, str | None]] = []

    class Group:
        def __init__(self, *_: object) -> None:
            seen.append((os.environ.get("TORCH_NCCL_BLOCKING_WAIT"), os.environ.get("NCCL_SOCKET_IFNAME")))

        broadcast: Callable[..., Any] = lambda *_: type("Work", (), {"wait": lambda _: None})()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
    store, port = listen(2)
    group = make_group(port, rank=1, backend="nccl", device=torch.device("cuda:0"))
    assert seen == [("1", "lo")]
    assert group.device == torch.device("cuda:0")
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    del store
