"""Attention by a fixed tree in Triton's interpreter: right, and a query has the same bits with any other queries.

The interpreter multiplies tiles by NumPy, whose rows depend on their place in a tile. Here products are summed in one order for
all rows, as wgmma does; bits on a GPU are compared in tests/gpu/test_tree_gpu.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import fa_serve
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.triton.tree import plan as tree
from fa_serve.spec import TREE_SPLITS
from fa_serve.testing import assert_lse_matches, assert_matches_reference, cu_seqlens

PAGE = 16


@dataclass(frozen=True)
class Case:
    q_lens: tuple[int, ...] = (1, 40, 3)
    kv_lens: tuple[int, ...] = (70, 150, 33)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    dtype: torch.dtype = torch.float32
    left: int = -1
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    fp8: bool = False


class Problem:
    """Sequences in pages that lie in no order; what no sequence owns is NaN."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)
        self.case = case
        num_heads, heads = case.heads
        pages = [-(-n // PAGE) for n in case.kv_lens]
        order = torch.randperm(sum(pages) + 1, generator=generator)
        self.q = torch.randn(sum(case.q_lens), num_heads, case.dims[0], generator=generator).to(case.dtype)
        self.k, self.v = (torch.full((len(order), PAGE, heads, dim), float("nan"), dtype=case.dtype) for dim in case.dims)
        self.table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        begin = 0
        for row, (count, length) in enumerate(zip(pages, case.kv_lens, strict=True)):
            self.table[row, :count] = order[begin : begin + count]
            begin += count
            for place in range(length):
                page = self.table[row, place // PAGE]
                for cache in (self.k, self.v):
                    cache[page, place % PAGE] = torch.randn(heads, cache.shape[3], generator=generator).to(case.dtype)
        self.sinks = torch.randn(num_heads, generator=generator) if case.sinks else None
        self.descales: dict[str, Tensor] = {}
        if case.fp8:
            self.descales = {name: 0.5 + torch.rand(heads, generator=generator) for name in ("k_descale", "v_descale")}
            self.k, self.v = (cache.to(torch.float8_e4m3fn) for cache in (self.k, self.v))

    def compute(self, q: Tensor, rows: list[int], q_lens: list[int], kv_lens: list[int], **options: Any) -> Any:
        """Attention of some sequences of the problem, with other lengths."""
        case = self.case
        return fa_serve.attention_paged(
            q,
            self.k,
            self.v,
            block_table=self.table[rows],
            seqused_k=torch.tensor(kv_lens, dtype=torch.int32),
            cu_seqlens_q=cu_seqlens(q_lens),
            max_seqlen_q=max(q_lens),
            max_seqlen_k=max(kv_lens),
            window_size=(case.left, 0),
            attention_chunk=case.chunk,
            softcap=case.softcap,
            sinks=self.sinks,
            return_lse=True,
            **self.descales,
            **{"num_splits": TREE_SPLITS, "backend": "triton", **options},
        )

    def whole(self, **options: Any) -> Any:
        return self.compute(self.q, [*range(len(self.case.q_lens))], [*self.case.q_lens], [*self.case.kv_lens], **options)


def dot_in_one_order(self: InterpreterBuilder, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """A product whose elements are each summed from the first to the last number."""
    products = a.data.astype(np.float32)[:, :, None] * b.data.astype(np.float32)[None, :, :]
    return TensorHandle(np.add.reduce(products, axis=1) + d.data, d.dtype.scalar)


CASES = {
    "plain": Case(),
    "float16": Case(dtype=torch.float16),
    "window": Case(left=20),
    "chunk": Case(chunk=48),
    "softcap-sinks": Case(softcap=5.0, sinks=True),
    "float8": Case(dtype=torch.float16, fp8=True),
    "groups-dims": Case(heads=(6, 2), dims=(24, 40)),
}


@pytest.fixture(autouse=True)
def short_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "GROUP_KEYS", 64)


@pytest.mark.parametrize("apart", [False, True], ids=["whole", "apart"])
@pytest.mark.parametrize("name", CASES)
def test_the_tree_computes_attention(name: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(CASES[name])
    monkeypatch.setattr(tree, "_MOST_BUFFER", 1 << 30 if apart else 0)
    monkeypatch.setattr(tree, "multiprocessors", lambda *_: 1 << 10)
    out, lse = problem.whole()
    eager, _ = problem.whole(backend="sdpa", num_splits=0)
    wide = Problem(CASES[name])
    wide.q = wide.q.double()
    if not wide.case.fp8:
        wide.k, wide.v = (x.double() for x in (wide.k, wide.v))
    exact, exact_lse = wide.whole(backend="reference", num_splits=0)
    assert_matches_reference(out, exact, eager)
    assert_lse_matches(lse, exact_lse)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "window", "float8"])
def test_a_query_has_the_same_bits_in_a_prompt_in_a_chunk_and_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_in_one_order)
    problem = Problem(CASES[name])
    case = problem.case
    out, lse = problem.whole()
    first = case.q_lens[0]
    end = first + case.q_lens[1]
    length = case.kv_lens[1]

    def compute(begin: int, stop: int, **options: Any) -> tuple[Tensor, Tensor]:
        """Some of the queries of the second sequence, as its last ones."""
        return problem.compute(problem.q[begin:stop], [1], [stop - begin], [length - (end - stop)], **options)

    for begin, stop in ((first + 1, first + 2), (first + 7, first + 30), (end - 1, end)):
        for most in (0, 1 << 30):
            monkeypatch.setattr(tree, "_MOST_BUFFER", most)
            fa_serve.launching.plans.PLANS.clear()
            part, part_lse = compute(begin, stop)
            assert torch.equal(part, out[begin:stop]), (begin, stop, most)
            assert torch.equal(part_lse, lse[:, begin:stop])


@pytest.mark.slow
def test_groups_at_other_positions_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of the tree: what it is compared with would be noticed."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_in_one_order)
    problem = Problem(CASES["plain"])
    out, _ = problem.whole()
    monkeypatch.setattr(tree, "GROUP_KEYS", 32)
    fa_serve.launching.plans.PLANS.clear()
    other, _ = problem.whole()
    assert not torch.equal(out, other)


def test_rows_behind_the_last_sequence_are_cleared_and_empty_sequences_are_passed_over() -> None:
    problem = Problem(replace(Case(), q_lens=(2, 0, 3), kv_lens=(20, 5, 33)))
    expected, expected_lse = problem.whole()
    padded = torch.cat([problem.q, torch.full_like(problem.q[:2], float("nan"))])
    out, lse = problem.compute(padded, [0, 1, 2], [2, 0, 3], [20, 5, 33])
    assert torch.equal(out[:5], expected)
    assert torch.equal(lse[:, :5], expected_lse)
    assert not out[5:].any()
    assert (lse[:, 5:] == -torch.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["whole", "apart"])
def test_sequences_of_more_queries_are_left_to_another_kernel(apart: bool) -> None:
    problem = Problem(Case())
    expected, expected_lse = problem.whole()
    tensors = AttentionTensors(
        problem.q,
        problem.k,
        problem.v,
        cu_seqlens_q=cu_seqlens([*problem.case.q_lens]),
        keys=torch.tensor(problem.case.kv_lens, dtype=torch.int32),
        block_table=problem.table,
        out=torch.full_like(expected, 7.0),
        lse=torch.full_like(expected_lse, 7.0),
    )
    options = AttentionOptions(32**-0.5, (-1, 0), 0.0, 3, 150, True, TREE_SPLITS)
    out, lse = tree.plan_tree(tensors, options, apart=apart)(tensors)
    assert lse is not None
    for rows in (slice(0, 1), slice(41, 44)):
        torch.testing.assert_close(out[rows], expected[rows])
        torch.testing.assert_close(lse[:, rows], expected_lse[:, rows])
    assert (out[1:41] == 7.0).all()
    assert (lse[:, 1:41] == 7.0).all()
