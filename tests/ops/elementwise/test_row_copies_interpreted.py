"""The kernel that packs rows, in Triton's interpreter, against PyTorch."""

from __future__ import annotations

import torch
from interpreter_bounds import reachable
from rounded_once import randn

from fa_serve.ops import RowTable
from fa_serve.ops.elementwise.row_copies import launch_move_rows
from fa_serve.ops.torch_ops import TorchOps


def test_rows_are_packed_and_unpacked() -> None:
    """A cache in a GPU's order of dimensions, one of latent keys in float8, and states of more than a piece."""
    shapes = [
        randn(5, 2, 16, 8, dtype=torch.bfloat16).transpose(1, 2),
        torch.randint(256, (5, 16, 1, 24), dtype=torch.uint8).view(torch.float8_e4m3fn),
        randn(5, 3, 1500, dtype=torch.float32),
        randn(5, 7, dtype=torch.float64),
    ]
    table = RowTable(shapes)
    rows = torch.tensor([4, 0, 3])
    packed = torch.empty(3, table.num_words, dtype=torch.int64)
    expected = torch.empty_like(packed)
    with reachable(*shapes):
        launch_move_rows(table, rows, packed, True)
    TorchOps().move_rows(table, rows, expected, True)
    assert torch.equal(packed, expected)
    assert torch.equal(packed[1, -7:].view(torch.float64), shapes[3][0])

    copies = [x.clone() for x in shapes]
    target = RowTable(copies)
    others = torch.tensor([1, 2, 4])
    with reachable(*copies):
        launch_move_rows(target, others, packed, False)
    for x, copy in zip(shapes, copies, strict=True):
        assert torch.equal(copy[others].view(torch.uint8), x[rows].view(torch.uint8))
        assert torch.equal(copy[[0, 3]].view(torch.uint8), x[[0, 3]].view(torch.uint8)), "other rows stay as they are"
