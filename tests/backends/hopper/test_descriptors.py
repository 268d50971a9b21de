"""`hopper.descriptors`: which strides the copy engine accepts, and that ragged views address and bound the right rows."""

from __future__ import annotations

import pytest
import torch

from fa_serve.backends.hopper.descriptors import copy_engine_strides, dense_view, ragged_view


@pytest.mark.parametrize(
    ("shape", "strides", "encoded"),
    [
        pytest.param((2, 100, 4, 64), (25600, 256, 64, 1), (25600, 256, 64, 1), id="contiguous"),
        pytest.param((2, 100, 4, 64), (25600, 64, 6400, 1), (25600, 64, 6400, 1), id="heads-first"),
        pytest.param((1, 100, 4, 64), (3, 256, 64, 1), (8, 256, 64, 1), id="one-batch"),
        pytest.param((2, 100, 1, 64), (6400, 64, 0, 1), (6400, 64, 8, 1), id="one-head"),
        pytest.param((2, 100, 4, 64), (0, 256, 64, 1), None, id="expanded"),
        pytest.param((2, 100, 4, 64), (25600, 256, 1, 4), None, id="last-not-contiguous"),
        pytest.param((2, 100, 4, 64), (26400, 264, 66, 1), None, id="not-multiples-of-16-bytes"),
    ],
)
def test_strides(shape: tuple[int, ...], strides: tuple[int, ...], encoded: tuple[int, ...] | None) -> None:
    assert copy_engine_strides(shape, strides) == encoded


def test_strides_of_float8_are_multiples_of_16() -> None:
    assert copy_engine_strides((2, 100, 4, 64), (26400, 264, 64, 1)) == (26400, 264, 64, 1)
    assert copy_engine_strides((2, 100, 4, 64), (26400, 264, 64, 1), itemsize=1) is None


def test_a_dense_view_is_bounded_by_the_tensor() -> None:
    view = dense_view((2, 100, 4, 96), (38400, 384, 96, 1), torch.bfloat16, 64, 128)
    assert view.shape == (2, 100, 4, 96)
    assert view.block_shape == (1, 64, 1, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bfloat16", "float8"])
@pytest.mark.parametrize(("start", "length"), [(0, 1), (5, 70), (1000, 0), (1 << 24, 1 << 20)])
def test_a_ragged_view_addresses_rows_and_ends_with_the_sequence(start: int, length: int, dtype: torch.dtype) -> None:
    """Row r of a sequence is at coordinates (2^30, start + length, 2^30 - length + r, head, column)."""
    row = 512
    head = 128
    view = ragged_view((1 << 25, 4, 128), (row, head, 1), dtype, 64, 128)
    size = dtype.itemsize
    for r in (0, max(length - 1, 0), length, length + 63):
        corner = (1 << 30, start + length, (1 << 30) - length + r, 3, 0)
        elements = sum(at * stride for at, stride in zip(corner, view.strides, strict=True))
        assert size * elements % (1 << 64) == size * ((start + r) * row + 3 * head)
        assert all(0 <= at < size for at, size in zip(corner, view.shape, strict=True)) == (r < length)
