"""Calls with a mask of elements that kernels compute by its blocks: patterns, broadcast shapes, and bool and float masks.

`check_masked(case, backend, dtype, device)` draws a mask, computes the float64 oracle with it, and applies the 2x rule to what
the public function returns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fa_serve
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import assert_lse_matches, assert_matches_reference, eager_attention, make_qkv


@dataclass(frozen=True)
class MaskCase:
    """pattern: see `pattern_of`; form: "bool", "hidden" (0 and -inf), "bias" (-inf, 0 and others) or "least" (0 and the least
    number of the dtype)
    over:    the dimensions that the mask has, of "b", "h", "q" and "k"; it broadcasts the others
    expanded: the mask is expanded to all sequences and heads, without more memory"""

    batch: int = 1
    seqlen_q: int = 300
    seqlen_k: int = 300
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int = 0
    pattern: str = "prefix"
    form: str = "bool"
    over: str = "qk"
    expanded: bool = False
    causal: bool = False
    softcap: float = 0.0
    sinks: bool = False

    def __str__(self) -> str:
        plain = MaskCase()
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__ if getattr(self, name) != getattr(plain, name)}
        return "_".join(f"{name}-{value}" for name, value in shown.items()) or "plain"


BASE = MaskCase()
CASES = [
    BASE,
    replace(BASE, pattern="documents", heads=6, batch=2, over="bqk", seqlen_q=256, seqlen_k=256),
    replace(BASE, pattern="random", over="bhqk", batch=2, seqlen_q=257, seqlen_k=385),
    replace(BASE, pattern="unseen rows", form="hidden"),
    replace(BASE, pattern="unseen rows", seqlen_k=400, sinks=True),
    replace(BASE, pattern="everything", form="hidden", over="hqk"),
    replace(BASE, pattern="padding", over="bk", batch=2, form="hidden", causal=True),
    replace(BASE, pattern="padding", over="bk", batch=2, expanded=True),
    replace(BASE, pattern="prefix", causal=True, softcap=5.0, form="bias"),
    replace(BASE, pattern="unseen rows", over="q", heads=2),
    replace(BASE, form="bias", over="hqk", kv_heads=1, head_dim=128, pattern="documents", seqlen_k=304),
    replace(BASE, form="bias", over="bqk", batch=2, seqlen_q=259, seqlen_k=390, pattern="random"),
    replace(BASE, form="least", pattern="images", head_dim=80, head_dim_v=48),
]


def pattern_of(case: MaskCase, device: str) -> Tensor:
    """bool (batch, heads, seqlen_q, seqlen_k) as far as the mask has these dimensions, else of size 1."""
    draw = torch.Generator().manual_seed(3)
    shape = [size if name in case.over else 1 for name, size in zip("bhqk", sizes_of(case), strict=True)]
    i = torch.arange(shape[2])[:, None]
    j = torch.arange(shape[3])[None, :]
    patterns = {
        "prefix": lambda: (j <= i) | (j < case.seqlen_k // 3),
        "documents": lambda: i // 140 == j // 140,
        "images": lambda: (j <= i) | ((i // 90 == j // 90) & (i // 90 % 2 == 1)),
        "random": lambda: torch.rand(shape, generator=draw) < 0.3,
        "everything": lambda: torch.ones(shape, dtype=torch.bool),
        "unseen rows": lambda: ((i + j) % 3 > 0) & (i % 5 > 0) & ((i < 128) | (i > 260)),
        "padding": lambda: j >= torch.arange(shape[0]).view(-1, 1, 1, 1) * 150,
    }
    return patterns[case.pattern]().expand(shape).contiguous().to(device)


def sizes_of(case: MaskCase) -> tuple[int, int, int, int]:
    return case.batch, case.heads, case.seqlen_q, case.seqlen_k


def make_mask(case: MaskCase, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    keep = pattern_of(case, device)
    least = {"hidden": float("-inf"), "bias": float("-inf"), "least": torch.finfo(dtype).min}
    if case.form != "bool":
        added = torch.zeros(keep.shape, dtype=dtype, device=device)
        if case.form == "bias":
            added = torch.linspace(-3, 2, keep.numel(), dtype=torch.float32, device=device).view(keep.shape).to(dtype)
            added[..., :128, :128] = 0
        keep = torch.where(keep, added, least[case.form])
    return keep.expand(case.batch, case.heads, -1, -1) if case.expanded else keep


def check_masked(case: MaskCase, backend: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Raise AssertionError if a row breaks the 2x rule, or if it sees no key and is not zero with an lse of -inf."""
    dims = (case.heads, case.kv_heads, case.head_dim, case.head_dim_v or None)
    q, k, v = make_qkv(case.batch, case.seqlen_q, case.seqlen_k, *dims, dtype=dtype, device=device)
    mask = make_mask(case, dtype, device)
    shared: dict[str, Any] = {
        "softcap": case.softcap,
        "sinks": torch.linspace(-1.5, 2.0, case.heads, device=device) if case.sinks else None,
    }
    oracle = {**shared, "softmax_scale": case.head_dim**-0.5, "window_size": (-1, 0 if case.causal else -1), "mask": mask}
    exact, exact_lse = attention_reference(*(x.double() for x in (q, k, v)), **oracle)
    eager = eager_attention(q, k, v, **oracle)
    out, lse = fa_serve.attention(q, k, v, mask=mask, causal=case.causal, return_lse=True, backend=backend, **shared)
    assert_matches_reference(out, exact, eager)
    assert_lse_matches(lse, exact_lse, case.softcap)
