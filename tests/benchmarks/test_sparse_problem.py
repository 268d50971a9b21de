"""The problem of the block-sparse benchmark, on a CPU: the part that is kept, its check, and the same call of FlexAttention."""

from __future__ import annotations

import pytest
import torch
from sparse_problem import BLOCK, SparseProblem


@pytest.mark.parametrize("causal", [False, True])
def test_all_calls_agree(causal: bool) -> None:
    torch.manual_seed(0)
    problem = SparseProblem.make(8 * BLOCK, 2, 32, 0.25, causal, torch.float32, "cpu")
    ours = problem.ours()()
    problem.check(ours, "ours")
    if causal:  # has both kinds of blocks, and compiling takes seconds
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
