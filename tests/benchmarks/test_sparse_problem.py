"""The problem of the block-sparse benchmark, on a CPU: the part that is kept, its check, and the same call of FlexAttention."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from benchmarks.attention import sparse_problem
from benchmarks.attention.sparse_problem import BLOCK, SparseProblem


def attention_by_blocks(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
    """What compiled FlexAttention computes. Compiling takes 15 s of a CPU, and without a compiler it ignores the lists."""
    seqlen = q.shape[2]
    positions = torch.arange(seqlen)
    zero = torch.zeros((), dtype=torch.bool)
    inside = block_mask.mask_mod(zero, zero, positions[:, None], positions[None]).expand(seqlen, seqlen)
    lists = (
        (block_mask.kv_num_blocks, block_mask.kv_indices, inside),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, torch.ones_like(inside)),
    )
    heads = block_mask.kv_indices.shape[1]
    kept = torch.zeros(heads, seqlen, seqlen, dtype=torch.bool)
    for counts, indices, tokens in lists:
        for head, row in product(range(heads), range(seqlen // BLOCK)):
            for column in indices[0, head, row, : counts[0, head, row]].tolist():
                block = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
                kept[head][block] |= tokens[block]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)


@pytest.mark.parametrize("causal", [False, True])
def test_all_calls_agree(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(sparse_problem, "flex_attention", attention_by_blocks)
    torch.manual_seed(0)
    problem = SparseProblem.make(8 * BLOCK, 2, 32, 0.25, causal, torch.float32, "cpu")
    ours = problem.ours()()
    problem.check(ours, "ours")
    torch.testing.assert_close(problem.flex()(), ours, rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError, match="dense: error"):
        problem.check(problem.dense()(), "dense")


def test_the_part_that_is_kept() -> None:
    problem = SparseProblem.make(16 * BLOCK, 2, 16, 0.25, False, torch.float32, "cpu")
    assert problem.part == 0.25
    assert set(problem.keep.sum(-1).flatten().tolist()) == {4}
    assert bool(problem.keep.diagonal(dim1=2, dim2=3).all())
    causal = SparseProblem.make(16 * BLOCK, 2, 16, 0.5, True, torch.float32, "cpu")
    assert not bool(causal.keep.triu(1).any())
    assert abs(causal.part - 0.5) < 0.04
