"""Paged decode and mixed batches against FlashAttention-3 on one GPU, correctness first.

    python benchmarks/bench_decode.py decode     # 45 cells, uneven lengths, float8 caches: about 2 minutes
    python benchmarks/bench_decode.py mixed      # 32 sequences decoding and one mid-prompt, in one call

bfloat16, page_size 16, pages in random order. Times are microseconds of one call inside a CUDA graph, since that is how a step
runs; FA3's is its own paged call, whose scheduling metadata is made on the way. A float8 cell's peer is our own bfloat16. A
cell whose result is wrong reports no speed. Left out: prefill (bench_attention.py), the choice of tiles (tune_decode.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from measure import Results, fa3, graph_microseconds, host_microseconds
from torch import Tensor

import fa_serve
from fa_serve.backends.reference import ReferenceBackend
from fa_serve.testing import assert_matches_reference, cu_seqlens, eager_attention

HEADS = ((32, 8, 128), (32, 32, 128), (64, 8, 128), (16, 8, 128), (64, 8, 64))
CELLS = (
    (1, 1024), (1, 16384), (1, 131072), (8, 8192), (32, 4096), (64, 8192), (128, 1024), (256, 512), (256, 4096),
)  # fmt: skip
PAGE = 16


@dataclass(frozen=True)
class Problem:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    descales: tuple[Tensor | None, Tensor | None] = (None, None)

    def ours(self) -> Callable[[], Tensor]:
        out, used, cu = torch.empty_like(self.q), torch.tensor(self.kv_lens, device="cuda", dtype=torch.int32), self.cu_q()

        def call() -> Tensor:
            fa_serve.attention_paged(
                self.q, self.k_cache, self.v_cache, block_table=self.block_table, seqused_k=used, cu_seqlens_q=cu,
                max_seqlen_q=max(self.q_lens), max_seqlen_k=max(self.kv_lens), causal=True, k_descale=self.descales[0],
                v_descale=self.descales[1], out=out,
            )  # fmt: skip
            return out

        return call

    def flash3(self) -> Callable[[], Tensor] | None:
        flash = fa3()
        if flash is None:
            return None
        out, used, cu = torch.empty_like(self.q), torch.tensor(self.kv_lens, device="cuda", dtype=torch.int32), self.cu_q()

        def call() -> Tensor:
            flash(
                self.q, self.k_cache, self.v_cache, max(self.q_lens), cu, max(self.kv_lens), fa_version=3, out=out,
                seqused_k=used, causal=True, block_table=self.block_table,
            )  # fmt: skip
            return out

        return call

    def cu_q(self) -> Tensor:
        return cu_seqlens(self.q_lens, torch.device("cuda"))

    def check(self, rows: int) -> None:
        """`rows` of the sequences, by the 2x rule against the float64 oracle."""
        out = self.ours()()
        starts = [0, *torch.tensor(self.q_lens).cumsum(0).tolist()]
        for row in sorted({0, len(self.q_lens) - 1, *range(0, len(self.q_lens), -(-len(self.q_lens) // rows))}):
            q, n = self.q[starts[row] : starts[row + 1]], self.kv_lens[row]
            pages = self.block_table[row, : -(-n // PAGE)].long()
            k, v = (
                (x[pages].flatten(0, 1)[:n].double() * (1.0 if d is None else d.double()[:, None])).to(q.dtype)
                for x, d in zip((self.k_cache, self.v_cache), self.descales, strict=True)
            )
            options = {"softmax_scale": q.shape[-1] ** -0.5, "window_size": (-1, 0), "softcap": 0.0, "sinks": None}
            exact, _ = ReferenceBackend().forward_paged(
                q.double(), self.k_cache, self.v_cache, block_table=self.block_table[row : row + 1],
                seqused_k=torch.tensor([n], device="cuda", dtype=torch.int32),
                cu_seqlens_q=cu_seqlens([len(q)], torch.device("cuda")), max_seqlen_q=len(q), max_seqlen_k=n, num_splits=0,
                out=None, return_lse=False, k_descale=self.descales[0], v_descale=self.descales[1], **options,
            )  # fmt: skip
            eager = eager_attention(q[None], k[None], v[None], **options)[0]
            assert_matches_reference(out[starts[row] : starts[row + 1]], exact, eager, f"row {row}")


@cache
def pool(kv_heads: int, dim: int, pages: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (pages, PAGE, kv_heads, dim)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2))
    return k, v


def make(
    kv_lens: list[int], heads: int, kv_heads: int, dim: int, q_lens: list[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:  # fmt: skip
    counts = [-(-n // PAGE) for n in kv_lens]
    if pool.cache_info().currsize > 1:
        pool.cache_clear()
    k_cache, v_cache = pool(kv_heads, dim, 65536, dtype)
    table = torch.zeros(len(kv_lens), max(counts), device="cuda", dtype=torch.int32)
    for row, pages in enumerate(torch.randperm(65536, device="cuda", dtype=torch.int32)[: sum(counts)].split(counts)):
        table[row, : len(pages)] = pages
    q_lens = q_lens or [1] * len(kv_lens)
    q = torch.randn(sum(q_lens), heads, dim, device="cuda", dtype=torch.bfloat16)
    fp8 = dtype == torch.float8_e4m3fn
    descales = (torch.rand(kv_heads, device="cuda") + 0.5, torch.rand(kv_heads, device="cuda") + 0.5) if fp8 else (None, None)
    return Problem(q, k_cache, v_cache, table, tuple(q_lens), tuple(kv_lens), descales)


def uneven() -> Iterator[tuple[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    for batch in (16, 64, 256):
        yield f"{batch}_log", [int(2**e) for e in (torch.rand(batch, generator=generator) * 8 + 5).tolist()]  # 32 to 8192
        yield f"{batch}_20x", [20 * 512 if i % 10 == 3 else 512 for i in range(batch)]


def measure(results: Results, case: str, problem: Problem, peers: dict[str, float] | None = None) -> None:
    problem.check(2)
    ours, flash = problem.ours(), problem.flash3()
    if peers is None and flash is not None:
        worst = (ours().float() - flash().float()).abs().max().item()
        assert worst < 0.05, f"FA3 and ours differ by {worst}"
    mine = graph_microseconds(ours, rep=30)
    if peers is None:
        peers = {} if flash is None else {"fa3": graph_microseconds(flash, rep=30)}
    ratio = results.add(case, "us", mine, peers)
    size = 2 * sum(problem.kv_lens) * problem.k_cache.shape[2] * problem.k_cache.shape[3] * problem.k_cache.element_size()
    theirs = next(iter(peers.values()), float("nan"))
    print(f"{case:<26}{mine:9.1f}{theirs:9.1f}{size / mine * 1e-6:7.2f}{ratio:7.2f}", flush=True)


def decode(args: argparse.Namespace) -> None:
    results = Results("decode", args.out)
    print(f"{'case':<26}{'ours us':>9}{'peer us':>9}{'TB/s':>7}{'ratio':>7}")
    for heads, kv_heads, dim in HEADS:
        layout = f"{heads}_{kv_heads}_d{dim}"
        for batch, kv in CELLS:
            measure(results, f"{layout}_{batch}x{kv}", make([kv] * batch, heads, kv_heads, dim))
        if (heads, dim) in ((32, 128), (64, 64)) and kv_heads == 8:
            for name, lengths in uneven():
                measure(results, f"{layout}_{name}", make(lengths, heads, kv_heads, dim))
            for batch, kv in ((1, 131072), (64, 8192), (256, 4096)):
                plain = graph_microseconds(make([kv] * batch, heads, kv_heads, dim).ours(), rep=30)
                small = make([kv] * batch, heads, kv_heads, dim, dtype=torch.float8_e4m3fn)
                measure(results, f"{layout}_{batch}x{kv}_fp8", small, {"own_bf16": plain})
    first = make([1024], 32, 8, 128).ours()
    print(f"host time of a call {host_microseconds(first):.1f} us")
    results.write()


def mixed(args: argparse.Namespace) -> None:
    results = Results("mixed", args.out)
    print(f"{'case':<26}{'ours us':>9}{'peer us':>9}{'TB/s':>7}{'ratio':>7}")
    for heads, kv_heads, dim in HEADS:
        for name, before in (("new", 0), ("after_4k", 4096)):
            problem = make([4096] * 32 + [before + 2048], heads, kv_heads, dim, q_lens=[1] * 32 + [2048])
            measure(results, f"{heads}_{kv_heads}_d{dim}_{name}", problem)
    results.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=["decode", "mixed"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.manual_seed(0)
    {"decode": decode, "mixed": mixed}[args.bench](args)


if __name__ == "__main__":
    main()
