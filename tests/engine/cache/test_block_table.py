"""The block table: new pages reach the device once, also when a step fails before they are sent."""

from __future__ import annotations

import numpy as np
import torch

from fa_serve.engine.cache.block_table import BlockTable
from fa_serve.engine.runner.transfer import send

CPU = torch.device("cpu")


def rows(table: BlockTable, width: int = 3) -> list[list[int]]:
    return table.rows(torch.arange(2), width).tolist()


def test_only_new_pages_are_sent() -> None:
    table = BlockTable(2, 3, CPU)
    table.fill(1, [7, 8])
    changes = table.changes()
    assert (changes["table_index"].tolist(), changes["table_pages"].tolist()) == ([3, 4], [7, 8])
    table.apply(send(changes, CPU))
    assert rows(table) == [[0, 0, 0], [7, 8, 0]]
    table.fill(1, [7, 8])
    assert table.changes() == {}
    table.fill(1, [7, 8, 9])
    table.fill(0, [4])
    table.apply(send(table.changes(), CPU))
    assert rows(table) == [[4, 0, 0], [7, 8, 9]]
    assert table.pages(np.array([1, 0]), np.array([2, 0])).tolist() == [9, 4]


def test_a_slot_of_another_sequence_starts_again() -> None:
    table = BlockTable(2, 3, CPU)
    table.fill(0, [7, 8])
    table.apply(send(table.changes(), CPU))
    table.clear(0)
    table.fill(0, [5])
    table.apply(send(table.changes(), CPU))
    assert rows(table, 1) == [[5], [0]]


def test_changes_that_were_not_sent_come_again() -> None:
    table = BlockTable(2, 3, CPU)
    table.fill(0, [7])
    table.changes()  # this step fails
    table.clear(0)
    table.fill(0, [7, 8])
    table.apply(send(table.changes(), CPU))
    assert rows(table, 2) == [[7, 8], [0, 0]]
