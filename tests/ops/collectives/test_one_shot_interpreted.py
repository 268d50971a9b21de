"""The one-shot all-reduce in Triton's interpreter: its arithmetic rank by rank, and its barrier between processes.

The interpreter runs one kernel at a time in a process. So the arithmetic is tested with the parts of the other ranks in place
and without waiting, and the barrier with one process for each rank and buffers in a shared file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from interpreter_bounds import reachable
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn
from sum_ranks import run_ranks, table
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.collectives.all_reduce import AllReduce, add_and_norm, listen
from fa_serve.ops.collectives.one_shot import launch_all_reduce
from fa_serve.ops.collectives.peer_buffers import FLAG_BYTES, MAX_BYTES, MAX_PROGRAMS, Peers, buffer_bytes
from fa_serve.ops.collectives.peer_memory import PeerSums

CALLS = 12
SCRIPT = """
import random, sys, time, torch
from sum_ranks import peers_of
from test_one_shot_interpreted import CALLS, message
from fa_serve.ops.collectives.one_shot import launch_all_reduce
path, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
peers, buffers = peers_of(path, rank, size, 2)
delays = random.Random(rank)
for call in range(CALLS):
    time.sleep(delays.choice([0, 0, 0.05]))
    x = message(call, rank)
    launch_all_reduce(x, peers, x)
    expected = message(call, 0)
    for other in range(1, size):
        expected += message(call, other)
    assert torch.equal(x, expected), f"call {call} of rank {rank}"
print("right")
"""


def message(call: int, rank: int) -> Tensor:
    """Float32, with another number of rows and so of programs in each call."""
    return randn([1, 5, 2, 9][call % 4], 48, dtype=torch.float32, seed=100 * call + rank)


@contextmanager
def alone(rank: int, parts: list[Tensor], processors: int = 2) -> Iterator[Peers]:
    """What a rank sees in its first call if all others have written their parts. It waits for nobody."""
    size = len(parts)
    buffers = torch.zeros(size, buffer_bytes(size), dtype=torch.uint8)
    for other, part in enumerate(parts):
        if other != rank:
            half = buffers[other, FLAG_BYTES + MAX_BYTES :].view(part.dtype)
            half[: part.numel()] = part.flatten()
    calls = torch.zeros(1 + MAX_PROGRAMS, dtype=torch.int64)
    calls[1:] = 1
    with reachable(buffers):
        yield Peers(rank, size, table(buffers), calls, processors)
        told = buffers[:, :FLAG_BYTES].view(torch.int64).view(size, -1)[:, : 2 * processors * size].view(size, -1, size)
        assert told.max() == 1
        assert torch.equal(told.amax((0, 1)).nonzero()[:, 0], torch.tensor([rank]))  # only this rank's flags, and on all ranks
        assert bool((told[:, 0, rank] == 1).all())
        assert int(calls[0]) == 2 * MAX_PROGRAMS


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("size", "total", "width"), [(2, 1, 64), (3, 5, 80), (8, 3, 333), (2, 41, 1024), (2, 1, 5000)])
def test_the_sum_has_the_order_of_ranks(size: int, total: int, width: int, dtype: torch.dtype) -> None:
    """With 41 rows, each of the programs has several tiles, and the last tile has rows of no message.

    The interpreter rounds float32 to bfloat16 towards 0, so the order of the sum is seen in float32 only.
    """
    parts = [randn(total, width, dtype=dtype, seed=seed) for seed in range(size)]
    exact = parts[0].float()
    for part in parts[1:]:
        exact = exact + part.float()
    for rank in {0, 1, size - 1}:
        x = parts[rank].clone()
        with alone(rank, parts, processors=1) as peers:
            assert launch_all_reduce(x, peers, x) is None
        if dtype == torch.float32:
            assert torch.equal(x, exact)
        assert_rounded_once(x, exact.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("after", [False, True], ids=["no norm after", "norm after"])
@pytest.mark.parametrize("before", [False, True], ids=["no norm before", "norm before"])
@pytest.mark.parametrize(("total", "width"), [(1, 64), (6, 300), (2, 10000)])
def test_residual_and_norms(total: int, width: int, before: bool, after: bool, dtype: torch.dtype) -> None:
    """10,000 numbers are so many that weights are loaded late."""
    parts = [randn(total, width, dtype=dtype, seed=seed) for seed in range(2)]
    x = randn(total, 2 * width, dtype=dtype, seed=2)[:, :width]
    norm_after = ops.Norm(randn(width, dtype=dtype, seed=3), 1e-3, 1.0) if after else None
    norm_before = ops.Norm(randn(width, dtype=dtype, seed=4), 1e-5) if before else None
    y = sum(part.double() for part in parts)
    y = 0.25 * y if norm_after is None else ops.rms_norm(y, norm_after._replace(weight=norm_after.weight.double()))
    exact = x.double() + y
    with alone(1, parts) as peers:
        normed = launch_all_reduce(parts[1], peers, x, residual=x, after=norm_after, before=norm_before, alpha=0.25)
    assert_rounded_once(x, exact)
    assert (normed is not None) == before
    if normed is not None and norm_before is not None:
        assert_rounded_once(normed, ops.rms_norm(x.double(), norm_before._replace(weight=norm_before.weight.double())))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_wait_for_each_other(size: int, tmp_path: Path) -> None:
    """Processes that begin each call at other times add up the right parts, in halves that they use again."""
    assert run_ranks(SCRIPT, "test_one_shot_interpreted", size, tmp_path) == ["right\n"] * size


@pytest.fixture
def single() -> Iterator[tuple[AllReduce, Peers]]:
    """A group of one rank with the buffers of one shot."""
    memory = torch.zeros(buffer_bytes(1), dtype=torch.uint8)
    peers = Peers(0, 1, table(memory[None]), torch.zeros(1 + MAX_PROGRAMS, dtype=torch.int64), 2)
    all_reduce = AllReduce(listen(1)[0], 0, 1, torch.device("cpu"))
    all_reduce._peer_sums = PeerSums(peers, memory)
    try:
        with reachable(memory):
            yield all_reduce, peers
    finally:
        all_reduce.close()


def num_calls(peers: Peers) -> int:
    return int(peers.calls[0]) // (2 * MAX_PROGRAMS)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_one_operation_computes_what_its_pieces_compute(dtype: torch.dtype, single: tuple[AllReduce, Peers]) -> None:
    """The pieces round the sum and what is added to the residual stream; the kernel rounds once."""
    all_reduce, peers = single
    norms = [ops.Norm(randn(96, dtype=dtype, seed=seed), 1e-5) for seed in (1, 2)]
    tolerance = 4 * torch.finfo(dtype).eps
    for call, (after, before) in enumerate([(None, None), (None, norms[0]), (norms[1], None), (norms[1], norms[0])]):
        x = randn(3, 96, dtype=dtype, seed=3)
        y = randn(3, 96, dtype=dtype, seed=4)
        expected = add_and_norm(x.clone(), y.clone(), 0.5, after, before)
        actual = all_reduce.add(x, y, alpha=0.5, after=after, before=before)
        assert num_calls(peers) == call + 1
        assert actual[0] is x
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=4 * tolerance)


def test_which_sums_take_one_shot(single: tuple[AllReduce, Peers]) -> None:
    all_reduce, peers = single
    x = randn(1, 3, 96, dtype=torch.float32)
    assert torch.equal(all_reduce(x.clone()), x)
    assert num_calls(peers) == 1
    all_reduce(torch.zeros(1 + MAX_BYTES // 2048, 1024, dtype=torch.bfloat16))
    all_reduce(torch.zeros(3, 4, dtype=torch.int32))
    all_reduce(torch.zeros(0, 4))
    with all_reduce.paused():
        all_reduce.add(x[0], x[0].clone())
    assert num_calls(peers) == 1
    all_reduce.close()
    assert torch.equal(all_reduce._peer_sums is None and x, x)


def test_a_lost_rank_ends_the_wait_at_once_and_for_good() -> None:
    """Rank 1 never writes its flag, or writes that of an earlier call."""
    memory = torch.zeros(2, buffer_bytes(2), dtype=torch.uint8)
    peers = Peers(0, 2, table(memory), torch.zeros(1 + MAX_PROGRAMS, dtype=torch.int64), 2)
    peer_sums = PeerSums(peers, memory[0])
    peer_sums.abort()
    x = torch.ones(2, 64)
    with reachable(memory):
        for _ in range(3):
            peer_sums.sum(x)
    assert num_calls(peers) == 3
