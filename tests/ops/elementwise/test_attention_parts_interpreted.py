"""The merge of two parts of attention in Triton's interpreter and in PyTorch, against softmax over all keys in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.elementwise.attention_parts import launch_merge_attention

INF = float("inf")


def part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over some keys in float64: out (total, heads, dim) and lse (heads, total). scores: (total, heads, keys)"""
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("thk,khd->thd", weights, values).contiguous(), lse.t()


@pytest.mark.parametrize("merge", [launch_merge_attention, ops.merge_attention])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_parts_make_the_whole(dtype: torch.dtype, merge: Callable[..., Tensor]) -> None:
    """Rows 0 and 1 lack one part, and row 2 lacks both; scores are so large that their exponentials overflow."""
    scores = 200 * randn(5, 9, 12, dtype=torch.float64)
    values = randn(12, 9, 24, dtype=torch.float64, seed=1)
    scores[0, :, :5] = scores[1, :, 5:] = scores[2] = -INF
    first, first_lse = part(scores[..., :5], values[:5])
    second, second_lse = part(scores[..., 5:], values[5:])
    out = first.to(dtype)
    other = second.to(dtype)
    lses = [x.float().contiguous() for x in (first_lse, second_lse)]
    exact, _ = part(scores, values)
    assert merge(out, lses[0], other, lses[1]) is out
    assert torch.equal(out[0], other[0])
    assert torch.equal(out[1], first[1].to(dtype))
    assert not out[2].any()
    torch.testing.assert_close(out.double(), exact, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)
    shares = [(x.double() - torch.logaddexp(lses[0].double(), lses[1].double())).exp().nan_to_num(0.0).t() for x in lses]
    assert_rounded_once(out, first.to(dtype).double() * shares[0][..., None] + other.double() * shares[1][..., None])
