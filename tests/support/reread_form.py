"""The form of few rows that reads the tail again for each row (reread_rows.py), where another is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa_serve.ops.linear_attention import table, tiles
from fa_serve.ops.linear_attention.problem import Recurrence
from fa_serve.ops.linear_attention.tiles import FewRowsTile, few_rows_tile


def reread_rows(monkeypatch: pytest.MonkeyPatch, **change: int) -> None:
    """Compute few rows with the tile of an H200, of which `change` replaces fields."""

    monkeypatch.setattr(tiles, "REREADS_ROWS", True)

    def tile(asked: Recurrence) -> FewRowsTile:
        return few_rows_tile(replace(asked, arch=90))._replace(**change)

    rows = tuple(replace(row, tile=tile) if row.name == "few_rows" else row for row in table.RECURRENCE_KERNELS)
    monkeypatch.setattr(table, "RECURRENCE_KERNELS", rows)
