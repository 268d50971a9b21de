"""One step over a paged cache: its tensors, our call, the call of FlashAttention-3, and the check against float64.

bench_attention.py times the public function. tune_decode.py times the plan of the decoding kernel with given tiles. Pages lie
in random order. Without a shared pool, everything that no sequence owns is NaN, and entries of the block table past the last
page point outside of the cache. Cells of a grid share a pool, because filling gigabytes takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fa_serve
from benchmarks.measure import fa3
from fa_serve import spec
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.reference import attention_reference
from fa_serve.backends.triton.decode.plan import DecodeTiles, decode_tiles, plan_decode
from fa_serve.launching.launch import multiprocessors
from fa_serve.spec import Precision
from fa_serve.testing import assert_lse_matches, assert_matches_reference, cu_seqlens, eager_attention

DEVICE = torch.device("cuda", 0)
POOL_PAGES = 65536  # of 16 tokens: 2^20 tokens
LARGEST_SCORES = 2**28  # in float64 2 GiB; a chunk of 2048 queries of 64 heads behind 64k keys has 33 times as many


@dataclass
class Problem:
    """`options` holds the other tensors and the options of the call by name, with `seqused_k` for the field `keys`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    options: dict[str, Any]

    @classmethod
    def make(
        cls,
        lengths: Sequence[int],
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = 16,
        queries: int | Sequence[int] = 1,
        pool: tuple[Tensor, Tensor] | None = None,
    ) -> Problem:
        q_lens = [queries] * len(lengths) if isinstance(queries, int) else list(queries)
        counts = [-(-n // page_size) for n in lengths]
        poisoned = pool is None
        if pool is None:
            shape = (sum(counts), page_size, kv_heads, dim)
            k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).to(dtype) for _ in range(2))
            pool = k, v
        order = torch.randperm(len(pool[0]), device=DEVICE, dtype=torch.int32)[: sum(counts)]
        table = torch.full((len(lengths), max(counts)), 2**28 if poisoned else 0, device=DEVICE, dtype=torch.int32)
        for row, pages in enumerate(order.split(counts)):
            table[row, : len(pages)] = pages
            if poisoned and lengths[row] % page_size:
                for cache in pool:
                    cache[int(pages[-1]), lengths[row] % page_size :] = float("nan")
        options = {
            "block_table": table,
            "seqused_k": torch.tensor(lengths, device=DEVICE, dtype=torch.int32),
            "cu_seqlens_q": cu_seqlens(q_lens, DEVICE),
            "max_seqlen_q": max(q_lens),
            "max_seqlen_k": max(lengths),
            "softmax_scale": dim**-0.5,
            "window_size": (-1, 0),
            "softcap": 0.0,
            "sinks": None,
            "k_descale": None,
            "v_descale": None,
            "num_splits": 0,
            "out": None,
            "return_lse": False,
        }
        fp8 = dtype == torch.float8_e4m3fn
        q = torch.randn(sum(q_lens), heads, dim, device=DEVICE, dtype=torch.bfloat16 if fp8 else dtype)
        if fp8:
            options |= {name: torch.rand(kv_heads, device=DEVICE) + 0.5 for name in ("k_descale", "v_descale")}
        return cls(q, *pool, options)

    def plan(self, tiles: DecodeTiles | None = None, **changes: Any) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Plan the decoding kernel with these tiles, or those of `decode_tiles`, and with options changed."""
        given = self.options | changes
        tensors = AttentionTensors(
            self.q,
            self.k_cache,
            self.v_cache,
            keys=given.pop("seqused_k"),
            **{name: given.pop(name) for name in AttentionTensors._fields if name in given},
        )
        return partial(plan_decode(tensors, AttentionOptions(**given), tiles), tensors)

    def run(self, tiles: DecodeTiles | None = None, **changes: Any) -> tuple[Tensor, Tensor | None]:
        """Plan and run at once."""
        return self.plan(tiles, **changes)()

    def default_tiles(self) -> DecodeTiles:
        batch = len(self.options["seqused_k"])
        _, heads, dim = self.q.shape
        kv_heads = self.k_cache.shape[2]
        return decode_tiles(
            spec.arch_of(DEVICE),
            multiprocessors(DEVICE, 0),
            self.q.element_size(),
            self.k_cache.element_size(),
            dim,
            dim,
            heads,
            kv_heads,
            batch,
            self.options["max_seqlen_q"],
            self.options["max_seqlen_k"],
            0,
        )

    def ours(self, backend: str = "auto", precision: Precision = "bf16") -> Callable[[], Tensor]:
        """A call of the public function."""
        out = torch.empty_like(self.q)
        o = self.options
        names = ("block_table", "seqused_k", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "k_descale", "v_descale")
        call = {name: o[name] for name in names} | {"causal": True, "out": out, "backend": backend, "precision": precision}
        return lambda: fa_serve.attention_paged(self.q, self.k_cache, self.v_cache, **call)

    def fa3(self) -> Callable[[], Tensor] | None:
        """A call of FlashAttention-3, or None where it is not installed."""
        flash = fa3()
        o = self.options
        if flash is None:
            return None
        out = torch.empty_like(self.q)

        def call() -> Tensor:
            flash(
                self.q,
                self.k_cache,
                self.v_cache,
                o["max_seqlen_q"],
                o["cu_seqlens_q"],
                o["max_seqlen_k"],
                fa_version=3,
                out=out,
                seqused_k=o["seqused_k"],
                causal=True,
                block_table=o["block_table"],
            )
            return out

        return call

    def check(
        self,
        what: str,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        rows: int = 1 << 20,
        tiles: DecodeTiles | None = None,
        **changes: Any,
    ) -> None:
        """Compare the first, the last and about `rows` other sequences with float64; AssertionError if one breaks the 2x rule.

        Without `out`, `run` computes it with `tiles` and with the options changed.
        """
        o = self.options | changes
        if out is None:
            out, lse = self.run(tiles, **(changes | {"return_lse": True, "out": None}))
        starts = o["cu_seqlens_q"].tolist()
        page_size = self.k_cache.shape[1]
        count = len(starts) - 1
        exacts = []
        eagers = []
        ours = []
        lses = []
        exact_lses = []
        names = ("softmax_scale", "window_size", "softcap", "sinks")
        for row in sorted({0, count - 1, *range(0, count, -(-count // rows))}):
            a = starts[row]
            b = starts[row + 1]
            n = int(o["seqused_k"][row])
            pages = o["block_table"][row, : -(-n // page_size)].long()
            exact_kv = []
            eager_kv = []
            for cache, descale in ((self.k_cache, o["k_descale"]), (self.v_cache, o["v_descale"])):
                x = cache[pages].flatten(0, 1)[:n]
                scale = torch.ones(1, device=DEVICE) if descale is None else descale
                exact_kv.append((x.double() * scale.double()[:, None])[None])
                eager_kv.append((x.to(self.q.dtype) * scale[:, None]).to(self.q.dtype)[None])
            options = {name: o[name] for name in names}
            # the last query of a piece sees all keys that are passed, because windows end at the query
            piece = max(1, LARGEST_SCORES // (self.q.shape[1] * n))
            for start in range(a, b, piece):
                end = min(start + piece, b)
                queries = self.q[start:end][None]
                seen = n - (b - end)
                exact, exact_lse = attention_reference(queries.double(), *(x[:, :seen] for x in exact_kv), **options)
                eagers.append(eager_attention(queries, *(x[:, :seen] for x in eager_kv), **options)[0])
                exacts.append(exact[0])
                ours.append(out[start:end])
                if lse is not None:
                    lses.append(lse[:, start:end])
                    exact_lses.append(exact_lse[0])
        assert_matches_reference(torch.cat(ours), torch.cat(exacts), torch.cat(eagers), what)
        if lse is not None:
            assert_lse_matches(torch.cat(lses, 1), torch.cat(exact_lses, 1))

    @property
    def bytes_read(self) -> int:
        """Bytes of keys and values that a kernel reads if it reads each once."""
        tokens = int(self.options["seqused_k"].sum())
        return 2 * tokens * self.k_cache.shape[2] * self.k_cache.shape[3] * self.k_cache.element_size()


def pools(dtype: torch.dtype = torch.bfloat16) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Returns a function (kv_heads, dim) -> random keys and values of POOL_PAGES pages. It keeps one pair: the last one."""
    held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def pool(kv_heads: int, dim: int) -> tuple[Tensor, Tensor]:
        if (kv_heads, dim) not in held:
            held.clear()
            shape = (POOL_PAGES, 16, kv_heads, dim)
            k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).to(dtype) for _ in range(2))
            held[kv_heads, dim] = k, v
        return held[kv_heads, dim]

    return pool


def uneven(batch: int) -> dict[str, list[int]]:
    """Lengths of a batch: log-uniform from 32 to 8192, and 512 with 10% of the sequences 20 times as long."""
    exponents = torch.rand(batch, generator=torch.Generator().manual_seed(batch)) * 8 + 5
    return {"log": [int(2**e) for e in exponents.tolist()], "20x": [20 * 512 if i % 10 == 3 else 512 for i in range(batch)]}
