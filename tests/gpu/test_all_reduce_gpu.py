"""The kernels of sums on GPUs: their flags with two ranks on one GPU, and everything with two GPUs beside NCCL.

Two ranks on one GPU are two streams of this process with buffers in its memory: the same kernels and flags as with two GPUs.
Programs of both must fit on the GPU at once, so there are few. A kernel that waits in vain would wait for ever: a timer ends it
by `PeerSums.abort`, and the test fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rounded_once import assert_rounded_once, dtype_id, randn
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.collectives.all_reduce import AllReduce, join, listen
from fa_serve.ops.collectives.one_shot import launch_all_reduce
from fa_serve.ops.collectives.peer_buffers import MAX_BYTES, MAX_PROGRAMS, Peers, buffer_bytes
from fa_serve.ops.collectives.peer_memory import PeerSums

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 4096), (3, 333), (37, 1024), (1, 16384), (128, 4096), (9, 5120)]
LARGE_SHAPES = [(1025, 1024), (777, 4096), (1031, 5120), (3001, 333), (401, 16384), (2049, 4096)]
"""With several parts for a program: odd numbers of rows, rows without alignment, and rows that are loaded late."""
REPLAYS = 100
SECONDS = 60.0
"""How long a test on one GPU may take."""


class Pair:
    """Two ranks on one GPU."""

    def __init__(self) -> None:
        self.buffers = torch.zeros(2, buffer_bytes(2), dtype=torch.uint8, device="cuda")
        addresses = torch.tensor([buffer.data_ptr() for buffer in self.buffers], device="cuda")
        self.calls = [torch.zeros(1 + MAX_PROGRAMS, dtype=torch.int64, device="cuda") for _ in range(2)]
        self.peers = [Peers(rank, 2, addresses, self.calls[rank], 16) for rank in range(2)]
        self.peer_sums = [PeerSums(self.peers[rank], self.buffers[rank]) for rank in range(2)]
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()  # `abort` writes on another stream than the one that fills buffers with zeros

    def warm_up(self, work: Callable[[int], object]) -> None:
        """Compile and load what `work(rank)` launches. A module may not be loaded beside a kernel that waits."""
        for peer_sums in self.peer_sums:
            peer_sums.abort()
        torch.cuda.synchronize()
        for _ in range(3):
            for rank in range(2):
                work(rank)
        torch.cuda.synchronize()
        for tensor in (self.buffers, *self.calls):
            tensor.zero_()
        torch.cuda.synchronize()

    def on_both(self, work: Callable[[int], object]) -> None:
        for rank in range(2):
            with torch.cuda.stream(self.streams[rank]):
                work(rank)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    late = threading.Event()

    def end() -> None:
        late.set()
        for peer_sums in made.peer_sums:
            peer_sums.abort()

    timer = threading.Timer(SECONDS, end)
    timer.start()
    yield made
    torch.cuda.synchronize()  # before the timer ends, because a test that has failed may leave a kernel that waits
    timer.cancel()
    assert not late.is_set(), f"a kernel has waited for {SECONDS:g} s"


def parts_of(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [randn(*shape, dtype=dtype, seed=2 * seed + rank).cuda() for rank in range(2)]


def total_of(parts: list[Tensor]) -> Tensor:
    return (parts[0].float() + parts[1].float()).to(parts[0].dtype)


def sum_in_place(pair: Pair, rank: int, x: Tensor, pushed: bool) -> None:
    launch_all_reduce(x, pair.peers[rank], x, pushed=pushed)


@pytest.mark.parametrize("kinds", [[False], [True], [True, False], [True, True, False]], ids=["small", "large", "both", "odd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_calls_of_different_sizes_follow_each_other(pair: Pair, dtype: torch.dtype, kinds: list[bool]) -> None:
    """Of either kernel or of both in turn, which count their calls together."""
    messages = []
    for call in range(60):
        pushed = kinds[call % len(kinds)]
        shapes = LARGE_SHAPES if pushed else SHAPES
        messages.append((pushed, parts_of(shapes[call // len(kinds) % len(shapes)], dtype, call)))
    pair.warm_up(lambda rank: [sum_in_place(pair, rank, parts[rank].clone(), pushed) for pushed, parts in messages])
    expected = [total_of(parts) for _, parts in messages]
    torch.cuda.synchronize()
    pair.on_both(lambda rank: [sum_in_place(pair, rank, parts[rank], pushed) for pushed, parts in messages])
    torch.cuda.synchronize()
    for (_, parts), total in zip(messages, expected, strict=True):
        assert torch.equal(parts[0], total)
        assert torch.equal(parts[1], total)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", [(1, 4096), (5, 8192), (2, 12288), (779, 4096), (2049, 1024), (1031, 5120), (131, 16384)])
def test_residual_and_norms(pair: Pair, shape: tuple[int, int], dtype: torch.dtype) -> None:
    pushed = shape[0] * shape[1] * dtype.itemsize > MAX_BYTES
    after, before = (ops.Norm(randn(shape[1], dtype=dtype, seed=seed).cuda(), 1e-5, 1.0) for seed in (8, 9))
    parts = parts_of(shape, dtype)
    x = randn(*shape, dtype=dtype, seed=7).cuda()
    residuals = [x.clone() for _ in range(2)]
    normed: dict[int, Tensor | None] = {}

    def add(rank: int) -> None:
        options = {"residual": residuals[rank], "after": after, "before": before, "pushed": pushed}
        normed[rank] = launch_all_reduce(parts[rank], pair.peers[rank], residuals[rank], **options)

    pair.warm_up(add)
    for residual in residuals:
        residual.copy_(x)
    torch.cuda.synchronize()
    pair.on_both(add)
    torch.cuda.synchronize()
    exact = x.double() + ops.rms_norm(parts[0].double() + parts[1].double(), after._replace(weight=after.weight.double()))
    for rank in range(2):
        assert_rounded_once(residuals[rank], exact)
        result = normed[rank]
        assert result is not None
        wide = before._replace(weight=before.weight.double())
        assert_rounded_once(result, ops.rms_norm(residuals[rank].double(), wide))
    assert torch.equal(residuals[0], residuals[1])


def test_graphs_with_an_odd_number_of_calls_are_replayed(pair: Pair) -> None:
    """The halves that the calls of a graph use differ from one replay to the next."""
    dtype = torch.bfloat16
    shapes = [SHAPES[0], LARGE_SHAPES[1], SHAPES[2]]
    inputs = [parts_of(shape, dtype) for shape in shapes]
    outputs = [[torch.zeros_like(x) for x in parts] for parts in inputs]
    checks = [[torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2)] for _ in shapes]
    expected = [total_of(parts) for parts in inputs]

    def step(rank: int) -> None:
        for parts, outs, wrong, total in zip(inputs, outputs, checks, expected, strict=True):
            pair.peer_sums[rank].sum(outs[rank].copy_(parts[rank]))
            wrong[rank].add_((outs[rank] != total).sum())

    pair.warm_up(step)
    for wrong in [x for each in checks for x in each]:
        wrong.zero_()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph):
            step(rank)
    torch.cuda.synchronize()
    for _ in range(REPLAYS):
        pair.on_both(lambda rank: graphs[rank].replay())
    torch.cuda.synchronize()
    assert [int(x) for each in checks for x in each] == [0] * 2 * len(shapes)
    assert [int(calls[0]) for calls in pair.calls] == [2 * MAX_PROGRAMS * len(shapes) * REPLAYS] * 2


@pytest.mark.parametrize("rows", [4, 1023])
def test_a_lost_rank_ends_the_wait(pair: Pair, rows: int) -> None:
    x = torch.ones(rows, 4096, device="cuda")
    pair.warm_up(lambda rank: pair.peer_sums[rank].sum(x))
    done = torch.cuda.Event()
    with torch.cuda.stream(pair.streams[0]):
        pair.peer_sums[0].sum(x)
        done.record()
    threading.Event().wait(0.5)
    assert not done.query()
    pair.peer_sums[0].abort()
    done.synchronize()


def _ranks(work: str) -> None:
    """Run a function of this module in a process for each of two GPUs, as `work(all_reduce, rank)`."""
    store, port = listen(2)
    folders = [Path(__file__).parent, Path(__file__).parents[1], Path(__file__).parents[2]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])}
    script = f"import sys, test_all_reduce_gpu as t; t.run(t.{work}, int(sys.argv[1]), {port})"
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(rank)], stderr=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    del store


def run(work: Callable[[AllReduce, int], None], rank: int, port: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    all_reduce = AllReduce(join(port, 2), rank, 2, device)
    work(all_reduce, rank)
    all_reduce.close()


def compare_with_nccl(all_reduce: AllReduce, rank: int) -> None:
    """8 KB to 64 MB by both kernels, in graphs that are replayed with new numbers."""
    hidden = 4096
    norm = ops.Norm(randn(hidden, dtype=torch.bfloat16, seed=9).cuda(), 1e-5)
    for num_bytes in (8 << 10, 64 << 10, 512 << 10, MAX_BYTES, MAX_BYTES + 8 * hidden, 8 << 20, 64 << 20):
        shape = (num_bytes // 2 // hidden, hidden)
        own, other = (parts_of(shape, torch.bfloat16)[r] for r in (rank, 1 - rank))
        assert all_reduce.kernel_of(own) == ("one shot" if num_bytes <= MAX_BYTES else "pushed")
        x = torch.zeros_like(own)
        y = own.clone()
        ours = torch.empty_like(own)
        nccl = torch.empty_like(own)
        fused = [torch.empty_like(own), torch.empty_like(own)]

        def step(x=x, y=y, ours=ours, nccl=nccl, fused=fused) -> None:
            ours.copy_(all_reduce(y.clone()))
            nccl.copy_(y)
            dist.all_reduce(nccl)
            results = all_reduce.add(x.clone(), y.clone(), before=norm)
            for kept, result in zip(fused, results, strict=True):
                kept.copy_(result)

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        for replay in range(REPLAYS if num_bytes <= MAX_BYTES else 10):
            y.copy_(own * (replay + 1))
            x.copy_(own + other + replay)
            graph.replay()
            parts = [y, other * (replay + 1)]
            assert torch.equal(ours, total_of(parts))
            assert torch.equal(ours, nccl)
            residual, normed = fused
            assert_rounded_once(residual, x.double() + parts[0].double() + parts[1].double())
            wide = norm._replace(weight=norm.weight.double())
            assert_rounded_once(normed, ops.rms_norm(residual.double(), wide))


def lose_a_rank(all_reduce: AllReduce, rank: int) -> None:
    """Rank 1 does not come to the second sum."""
    x = torch.ones(4, 4096, device="cuda")
    all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(0)
    done = torch.cuda.Event()
    all_reduce(x)
    done.record()
    threading.Event().wait(1.0)
    assert not done.query()
    all_reduce.abort()
    done.synchronize()
    os._exit(0)  # NCCL's group is gone


@TWO_GPUS
@pytest.mark.parametrize("work", ["compare_with_nccl", "lose_a_rank"])
def test_two_gpus(work: str) -> None:
    _ranks(work)


@TWO_GPUS
def test_two_gpus_answer_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of two ranks, one after the other: the ranks of the second one connect as those of the first did."""
    from fa_serve.engine import Engine, EngineConfig, SamplingParams

    connected = []

    def connect(*args: Any, connect=PeerSums.connect) -> PeerSums | None:
        connected.append(connect(*args))
        return connected[-1]

    monkeypatch.setattr(PeerSums, "connect", connect)
    prompts = ["Once upon a time", "one two three one two three", "The answer is "] * 4
    params = SamplingParams(max_tokens=24, temperature=0.0)
    answers = []
    for size, eager in ((1, False), (2, False), (2, True)):
        engine = Engine(EngineConfig(device="cuda", dtype="float32", tensor_parallel=size, eager=eager, num_pages=800))
        answers.append([each.token_ids for each in engine.generate(prompts, params)])
        engine.close()
    assert answers[0] == answers[1] == answers[2]
    assert [peer_sums is not None for peer_sums in connected] == [True, True]
