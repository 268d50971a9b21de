"""Inputs for tests of the Hopper kernel in the emulator, and their comparison with the reference."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hopper_emulator import emulated
from torch import Tensor

from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import HopperTiles, Schedule
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import (
    assert_lse_matches,
    assert_matches_reference,
    cu_seqlens,
    eager_attention,
    make_paged,
    make_qkv,
)

GRID = Schedule.GRID
DYNAMIC = Schedule.DYNAMIC
CAUSAL = (-1, 0)
FULL = (-1, -1)


@dataclass(frozen=True)
class Case:
    id: str
    seqlen_q: int = 200
    seqlen_k: int = 200
    heads: tuple[int, int] = (2, 1)
    head_dim: tuple[int, int] = (64, 64)
    batch: int = 1
    window: tuple[int, int] = CAUSAL
    softcap: float = 0.0
    sinks: bool = False
    scale: float = 0.125
    dtype: torch.dtype = torch.bfloat16
    tiles: HopperTiles | None = None
    page_size: int = 16
    max_splits: int | None = None

    def make_sinks(self) -> Tensor | None:
        return torch.randn(self.heads[0], generator=torch.Generator().manual_seed(1)) if self.sinks else None

    def options(self, max_seqlen_q: int, max_seqlen_k: int, skip_q: int = 0) -> AttentionOptions:
        return AttentionOptions(
            self.scale, self.window, self.softcap, max_seqlen_q, max_seqlen_k, return_lse=True, skip_q=skip_q
        )

    def check(self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Compare a dense result with the reference."""
        options = {
            "softmax_scale": self.scale,
            "window_size": self.window,
            "softcap": self.softcap,
            "sinks": self.make_sinks(),
        }
        exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), **options)
        assert_matches_reference(out, exact, eager_attention(q, k, v, **options))
        assert_lse_matches(lse, exact_lse, self.softcap)


def run_dense(case: Case, **emulation: Any) -> None:
    """Emulate a dense call and compare it with the reference."""
    q, k, v = make_qkv(case.batch, case.seqlen_q, case.seqlen_k, *case.heads, *case.head_dim, dtype=case.dtype)
    tensors = AttentionTensors(q, k, v, case.make_sinks())
    with emulated(**emulation):
        out, lse = plan_hopper_forward(tensors, case.options(case.seqlen_q, case.seqlen_k), case.tiles)(tensors)
    case.check(out, lse, q, k, v)


@dataclass
class PagedCall:
    """A paged call, and for each of its sequences the rows in q, the keys and the values."""

    case: Case
    tensors: AttentionTensors
    options: AttentionOptions
    sequences: list[tuple[slice, Tensor, Tensor]]

    @classmethod
    def of(cls, case: Case, lengths_q: list[int], lengths_k: list[int], skip_q: int = 0) -> PagedCall:
        """Pages are in random order, slots that no sequence uses are NaN, and unused entries of the block table are invalid."""
        q, k, v = (x[0] for x in make_qkv(1, sum(lengths_q), sum(lengths_k), *case.heads, *case.head_dim, dtype=case.dtype))
        keys = k.split(lengths_k)
        values = v.split(lengths_k)
        k_cache, v_cache, block_table, seqused_k = make_paged(keys, values, case.page_size)
        cu_seqlens_q = cu_seqlens(lengths_q)
        tensors = AttentionTensors(
            q, k_cache, v_cache, case.make_sinks(), cu_seqlens_q=cu_seqlens_q, keys=seqused_k, block_table=block_table
        )
        rows = [slice(a, b) for a, b in pairwise(cu_seqlens_q.tolist())]
        options = case.options(max(lengths_q), max(lengths_k), skip_q)
        return cls(case, tensors, options, list(zip(rows, keys, values, strict=True)))

    def run(self, **emulation: Any) -> tuple[Tensor, Tensor]:
        with emulated(**emulation):
            out, lse = plan_hopper_forward(self.tensors, self.options, self.case.tiles, self.case.max_splits)(self.tensors)
        assert lse is not None
        return out, lse

    def check(self, out: Tensor, lse: Tensor, sequence: int) -> None:
        rows, k, v = self.sequences[sequence]
        self.case.check(out[None, rows], lse[None, :, rows], self.tensors.q[None, rows], k[None], v[None])


def run_paged(case: Case, **emulation: Any) -> None:
    """Emulate sequences of several lengths in pages, one of them without queries and one without keys, and check each."""
    call = PagedCall.of(case, [70, 0, 1, 150, 90], [70, 30, 9, 310, 0])
    out, lse = call.run(**emulation)
    for sequence in (0, 2, 3):
        call.check(out, lse, sequence)
    assert (out[call.sequences[4][0]] == 0).all()


def run_with_skipped_sequences(max_splits: int | None = None, **emulation: Any) -> None:
    """Emulate a call that leaves sequences of up to 16 queries to another kernel: their rows stay as they are."""
    call = PagedCall.of(Case("", max_splits=max_splits), [1, 70, 16, 17, 0], [90, 70, 33, 40, 5], skip_q=16)
    out = torch.full_like(call.tensors.q, 7.0)
    lse = torch.full((2, 104), 7.0)
    call.tensors = call.tensors._replace(out=out, lse=lse)
    call.run(**emulation)
    for sequence in (1, 3):
        call.check(out, lse, sequence)
    for sequence in (0, 2, 4):
        rows = call.sequences[sequence][0]
        assert (out[rows] == 7.0).all()
        assert (lse[:, rows] == 7.0).all()
