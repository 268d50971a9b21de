"""apply_rotary_emb against complex multiplication, for all its ways to name positions."""

from __future__ import annotations

import pytest
import torch
from cache_checks import rotated

from fa_serve.flash_attn.rotary import apply_rotary, apply_rotary_emb
from fa_serve.testing import cu_seqlens


def tables(positions: int = 20, half: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(positions, half, generator=torch.Generator().manual_seed(1)) * 3
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, [2, 9]])
@pytest.mark.parametrize("dim", [8, 12])
def test_dense(interleaved: bool, offsets: int | list[int], dim: int) -> None:
    x = torch.randn(2, 5, 3, dim)
    cos, sin = tables()
    starts = [offsets, offsets] if isinstance(offsets, int) else offsets
    given = offsets if isinstance(offsets, int) else torch.tensor(offsets)
    found = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=given)
    for b, start in enumerate(starts):
        exact = rotated(x[b], cos, sin, [start + i for i in range(5)], interleaved)
        torch.testing.assert_close(found[b], exact.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offsets", [0, [4, 1, 7]])
def test_packed(offsets: int | list[int]) -> None:
    lengths = [3, 0, 4]
    x = torch.randn(7, 2, 8)
    cos, sin = tables()
    starts = [offsets] * 3 if isinstance(offsets, int) else offsets
    given = offsets if isinstance(offsets, int) else torch.tensor(offsets, dtype=torch.int32)
    found = apply_rotary_emb(x, cos, sin, seqlen_offsets=given, cu_seqlens=cu_seqlens(lengths), max_seqlen=4)
    places = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
    torch.testing.assert_close(found, rotated(x, cos, sin, places, False).float(), rtol=1e-5, atol=1e-6)


def test_in_place_and_rounded_once() -> None:
    x = torch.randn(1, 5, 2, 8, dtype=torch.bfloat16)
    cos, sin = (table.bfloat16() for table in tables())
    exact = rotated(x[0], cos, sin, list(range(5)), False).bfloat16()
    other = x.clone()
    assert apply_rotary_emb(other, cos, sin, inplace=True) is other
    torch.testing.assert_close(other[0], exact, rtol=8e-3, atol=1e-3)


def test_rotating_back() -> None:
    x = torch.randn(2, 5, 3, 8)
    cos, sin = tables()
    there = apply_rotary(x, cos, sin, 3, interleaved=True)
    assert torch.equal(there, apply_rotary_emb(x, cos, sin, True, seqlen_offsets=3))
    torch.testing.assert_close(apply_rotary(there, cos, sin, 3, interleaved=True, conjugate=True), x)


def test_gradients() -> None:
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (table.double() for table in tables())
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(lambda x, way=interleaved: apply_rotary_emb(x, cos, sin, way), x)
