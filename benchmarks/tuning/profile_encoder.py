"""Where the time of an encoder's batch goes: kernels, idle time, and how long its products take alone.

    python -m benchmarks.tuning.profile_encoder --shapes bge-base,modernbert-large

A call encodes as many texts as fill BATCHES batches, as an offline case of `bench_embeddings` does. Products are timed alone
twice. At the rate of a large product, their time is the floor of the `products` lines of `bench_embeddings`. At their own
shapes, it shows how much of that rate matrices of these sizes reach. Models have random weights. What the host does for a
batch is timed part by part, while nothing else runs: a thread tokenizes, and another one launches and turns results into rows.
A table shows when each batch of one call was launched, and when the GPU computed it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.engine.bench_embeddings import make_folder, operations_a_second, texts_of
from benchmarks.measure import graph_microseconds
from benchmarks.tuning.profile_engine import observe
from fa_serve.engine import Encoder, EngineConfig
from fa_serve.engine.pooling.params import PoolingParams

BATCHES = 8
CALLS = 3
"""Calls that are timed, and as many that are profiled."""
ROUNDS = 9
ADDMM = (torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default)
MM = torch.ops.aten.mm.default
LINEAR = torch.ops.aten.linear.default
"""Products with (outputs, inputs) weights; in inference mode this operator is not divided into others."""


class Products(TorchDispatchMode):
    """Counts the products that are computed inside, by (rows, inner size, columns)."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (LINEAR, MM, *ADDMM):
            a, b = args[1:3] if func in ADDMM else args[:2]
            columns = b.shape[0] if func is LINEAR else b.shape[1]
            self.shapes[a.numel() // a.shape[-1], a.shape[-1], columns] += 1
        return func(*args, **(kwargs or {}))


def products_of(encoder: Encoder, texts: list[str]) -> Counter[tuple[int, int, int]]:
    """The products of a batch with these texts, without CUDA graphs, which compute nothing that could be counted."""
    pipeline = encoder._pipeline
    graphs = pipeline.graphs
    sizes = [] if graphs is None else graphs._sizes
    if graphs is not None:
        graphs._sizes = []
    try:
        with torch.inference_mode(), Products() as found:
            pipeline.compute(encoder.reader.read(texts), PoolingParams())
    finally:
        if graphs is not None:
            graphs._sizes = sizes
    return found.shapes


def milliseconds_alone(shapes: Counter[tuple[int, int, int]], dtype: torch.dtype, device: str) -> float:
    """How long these products take by themselves, with a bias each."""
    spent = 0.0
    for (rows, inner, columns), count in shapes.items():
        x = torch.randn(rows, inner, dtype=dtype, device=device)
        weight = torch.randn(columns, inner, dtype=dtype, device=device)
        bias = torch.randn(columns, dtype=dtype, device=device)
        each = graph_microseconds(lambda x=x, weight=weight, bias=bias: torch.nn.functional.linear(x, weight, bias))
        operations = 2 * rows * inner * columns
        print(f"  {count} x ({rows}, {inner}) x ({inner}, {columns}): {each:.1f} us, {operations / each / 1e6:.0f} TFLOPS")
        spent += count * each / 1e3
    return spent


def host_milliseconds(encoder: Encoder, texts: list[str]) -> dict[str, float]:
    """What the host does for one batch, and how long each part takes: the median of ROUNDS."""
    pipeline = encoder._pipeline
    taken: dict[str, list[float]] = {"tokenizing": [], "launching": [], "results": []}
    params = PoolingParams()
    with torch.inference_mode():
        for _ in range(ROUNDS):
            times = [time.perf_counter()]
            inputs = encoder.reader.read(texts)
            times.append(time.perf_counter())
            results = pipeline.compute(inputs, params)
            times.append(time.perf_counter())
            on_host = results.cpu()
            begin = time.perf_counter()
            pipeline.finish(pipeline.rows(on_host, inputs, params), params)
            times.append(times[-1] + time.perf_counter() - begin)
            for part, (before, after) in zip(taken.values(), pairwise(times), strict=True):
                part.append(1e3 * (after - before))
    return {name: statistics.median(each) for name, each in taken.items()}


def timeline(encoder: Encoder, texts: list[str]) -> str:
    """When the batches of one call were launched and computed, in milliseconds from the begin of the call."""
    compute = encoder._pipeline.compute
    rows: list[tuple[float, float, torch.cuda.Event, torch.cuda.Event]] = []

    def watched(unused: Any, *args: Any) -> torch.Tensor:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        launched = time.perf_counter()
        events[0].record()
        results = compute(*args)
        events[1].record()
        rows.append((launched, time.perf_counter(), events[0], events[1]))
        return results

    with patch.object(type(encoder._pipeline), "compute", watched):
        torch.cuda.synchronize()
        origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        origin.record()
        begin = time.perf_counter()
        encoder.encode(texts)
        end = time.perf_counter()
    lines = ["| batch | launched | until | computed | until |", "|---|---|---|---|---|"]
    for number, (launched, until, first, last) in enumerate(rows):
        host = f"{1e3 * (launched - begin):.1f} | {1e3 * (until - begin):.1f}"
        lines.append(f"| {number} | {host} | {origin.elapsed_time(first):.1f} | {origin.elapsed_time(last):.1f} |")
    return "\n".join([*lines, f"the call took {1e3 * (end - begin):.1f} ms"])


def profile(shape: str, args: argparse.Namespace) -> None:
    """Print where the time of the batches of one shape goes."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_folder(shape, Path(folder), args.dtype)
        settings = EngineConfig(
            model=made, dtype=args.dtype, device=args.device, max_num_batched_tokens=args.tokens, max_num_seqs=1024
        )
        encoder = Encoder(settings, ahead=True)
    many = max(args.tokens // args.length, 1)
    texts = texts_of(many * BATCHES, args.length)
    encoder.encode(texts)
    step = observe(lambda: encoder.encode(texts), CALLS)
    idle = max(0.0, 1 - step.busy / step.wall)
    rate = len(texts) / step.wall * 1e3
    print(f"{shape}, {many} texts of {args.length} tokens: {step.wall / BATCHES:.3f} ms a batch, {rate:.0f} sentences/s")
    print(f"device busy {step.busy / BATCHES:.3f} ms, {idle:.0%} idle")
    host = ", ".join(f"{name} {taken:.2f} ms" for name, taken in host_milliseconds(encoder, texts[:many]).items())
    print(f"host, for a batch: {host}")
    if torch.cuda.is_available():
        print(timeline(encoder, texts))
    shapes = products_of(encoder, texts[:many])
    alone = milliseconds_alone(shapes, encoder._pipeline.model.model.dtype, encoder.config.device)
    floor = ""
    if torch.cuda.is_available():
        operations = sum(2 * rows * inner * columns * count for (rows, inner, columns), count in shapes.items())
        floor = f", {operations / operations_a_second(args.dtype) * 1e3:.3f} ms at the rate of a large product"
    print(f"products: {alone:.3f} ms at their own shapes{floor}")
    print(step.table(args.top), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="bge-base,bge-large,modernbert-large,qwen3-0.6b")
    parser.add_argument("--length", type=int, default=512, help="tokens of a text")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a batch")
    parser.add_argument("--top", type=int, default=14, help="kernels in a table")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    for shape in args.shapes.split(","):
        profile(shape, args)


if __name__ == "__main__":
    main()
