"""`hopper.split_kv.combine` against the combination of whole tensors; `test_split.py` has it behind the attention kernel."""

from __future__ import annotations

import pytest
import torch
from cross_compile import compiling_for
from hopper_emulator import emulated
from sampled_cases import each_nth

from fa_serve.backends.hopper.forward.tiles import MAX_SPLITS
from fa_serve.backends.hopper.split_kv.combine import Combine, plan_combine

TOKENS = 11
HEADS = 6


def problem(splits: int, dim: int, *, padded: bool) -> tuple[Combine, torch.Tensor, torch.Tensor]:
    """-> combine, buffer and table of two tiles of 8 queries: tokens 0 to 4 in one split, tokens 6 to 10 in `splits`."""
    combine = plan_combine(
        capacity=5,
        queries=8,
        tokens=TOKENS,
        num_heads=HEADS,
        splits=splits,
        head_dim_v=dim,
        out_strides=(HEADS * dim, dim),
        padded=padded,
    )
    buffer = torch.randn(combine.buffer_size, generator=torch.Generator().manual_seed(0))
    table = torch.full((6, 8), -1, dtype=torch.int32)
    table[0] = torch.tensor([0, MAX_SPLITS, 0, 5, 0, 9, 0, 1])
    for split in range(splits):
        table[1 + split] = torch.tensor([0, splits * MAX_SPLITS + split, 6, 5, 0, 9, split, split + 1])
    table[5, 0] = 0
    table[5, 1] = 1 + splits
    return combine, buffer, table.view(-1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("splits", "dim"), [(2, 64), (3, 40), (4, 256)])
def test_combines_rows_of_several_splits(splits: int, dim: int, padded: bool) -> None:
    combine, buffer, table = problem(splits, dim, padded=padded)
    rows = splits * TOKENS * HEADS
    outs = buffer[: rows * dim].view(splits, TOKENS, HEADS, dim)
    logs = buffer[rows * dim :].view(splits, TOKENS, HEADS)
    logs[1, 7] = float("-inf")
    logs[:, 8, 2] = float("-inf")
    outs[:, 8, 2] = 0.0
    out = torch.full((TOKENS, HEADS, dim), 7.0, dtype=torch.bfloat16)
    lse = torch.full((HEADS, TOKENS), 7.0)
    with emulated():
        combine(out, lse, buffer, table)
    weights = torch.nan_to_num(logs.softmax(0), nan=0.0)
    expected = (outs * weights[..., None]).sum(0)
    torch.testing.assert_close(out[6:].float(), expected[6:], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[:, 6:], logs.logsumexp(0).T[:, 6:])
    if padded:
        torch.testing.assert_close(out[:5].float(), outs[0, :5], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[:, :5], logs[0, :5].T)
    else:
        assert (out[:6] == 7.0).all()
        assert (lse[:, :6] == 7.0).all()
    assert (out[5] == 7.0).all()


@pytest.mark.parametrize("dim", each_nth(2, [64, 128, 256]))
def test_compiles_without_spills_and_shared_reductions(dim: int) -> None:
    combine, buffer, table = problem(4, dim, padded=False)
    with compiling_for("sm90") as kernels:
        combine(torch.empty(TOKENS, HEADS, dim, dtype=torch.bfloat16), torch.empty(HEADS, TOKENS), buffer, table)
    (kernel,) = kernels
    assert kernel.spill_bytes == 0
    assert "SHFL" not in kernel.sass, "a thread must add up its own columns"
