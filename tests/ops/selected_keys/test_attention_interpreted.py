"""The kernel of token-sparse attention, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from selected_keys_cases import PagedQueries, numbers, sparse_reference

from fa_serve.ops.triton_ops import TritonOps

OPS = TritonOps()


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("num_splits", [0, 1, 3], ids=lambda n: f"splits{n}")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dim_v", "latent"),
    [
        pytest.param(20, 1, 24 + 8, 24, True, id="latent"),
        pytest.param(3, 3, 24, 12, False, id="one-head-each"),
        pytest.param(6, 2, 16, 16, False, id="grouped"),
    ],
)
def test_attention_to_slots(
    heads: int, kv_heads: int, dim: int, dim_v: int, latent: bool, num_splits: int, with_sinks: bool
) -> None:
    """The first query sees one key, the second none; the others see up to 37, not in order, with -1 between them."""
    step = PagedQueries.of([(1, 60), (1, 12)], page_size=8)
    k = step.cache(kv_heads, dim, torch.float32, seed=7)
    v = k[..., :dim_v] if latent else step.cache(kv_heads, dim_v, torch.float32, seed=9)
    if not latent:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))  # as on a GPU: heads before tokens
    q = numbers(4, heads, dim, seed=11)
    slots = torch.full((4, 37), -1, dtype=torch.int32)
    slots[0, 5] = step.slots_of(1, 12)[-1]
    for row in (2, 3):
        shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(row))[: 37 - row]
        slots[row, row:] = step.slots_of(0, 60)[shuffled].int()
    sinks = numbers(heads, seed=12) if with_sinks else None
    out = OPS.sparse_attention(q, k, v, slots, sinks, 0.3, num_splits)
    assert out.shape == (4, heads, dim_v)
    torch.testing.assert_close(out.double(), sparse_reference(q, k, v, slots, 0.3, sinks), atol=1e-5, rtol=1e-5)
    assert out[1].eq(0).all()
