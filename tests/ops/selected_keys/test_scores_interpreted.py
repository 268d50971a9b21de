"""The kernels that choose keys, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from selected_keys_cases import PagedQueries, numbers

from fa_serve.ops.selected_keys import scores
from fa_serve.ops.triton_ops import TritonOps

OPS = TritonOps()
STEP = [(3, 41), (1, 7), (5, 5)]


@pytest.mark.parametrize("rows_at_a_time", [1 << 26, 50])
def test_choice_of_keys(rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, chunks and single tokens; also if the scores of few queries are held at a time."""
    monkeypatch.setattr(scores, "MAX_SCORES", rows_at_a_time)
    step = PagedQueries.of(STEP, page_size=4, behind=2)
    q = numbers(step.total, 3, 8, seed=1)
    weights = numbers(step.total, 3, seed=2)
    cache = step.cache(1, 8, torch.float32, seed=5)
    slots = OPS.select_slots(q, cache, weights, *step.places.values(), 6)
    assert slots.shape == (step.total, 6)
    assert slots.dtype == torch.int32
    expected = step.best_slots(q, cache, weights, 6)
    assert [set(row[row >= 0].tolist()) for row in slots] == expected
    assert [int((row >= 0).sum()) for row in slots] == [len(row) for row in expected]


def test_all_keys_are_chosen_where_there_are_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is scored."""
    monkeypatch.setattr(scores, "_score", None)
    step = PagedQueries.of(STEP, page_size=4, behind=1)
    cache = step.cache(1, 8, torch.float32, seed=5)
    slots = OPS.select_slots(numbers(step.total, 3, 8), cache, numbers(step.total, 3), *step.places.values(), 50)
    assert slots.shape == (step.total, 41)
    rows = iter(slots)
    for sequence, (queries, keys) in enumerate(STEP):
        for query in range(queries):
            expected = step.slots_of(sequence, keys - queries + query + 1).tolist()
            assert next(rows).tolist() == expected + [-1] * (41 - len(expected))
    assert next(rows).tolist() == [-1] * 41
