"""Benches over a paged cache: decoding, mixed steps, chunks of prompts, several queries per sequence.

bench_attention.py calls them. The peer is FlashAttention-3. The first and the last sequence of each cell, and about two others,
are compared with float64 before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import fa_serve
from benchmarks.attention.attention_cells import (
    CHUNK_CELLS,
    CHUNK_HEADS,
    DECODE_CELLS,
    MIXED_CELLS,
    PAGED_HEADS,
    VERIFY_CELLS,
    VERIFY_HEADS,
)
from benchmarks.attention.paged_problem import Problem, pools, uneven
from benchmarks.measure import Cells, Results, graph_microseconds, host_microseconds, in_turns, read_bandwidth, sdpa

HEADER = f"{'case':<32}{'ours us':>9}{'peer us':>9}{'TB/s':>7}{'ratio':>7}"
FLOAT8 = torch.float8_e4m3fn
Heads = tuple[int, int, int]
"""Query heads, KV heads, head_dim."""


def paged_cell(
    results: Results, cells: Cells, case: str, make: Callable[[], Problem], plain: Callable[[], Problem] | None = None
) -> None:
    """Check the result, then time ours and FA3. `plain`, if given, makes the problem whose time replaces that of FA3."""
    if not cells.takes(case):
        return
    peers = {} if plain is None else {"own_bf16": graph_microseconds(plain().ours())}
    problem = make()
    ours = problem.ours()
    flash = problem.fa3() if plain is None else None
    problem.check(case, ours(), rows=2)
    calls: dict[str, Callable[[], Tensor]] = {} if flash is None else {"fa3": flash}
    for name, call in calls.items():
        worst = (ours().float() - call().float()).abs().max().item()
        assert worst < 0.05, f"{name} and ours differ by {worst}"
    rates = in_turns({"ours": ours} | calls, graph_microseconds) | peers
    mine = rates.pop("ours")
    ratio = results.add(case, "us", mine, rates)
    theirs = next(iter(rates.values()), float("nan"))
    print(f"{case:<32}{mine:9.1f}{theirs:9.1f}{problem.bytes_read / mine * 1e-6:7.2f}{ratio:7.2f}", flush=True)


def decode(args: argparse.Namespace) -> None:
    """One query per sequence: equal and uneven lengths, float8 caches, and dense caches beside PyTorch's kernels."""
    results = Results("decode", args.out)
    bandwidth = read_bandwidth()
    results.add("read_bandwidth", "TB/s", bandwidth, {})
    print(f"read bandwidth {bandwidth:.2f} TB/s\n{HEADER}", flush=True)
    pool = pools()
    small_pool = pools(FLOAT8)
    for layout in PAGED_HEADS:
        name = "{}_{}_d{}".format(*layout)
        for batch, kv in DECODE_CELLS:
            paged_cell(results, args.cells, f"{name}_{batch}x{kv}", partial(_pooled, pool, layout, [kv] * batch))
        if layout not in ((32, 8, 128), (64, 8, 64)):
            continue
        for batch in (16, 64, 256):
            for kind, lengths in uneven(batch).items():
                paged_cell(results, args.cells, f"{name}_{batch}_{kind}", partial(_pooled, pool, layout, lengths))
        for batch, kv in ((1, 131072), (64, 8192), (256, 4096)):
            small = partial(_pooled, small_pool, layout, [kv] * batch, dtype=FLOAT8)
            paged_cell(
                results, args.cells, f"{name}_{batch}x{kv}_fp8", small, plain=partial(_pooled, pool, layout, [kv] * batch)
            )
    first = Problem.make([1024], 32, 8, 128).ours()
    print(f"host time of a call {host_microseconds(first):.1f} us")
    dense_decode(results, args.cells)
    results.write()


def dense_decode(results: Results, cells: Cells) -> None:
    """One token over a cache of (batch, heads, seqlen, dim), the layout of transformers; the peers are PyTorch's kernels."""
    for batch, kv in ((1, 1024), (1, 16384), (8, 8192), (32, 4096)):
        case = f"32_8_d128_{batch}x{kv}_dense"
        if not cells.takes(case):
            continue
        q = torch.randn(batch, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, 8, kv, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
        ours = partial(fa_serve.attention, q, k, v, causal=True)
        kinds = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        calls = {name: sdpa(kind, q, k, v, False) for name, kind in kinds.items()}
        for name, call in calls.items():
            worst = (ours().float() - call().transpose(1, 2).float()).abs().max().item()
            assert worst < 0.05, f"{name} and ours differ by {worst}"
        rates = in_turns({"ours": ours} | calls, graph_microseconds)
        mine = rates.pop("ours")
        ratio = results.add(case, "us", mine, rates)
        shown = "  ".join(f"{name} {us:.1f}" for name, us in rates.items())
        print(f"dense {batch}x{kv:<10} ours {mine:.1f}  {shown}  ratio {ratio:.2f}", flush=True)


def mixed(args: argparse.Namespace) -> None:
    """Sequences of 4096 keys that decode, in one call with chunks of prompts."""
    steps: dict[str, tuple[list[int], list[int]]] = {}
    for decoding, chunks, tokens, before in MIXED_CELLS:
        lengths = [4096] * decoding + [before + tokens] * chunks
        steps[f"{decoding}+{chunks}x{tokens}_after_{before}"] = lengths, [1] * decoding + [tokens] * chunks
    _paged_grid("mixed", PAGED_HEADS, steps, args)


def chunk(args: argparse.Namespace) -> None:
    """A chunk of a prompt behind the keys of its earlier chunks."""
    steps = {f"{q}_of_{before + q}x{batch}": ([before + q] * batch, q) for q, before, batch in CHUNK_CELLS}
    _paged_grid("chunk", CHUNK_HEADS, steps, args)


def verify(args: argparse.Namespace) -> None:
    """Several queries per sequence: drafts that are verified, or the tail of a chunk."""
    steps = {f"{q}_of_{keys}x{batch}": ([keys] * batch, q) for q, keys, batch in VERIFY_CELLS}
    _paged_grid("verify", VERIFY_HEADS, steps, args)


def _paged_grid(
    bench: str, layouts: Sequence[Heads], steps: Mapping[str, tuple[list[int], int | list[int]]], args: argparse.Namespace
) -> None:
    """Each of `steps`, which are the lengths and the queries of the sequences by name, with each of the layouts of heads."""
    results = Results(bench, args.out)
    print(HEADER)
    pool = pools()
    for layout in layouts:
        for name, (lengths, queries) in steps.items():
            case = "{}_{}_d{}".format(*layout) + f"_{name}"
            paged_cell(results, args.cells, case, partial(_pooled, pool, layout, lengths, queries))
    results.write()


def _pooled(
    pool: Callable[[int, int], tuple[Tensor, Tensor]],
    layout: Heads,
    lengths: list[int],
    queries: int | list[int] = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    heads, kv_heads, dim = layout
    return Problem.make(lengths, heads, kv_heads, dim, dtype, queries=queries, pool=pool(kv_heads, dim))
