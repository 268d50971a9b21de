"""One step of latent attention over a paged cache: its tensors, our call, its check against float64, and the benchmark.

bench_attention.py calls `latent`; tests/benchmarks runs the check and the benchmark on a CPU. A key has 512 + 64 numbers, the
first 512 of which are its value, and all query heads share one KV head. Pages lie in random order, and whatever no sequence
owns is NaN.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fa_serve
from benchmarks.attention.attention_cells import LATENT_CELLS, LATENT_FLOAT8_CELLS, LATENT_HEADS
from benchmarks.measure import Results, graph_microseconds, in_turns, read_bandwidth
from fa_serve.backends.hopper.latent.tiles import MIN_ROWS
from fa_serve.backends.reference import attention_reference
from fa_serve.spec import FEW_QUERIES
from fa_serve.testing import assert_matches_reference, cu_seqlens, eager_attention

RANK = 512
ROPE = 64
SCALE = 192**-0.5
"""That of DeepSeek's heads of 128 + 64 numbers."""
DESCALE = 0.5
"""A float8 cache is multiplied by this power of two, so that its keys are exact in every dtype."""


@dataclass
class LatentProblem:
    """lengths: of the sequences; queries: the last so many tokens of each are the queries; options: the rest of the call"""

    q: Tensor
    cache: Tensor
    lengths: list[int]
    queries: int
    options: dict[str, Any]

    @classmethod
    def make(
        cls,
        lengths: Sequence[int],
        heads: int,
        queries: int,
        dtype: torch.dtype,
        device: str,
        *,
        page_size: int = 16,
        float8: bool = False,
    ) -> LatentProblem:
        """Random numbers. heads: query heads; float8: the cache is float8_e4m3fn"""
        counts = [-(-n // page_size) for n in lengths]
        order = torch.randperm(sum(counts) + 3, dtype=torch.int32, device=device)
        cache = torch.empty(len(order), page_size, 1, RANK + ROPE, dtype=dtype, device=device).normal_()
        cache[order[sum(counts) :].long()] = float("nan")
        table = torch.full((len(lengths), max(counts)), 2**28, dtype=torch.int32, device=device)
        for row, pages in enumerate(order[: sum(counts)].split(counts)):
            table[row, : len(pages)] = pages
            cache[int(pages[-1]), (lengths[row] - 1) % page_size + 1 :] = float("nan")
        options = {
            "block_table": table,
            "seqused_k": torch.tensor(lengths, dtype=torch.int32, device=device),
            "cu_seqlens_q": cu_seqlens([queries] * len(lengths), device),
            "max_seqlen_q": queries,
            "max_seqlen_k": max(lengths),
            "softmax_scale": SCALE,
        }
        if float8:
            cache = cache.to(torch.float8_e4m3fn)
            options |= {name: torch.full((1,), DESCALE, device=device) for name in ("k_descale", "v_descale")}
        q = torch.randn(len(lengths) * queries, heads, RANK + ROPE, device=device).to(dtype)
        return cls(q, cache, list(lengths), queries, options)

    def ours(self, way: str = "auto") -> Callable[[], Tensor]:
        """A call of the public function, by a backend or by one of WAYS."""
        backend = WAYS.get(way, way)
        out = self.q.new_empty(*self.q.shape[:2], RANK)

        def call() -> Tensor:
            result = fa_serve.attention_paged(
                self.q, self.cache, self.cache[..., :RANK], out=out, backend=backend, **self.options
            )
            assert isinstance(result, Tensor)
            return result

        return call

    def check(self, out: Tensor, what: str, rows: int = 2) -> None:
        """Compare the last `rows` queries of the first and of the last sequence; AssertionError if they break the 2x rule.

        The heads of one query are the queries of one call of the oracle, because they share all keys. With heads as heads, it
        would copy the keys for each of them, which for 128 heads and 131,072 keys is 77 GB.
        """
        page_size = self.cache.shape[1]
        ours = []
        exacts = []
        eagers = []
        for index in sorted({0, len(self.lengths) - 1}):
            n = self.lengths[index]
            pages = self.options["block_table"][index, : -(-n // page_size)].long()
            keys = self.cache[pages].flatten(0, 1)[:n].to(self.q.dtype)[None]
            if "k_descale" in self.options:
                keys *= DESCALE
            for back in range(min(rows, self.queries)):
                row = (index + 1) * self.queries - 1 - back
                seen = keys[:, : n - back]
                queries = self.q[row][None, :, None]
                exact, _ = attention_reference(queries.double(), seen.double(), seen[..., :RANK].double(), softmax_scale=SCALE)
                exacts.append(exact[0])
                eagers.append(eager_attention(queries, seen, seen[..., :RANK], softmax_scale=SCALE)[0])
                ours.append(out[row][:, None])
        assert_matches_reference(torch.cat(ours), torch.cat(exacts), torch.cat(eagers), what)

    @property
    def bytes_read(self) -> int:
        """Bytes of the keys that a kernel reads if it reads each once."""
        return sum(self.lengths) * (RANK + ROPE) * self.cache.element_size()

    @property
    def operations(self) -> int:
        """Floating-point operations of the products with the keys that queries see."""
        pairs = sum(self.queries * n - self.queries * (self.queries - 1) // 2 for n in self.lengths)
        return 2 * pairs * self.q.shape[1] * (2 * RANK + ROPE)


WAYS = {"hopper": "hopper", "portable": "triton"}
"""The kernels of latent attention, and the backends that have them."""


def _ways(args: argparse.Namespace, problem: LatentProblem) -> list[str]:
    """The backends to call, of which that for Hopper only decodes 16-bit caches with enough rows."""
    if not args.ways:
        return [args.backend]
    decodes = problem.queries <= FEW_QUERIES and problem.q.shape[1] * problem.queries >= MIN_ROWS
    hopper = decodes and "k_descale" not in problem.options and problem.q.is_cuda
    return [way for way in args.ways if way != "hopper" or hopper]


def latent(args: argparse.Namespace) -> None:
    """Latent attention over pages. The last columns are GB/s of keys, their part of the read bandwidth, and TFLOPS.

    A few small calls are compared with float64 first, and two sequences of each cell. `--peers` does not apply. `--ways
    hopper,portable` measures both kernels of decoding in turns, where the kernel for Hopper serves the cell; else the calls
    are those of `--backend`. With `--tiny` nothing is known of the read bandwidth.
    """
    dtype, device = (torch.float32, "cpu") if args.tiny else (torch.bfloat16, "cuda")
    results = Results("latent", args.out)
    for queries in (1, 3, 40):
        for float8 in (False, True):
            gated = LatentProblem.make([333, 1000, 77], 4 if args.tiny else 128, queries, dtype, device, float8=float8)
            for way in _ways(args, gated):
                gated.check(gated.ours(way)(), f"gate of {queries} queries, float8 {float8}, {way}", rows=3)
    print("the gate holds")
    bandwidth = float("nan")
    if not args.tiny:
        bandwidth = read_bandwidth()
        results.add("read_bandwidth", "TB/s", bandwidth, {})
    print(f"read bandwidth {bandwidth:.2f} TB/s\n{'case':<36}{'us':>9}{'GB/s':>9}{'of it':>8}{'TFLOPS':>9}")
    for heads in (4,) if args.tiny else LATENT_HEADS:
        grids = ([(1, 70, 3), (2, 50, 1)], [(1, 70, 3)]) if args.tiny else (LATENT_CELLS, LATENT_FLOAT8_CELLS)
        for float8, grid in zip((False, True), grids, strict=True):
            for queries, keys, batch in grid:
                case = f"h{heads}_{queries}_of_{keys}x{batch}" + "_float8" * float8
                if not args.cells.takes(case):
                    continue
                problem = LatentProblem.make([keys] * batch, heads, queries, dtype, device, float8=float8)
                calls = {way: problem.ours(way) for way in _ways(args, problem)}
                for way, call in calls.items():
                    problem.check(call(), f"{case}, {way}")
                for way, us in in_turns(calls, graph_microseconds).items():
                    name = f"{case}_{way}" if args.ways else case
                    results.add(name, "us", us, {})
                    rate = problem.bytes_read / us * 1e-3
                    flops = problem.operations / us * 1e-6
                    print(f"{name:<36}{us:9.1f}{rate:9.0f}{rate / bandwidth * 1e-3:8.1%}{flops:9.0f}", flush=True)
    results.write()
