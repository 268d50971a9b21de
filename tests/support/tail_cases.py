"""Packed calls whose last sequence ends before the end of q, as batches have them that are padded for a CUDA graph.

The rule is that of `fa_serve.api`: out is 0 and lse is -inf in the rows behind the last sequence, whatever backend computes.
Their queries are NaN here, memory that nobody wrote is NaN as well, and `out` is a part of a larger buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from block_sparse_cases import SparseCase, make_lists
from torch import Tensor

import fa_serve
from fa_serve.testing import cu_seqlens, make_paged, make_qkv

BEHIND_OUT = 3
"""Rows of the buffer that do not belong to `out`."""


@dataclass(frozen=True)
class TailCase:
    """tail: rows behind the last sequence, of q and of packed keys; latent: values are the first numbers of the keys"""

    lengths_q: tuple[int, ...] = (5, 4)
    lengths_k: tuple[int, ...] = (5, 4)
    tail: int = 7
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    layout: str = "varlen"
    sinks: bool = False
    latent: bool = False
    sparse: bool = False
    num_splits: int = 0
    precision: str = "bf16"

    def __str__(self) -> str:
        lengths = ["-".join(map(str, n)) for n in (self.lengths_q, self.lengths_k)]
        named = [name for name in ("sinks", "latent", "sparse") if getattr(self, name)]
        named += ["H" + "-".join(map(str, self.heads))] if self.heads != TailCase.heads else []
        named += [f"S{self.num_splits}"] if self.num_splits else []
        named += [self.precision] if self.precision != "bf16" else []
        return "_".join([self.layout, f"Q{lengths[0]}", f"K{lengths[1]}", f"T{self.tail}", f"D{self.head_dim}", *named])


VARLEN = [
    TailCase(),
    TailCase(sinks=True),
    TailCase((50, 0, 40), (50, 9, 60), tail=70, heads=(4, 1)),
    TailCase((1,), (1,), tail=500, head_dim=24),  # more rows than the programs of the sequence write at a time
    TailCase((9, 0), (9, 0)),
    TailCase((), (), tail=5),
    TailCase((0, 0), (5, 3), tail=5, sinks=True),
    TailCase((5, 4), (0, 0), sinks=True),
    TailCase((70, 5), (70, 5), sparse=True, sinks=True),
    TailCase((3,), (3,), tail=300, sparse=True),
    TailCase((0,), (5,), sparse=True),
]
PAGED = [
    TailCase((40, 33), (64, 70), layout="paged", sinks=True),  # prompts, or a mixed batch
    TailCase((40, 1, 0), (64, 70, 3), layout="paged"),
    TailCase((33,), (64,), tail=1, layout="paged"),
    TailCase((1, 1, 1), (40, 300, 0), layout="paged"),  # decoding
    TailCase((1, 1), (40, 300), layout="paged", num_splits=3, sinks=True),
    TailCase((2, 5), (40, 300), layout="paged", tail=90),
    TailCase((0, 0), (5, 3), layout="paged", sinks=True),
    TailCase((), (), layout="paged"),
    TailCase((1, 1), (40, 300), layout="paged", latent=True, heads=(16, 1), head_dim=40),
    TailCase((40, 1), (64, 70), layout="paged", latent=True, heads=(16, 1), head_dim=40),
    TailCase((33, 20), (64, 70), layout="paged", latent=True, heads=(4, 1), head_dim=40, tail=40),
    TailCase((), (), layout="paged", latent=True, heads=(16, 1), head_dim=40),
    TailCase((70, 1), (150, 90), layout="paged", sparse=True),
    TailCase((1, 1), (150, 90), layout="paged", sparse=True, num_splits=2, sinks=True),
]


def params(cases: list[TailCase]) -> list[Any]:
    assert len({str(case) for case in cases}) == len(cases), "two cases have the same name"
    return [pytest.param(case, id=str(case)) for case in cases]


def make_tail(case: TailCase, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q with its tail, k, v, and the other arguments of the call, by the names of `fa_serve.api`."""
    total_q = sum(case.lengths_q)
    total_k = sum(case.lengths_k)
    q, k, v = (x[0] for x in make_qkv(1, total_q, total_k, *case.heads, case.head_dim, dtype=dtype, device=device))
    q = torch.cat([q, q.new_full((case.tail, *q.shape[1:]), float("nan"))])
    given: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens(case.lengths_q, device),
        "max_seqlen_q": max(case.lengths_q, default=0),
        "max_seqlen_k": max(case.lengths_k, default=0),
        "softmax_scale": 0.2,
        "sinks": torch.linspace(-1.0, 1.0, case.heads[0], device=device) if case.sinks else None,
        "return_lse": True,
    }
    if case.sparse:
        same = {"lengths_q": case.lengths_q, "lengths_k": case.lengths_k, "heads": case.heads[0], "kv_heads": case.heads[1]}
        given["block_mask"], _ = make_lists(SparseCase(**same, kept=0.8), device)
    if case.layout == "varlen":
        given["cu_seqlens_k"] = cu_seqlens(case.lengths_k, device)
        k, v = (torch.cat([x, x.new_full((case.tail, *x.shape[1:]), float("nan"))]) for x in (k, v))
        return q, k, v, given
    keys = list(k.split(case.lengths_k)) or [k]
    values = list(v.split(case.lengths_k)) or [v]
    k, v, block_table, seqused_k = make_paged(keys, values, 16)
    batch = len(case.lengths_q)
    given |= {"block_table": block_table[:batch], "seqused_k": seqused_k[:batch]}
    if case.latent:
        v = k[..., : case.head_dim - 16]
    return q, k, v, given


Attend = Callable[..., tuple[Tensor, Tensor]]


def attend(case: TailCase, backend: str) -> Attend:
    """The public function, with the options of the case."""
    if case.layout == "varlen":
        return lambda *qkv, **given: fa_serve.attention_varlen(
            *qkv, **given, causal=True, backend=backend, precision=case.precision
        )
    return lambda *qkv, **given: fa_serve.attention_paged(
        *qkv, **given, backend=backend, num_splits=case.num_splits, precision=case.precision
    )


def check_tail(case: TailCase, call: Attend, dtype: torch.dtype, device: str = "cpu") -> None:
    """Compare `call` with a tail to `call` without one, and look at every row of its results."""
    q, k, v, given = make_tail(case, dtype, device)
    total = sum(case.lengths_q)
    expected, expected_lse = call(q[:total].clone(), k, v, **given)
    buffer = torch.full((total + case.tail + BEHIND_OUT, case.heads[0], v.shape[-1]), 7.0, dtype=dtype, device=device)
    strided = torch.full((*buffer.shape[:2], 2 * v.shape[-1]), 7.0, dtype=dtype, device=device)
    views = (None, buffer[:-BEHIND_OUT], strided[:-BEHIND_OUT, :, : v.shape[-1]])
    for out in views:
        found, lse = call(q, k, v, **given, out=out)
        assert out is None or found.data_ptr() == out.data_ptr()
        assert torch.equal(found[total:], torch.zeros_like(found[total:])), "out behind the last sequence"
        assert torch.equal(lse[:, total:], torch.full_like(lse[:, total:], float("-inf"))), "lse behind the last sequence"
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found[:total], expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse[:, :total], expected_lse, rtol=tolerance, atol=tolerance)
    assert (buffer[-BEHIND_OUT:] == 7.0).all(), "rows behind `out`"
    assert (strided[-BEHIND_OUT:] == 7.0).all(), "rows behind `out`"
    assert (strided[..., v.shape[-1] :] == 7.0).all(), "columns beside `out`"


def check_tail_gradients(backend: str, dtype: torch.dtype, device: str = "cpu", head_dim: int = 16) -> None:
    """Gradients of rows of q, k and v behind the last sequence are 0, and the others are those of a call without such rows.

    The gradient of out is NaN in these rows, and so is that of lse.
    """
    case = TailCase((50, 40), (50, 60), tail=70, sinks=True, head_dim=head_dim)
    q, k, v, given = make_tail(case, dtype, device)
    draw = torch.Generator().manual_seed(2)
    dout = torch.randn(q.shape, generator=draw).to(device, dtype)
    dlse = torch.randn(q.shape[1::-1], generator=draw).to(device)
    dout[90:] = float("nan")
    dlse[:, 90:] = float("nan")
    found = []
    for rows_q, rows_k in ((len(q), len(k)), (90, 110)):
        leaves = [x[:n].clone().requires_grad_() for x, n in ((q, rows_q), (k, rows_k), (v, rows_k))]
        sinks = given["sinks"].clone().requires_grad_()
        out, lse = fa_serve.attention_varlen(*leaves, **given | {"sinks": sinks}, causal=True, backend=backend)
        given_back = [dout[:rows_q], dlse[:, :rows_q].to(lse.dtype)]
        found.append(torch.autograd.grad([out, lse], [*leaves, sinks], given_back))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual[: len(expected)], expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(actual[len(expected) :], torch.zeros_like(actual[len(expected) :]))
