"""The kernel of large sums in Triton's interpreter: it has the bits of one shot, and no rank overwrites what is not read yet.

The interpreter runs one kernel at a time in a process. So the arithmetic is tested with ranks that run one after the other and
wait for nobody, and the order of writes and reads with two processes, one of which is slow.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreter_bounds import reachable
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn
from sum_ranks import run_ranks, table
from torch import Tensor

from fa_serve import ops
from fa_serve.launching.launch import power_of_2
from fa_serve.ops.collectives.one_shot import launch_all_reduce
from fa_serve.ops.collectives.peer_buffers import MAX_BYTES, MAX_PROGRAMS, PUSHED_BYTES, PUSHED_FLAGS, Peers, buffer_bytes
from fa_serve.ops.collectives.peer_memory import PeerSums
from fa_serve.ops.collectives.pushed_sum import plan_pushed_sum

SHAPES = [(1, 64, 1), (5, 333, 1), (7, 2048, 1), (30, 1024, 4), (3, 5000, 1), (2, 10000, 1)]
"""Rows, their width, and processors. A program has at most 4 parts, one for each slot. The widest rows are loaded late."""
NORMS = [
    *[(5, 333, 1, before, after) for before in (False, True) for after in (False, True)],
    (30, 1024, 4, True, True),
    (2, 10000, 1, True, True),
]
"""The same, and whether there is a norm before the next layer and one after the sum."""
SCRIPT = """
import sys, time, torch
import fa_serve.ops.collectives.pushed_sum as kernel
from fa_serve.launching.plans import PLANS
from sum_ranks import peers_of
from test_pushed_sum_interpreted import CALLS, message
from fa_serve.ops.collectives.one_shot import launch_all_reduce
path, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
peers, buffers = peers_of(path, rank, size, 1)
wait, write, count = kernel.wait_for_flags, kernel.write_flag, kernel.count_call

def slowly(function, slow):
    def then_sleep(*arguments):
        function(*arguments)
        if rank == slow:
            time.sleep(0.02)
    return then_sleep

def run(slow, calls=3 * CALLS, waits=True, slots=4, halves=2):
    kernel.wait_for_flags = slowly(wait if waits else lambda *_: None, slow)
    kernel.write_flag = slowly(write, slow)
    kernel._SLOTS = slots
    PLANS.clear()
    kernel.count_call = count if halves == 2 else lambda *arguments: 2 * count(*arguments)
    wrong = 0
    for call in range(calls):
        x = message(call, rank)
        launch_all_reduce(x, peers, x, pushed=call % 4 != 2)
        wrong += not torch.equal(x, message(call, 0) + message(call, 1))
    return wrong

# the last one writes flags with higher numbers, which no lower ones may follow
print(run(0, CALLS), run(1, CALLS), run(1, slots=3), run(1, CALLS, waits=False), run(1, halves=1))
"""
CALLS = 5


def message(call: int, rank: int) -> Tensor:
    """Float32. In turn, one program has all rows, as wide ones leave room for one, and two programs share them."""
    rows, width = [(5, 4096), (9, 2048), (3, 48), (2, 4096)][call % 4]
    return randn(rows, width, dtype=torch.float32, seed=100 * call + rank)


def told(buffer: Tensor) -> int:
    """How many programs have told the rank of this buffer of a part, in a first call."""
    flags = buffer[PUSHED_FLAGS:].view(torch.int64)[:MAX_PROGRAMS]
    assert bool(((flags == 0) | (flags >> 20 == 1)).all())
    return int((flags > 0).sum())


Result = tuple[Tensor, Tensor | None]


def both(
    parts: list[Tensor], processors: int, *, pushed: bool, residual: Tensor | None = None, **options: object
) -> list[Result]:
    """The results of two ranks whose waits end at once. Rank 1 runs first, to write its parts, and again when rank 0 has."""
    buffers = torch.zeros(2, buffer_bytes(2), dtype=torch.uint8)
    results: dict[int, Result] = {}
    with reachable(buffers):
        for rank in (1, 0, 1):
            calls = torch.full((1 + MAX_PROGRAMS,), torch.iinfo(torch.int64).max, dtype=torch.int64)
            calls[0] = 0
            peers = Peers(rank, 2, table(buffers), calls, processors)
            x = parts[rank].clone()
            out = x if residual is None else torch.cat([residual, residual], 1)[:, : x.shape[1]]
            normed = launch_all_reduce(x, peers, out, residual=None if residual is None else out, pushed=pushed, **options)
            results[rank] = out, normed
            assert int(calls[0]) == 2 * MAX_PROGRAMS
            assert not pushed or told(buffers[1 - rank]) > 0
    return [results[0], results[1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("total", "width", "processors"), SHAPES)
def test_the_sum_has_the_bits_of_one_shot(total: int, width: int, processors: int, dtype: torch.dtype) -> None:
    """In place. The interpreter rounds float32 to bfloat16 towards 0, so the sum is exact in float32 only."""
    parts = [randn(total, width, dtype=dtype, seed=seed) for seed in range(2)]
    exact = parts[0].float() + parts[1].float()
    results = both(parts, processors, pushed=True)
    for (out, normed), (expected, _) in zip(results, both(parts, processors, pushed=False), strict=True):
        assert normed is None
        assert torch.equal(out, expected)
        if dtype == torch.float32:
            assert torch.equal(out, exact)
        assert_rounded_once(out, exact.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("total", "width", "processors", "before", "after"), NORMS)
def test_residual_and_norms(total: int, width: int, processors: int, before: bool, after: bool, dtype: torch.dtype) -> None:
    """The result replaces the residual stream, whose rows have gaps between them."""
    parts = [randn(total, width, dtype=dtype, seed=seed) for seed in range(2)]
    x = randn(total, width, dtype=dtype, seed=2)
    norm_after = ops.Norm(randn(width, dtype=dtype, seed=3), 1e-3, 1.0) if after else None
    norm_before = ops.Norm(randn(width, dtype=dtype, seed=4), 1e-5) if before else None
    y = parts[0].double() + parts[1].double()
    y = 0.25 * y if norm_after is None else ops.rms_norm(y, norm_after._replace(weight=norm_after.weight.double()))
    options = {"residual": x, "after": norm_after, "before": norm_before, "alpha": 0.25}
    results = [result for pushed in (True, False) for result in both(parts, processors, pushed=pushed, **options)]
    out, normed = results[0]
    assert_rounded_once(out, x.double() + y)
    assert (normed is not None) == before
    if normed is not None and norm_before is not None:
        assert_rounded_once(normed, ops.rms_norm(out.double(), norm_before._replace(weight=norm_before.weight.double())))
    for other in results[1:]:
        assert torch.equal(other[0], out)
        assert normed is None or torch.equal(other[1], normed)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("width", [1, 333, 4096, 16384])
def test_the_slots_of_all_programs_fit_into_half_of_the_buffer(width: int, dtype: torch.dtype) -> None:
    """On a GPU of any size: rows of 64 KB leave room for 64 programs."""
    x = torch.zeros(1, dtype=dtype).expand(1 << 24, width)
    peers = Peers(0, 2, torch.zeros(2, dtype=torch.int64), torch.zeros(1 + MAX_PROGRAMS, dtype=torch.int64), 1000)
    (programs, _, _) = plan_pushed_sum(x, peers, x, None, (1.0, 0.0, 0.0, 0.0, 0.0))._grid
    slot_bytes = max(8192, power_of_2(width) * dtype.itemsize)
    assert programs == min(MAX_PROGRAMS, PUSHED_BYTES // (4 * slot_bytes))


@pytest.mark.slow
def test_parts_are_not_overwritten_before_they_are_read(tmp_path: Path) -> None:
    """Either rank may be slow. Calls of both kernels follow each other, with slots of different sizes.

    Sums are wrong if there are fewer slots, if no rank waits, or if all calls use the same half, so the delays are long enough.
    A race is not lost every time, so some of these have more calls.
    """
    counts = [
        [int(word) for word in printed.split()] for printed in run_ranks(SCRIPT, "test_pushed_sum_interpreted", 2, tmp_path)
    ]
    right, also_right, *broken = [sum(both_ranks) for both_ranks in zip(*counts, strict=True)]
    assert (right, also_right) == (0, 0)
    assert len(broken) == 3
    assert min(broken) > 0


def test_a_lost_rank_ends_every_wait_of_a_large_sum() -> None:
    """Rank 1 never writes a flag. Each of 36 multiprocessors has one program; the last one has no second part."""
    buffers = torch.zeros(2, buffer_bytes(2), dtype=torch.uint8)
    peers = Peers(0, 2, table(buffers), torch.zeros(1 + MAX_PROGRAMS, dtype=torch.int64), 36)
    peer_sums = PeerSums(peers, buffers[0])
    peer_sums.abort()
    x = torch.ones(2 * 36 - 1, MAX_BYTES // 64 // 4)
    assert peer_sums.takes(x)
    with reachable(buffers):
        assert peer_sums.sum(x) is x
    assert told(buffers[1]) == 36
    assert told(buffers[0]) == 0
    assert bool((x == 1).all())  # nothing has arrived
