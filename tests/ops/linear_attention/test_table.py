"""Which kernel computes a recurrence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fa_serve.ops.linear_attention.problem import Recurrence
from fa_serve.ops.linear_attention.table import RECURRENCE_KERNELS, select_recurrence_kernel

QWEN = Recurrence(kind="delta", rows="few", dtype=torch.bfloat16, dim=128, dim_v=128, page_size=16)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "few_rows"),
        ({"rows": "pieces"}, "pieces"),
        ({"kind": "linear", "dim": 256}, "few_rows"),
        ({"kind": "conv", "dim": 0}, "convolution"),
        ({"kind": "scan", "dim": 0}, "scans"),
        ({"kind": "lru", "dim": 0, "rows": "pieces"}, "scans"),
        ({"kind": "scan", "dim": 0, "page_size": 8}, "torch"),
        ({"triton": False}, "torch"),
        ({"kind": "conv", "triton": False}, "torch"),
        ({"dtype": torch.float64}, "torch"),
        ({"dim": 512}, "torch"),
        ({"page_size": 128}, "torch"),
        ({"page_size": 128, "rows": "pieces"}, "torch"),
    ],
    ids=str,
)
def test_the_choice(changes: dict[str, object], name: str) -> None:
    assert select_recurrence_kernel(replace(QWEN, **changes)).kernel.name == name  # type: ignore[arg-type]


def test_a_choice_says_why() -> None:
    choice = select_recurrence_kernel(replace(QWEN, dim=512))
    assert choice.passed_over["few_rows"] == "takes keys of up to 256 numbers, got 512"
    assert choice.passed_over["pieces"] == "takes rows='pieces', got 'few'"
    assert choice.passed_over["convolution"] == "computes recurrences of kind conv, got delta"
    reasons = select_recurrence_kernel(replace(QWEN, triton=False)).passed_over
    assert reasons["few_rows"] == "needs Triton, which does not run on the device"
    assert select_recurrence_kernel(replace(QWEN, kind="lru", page_size=8)).passed_over["scans"] == (
        "takes pages whose size is a multiple of 16 tokens, got 8"
    )


def test_both_halves_of_a_step_have_a_kernel_or_none() -> None:
    """A step is computed by kernels or by PyTorch as a whole, so what few rows refuse pieces refuse."""
    for kind in ("delta", "linear"):
        for dim in (16, 128, 256, 257):
            for page_size in (16, 64, 65):
                asked = replace(QWEN, kind=kind, dim=dim, page_size=page_size)
                names = {select_recurrence_kernel(replace(asked, rows=rows)).kernel.name for rows in ("few", "pieces")}
                assert names in ({"few_rows", "pieces"}, {"torch"})


def test_the_last_row_computes_everything() -> None:
    assert RECURRENCE_KERNELS[-1].name == "torch"
    assert len({kernel.name for kernel in RECURRENCE_KERNELS}) == len(RECURRENCE_KERNELS)
