"""One step of latent attention over a paged cache: its tensors, our call, its check against float64, and the benchmark.

bench_attention.py calls `latent`; tests/benchmarks runs the check on a CPU. A key has 512 + 64 numbers, the first
512 of which are its value, and all query heads share one KV head. Pages lie in random order, and whatever no sequence owns is
NaN.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attention_cells import LATENT_CELLS, LATENT_HEADS
from measure import Results, graph_microseconds, in_turns, read_bandwidth
from torch import Tensor

import fa_serve
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import assert_matches_reference, cu_seqlens, eager_attention, make_paged

RANK = 512
ROPE = 64
SCALE = 192**-0.5
"""That of DeepSeek's heads of 128 + 64 numbers."""


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
        cls, lengths: Sequence[int], heads: int, queries: int, dtype: torch.dtype, device: str, page_size: int = 16
    ) -> LatentProblem:
        """Random numbers. heads: query heads"""
        keys = [torch.randn(n, 1, RANK + ROPE, device=device).to(dtype) for n in lengths]
        empty = [k[..., :0] for k in keys]
        cache, _, block_table, seqused_k = make_paged(keys, empty, page_size)
        options = {
            "block_table": block_table,
            "seqused_k": seqused_k,
            "cu_seqlens_q": cu_seqlens([queries] * len(lengths), device),
            "max_seqlen_q": queries,
            "max_seqlen_k": max(lengths),
            "softmax_scale": SCALE,
        }
        q = torch.randn(len(lengths) * queries, heads, RANK + ROPE, device=device).to(dtype)
        return cls(q, cache, list(lengths), queries, options)

    def ours(self, backend: str = "auto") -> Callable[[], Tensor]:
        """A call of the public function."""
        out = self.q.new_empty(*self.q.shape[:2], RANK)

        def call() -> Tensor:
            result = fa_serve.attention_paged(
                self.q, self.cache, self.cache[..., :RANK], out=out, backend=backend, **self.options
            )
            assert isinstance(result, Tensor)
            return result

        return call

    def check(self, out: Tensor, what: str, rows: int = 2) -> None:
        """Compare the first and the last of the sequences, `rows` queries of each; AssertionError if one breaks the 2x rule."""
        count = len(self.lengths)
        page_size = self.cache.shape[1]
        ours = []
        exacts = []
        eagers = []
        for index in sorted({0, count - 1}):
            n = self.lengths[index]
            pages = self.options["block_table"][index, : -(-n // page_size)].long()
            keys = self.cache[pages].flatten(0, 1)[:n][None]
            last = (index + 1) * self.queries
            own = slice(last - min(rows, self.queries), last)
            options = {"softmax_scale": SCALE, "window_size": (-1, 0)}
            queries = self.q[own][None]
            exact, _ = attention_reference(queries.double(), keys.double(), keys[..., :RANK].double(), **options)
            exacts.append(exact[0])
            eagers.append(eager_attention(queries, keys, keys[..., :RANK], **options)[0])
            ours.append(out[own])
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


def latent(args: argparse.Namespace) -> None:
    """Latent attention over pages. The last columns are GB/s of keys, their part of the read bandwidth, and TFLOPS.

    A few small calls are compared with float64 first, and two sequences of each cell. `--peers` does not apply.
    """
    results = Results("latent", args.out)
    for queries in (1, 3, 40):
        gated = LatentProblem.make([333, 1000, 77], 128, queries, torch.bfloat16, "cuda")
        gated.check(gated.ours(args.backend)(), f"gate of {queries} queries", rows=queries)
    bandwidth = read_bandwidth()
    results.add("read_bandwidth", "TB/s", bandwidth, {})
    print(f"the gate holds; read bandwidth {bandwidth:.2f} TB/s\n{'case':<28}{'us':>9}{'GB/s':>9}{'of it':>8}{'TFLOPS':>9}")
    for heads in LATENT_HEADS:
        for queries, keys, batch in LATENT_CELLS:
            case = f"h{heads}_{queries}_of_{keys}x{batch}"
            problem = LatentProblem.make([keys] * batch, heads, queries, torch.bfloat16, "cuda")
            ours = problem.ours(args.backend)
            problem.check(ours(), case)
            us = in_turns({"ours": ours}, graph_microseconds)["ours"]
            results.add(case, "us", us, {})
            rate = problem.bytes_read / us * 1e-3
            flops = problem.operations / us * 1e-6
            print(f"{case:<28}{us:9.1f}{rate:9.0f}{rate / bandwidth * 1e-3:8.1%}{flops:9.0f}", flush=True)
    results.write()
