"""Token-sparse attention in PyTorch: the choice of keys, and attention to them."""

from __future__ import annotations

import pytest
import torch
from selected_keys_cases import PagedQueries, numbers, sparse_reference

from fa_serve import ops
from fa_serve.ops.selected_keys import fallback


def test_choice_of_keys() -> None:
    step = PagedQueries.of([(3, 41), (1, 7), (5, 5)], page_size=4, behind=2)
    q = numbers(step.total, 3, 8, seed=1)
    weights = numbers(step.total, 3, seed=2)
    cache = step.cache(1, 8, torch.float32, seed=5)
    slots = ops.select_slots(q, cache, weights, topk=6, **step.places)
    assert slots.shape == (step.total, 6)
    assert [set(row[row >= 0].tolist()) for row in slots] == step.best_slots(q, cache, weights, 6)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("gathered", [1 << 22, 1])
def test_attention_to_slots(gathered: int, with_sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the keys of one query are gathered at a time."""
    monkeypatch.setattr(fallback, "_GATHERED", gathered)
    step = PagedQueries.of([(1, 30)], page_size=8)
    k = step.cache(2, 16, torch.float32, seed=7)
    q = numbers(3, 6, 16, seed=11)
    slots = torch.full((3, 9), -1, dtype=torch.int32)
    slots[0, 1:] = step.slots_of(0, 30)[[3, 29, 4, 8, 0, 11, 12, 20]].int()
    slots[2, 8] = step.slots_of(0, 30)[17].int()
    sinks = numbers(6, seed=12) if with_sinks else None
    out = ops.sparse_attention(q, k, k[..., :12], slots, softmax_scale=0.25, sinks=sinks)
    exact = sparse_reference(q, k, k[..., :12], slots, 0.25, sinks)
    torch.testing.assert_close(out.double(), exact, atol=1e-6, rtol=1e-5)
    assert out[1].eq(0).all()


def test_gradients_reach_queries_and_chosen_keys_only() -> None:
    """The second query has no keys."""
    q = numbers(2, 2, 4).requires_grad_()
    k = numbers(1, 6, 1, 4, seed=1).requires_grad_()
    slots = torch.tensor([[4, 1, -1], [-1, -1, -1]], dtype=torch.int32)
    ops.sparse_attention(q, k, k, slots, softmax_scale=0.5).sum().backward()
    assert q.grad is not None
    assert k.grad is not None
    assert q.grad[0].abs().sum() > 0
    assert q.grad[1].eq(0).all()
    assert k.grad[0].abs().sum((1, 2)).nonzero()[:, 0].tolist() == [1, 4]


def test_without_queries() -> None:
    k = numbers(1, 6, 1, 4)
    none = torch.empty(0, 3, dtype=torch.int32)
    assert ops.sparse_attention(k.new_empty(0, 2, 4), k, k, none, softmax_scale=1.0).shape == (0, 2, 4)
