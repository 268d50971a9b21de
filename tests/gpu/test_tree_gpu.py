"""Attention by a fixed tree on a GPU: right, and a query has the same bits in prompts, chunks, drafts, and alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fa_serve
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.triton.tree.plan import plan_tree
from fa_serve.spec import TREE_SPLITS
from fa_serve.testing import cu_seqlens

LENGTH = 1700


@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (16, 1)], ids=str)
@pytest.mark.parametrize(("head_dim", "left", "softcap"), [(128, -1, 0.0), (64, 300, 0.0), (256, -1, 30.0)])
def test_a_query_has_the_same_bits_with_any_others(heads: tuple[int, int], head_dim: int, left: int, softcap: float) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    pages = -(-LENGTH // 16)
    make = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, device="cuda")  # noqa: E731
    q = make(LENGTH, num_heads, head_dim)
    k, v = (make(2 * pages, num_kv_heads, 16, head_dim).transpose(1, 2) for _ in range(2))
    table = torch.randperm(2 * pages, device="cuda").int().view(2, pages)

    def compute(first: int, last: int, *, beside: int = 0, **form: Any) -> Tensor:
        """Queries first to last of a sequence, with another sequence of `beside` queries before it."""
        q_lens = [beside, last - first]
        kv_lens = [beside, last]
        rows = torch.cat([make(beside, num_heads, head_dim), q[first:last]])
        numbers: Any = {"dtype": torch.int32, "device": "cuda"}
        tensors = AttentionTensors(
            rows,
            k,
            v,
            cu_seqlens_q=cu_seqlens(q_lens, rows.device),
            keys=torch.tensor(kv_lens, **numbers),
            block_table=table,
        )
        options = AttentionOptions(head_dim**-0.5, (left, 0), softcap, max(q_lens), max(kv_lens), False, TREE_SPLITS)
        return plan_tree(tensors, options, **form)(tensors)[0][beside:]

    whole = compute(0, LENGTH)
    exact = fa_serve.attention(
        *(x[None].double() for x in (q, *(c[table[1]].flatten(0, 1)[:LENGTH] for c in (k, v)))),
        causal=True,
        window_size=(left, 0),
        softcap=softcap,
        backend="reference",
    )[0]
    assert (whole.double() - exact).abs().max() < 2e-2
    for first, last in ((0, 1), (511, 512), (512, 513), (LENGTH - 1, LENGTH), (700, 705), (3, 900), (1000, LENGTH)):
        for apart in (False, True):
            for beside in (0, 1, 100):
                assert torch.equal(compute(first, last, apart=apart, beside=beside), whole[first:last]), (first, apart, beside)
    if head_dim <= 128 and torch.cuda.get_device_capability()[0] == 9:
        for first, last in ((LENGTH - 1, LENGTH), (3, 900), (0, LENGTH)):
            assert torch.equal(compute(first, last, apart=False, block_m=128), whole[first:last]), (
                "plan.CHOOSES_ROWS must be off"
            )
