"""The sum over the ranks of tensor parallelism: us of a call inside a CUDA graph, beside NCCL.

    python -m benchmarks.attention.bench_allreduce         # two GPUs of this machine, 8 KB to 64 MB in bfloat16
    python -m benchmarks.attention.bench_allreduce --ranks 4 --hidden 8192
    python -m benchmarks.attention.bench_allreduce --tiny  # on a CPU through gloo, which shows only that the benchmark runs

Each rank is a process. "sum" is the sum alone; "norm" adds it to the residual stream and normalises the result as well: ours
in `AllReduce.add`, and the peer with NCCL's sum, an addition and the kernel of the norm. All ranks compare every cell with
float64 first, and the benchmark ends if one is wrong. Ours is what `AllReduce` chooses: one shot up to 2 MB; above, parts
that two ranks push to each other, and NCCL with more ranks. A case says which. Times are those of rank 0, whose graph of
several calls waits for the other ranks in each of them. Results go to results/allreduce.jsonl in the form of measure.py. Left
out: whole steps of divided models.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import Results
from fa_serve import ops
from fa_serve.ops.collectives.all_reduce import AllReduce, add_and_norm, join, listen

ROOT = Path(__file__).parents[2]
SIZES = {"8 KB": 8 << 10, "64 KB": 64 << 10, "0.5 MB": 512 << 10, "2 MB": 2 << 20, "8 MB": 8 << 20, "64 MB": 64 << 20}
TINY_SIZES = {"1 KB": 1 << 10, "4 KB": 4 << 10}
CALLS = 20
"""Calls in a graph."""
REPLAYS = 50


class Rank:
    """One process of the benchmark."""

    def __init__(self, all_reduce: AllReduce, rank: int, size: int, device: torch.device, hidden: int) -> None:
        self.all_reduce = all_reduce
        self.rank = rank
        self.size = size
        self.device = device
        self.hidden = hidden
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.norm = ops.Norm(self.draw(1, 99)[0], 1e-6)

    def draw(self, rows: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, self.hidden, generator=generator).to(self.device, self.dtype)

    def rows(self, num_bytes: int) -> int:
        return num_bytes // self.hidden // self.dtype.itemsize

    def ours(self, x: Tensor, y: Tensor, *, norm: bool) -> tuple[Tensor, Tensor | None]:
        if not norm:
            return self.all_reduce(y), None
        return self.all_reduce.add(x, y, before=self.norm)

    def theirs(self, x: Tensor, y: Tensor, *, norm: bool) -> tuple[Tensor, Tensor | None]:
        """The same through torch.distributed."""
        dist.all_reduce(y)
        return add_and_norm(x, y, 1.0, None, self.norm) if norm else (y, None)

    def check(self, num_bytes: int, *, norm: bool) -> None:
        """Raise AssertionError if a result differs from float64 by more than the roundings of the pieces."""
        rows = self.rows(num_bytes)
        parts = [self.draw(rows, seed) for seed in range(self.size)]
        residual = self.draw(rows, self.size)
        total = sum(part.double() for part in parts)
        exact = residual.double() + total if norm else total
        bound = 2.0 * self.size * torch.finfo(self.dtype).eps
        for call in (self.ours, self.theirs):
            out, normed = call(residual.clone(), parts[self.rank].clone(), norm=norm)
            assert float((out - exact).abs().max() / exact.abs().max()) < bound, call.__name__
            if normed is not None:
                wide = ops.rms_norm(exact, self.norm._replace(weight=self.norm.weight.double()))
                assert float((normed - wide).abs().max() / wide.abs().max()) < bound, call.__name__

    def microseconds(self, call: Callable[[], object]) -> float:
        """Least of several means of replays. Without a GPU, the host time of one call."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call()
        times = []
        for _ in range(5):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            graph.replay()
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / REPLAYS / CALLS)
        return min(times)

    def measure(self, num_bytes: int, *, norm: bool) -> tuple[float, float]:
        """Us of ours and of the peer. Sums are repeated in place, so the parts are 0."""
        x = torch.zeros(self.rows(num_bytes), self.hidden, device=self.device, dtype=self.dtype)
        y = torch.zeros_like(x)
        ours = self.microseconds(lambda: self.ours(x, y, norm=norm))
        theirs = self.microseconds(lambda: self.theirs(x, y, norm=norm))
        return ours, theirs


def run(args: argparse.Namespace, rank: int, port: int | None) -> None:
    """All cells on one rank. port: where rank 0 listens; None on rank 0, which starts the others"""
    device = torch.device("cpu") if args.tiny else torch.device("cuda", rank)
    if not args.tiny:
        torch.cuda.set_device(device)
    others = []
    if port is None:
        store, port = listen(args.ranks)
        command = [sys.executable, "-m", "benchmarks.attention.bench_allreduce", *sys.argv[1:], "--port", str(port), "--rank"]
        others = [subprocess.Popen([*command, str(other)]) for other in range(1, args.ranks)]
    else:
        store = join(port, args.ranks)
    all_reduce = AllReduce(store, rank, args.ranks, device)
    try:
        member = Rank(all_reduce, rank, args.ranks, device, 64 if args.tiny else args.hidden)
        cells = [(size, norm) for size in (TINY_SIZES if args.tiny else SIZES).items() for norm in (False, True)]
        for (_, num_bytes), norm in cells:
            member.check(num_bytes, norm=norm)
        results = Results("allreduce", args.out)
        if rank == 0:
            print("gate: results are right")
        for (size, num_bytes), norm in cells:
            ours, theirs = member.measure(num_bytes, norm=norm)
            if rank == 0:
                kernel = all_reduce.kernel_of(
                    torch.empty(member.rows(num_bytes), member.hidden, device=device, dtype=member.dtype)
                )
                case = f"{size} {'norm' if norm else 'sum'} {args.ranks} ranks {kernel}"
                ratio = results.add(case, "us", ours, {dist.get_backend(): theirs})
                print(f"{case:<36} {ours:8.2f} us, {dist.get_backend()} {theirs:8.2f} us, ratio {ratio:.2f}")
        if rank == 0:
            results.write()
    except BaseException:
        for process in others:
            process.kill()  # it may wait on its GPU for this rank
        raise
    finally:
        all_reduce.close()
        for process in others:
            process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096, help="numbers of a row")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU in float32")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.tiny and torch.cuda.device_count() < args.ranks:
        parser.error(f"--ranks must be at most {torch.cuda.device_count()}, the number of GPUs; --tiny needs none")
    if args.tiny:
        torch.set_num_threads(1)
    run(args, args.rank, args.port)


if __name__ == "__main__":
    main()
