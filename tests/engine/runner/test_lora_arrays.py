"""Tokens are sorted by adapter and cut into tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fa_serve.engine.runner.lora_arrays import (
    LARGE_TILE_ROWS,
    StepAdapters,
    lora_arrays,
    lora_padding,
    tile_arrays,
    tile_rows,
)
from fa_serve.engine.runner.padded_steps import PaddedSteps, Shape, padding
from fa_serve.ops.lora.problem import SMALL_TILE_ROWS


def test_each_tile_has_the_tokens_of_one_adapter() -> None:
    rows, tiles = tile_arrays(np.array([2, -1, 0, 2, 2, -1, 0, 2]), block_rows=3)
    assert rows.tolist() == [2, 6, 0, 3, 4, 7, 1, 5]
    assert tiles.tolist() == [[0, 0, 2], [2, 2, 3], [2, 5, 1], [-1, 6, 2]]
    assert (rows.dtype, tiles.dtype) == (np.int32, np.int32)


def test_rows_without_adapters_have_tiles_too() -> None:
    _, tiles = tile_arrays(np.array([-1] * 17), block_rows=16)
    assert tiles.tolist() == [[-1, 0, 16], [-1, 16, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_padding_holds_every_step(seed: int) -> None:
    draw = np.random.default_rng(seed)
    batch = int(draw.integers(1, 40))
    queries = int(draw.choice([1, 5, 16, 200]))
    lengths = draw.integers(1, queries + 1, batch)
    slots = np.repeat(draw.integers(-1, 50, batch), lengths)
    fields = lora_arrays(StepAdapters(slots, False, ()), np.zeros(0, dtype=np.int64), len(slots), queries)
    padding = lora_padding(len(slots), batch, queries)
    assert len(fields["lora_tiles"]) <= len(padding["lora_tiles"])
    assert fields.keys() == padding.keys()
    counts = dict.fromkeys(slots.tolist(), 0)
    for slot, first, count in fields["lora_tiles"].tolist():
        assert (slots[fields["lora_rows"][first : first + count]] == slot).all()
        counts[slot] += count
    assert counts == {slot: int((slots == slot).sum()) for slot in counts}
    assert fields["lora_slots"].tolist() == slots.tolist()


@pytest.mark.parametrize(
    ("tokens", "total", "queries"), [(5, 128, 1), (33, 128, 1), (128, 128, 1), (70, 128, 200), (70, 192, 200), (192, 192, 200)]
)
def test_tiles_name_each_row_of_a_graph_once(tokens: int, total: int, queries: int) -> None:
    """Kernels that compute a product by its tiles would leave other rows as memory was, which may be NaN."""
    draw = np.random.default_rng(tokens)
    slots = np.sort(draw.integers(-1, 3, tokens))  # sorted: a batch of few sequences has several tokens of each
    shape = Shape(total, 64, queries, 1024, lora=True)
    fields = lora_arrays(StepAdapters(slots, False, ()), np.zeros(0, dtype=np.int64), total, queries)
    step = {
        "input_ids": np.zeros(tokens, np.int64),
        "slots": np.zeros(3, np.int64),
        "cu_seqlens_q": np.array([0, 1, 2, tokens]),
    }
    for padded in (padding(shape), PaddedSteps(torch.device("cpu"), states=False).padded(step | fields, shape)):
        named = [padded["lora_rows"][first : first + count] for _, first, count in padded["lora_tiles"].tolist()]
        assert sorted(np.concatenate(named).tolist()) == list(range(total))
        assert len(padded["lora_tiles"]) == total // tile_rows(total, queries) + 65
    assert padded["lora_slots"].tolist() == slots.tolist() + [-1] * (total - tokens)


def test_adapters_of_the_head_name_their_rows_of_logits() -> None:
    adapters = StepAdapters(np.array([1, 1, 1, -1, 4]), True, (1, 4))
    fields = lora_arrays(adapters, np.array([2, 3, 4]), tokens=5, queries=3)
    assert fields["lora_tokens_1"].tolist() == [0, 1, 2]
    assert fields["lora_logits_1"].tolist() == [0]
    assert fields["lora_tokens_4"].tolist() == [4]
    assert fields["lora_logits_4"].tolist() == [2]


def test_tiles_follow_the_number_of_tokens_and_the_longest_chunk() -> None:
    assert [tile_rows(256, queries) for queries in (1, 16, 17)] == [SMALL_TILE_ROWS, SMALL_TILE_ROWS, LARGE_TILE_ROWS]
    assert [tile_rows(tokens, tokens) for tokens in (64, 128, 129)] == [SMALL_TILE_ROWS, SMALL_TILE_ROWS, LARGE_TILE_ROWS]
