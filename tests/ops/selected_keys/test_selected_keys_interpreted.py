"""The kernels of token-sparse attention, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from selected_keys_cases import PagedQueries, numbers, sparse_reference

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


@pytest.mark.parametrize("num_splits", [0, 1, 3], ids=lambda n: f"splits{n}")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dim_v", "latent"),
    [
        pytest.param(20, 1, 24 + 8, 24, True, id="latent"),
        pytest.param(3, 3, 24, 12, False, id="one-head-each"),
        pytest.param(6, 2, 16, 16, False, id="grouped"),
    ],
)
def test_attention_to_slots(heads: int, kv_heads: int, dim: int, dim_v: int, latent: bool, num_splits: int) -> None:
    """The first query sees one key, the second none; the others see up to 37, not in order, with -1 between them."""
    step = PagedQueries.of([(1, 60), (1, 12)], page_size=8)
    k = step.cache(kv_heads, dim, torch.float32, seed=7)
    v = k[..., :dim_v] if latent else step.cache(kv_heads, dim_v, torch.float32, seed=9)
    if not latent:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))  # as on a GPU: heads before tokens
    q = numbers(4, heads, dim, seed=11)
    slots = torch.full((4, 37), -1, dtype=torch.int32)
    slots[0, 5] = step.slots_of(1, 12)[-1]
    for row in (2, 3):
        shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(row))[: 37 - row]
        slots[row, row:] = step.slots_of(0, 60)[shuffled].int()
    out = OPS.sparse_attention(q, k, v, slots, 0.3, num_splits)
    assert out.shape == (4, heads, dim_v)
    torch.testing.assert_close(out.double(), sparse_reference(q, k, v, slots, 0.3), atol=1e-5, rtol=1e-5)
    assert out[1].eq(0).all()
