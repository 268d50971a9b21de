"""Random inputs for ops, and the bound of a result that is computed in float32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]


def assert_rounded_once(actual: Tensor, exact: Tensor) -> None:
    """The error is one rounding of the result's dtype plus the error of a float32 computation."""
    assert actual.shape == exact.shape
    bound = torch.finfo(actual.dtype).eps * exact.abs() + 4e-6 * exact.abs().max()
    assert bool(((actual.double() - exact).abs() <= bound).all())


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
