"""Token-sparse latent attention (DeepSeek V3.2): the choice of keys, and attention to them, for prompts and for decoding.

    python -m benchmarks.attention.bench_sparse              # all cells
    python -m benchmarks.attention.bench_sparse --cells decode   # those whose names contain one of these
    python -m benchmarks.attention.bench_sparse --tune       # also with other tiles, for the first prompt and decoding cell
    python -m benchmarks.attention.bench_sparse --tiny       # on a CPU: small sizes, which show only that it runs

Queries have 128 or 64 heads of 512 + 64 numbers, and choose 2,048 keys each. "attend" cells are `ops.sparse_attention` in
TFLOPS, "choose" cells `ops.select_slots` in us, with an indexer of 64 heads of 128 numbers. Peers: "flashmla", FlashMLA's
sparse kernel, if it is installed (`flash_mla_sparse_fwd`); "floor", the time of reading each chosen key once, or of the
products at 800 TFLOPS if that is longer; for choosing, the time of reading the keys of the indexer once for each sequence, or
of its products. Results are compared with float64 first, and go to results/sparse_mla.jsonl in the form of measure.py.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Cells, Results, graph_microseconds, milliseconds, read_bandwidth
from fa_serve import ops
from fa_serve.testing import cu_seqlens

ROOT = Path(__file__).parents[2]
PAGE = 64
RANK = 512
ROPE = 64
SCALE = 192**-0.5
PEAK = 800e12
"""Products of bfloat16 that an H100 or H200 computes in a second, as libraries reach it."""
GATE = 2e-2
"""The largest difference from float64 that passes, as a part of the largest value."""


@dataclass(frozen=True)
class SparseSizes:
    """What is measured. prompts: (queries, keys); batches: (sequences, keys), with a query each"""

    device: str
    dtype: torch.dtype
    heads: tuple[int, ...]
    topk: int
    index_heads: int
    prompts: tuple[tuple[int, int], ...]
    batches: tuple[tuple[int, int], ...]


FULL_SIZES = SparseSizes(
    "cuda",
    torch.bfloat16,
    (128, 64),
    2048,
    64,
    ((4096, 8192), (4096, 32768)),
    ((1, 32768), (16, 32768), (64, 8192), (128, 32768)),
)
TINY_SIZES = SparseSizes("cpu", torch.float32, (2,), 8, 2, ((5, 20),), ((3, 20),))


@dataclass(frozen=True)
class SparseStep:
    """Sequences of one length in a paged cache, of which each has as many queries.

    latent: (num_pages, PAGE, 1, RANK + ROPE); index_keys: (num_pages, PAGE, 1, 128)
    """

    latent: Tensor
    index_keys: Tensor
    places: dict[str, Any]
    total: int
    keys: int

    @staticmethod
    def make(sequences: int, queries: int, keys: int, sizes: SparseSizes) -> SparseStep:
        pages = -(-keys // PAGE)
        make = partial(torch.randn, device=sizes.device, dtype=sizes.dtype)
        order = torch.randperm(sequences * pages, dtype=torch.int32, device=sizes.device)
        places = {
            "block_table": order.view(sequences, pages),
            "seqused_k": torch.full((sequences,), keys, dtype=torch.int32, device=sizes.device),
            "cu_seqlens_q": cu_seqlens([queries] * sequences, sizes.device),
            "max_seqlen_q": queries,
            "max_seqlen_k": keys,
        }
        latent = make(len(order), PAGE, 1, RANK + ROPE)
        return SparseStep(latent, make(len(order), PAGE, 1, 128), places, sequences * queries, keys)

    def random_slots(self, topk: int) -> Tensor:
        """Slots of each query, all of them different and of the query's sequence."""
        table = self.places["block_table"]
        sequences = len(table)
        queries = self.total // sequences
        rows = []
        for sequence in range(sequences):
            for _ in range(queries):
                place = torch.randperm(self.keys, device=table.device)[:topk]
                rows.append((table[sequence, place // PAGE] * PAGE + place % PAGE).int())
        return torch.stack(rows)


def exact_rows(q: Tensor, latent: Tensor, slots: Tensor, rows: int = 8) -> Tensor:
    """The first rows in float64."""
    keys = latent.flatten(0, 1)[:, 0]
    found = []
    for query, chosen in zip(q[:rows].double(), slots[:rows].long(), strict=True):
        own = keys[chosen].double()
        found.append(torch.softmax(query @ own.T * SCALE, dim=1) @ own[:, :RANK])
    return torch.stack(found)


def flash_mla_prefill() -> Callable[..., Any] | None:
    """FlashMLA's sparse kernel: (q, kv, indices, scale, dim_v) -> (out, ...); None if it is not installed."""
    if importlib.util.find_spec("flash_mla") is None:
        return None
    return getattr(importlib.import_module("flash_mla"), "flash_mla_sparse_fwd", None)


def measured(call: Callable[[], object], sizes: SparseSizes, *, in_graph: bool) -> float:
    """Microseconds."""
    if sizes.device == "cpu":
        call()
        return 1.0
    return graph_microseconds(call) if in_graph else milliseconds(call) * 1e3


def steps(sizes: SparseSizes) -> Iterator[tuple[str, SparseStep, bool]]:
    """(name, step, whether it decodes)"""
    for queries, keys in sizes.prompts:
        yield f"prefill {queries} of {keys}", SparseStep.make(1, queries, keys, sizes), False
    for sequences, keys in sizes.batches:
        yield f"decode {sequences} x {keys}", SparseStep.make(sequences, 1, keys, sizes), True


def sparse_mla(sizes: SparseSizes, cells: Cells, out: Path, *, tune: bool = False) -> None:
    """Run the benchmark and write its results to a folder."""
    results = Results("sparse_mla", out)
    on_gpu = sizes.device != "cpu"
    bandwidth = read_bandwidth() * 1e12 if on_gpu else 1.0  # bytes per second
    theirs = flash_mla_prefill() if on_gpu else None
    tuned: set[bool] = set()
    for name, step, decodes in steps(sizes):
        slots = step.random_slots(sizes.topk)
        for heads in sizes.heads:
            case = f"attend {heads} heads {name}"
            if not cells.takes(case):
                continue
            q = torch.randn(step.total, heads, RANK + ROPE, device=sizes.device, dtype=sizes.dtype)
            values = step.latent[..., :RANK]
            call = partial(ops.sparse_attention, q, step.latent, values, slots, softmax_scale=SCALE)
            exact = exact_rows(q, step.latent, slots)
            error = float((call()[: len(exact)].double() - exact).abs().max() / exact.abs().max())
            assert error < GATE, f"{case}: error {error:.3g}"
            products = 2 * step.total * slots.shape[1] * heads * (2 * RANK + ROPE)
            ours = measured(call, sizes, in_graph=decodes)
            num_bytes = step.total * slots.shape[1] * (RANK + ROPE) * 2
            floor = max(num_bytes / bandwidth if decodes else 0.0, products / PEAK) * 1e6
            peers = {"floor": products / floor / 1e6} if on_gpu else {}
            if theirs is not None:
                flat = step.latent.flatten(0, 1)
                peer = partial(theirs, q, flat, slots[:, None], SCALE, RANK)
                peers["flashmla"] = products / measured(peer, sizes, in_graph=decodes) / 1e6
            results.add(case, "TFLOPS", products / ours / 1e6, peers)
            if tune and decodes not in tuned:
                tuned.add(decodes)
                tune_tiles(q, step.latent, slots, products, decodes=decodes)
        case = f"choose {name}"
        if cells.takes(case):
            index_q = torch.randn(step.total, sizes.index_heads, 128, device=sizes.device, dtype=sizes.dtype)
            weights = torch.randn(step.total, sizes.index_heads, device=sizes.device)
            choose = partial(ops.select_slots, index_q, step.index_keys, weights, topk=sizes.topk, **step.places)
            products = 2 * step.total * step.keys * sizes.index_heads * 128
            floor = max(step.index_keys.nbytes / bandwidth, products / PEAK) * 1e6
            results.add(case, "us", measured(choose, sizes, in_graph=decodes), {"floor": floor} if on_gpu else {})
    results.write()


def tune_tiles(q: Tensor, latent: Tensor, slots: Tensor, products: int, *, decodes: bool) -> None:
    """Print TFLOPS with each of some tiles, without splits for prompts and with several numbers of splits for decoding."""
    from fa_serve.backends.hopper.latent.tiles import Ring
    from fa_serve.ops.selected_keys.attention import SelectedTiles, run_sparse_attention

    rings: list[SelectedTiles | Ring] = [Ring(32, 4), Ring(32, 3), Ring(16, 8)]
    candidates = rings + [
        SelectedTiles(64, block_n, width, num_warps, num_stages)
        for block_n, width, num_warps, num_stages in (
            (32, 256, 8, 3),
            (32, 256, 8, 2),
            (32, 256, 8, 4),
            (64, 256, 8, 2),
            (64, 128, 8, 2),
            (64, 512, 8, 2),
            (64, 256, 8, 1),
            (32, 256, 4, 3),
        )
    ]
    for tiles in candidates:
        for num_splits in (1, 2, 4, 8, 16) if decodes else (1,):
            call = partial(run_sparse_attention, q, latent, latent[..., :RANK], slots, None, SCALE, num_splits, tiles)
            us = graph_microseconds(call) if decodes else milliseconds(call) * 1e3
            print(f"  {tiles} splits {num_splits}: {us:.1f} us, {products / us / 1e6:.0f} TFLOPS", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="", help="parts of names of cells, separated by commas")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further cell is begun")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    sparse_mla(TINY_SIZES if args.tiny else FULL_SIZES, Cells(args.cells, args.budget), args.out, tune=args.tune)


if __name__ == "__main__":
    main()
