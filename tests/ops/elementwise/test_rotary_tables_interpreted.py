"""cos and sin of a rotary embedding in Triton's interpreter and by PyTorch, against float64."""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id

from fa_serve.ops.elementwise.rotary_tables import launch_rotary_tables
from fa_serve.ops.torch_ops import TorchOps


@pytest.mark.parametrize("compute", [launch_rotary_tables, TorchOps().rotary_tables], ids=["triton", "torch"])
@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rotary_tables(dtype: torch.dtype, repeats: int, compute) -> None:
    """The angle is rounded to float32 before its cosine is taken, which far positions show."""
    positions = torch.tensor([0, 1, 2, 17, 4095, 131071, 1 << 20])
    frequencies = 1e6 ** -(torch.arange(0, 48, 2) / 48)
    angles = (positions[:, None].float() * frequencies).double()
    cos, sin = compute(positions, frequencies, 1.25, dtype, repeats)
    for found, exact in ((cos, angles.cos()), (sin, angles.sin())):
        assert found.shape == (7, 24 * repeats)
        assert_rounded_once(found, (1.25 * exact).repeat(1, repeats))


def test_positions_of_32_bits_that_are_not_contiguous() -> None:
    positions = torch.arange(12, dtype=torch.int32)[::3]
    frequencies = torch.tensor([1.0, 0.1], dtype=torch.bfloat16)
    cos, sin = launch_rotary_tables(positions, frequencies, 1.0, torch.float32, 1)
    angles = positions[:, None].double() * frequencies.double()
    torch.testing.assert_close(cos.double(), angles.cos(), atol=1e-6, rtol=0)
    torch.testing.assert_close(sin.double(), angles.sin(), atol=1e-6, rtol=0)


def test_no_position_is_no_launch() -> None:
    cos, sin = launch_rotary_tables(torch.zeros(0, dtype=torch.int64), torch.ones(3), 1.0, torch.float32, 2)
    assert cos.shape == sin.shape == (0, 6)
