"""Measures what the ideas for chunks, verify steps, mixed steps and softcap bring: the call as it is, and without the idea.

    python -m benchmarks.tuning.ablate_steps  # about 3 minutes; bfloat16, pages of 16 in random order
    python -m benchmarks.tuning.ablate_steps --cells chunk --budget 60

chunk    the prompt kernel and the decoding kernel, of which `backends.chunks` chooses one
verify   tiles of 64 rows with queries as rows, and of 32 rows with keys as rows, where the former are chosen
mixed    two kernels, each for the sequences that suit it, and the prompt kernel for all sequences
softcap  prompts of 16k tokens with a softcap of 50 and without one

A figure is the time of the variant divided by the time of the call as it is: above 1, the idea is faster. Each call is compared
with float64 first.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import fa_serve
from benchmarks.attention.attention_cells import (
    CHUNK_CELLS,
    CHUNK_HEADS,
    HIDDEN,
    MIXED_CELLS,
    PAGED_HEADS,
    TOKENS,
    VERIFY_CELLS,
    VERIFY_HEADS,
)
from benchmarks.attention.paged_problem import Problem, pools
from benchmarks.measure import Cells, graph_microseconds, in_turns


def report(case: str, calls: dict[str, Callable[[], Any]]) -> None:
    """Time the calls in turn. The first one is the call as it is."""
    times = in_turns(calls, graph_microseconds)
    first, *others = times
    shown = "".join(f"  {name} {times[name] / times[first]:.2f}" for name in others)
    print(f"{case:<44}{first} {times[first]:9.1f} us{shown}", flush=True)


def chunk(case: str, problem: Problem) -> None:
    report(case, {"auto": problem.ours(), "prompt kernel": problem.ours("hopper"), "decoding kernel": problem.plan()})


def verify(case: str, problem: Problem) -> None:
    tiles = problem.default_tiles()
    if not tiles.by_rows:
        return
    # twice as many tiles of rows share the programs that run at once
    narrow = replace(tiles, block_m=32, block_n=64, splits=max(1, tiles.splits // 2))
    problem.check(case, tiles=narrow, rows=2)
    report(case, {"queries as rows": problem.plan(), "keys as rows": problem.plan(narrow)})


def mixed(case: str, problem: Problem) -> None:
    report(case, {"two kernels": problem.ours(), "prompt kernel": problem.ours("hopper")})


def softcap(cells: Cells) -> None:
    for head_dim in (64, 128, 256):
        case = f"softcap_d{head_dim}_causal_{TOKENS}"
        if cells.takes(case):
            shape = (1, TOKENS, HIDDEN // head_dim, head_dim)
            q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            call = partial(fa_serve.attention, q, k, v, causal=True)
            report(case, {"softcap": partial(call, softcap=50.0), "none": call})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="", help="parts of names of cells, separated by commas; default: all cells")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no cell is begun")
    args = parser.parse_args()
    torch.manual_seed(0)
    cells = Cells(args.cells, args.budget)
    softcap(cells)
    steps: list[tuple[Callable[[str, Problem], None], tuple[int, int, int], list[int], int | list[int]]] = []
    for layout in CHUNK_HEADS:
        steps += [(chunk, layout, [before + q] * batch, q) for q, before, batch in CHUNK_CELLS]
    for layout in VERIFY_HEADS:
        steps += [(verify, layout, [keys] * batch, q) for q, keys, batch in VERIFY_CELLS]
    for layout in PAGED_HEADS:
        for decoding, chunks, tokens, before in MIXED_CELLS:
            lengths = [4096] * decoding + [before + tokens] * chunks
            steps.append((mixed, layout, lengths, [1] * decoding + [tokens] * chunks))
    pool = pools()
    for measured, (heads, kv_heads, dim), lengths, queries in steps:
        counts = f"{queries}x{len(lengths)}" if isinstance(queries, int) else f"{queries.count(1)}+{max(queries)}"
        case = f"{measured.__name__}_{heads}_{kv_heads}_d{dim}_{counts}_of_{max(lengths)}"
        if cells.takes(case):
            problem = Problem.make(lengths, heads, kv_heads, dim, queries=queries, pool=pool(kv_heads, dim))
            problem.check(case, problem.ours()(), rows=2)
            measured(case, problem)
    cells.report()


if __name__ == "__main__":
    main()
