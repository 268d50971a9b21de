"""Tiles at the shapes of models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fa_serve.ops.linear_attention.problem import Recurrence
from fa_serve.ops.linear_attention.tiles import FewRowsTile, PiecesTile, few_rows_tile, pieces_tile


def recurrence(dim: int, dim_v: int, page_size: int = 16, *, by_channel: bool = False, arch: int = 90) -> Recurrence:
    kind = "delta" if by_channel else "linear"
    sizes = {"dim": dim, "dim_v": dim_v, "page_size": page_size, "by_channel": by_channel, "arch": arch}
    return Recurrence(kind=kind, rows="few", dtype=torch.bfloat16, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "tile"),
    [
        (recurrence(128, 128), FewRowsTile(64, 16, 4, 128, 168)),
        (recurrence(128, 128, by_channel=True), FewRowsTile(64, 16, 4, 168, 168)),
        (recurrence(128, 128, 64), FewRowsTile(64, 16, 4, 128, 168)),
        (recurrence(256, 64), FewRowsTile(32, 16, 4, 128, 168)),
        (recurrence(12, 10), FewRowsTile(16, 16, 4)),
        (recurrence(128, 128, arch=0), FewRowsTile(64, 16, 4, 128, 168)),
    ],
    ids=str,
)
def test_few_rows(asked: Recurrence, tile: FewRowsTile) -> None:
    assert few_rows_tile(asked) == tile


@pytest.mark.parametrize(
    ("asked", "tile"),
    [
        (recurrence(128, 128), PiecesTile(64, 3, 4, 4, 4, False, 168)),
        (recurrence(128, 128, arch=80), PiecesTile(64, 2, 8, 8, 4, False)),
        (recurrence(128, 128, arch=120), PiecesTile(64, 2, 8, 8, 4, False)),
        (recurrence(128, 128, arch=0), PiecesTile(64, 1, 4, 4, 4, False)),
        (recurrence(128, 128, by_channel=True), PiecesTile(64, 3, 8, 4, 4, False)),
        (recurrence(256, 64), PiecesTile(64, 1, 8, 8, 4, False)),
        (recurrence(12, 10), PiecesTile(64, 3, 4, 4, 4, False, 168)),
    ],
    ids=str,
)
def test_pieces(asked: Recurrence, tile: PiecesTile) -> None:
    assert pieces_tile(asked) == tile


@pytest.mark.parametrize(
    ("changes", "in_loop"),
    [
        ({}, True),
        ({"by_channel": True}, True),
        ({"loops": 30}, True),
        ({"loops": 29}, False),
        ({"loops": 29, "dim_v": 192}, True),
        ({"loops": 131, "by_channel": True}, False),
        ({"loops": 132, "by_channel": True}, True),
        ({"num_sms": 1140}, False),
        ({"kind": "linear"}, False),
        ({"dim": 256}, False),
        ({"dtype": torch.float32}, False),
        ({"arch": 80}, False),
        ({"arch": 100}, False),
        ({"arch": 0}, False),
    ],
    ids=str,
)
def test_outputs_in_the_loop_of_many_sequences(changes: dict[str, Any], in_loop: bool) -> None:
    """Eight sequences of Qwen3-Next fill an H200 nearly four times."""
    many = replace(recurrence(128, 128), kind="delta", rows="pieces", loops=8 * 32)
    assert pieces_tile(replace(many, **changes)).outputs_in_loop == in_loop


def test_values_are_filled_up_to_whole_blocks() -> None:
    tile = pieces_tile(recurrence(128, 128))
    assert [tile._replace(block_v=block_v).filled_columns for block_v in (32, 64, 128)] == [64, 64, 128]
