"""The cases that every backend is tested with: odd lengths, head groups, head sizes, each option, and combinations.

A `Case` says what to compute. `check(case, backend, dtype, device, layout)` makes inputs, computes them with the float64 oracle
and, through the public API, with the backend, and applies the 2x rule to every row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch

import fa_serve
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import (
    assert_lse_matches,
    assert_matches_reference,
    cu_seqlens,
    eager_attention,
    make_paged,
    make_qkv,
)


@dataclass(frozen=True)
class Case:
    lengths_q: tuple[int, ...] = (63,)
    lengths_k: tuple[int, ...] = (63,)
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    head_dim_v: int = 0
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    mask: str = ""  # "" | "keys" | "bool" | "float"
    page_size: int = 16
    alibi: str = ""  # "" | "heads" | "batch"
    chunk: int = 0

    def __str__(self) -> str:
        lengths = ["-".join(map(str, n)) for n in (self.lengths_q, self.lengths_k)]
        dims = f"D{self.head_dim}" + (f"-{self.head_dim_v}" if self.head_dim_v else "")
        parts = [f"Q{lengths[0]}", f"K{lengths[1]}", f"H{self.heads}-{self.kv_heads}", dims]
        parts += ["causal"] if self.causal else []
        parts += [f"W{self.window[0]},{self.window[1]}"] if self.window != (-1, -1) else []
        parts += ["softcap"] if self.softcap else []
        parts += ["sinks"] if self.sinks else []
        parts += [f"mask-{self.mask}"] if self.mask else []
        parts += [f"alibi-{self.alibi}"] if self.alibi else []
        parts += [f"C{self.chunk}"] if self.chunk else []
        parts += [f"P{self.page_size}"] if self.page_size != 16 else []
        return "_".join(parts)


def params(cases: list[Case]) -> list[Any]:
    assert len({str(case) for case in cases}) == len(cases), "two cases have the same name"
    return [pytest.param(case, id=str(case)) for case in cases]


def _lengths() -> list[Case]:
    odd = (1, 17, 63, 128, 1000)
    same = [Case((n,), (n,), heads=2, kv_heads=1, causal=causal) for n in odd for causal in (False, True)]
    unequal = ((1, 300), (17, 130), (130, 17), (100, 1), (5, 64))
    other = [Case((q,), (k,), causal=causal) for q, k in unequal for causal in (False, True)]
    return same + other


def _shapes() -> list[Case]:
    groups = [Case((70,), (90,), heads=8, kv_heads=n, causal=True) for n in (8, 2, 1)]
    dims = [Case((70,), (90,), head_dim=d, causal=True) for d in (32, 80, 96, 128, 192, 256, 512)]
    values = [
        Case((70,), (90,), head_dim=d, head_dim_v=dv, causal=True) for d, dv in ((192, 128), (64, 128), (80, 24), (24, 12))
    ]
    return groups + dims + values


def _options() -> list[Case]:
    base = Case((70,), (150,), heads=4, kv_heads=2)
    windows = ((-1, -1), (0, 0), (5, -1), (-1, 5), (40, 9), (200, 200))
    cases = [replace(base, window=w, causal=causal) for w in windows for causal in (False, True)]
    cases += [replace(case, softcap=20.0) for case in cases[::3]] + [replace(case, sinks=True) for case in cases[::3]]
    cases += [replace(case, softcap=20.0, sinks=True) for case in cases[2:12:4]]
    cases += [
        replace(base, lengths_q=(150,), lengths_k=(70,), causal=True, sinks=sinks, window=w)
        for sinks in (False, True)
        for w in ((-1, -1), (9, -1))
    ]  # rows that see no key
    return cases


def _masks() -> list[Case]:
    base = Case((70, 70), (150, 150), heads=4, kv_heads=2)
    cases = [replace(base, mask=mask, causal=causal) for mask in ("keys", "bool", "float") for causal in (False, True)]
    return [
        *cases,
        replace(base, mask="keys", window=(20, -1), causal=True, softcap=20.0, sinks=True),
        replace(base, mask="float", window=(20, 7), sinks=True),
    ]


def _positions() -> list[Case]:
    base = Case((70, 70), (150, 150), heads=4, kv_heads=2, causal=True)
    biased = [replace(base, alibi=alibi, causal=causal) for alibi in ("heads", "batch") for causal in (False, True)]
    chunks = [replace(base, chunk=chunk) for chunk in (1, 16, 100, 149, 150)]
    return [
        *biased,
        *chunks,
        replace(base, alibi="batch", window=(40, -1), softcap=20.0, sinks=True),
        replace(base, alibi="heads", mask="float"),
        replace(base, chunk=64, softcap=20.0, sinks=True, mask="keys"),
        replace(base, chunk=48, alibi="heads", lengths_q=(150, 150), lengths_k=(70, 70)),  # rows that see no key
        Case((1, 1), (300, 300), heads=8, kv_heads=2, causal=True, alibi="batch", chunk=70),
        Case((3, 3), (300, 300), heads=8, kv_heads=2, causal=True, alibi="batch", chunk=298),  # a border between the queries
    ]


_VARLEN_POSITIONS = [
    Case((17, 0, 128, 1, 63), (17, 0, 128, 1, 63), heads=4, kv_heads=1, causal=True, alibi="batch"),
    Case((17, 5, 128, 1, 0), (33, 0, 100, 77, 63), heads=8, kv_heads=2, causal=True, chunk=30),
    Case((17, 5, 128, 1), (33, 9, 300, 77), heads=4, kv_heads=2, causal=True, chunk=64, alibi="heads", sinks=True),
]
_PAGED_POSITIONS = [
    Case((17, 1, 128, 1, 0), (33, 300, 128, 16, 63), heads=4, kv_heads=1, causal=True, alibi="batch"),
    Case((1, 1, 1), (33, 300, 0), heads=8, kv_heads=2, causal=True, alibi="heads", chunk=128),
    Case((1, 2, 5, 16), (33, 300, 5, 26), heads=8, kv_heads=1, causal=True, page_size=32, chunk=17),
    Case(
        (40, 1), (100, 300), heads=4, kv_heads=2, causal=True, softcap=20.0, sinks=True, page_size=64, chunk=80, alibi="batch"
    ),
    Case((40, 33), (164, 170), heads=4, kv_heads=4, head_dim=80, causal=True, chunk=64),
]
DENSE = _lengths() + _shapes() + _options() + _masks() + _positions()
VARLEN = [
    Case((17, 0, 128, 1, 63), (17, 0, 128, 1, 63), heads=4, kv_heads=1, causal=True),
    Case((17, 5, 128, 1, 0), (33, 0, 100, 77, 63), heads=8, kv_heads=2, causal=True),
    Case((17, 5, 128, 1, 0), (33, 0, 100, 77, 63), heads=2, kv_heads=2, head_dim=96),
    Case((17, 5, 128, 1), (33, 9, 100, 77), heads=4, kv_heads=2, causal=True, window=(13, -1), softcap=20.0, sinks=True),
    Case((17, 5, 128, 1), (33, 9, 100, 77), heads=4, kv_heads=2, head_dim=192, head_dim_v=128, window=(13, 4)),
    Case((), (), causal=True),
    *_VARLEN_POSITIONS,
]
PAGED = [
    Case((17, 1, 128, 1, 0), (33, 300, 128, 16, 63), heads=4, kv_heads=1, causal=True),
    Case((1, 1, 1), (33, 300, 0), heads=8, kv_heads=2, causal=True, page_size=16),
    Case((1, 2, 5, 16), (33, 300, 5, 16), heads=8, kv_heads=1, causal=True, page_size=32),
    Case((40, 1), (64, 300), heads=4, kv_heads=2, causal=True, window=(20, -1), softcap=20.0, sinks=True, page_size=64),
    Case((1, 3), (257, 300), heads=8, kv_heads=2, causal=True, window=(20, -1), softcap=20.0, sinks=True, page_size=256),
    Case((40, 33), (64, 70), heads=4, kv_heads=4, head_dim=80, page_size=16),
    Case((1, 1), (64, 70), heads=4, kv_heads=4, head_dim=192, head_dim_v=128, causal=True),
    Case((40, 9), (64, 9), heads=4, kv_heads=1, head_dim=256, causal=True, page_size=7),
    Case((1, 1), (64, 9), heads=16, kv_heads=1, head_dim=256, causal=True),
    Case((1, 1, 1), (64, 9, 300), heads=8, kv_heads=2, head_dim=512, causal=True),
    Case((40, 3), (64, 70), heads=4, kv_heads=2, head_dim=512, head_dim_v=288, causal=True, window=(50, -1), sinks=True),
    *_PAGED_POSITIONS,
]


def decoding_head_dims() -> list[Case]:
    """Every head_dim of the kernels, with one query per sequence."""
    return [Case((1, 1), (300, 17), heads=4, kv_heads=2, head_dim=d, causal=True) for d in (*range(8, 257, 8), 512)]


def few_queries() -> list[Case]:
    """1 to 16 query heads per KV head and 1 to 16 queries per sequence, each of both at least once, in all sizes of tiles."""
    pairs = [(group, 17 - group) for group in range(1, 17)]
    pairs += [(group, 1) for group in (3, 5, 6, 7, 12)] + [(4, queries) for queries in (2, 3, 5, 8, 16)]
    return [Case((queries, 1), (300, 33), heads=2 * group, kv_heads=2, head_dim=128, causal=True) for group, queries in pairs]


def verified_drafts() -> list[Case]:
    """Few queries of many sequences, whose query heads share tiles on a Hopper GPU (`backends.hopper.forward.pack_gqa`).

    The last ones have a sequence that is much longer than the others, whose keys are divided (`backends.hopper.split_kv`).
    """
    queries = tuple(range(1, 17))
    keys = tuple(16 + 370 * i % 1900 for i in range(16))
    base = Case(queries, keys, heads=32, kv_heads=8, head_dim=128, causal=True)
    groups = [replace(base, heads=8 * group) for group in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)]
    dims = [replace(base, heads=64, head_dim=d, head_dim_v=dv) for d, dv in ((64, 0), (72, 0), (96, 0), (128, 64))]
    other = [replace(base, sinks=True, softcap=20.0), replace(base, window=(100, -1)), replace(base, page_size=48)]
    long = [replace(base, heads=heads, lengths_k=(20000, 0, 5, *keys[:-3])) for heads in (32, 56)]
    return [*groups, *dims, *other, *long]


def odd_groups() -> list[Case]:
    """Prompts whose number of query heads per KV head is no power of two."""
    return [Case((130, 70), (150, 200), heads=2 * group, kv_heads=2, head_dim=128, causal=True) for group in (3, 5, 6, 7, 12)]


def split_prompts() -> list[Case]:
    """Prompts of equal length with few rows behind many keys, whose keys are divided on a Hopper GPU (`backends.chunks`)."""
    return [
        Case((256,), (2000,), heads=16, kv_heads=2, head_dim=128, causal=True),
        Case((65, 65), (1500, 1030), heads=6, kv_heads=2, head_dim=64, causal=True, softcap=20.0, sinks=True),
        Case((100,), (1300,), heads=5, kv_heads=1, head_dim=96, causal=True, window=(1100, -1)),
    ]


def _sequences(case: Case, dtype: torch.dtype, device: str) -> list[tuple[torch.Tensor, ...]]:
    return [
        tuple(
            x[0]
            for x in make_qkv(
                1,
                q,
                k,
                case.heads,
                case.kv_heads,
                case.head_dim,
                case.head_dim_v or None,
                dtype=dtype,
                device=device,
                seed=index,
            )
        )
        for index, (q, k) in enumerate(zip(case.lengths_q, case.lengths_k, strict=True))
    ]


def _slopes_of(case: Case, device: str) -> torch.Tensor | None:
    """From steep slopes, which leave a row few keys, to a rising bias."""
    if not case.alibi:
        return None
    rows = len(case.lengths_q) if case.alibi == "batch" else 1
    slopes = torch.linspace(-0.02, 0.7, rows * case.heads, device=device).view(rows, case.heads)
    return slopes if case.alibi == "batch" else slopes[0]


def _options_of(case: Case, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a case as the API takes them, and as the oracle takes them."""
    sinks = torch.linspace(-1.5, 2.0, case.heads, device=device) if case.sinks else None
    same = {"softcap": case.softcap, "sinks": sinks, "alibi_slopes": _slopes_of(case, device), "attention_chunk": case.chunk}
    window = (case.window[0], 0 if case.causal else case.window[1])
    return (
        {"causal": case.causal, "window_size": case.window, **same},
        {"softmax_scale": case.head_dim**-0.5, "window_size": window, **same},
    )


def _mask(case: Case, device: str) -> torch.Tensor | None:
    if not case.mask:
        return None
    batch = len(case.lengths_q)
    seqlen_q = case.lengths_q[0]
    seqlen_k = case.lengths_k[0]
    shape = {
        "keys": (batch, 1, 1, seqlen_k),
        "bool": (batch, case.heads, seqlen_q, seqlen_k),
        "float": (1, case.heads, seqlen_q, seqlen_k),
    }
    draw = torch.randn(shape[case.mask], generator=torch.Generator().manual_seed(7)).to(device)
    return draw if case.mask == "float" else draw > -0.4


def check(case: Case, backend: str, dtype: torch.dtype, device: str = "cpu", layout: str = "dense", **extra: Any) -> None:
    """Raise AssertionError if a row breaks the 2x rule. `extra` are more options of the public function."""
    api, oracle = _options_of(case, device)
    sequences = _sequences(case, dtype, device)
    mask = _mask(case, device)
    masks = [None if mask is None else mask[i % mask.shape[0]][None] for i in range(len(sequences))]
    slopes = oracle.pop("alibi_slopes")
    expected = []
    for index, (qkv, m) in enumerate(zip(sequences, masks, strict=True)):
        alibi = slopes[index] if case.alibi == "batch" else slopes
        exact = attention_reference(*(x[None].double() for x in qkv), **oracle, mask=m, alibi_slopes=alibi)
        expected.append((exact, eager_attention(*(x[None] for x in qkv), **oracle, mask=m, alibi_slopes=alibi)))
    outs, lses = _run(case, sequences, mask, api, backend, layout, device, dtype, extra)
    if not sequences:
        return

    def rows(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([x.reshape(-1, x.shape[-1]) for x in parts])

    assert all(out.dtype == dtype for out in outs)
    exacts = rows([exact[0] for (exact, _), _ in expected])
    # the oracle computes in float64, so there its own rounding counts as well
    roundings = 2 if dtype == torch.float64 else 1
    assert_matches_reference(rows(outs), exacts, rows([e[0] for _, e in expected]), roundings=roundings)
    for ((_, lse), _), actual in zip(expected, lses, strict=True):
        assert_lse_matches(actual, lse[0], case.softcap)


def check_without_keys(backend: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """No sequence of the call has a key, in each layout: out is 0, and lse is the sink, or -inf without sinks."""
    q = torch.randn(9, 4, 64, dtype=dtype, device=device)
    k = q.new_zeros(0, 2, 64)
    sinks = torch.linspace(-1.0, 1.0, 4, device=device)
    cu = {"cu_seqlens_q": cu_seqlens([5, 4], device), "max_seqlen_q": 5}
    used = torch.zeros(2, dtype=torch.int32, device=device)
    table = torch.zeros(2, 1, dtype=torch.int32, device=device)
    for extra in ({}, {"sinks": sinks}):
        options = {"return_lse": True, "backend": backend, **extra}
        expected = (sinks if extra else torch.full((4,), float("-inf"), device=device)).to(torch.float32)[:, None]
        calls = [
            fa_serve.attention(q[None], k[None], k[None], **options),
            fa_serve.attention_varlen(q, k, k, cu_seqlens_k=used.new_zeros(3), max_seqlen_k=0, **cu, **options),
        ]
        for pages in (0, 1):  # the cache has no pages, or one that no sequence uses
            cache = q.new_full((pages, 16, 2, 64), float("nan"))
            paged = {"block_table": table[:, :pages], "seqused_k": used}
            calls.append(fa_serve.attention_paged(q, cache, cache, **paged, **cu, **options))
        for out, lse in calls:
            assert (out == 0).all()
            assert torch.equal(lse.to(torch.float32).reshape(4, 9), expected.expand(4, 9))


def check_without_queries(backend: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """No sequence of the call has a query, in each layout, or there is no sequence. Keys are enough for several splits."""
    keys = 2048
    k = torch.randn(2, keys, 2, 64, dtype=dtype, device=device)
    q = k.new_empty(2, 0, 4, 64)
    cu = {"cu_seqlens_q": cu_seqlens([0, 0], device), "max_seqlen_q": 0}
    used = torch.full((2,), keys, dtype=torch.int32, device=device)
    cache = k.view(-1, 64, 2, 64)
    table = torch.arange(2 * keys // 64, dtype=torch.int32, device=device).view(2, -1)
    for causal in (False, True):
        options = {"return_lse": True, "backend": backend, "causal": causal}
        packed = {"cu_seqlens_k": cu_seqlens([keys, keys], device), "max_seqlen_k": keys}
        calls = [
            fa_serve.attention(q, k, k, **options),
            fa_serve.attention(q[:0], k[:0], k[:0], **options),
            fa_serve.attention_varlen(q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), **cu, **packed, **options),
            fa_serve.attention_paged(q.flatten(0, 1), cache, cache, block_table=table, seqused_k=used, **cu, **options),
        ]
        for (out, lse), shape in zip(calls, ((2, 0, 4, 64), (0, 0, 4, 64), (0, 4, 64), (0, 4, 64)), strict=True):
            assert out.shape == shape
            assert lse.shape == ((shape[0], 4, 0) if len(shape) == 4 else (4, 0))
    if device == "cuda":
        torch.cuda.synchronize()


def check_gradients_of_nothing(backend: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Calls without queries, without keys, and without both, dense and packed, of infinite numbers: gradients are zeros."""
    for (seqlen_q, seqlen_k), packed in product(((0, 5), (5, 0), (0, 0)), (False, True)):
        q, k, v = (torch.full((2, n, 4, 64), torch.inf, dtype=dtype, device=device) for n in (seqlen_q, seqlen_k, seqlen_k))
        call = partial(fa_serve.attention, return_lse=True, backend=backend)
        if packed:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            cu = {f"cu_seqlens_{name}": cu_seqlens([n, n], device) for name, n in (("q", seqlen_q), ("k", seqlen_k))}
            lengths = {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
            call = partial(fa_serve.attention_varlen, return_lse=True, backend=backend, **cu, **lengths)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        found = call(*inputs)
        assert torch.equal(found[0], torch.zeros_like(found[0])), "an input that is infinite makes no NaN"
        for x, grad in zip(inputs, torch.autograd.grad(found, inputs, [torch.ones_like(y) for y in found]), strict=True):
            assert torch.equal(grad, torch.zeros_like(x))


def check_gradients(
    case: Case, backend: str, dtype: torch.dtype, device: str = "cpu", layout: str = "dense", with_lse: bool = False
) -> None:
    """Raise AssertionError if a gradient breaks the 2x rule. The exact gradients are those of autograd through the oracle.

    with_lse: the loss depends on lse, too; the case must have no rows that see no key
    A case where each row sees one key has dQ = dK = 0, which the rule cannot measure.
    """
    api, oracle = _options_of(case, device)
    mask = _mask(case, device)
    sequences = [[_leaf(x) for x in qkv] for qkv in _sequences(case, dtype, device)]
    shared = [_leaf(api["sinks"]), _leaf(mask)]
    draw = torch.Generator().manual_seed(11)
    shape = (case.heads, case.head_dim_v or case.head_dim)
    douts = [torch.randn(n, *shape, generator=draw).to(device, dtype) for n in case.lengths_q]
    dlses = [torch.randn(case.heads, n, generator=draw).to(device) for n in case.lengths_q]
    upstream = [*douts, *dlses] if with_lse else douts
    given = [tuple(x) for x in sequences]
    outs, lses = _run(case, given, shared[1], api | {"sinks": shared[0]}, backend, layout, device, dtype, {})
    actual = _gradients([*outs, *lses] if with_lse else outs, upstream, sequences, shared)
    expected = []
    for cast, attend in ((torch.Tensor.double, attention_reference), (torch.Tensor.detach, _eager_with_lse)):
        theirs = [[_leaf(cast(x.detach())) for x in qkv] for qkv in sequences]
        common = [None if x is None else _leaf(cast(x.detach())) if x.requires_grad else x for x in shared]
        outs = []
        lses = []
        for i, qkv in enumerate(theirs):
            row = None if common[1] is None else common[1][i % common[1].shape[0]][None]
            out, lse = attend(*(x[None] for x in qkv), **(oracle | {"sinks": common[0]}), mask=row)
            outs.append(out[0])
            lses.append(lse[0])
        expected.append(_gradients([*outs, *lses] if with_lse else outs, upstream, theirs, common))
    for name, ours, exact, eager in zip(("dq", "dk", "dv", "dsinks", "dmask"), actual, *expected, strict=True):
        if ours is not None:
            roundings = 4 if ours.dtype == torch.float32 else 1
            if name == "dsinks":  # a float32 sum over rows, each with a delta from its output, which is rounded to `dtype`
                roundings = max(roundings, round(torch.finfo(dtype).eps / torch.finfo(ours.dtype).eps))
            assert_matches_reference(ours, exact, eager, name, roundings)


def _leaf(x: Any) -> Any:
    return x.detach().requires_grad_() if x is not None and x.is_floating_point() else x


def _eager_with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return eager_attention(q, k, v, **options), attention_reference(q, k, v, **options)[1]


def _gradients(results: list[Any], grads: list[Any], sequences: list[Any], shared: list[Any]) -> list[Any]:
    """The gradients of q, k and v, each packed, then those of the sinks and of the mask, or None."""
    leaves = [x for qkv in sequences for x in qkv]
    extra = [x for x in shared if x is not None and x.requires_grad]
    given = [g.to(x.dtype) for x, g in zip(results, grads, strict=True)]
    found = torch.autograd.grad(results, leaves + extra, given, allow_unused=True, materialize_grads=True)
    packed = [torch.cat([g.flatten(0, -2) for g in found[i : len(leaves) : 3]]) for i in range(3)]
    rest = iter(found[len(leaves) :])
    return packed + [next(rest) if x is not None and x.requires_grad else None for x in shared]


def _run(
    case: Case,
    sequences: list[tuple[torch.Tensor, ...]],
    mask: torch.Tensor | None,
    api: dict[str, Any],
    backend: str,
    layout: str,
    device: str,
    dtype: torch.dtype,
    extra: dict[str, Any],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """out (seqlen_q, heads, head_dim_v) and lse (heads, seqlen_q) of each sequence."""
    options = api | extra | {"return_lse": True, "backend": backend}
    if layout == "dense":
        q, k, v = (torch.stack(x) for x in zip(*sequences, strict=True))
        out, lse = fa_serve.attention(q, k, v, mask=mask, **options)
        return list(out), list(lse)
    empty_q = torch.zeros(0, case.heads, case.head_dim, dtype=dtype, device=device)
    empty_k = torch.zeros(0, case.kv_heads, case.head_dim, dtype=dtype, device=device)
    empty_v = torch.zeros(0, case.kv_heads, case.head_dim_v or case.head_dim, dtype=dtype, device=device)
    q = torch.cat([x[0] for x in sequences] or [empty_q])
    cu_q = cu_seqlens(case.lengths_q, device)
    cu_k = cu_seqlens(case.lengths_k, device)
    longest_q = max(case.lengths_q, default=0)
    longest_k = max(case.lengths_k, default=0)
    if layout == "varlen":
        k = torch.cat([x[1] for x in sequences] or [empty_k])
        v = torch.cat([x[2] for x in sequences] or [empty_v])
        # rows of NaN after the last sequence, which no kernel may read
        q, k, v = (torch.cat([x, x.new_full((70, *x.shape[1:]), float("nan"))]) for x in (q, k, v))
        out, lse = fa_serve.attention_varlen(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k, **options
        )
        assert (out[-70:] == 0).all()
        assert (lse[:, -70:] == float("-inf")).all()
    else:
        k_cache, v_cache, table, used = make_paged([x[1] for x in sequences], [x[2] for x in sequences], case.page_size)
        out, lse = fa_serve.attention_paged(
            q, k_cache, v_cache, block_table=table, seqused_k=used, cu_seqlens_q=cu_q, max_seqlen_q=longest_q, **options
        )
    ends = list(pairwise(cu_q.tolist()))
    return [out[a:b] for a, b in ends], [lse[:, a:b] for a, b in ends]
