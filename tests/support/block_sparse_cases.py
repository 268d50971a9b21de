"""Block-sparse calls: lists of every kind and the mask of elements that they stand for, in each layout.

A `SparseCase` says what to compute. `check_sparse(case, backend, dtype, device)` draws lists, expands them block by block in
plain Python, computes the float64 oracle with that mask, and applies the 2x rule to what the public function returns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import fa_serve
from fa_serve import BlockLists
from fa_serve.backends.reference import attention_reference
from fa_serve.block_lists import pack_bits
from fa_serve.testing import (
    assert_lse_matches,
    assert_matches_reference,
    cu_seqlens,
    eager_attention,
    make_paged,
    make_qkv,
)


@dataclass(frozen=True)
class SparseCase:
    """kept: part of the blocks that lists have; list_heads: "one", "kv" or "q"; batched: each sequence has lists
    full: part of the kept blocks that are full; bits: the partial blocks have bits"""

    lengths_q: tuple[int, ...] = (150,)
    lengths_k: tuple[int, ...] = (210,)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    head_dim_v: int = 0
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    chunk: int = 0
    layout: str = "dense"
    page_size: int = 16
    block_size: tuple[int, int] = (64, 64)
    kept: float = 0.5
    list_heads: str = "one"
    batched: bool = True
    full: float = 0.5
    bits: bool = False
    num_splits: int = 0
    float8: bool = False

    def __str__(self) -> str:
        shown = {name: value for name, value in vars_of(self).items() if value != vars_of(SparseCase())[name]}
        return "_".join(f"{name}-{value}".replace(" ", "") for name, value in shown.items()) or "plain"


def vars_of(case: SparseCase) -> dict[str, Any]:
    return {name: getattr(case, name) for name in SparseCase.__dataclass_fields__}


BASE = SparseCase()
PAGED = replace(BASE, layout="paged", lengths_q=(70, 1, 130), lengths_k=(210, 150, 130), causal=True)
DECODE = replace(PAGED, lengths_q=(1, 1, 1, 1), lengths_k=(300, 64, 0, 9), heads=8)
CASES = [
    BASE,
    replace(BASE, kept=0.0),
    replace(BASE, kept=0.0, sinks=True),
    replace(BASE, kept=1.0),
    replace(BASE, kept=1.0, full=0.0, bits=True),
    replace(BASE, kept=1.0, full=1.0, causal=True, head_dim=64),
    replace(BASE, lengths_q=(60,), lengths_k=(50,), kept=1.0),  # one block
    replace(BASE, bits=True, list_heads="q"),
    replace(BASE, causal=True, bits=True, list_heads="kv", head_dim=128),
    replace(BASE, causal=True, list_heads="q", heads=6, kv_heads=2),
    replace(BASE, window=(40, 9), list_heads="kv", heads=6, kv_heads=2),
    replace(BASE, window=(70, -1), causal=True, softcap=20.0, sinks=True, bits=True),
    replace(BASE, causal=True, alibi=True, sinks=True, list_heads="q"),
    replace(BASE, causal=True, chunk=80, lengths_q=(130, 130), lengths_k=(210, 210)),
    replace(BASE, lengths_q=(130, 130), lengths_k=(70, 70), causal=True, batched=False),  # rows that see no key
    replace(BASE, lengths_q=(130, 130), lengths_k=(190, 190), block_size=(128, 128), bits=True, kv_heads=4),
    replace(BASE, block_size=(64, 128), bits=True, head_dim=80, head_dim_v=24),
    replace(BASE, block_size=(128, 64), causal=True, bits=True, heads=8, kv_heads=1),
    replace(BASE, lengths_q=(33,), head_dim=256, causal=True, bits=True),
    replace(BASE, lengths_q=(20,), lengths_k=(90,), heads=2, head_dim=512, causal=True, bits=True, kept=0.8),
    replace(BASE, lengths_q=(3, 3), lengths_k=(300, 300), heads=8, causal=True, bits=True, list_heads="kv"),
    replace(BASE, lengths_q=(1,), lengths_k=(400,), heads=16, kv_heads=1, kept=0.3),
    replace(BASE, layout="varlen", lengths_q=(70, 0, 130, 5), lengths_k=(70, 9, 130, 0), causal=True, bits=True),
    replace(BASE, layout="varlen", lengths_q=(17, 130), lengths_k=(200, 90), window=(50, 3), batched=False, list_heads="q"),
    replace(BASE, layout="varlen", lengths_q=(), lengths_k=()),
    PAGED,
    replace(PAGED, bits=True, list_heads="q", page_size=64),
    replace(PAGED, page_size=7, window=(60, -1), sinks=True, softcap=20.0, list_heads="kv"),
    replace(PAGED, lengths_q=(20, 1, 40), lengths_k=(140, 100, 40), page_size=128, num_splits=3, bits=True),
    replace(PAGED, page_size=32, kept=1.0, alibi=True),
    DECODE,
    replace(DECODE, list_heads="kv", bits=True, kept=0.7, sinks=True),
    replace(DECODE, list_heads="q", page_size=64, head_dim=128),
    replace(DECODE, list_heads="kv", page_size=64, num_splits=1, window=(100, -1)),
    replace(DECODE, kept=0.0),
    replace(DECODE, page_size=16, num_splits=5, kept=1.0, head_dim=64),
    replace(DECODE, page_size=16, float8=True, list_heads="kv"),
]


def make_lists(case: SparseCase, device: str = "cpu") -> tuple[BlockLists, Tensor]:
    """Lists in a random order, with poison behind the listed entries, and bool (batch, heads, longest_q, longest_k)."""
    draw = torch.Generator().manual_seed(5)
    rows, keys = case.block_size
    longest_q = max(case.lengths_q, default=1)
    longest_k = max(case.lengths_k, default=1)
    query_blocks = -(-longest_q // rows)
    key_blocks = max(1, -(-longest_k // keys))
    batch = max(1, len(case.lengths_q)) if case.batched else 1
    heads = {"one": 1, "kv": case.kv_heads, "q": case.heads}[case.list_heads]
    shape = (batch, heads, query_blocks)
    poison = 2**28
    lists = []
    for _ in range(2):
        num = torch.zeros(shape, dtype=torch.int32)
        lists.append((num, torch.full((*shape, key_blocks), poison, dtype=torch.int32)))
    (num, indices), (full_num, full_indices) = lists
    bits = torch.zeros((*shape, key_blocks, rows, keys), dtype=torch.bool)
    seen = torch.zeros(batch, heads, query_blocks * rows, key_blocks * keys, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, 3).tolist():
        for j in torch.randperm(key_blocks, generator=draw).tolist():
            kept, is_full = torch.rand(2, generator=draw).tolist()
            if kept >= case.kept:
                continue
            here = seen[b, h, i * rows : (i + 1) * rows, j * keys : (j + 1) * keys]
            if is_full < case.full:
                full_indices[b, h, i, full_num[b, h, i]] = j
                full_num[b, h, i] += 1
                here[:] = True
                continue
            keep = torch.rand(rows, keys, generator=draw) < 0.4 if case.bits else torch.ones(rows, keys, dtype=torch.bool)
            bits[b, h, i, num[b, h, i]] = keep
            indices[b, h, i, num[b, h, i]] = j
            num[b, h, i] += 1
            here[:] = keep
    full = (full_num.to(device), full_indices.to(device)) if case.full else (None, None)
    words = pack_bits(bits).to(device) if case.bits else None
    given = BlockLists(num.to(device), indices.to(device), *full, case.block_size, words)
    seen = seen[..., :longest_q, :longest_k].expand(max(1, len(case.lengths_q)), -1, -1, -1)
    return given, seen.repeat_interleave(case.heads // heads, dim=1).to(device)


def check_sparse(case: SparseCase, backend: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Raise AssertionError if a row breaks the 2x rule, or if it sees no key and is not zero with an lse of -inf."""
    lists, seen = make_lists(case, device)
    shared = {
        "softcap": case.softcap,
        "sinks": torch.linspace(-1.5, 2.0, case.heads, device=device) if case.sinks else None,
        "alibi_slopes": torch.linspace(0.05, 0.7, case.heads, device=device) if case.alibi else None,
        "attention_chunk": case.chunk,
    }
    oracle = {
        **shared,
        "softmax_scale": case.head_dim**-0.5,
        "window_size": (case.window[0], 0 if case.causal else case.window[1]),
    }
    sequences = []
    expected = []
    dims = (case.heads, case.kv_heads, case.head_dim, case.head_dim_v or None)
    for index, (n, m) in enumerate(zip(case.lengths_q, case.lengths_k, strict=True)):
        q, k, v = make_qkv(1, n, m, *dims, dtype=dtype, device=device, seed=index)
        if case.float8:
            k, v = (x.to(torch.float8_e4m3fn).to(dtype) for x in (k, v))
        mask = seen[index : index + 1, :, :n, :m]
        exact, lse = attention_reference(*(x.double() for x in (q, k, v)), **oracle, mask=mask)
        expected.append((exact[0], lse[0], eager_attention(q, k, v, **oracle, mask=mask)[0]))
        sequences.append((q[0], k[0], v[0]))
    options = {"causal": case.causal, "window_size": case.window, "return_lse": True, "backend": backend, **shared}
    outs, lses = _run_sparse(case, sequences, lists, options, dtype, device)
    if not sequences:
        return
    exact, eager, actual = (torch.cat(x) for x in ([e[0] for e in expected], [e[2] for e in expected], outs))
    assert_matches_reference(actual, exact, eager)
    for (_, lse, _), found in zip(expected, lses, strict=True):
        assert_lse_matches(found, lse, case.softcap)


def _run_sparse(
    case: SparseCase, sequences: list[Any], lists: BlockLists, options: dict[str, Any], dtype: torch.dtype, device: str
) -> tuple[list[Tensor], list[Tensor]]:
    if case.layout == "dense":
        q, k, v = (torch.stack(x) for x in zip(*sequences, strict=True))
        out, lse = fa_serve.attention(q, k, v, block_mask=lists, **options)
        return list(out), list(lse)
    empty = torch.zeros(0, case.heads, case.head_dim, dtype=dtype, device=device)
    q, k, v = (torch.cat([x[part] for x in sequences] or [empty[:, : case.kv_heads] if part else empty]) for part in range(3))
    longest = {"max_seqlen_q": max(case.lengths_q, default=0), "cu_seqlens_q": cu_seqlens(case.lengths_q, device)}
    if case.layout == "varlen":
        # rows of NaN after the last sequence, which no kernel may read
        q, k, v = (torch.cat([x, x.new_full((70, *x.shape[1:]), float("nan"))]) for x in (q, k, v))
        keys = {"cu_seqlens_k": cu_seqlens(case.lengths_k, device), "max_seqlen_k": max(case.lengths_k, default=0)}
        out, lse = fa_serve.attention_varlen(q, k, v, **longest, **keys, block_mask=lists, **options)
    else:
        caches = make_paged([x[1] for x in sequences], [x[2] for x in sequences], case.page_size)
        k_cache, v_cache, table, used = caches
        scales: dict[str, Any] = {}
        if case.float8:
            k_cache, v_cache = (x.to(torch.float8_e4m3fn) for x in (k_cache, v_cache))
            scales = {
                "k_descale": torch.ones(case.kv_heads, device=device),
                "v_descale": torch.ones(case.kv_heads, device=device),
            }
        pages = {"block_table": table, "seqused_k": used, "num_splits": case.num_splits}
        out, lse = fa_serve.attention_paged(q, k_cache, v_cache, **pages, **scales, **longest, block_mask=lists, **options)
    ends = longest["cu_seqlens_q"].tolist()
    pairs = list(pairwise(ends))
    return [out[a:b] for a, b in pairs], [lse[:, a:b] for a, b in pairs]
