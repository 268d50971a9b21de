"""Plans: what makes two calls look alike, and that a table stays within its bound."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fa_serve.backends.calls import AttentionTensors, CallOptions, complete_options, effective_chunk, growing_facts
from fa_serve.launching.plans import PlanTable, facts


def test_a_full_table_is_cleared() -> None:
    table = PlanTable(max_plans=2)
    for number in range(5):
        table.add((number,), lambda tensors: None)
    assert len(table) == 1


def test_the_first_plan_of_a_key_is_kept() -> None:
    """Two threads that plan the same call at once both run the same plan."""
    table = PlanTable()
    first = table.add(("key",), lambda tensors: 1)
    assert table.add(("key",), lambda tensors: 2) is first


X = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    "other",
    [X[:1], X.transpose(1, 2).contiguous().transpose(1, 2), X.half(), X.to("meta"), X.clone().requires_grad_(), None],
    ids=["shape", "strides", "dtype", "device", "gradient", "absence"],
)
def test_facts_differ(other: Tensor | None) -> None:
    assert facts(X) == facts(torch.ones(2, 3, 4))
    assert facts(X) != facts(other)


def test_facts_ignore_gradients_that_nobody_asks_for() -> None:
    with torch.no_grad():
        assert facts(X.clone().requires_grad_()) == facts(X)


def cache(keys: int, **changes: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as transformers' growing cache holds them, seen as (batch, seqlen, heads, dim)."""
    batch = changes.get("batch", 2)
    q = torch.zeros(batch, 8, 1, 32).transpose(1, 2)
    k = torch.zeros(batch, 2, keys, 32).transpose(1, 2)
    v = torch.zeros(batch, 2, keys, changes.get("dim_v", 32)).transpose(1, 2)
    return q, k, v


def padding(keys: int) -> Tensor:
    return torch.ones(2, 1, 1, keys, dtype=torch.bool)


def test_growing_facts_do_not_change_with_the_length() -> None:
    assert growing_facts(*cache(65), None) == growing_facts(*cache(127), None) is not None
    assert growing_facts(*cache(65), padding(65)) == growing_facts(*cache(127), padding(127)) is not None


def test_growing_facts_differ() -> None:
    plain = growing_facts(*cache(65), None)
    q, k, v = cache(66)
    others = [
        growing_facts(*cache(128), None),
        growing_facts(*cache(66, batch=3), None),
        growing_facts(*cache(66, dim_v=16), None),
        growing_facts(q, k, torch.zeros(2, 66, 2, 32), None),
        growing_facts(q, k, v, padding(66)),
        growing_facts(q, k, v, padding(66)[:1]),
        growing_facts(q, k, v, padding(132)[..., ::2]),
        growing_facts(q.half(), k, v, None),
    ]
    assert None not in others
    assert len({plain, *others}) == 1 + len(others)


def test_unusual_calls_have_no_growing_facts() -> None:
    q, k, v = cache(66)
    odd = torch.zeros(2, 2, 66, 33)[..., :32].transpose(1, 2)
    unusual = {
        "strides that are no multiple of 16": (q, odd, v, None),
        "a last dimension that is not contiguous": (q, torch.zeros(2, 66, 2, 64)[..., ::2], v, None),
        "v of another length": (q, k, cache(67)[2], None),
        "a float mask": (q, k, v, padding(66).float()),
        "a mask that depends on the head": (q, k, v, padding(66).expand(2, 8, 1, 66)),
        "a mask of one key": (q, k, v, padding(1)),
        "a gradient": (q, k.clone().requires_grad_(), v, None),
    }
    assert [name for name, call in unusual.items() if growing_facts(*call) is not None] == []


def test_slopes_of_heads_and_of_sequences_are_told_apart() -> None:
    slopes = [None, torch.ones(3), torch.ones(2, 3)]
    assert [AttentionTensors(X, X, X, alibi_slopes=x).alibi_form for x in slopes] == ["none", "heads", "batch"]


Q_16 = torch.zeros(2, 5, 4, 16)


def test_options_have_their_defaults_filled_in() -> None:
    """Q_16 has head_dim 16, so the scale is 1 / sqrt(16)."""
    options = complete_options(CallOptions(softcap=0), Q_16, 5, 7)
    assert (options.softmax_scale, options.window_size, options.softcap) == (0.25, (-1, -1), 0.0)
    assert type(options.softcap) is float
    given = complete_options(CallOptions(softmax_scale=2, window_size=(3, 4), softcap=5.0), Q_16, 5, 7)
    assert (given.softmax_scale, given.window_size, given.softcap) == (2.0, (3, 4), 5.0)
    assert (given.max_seqlen_q, given.max_seqlen_k, given.num_splits) == (5, 7, 0)


def test_causality_is_folded_into_the_window() -> None:
    assert complete_options(CallOptions(causal=True), Q_16, 5, 7).window_size == (-1, 0)
    assert complete_options(CallOptions(causal=True, window_size=(7, 3)), Q_16, 5, 7).window_size == (7, 0)


def test_a_window_that_32_bits_cannot_hold_is_shortened() -> None:
    """Kernels add a length to the window in 32 bits."""
    left, right = complete_options(CallOptions(window_size=(2**62, 2**31)), Q_16, 5, 7).window_size
    assert left == right
    assert 2**28 < left <= 2**30


def test_a_chunk_that_holds_every_key_is_no_chunk() -> None:
    assert [effective_chunk(chunk, (-1, 0), 100) for chunk in (0, 99, 100, 101)] == [0, 99, 0, 0]
