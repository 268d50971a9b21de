"""Models that keep states through the plugin: no state leaks from padding or from one sequence into another."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from hf_families import Family, cached, padding_mask, tokens
from hybrids import BY_NAME, HYBRIDS
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import fa_serve
from fa_serve.hf.adapter.state_modules import SeatedMixer, find_state_modules
from fa_serve.hf.surgery.states import unseat_states
from fa_serve.spec import UnsupportedModelError

FIRST = 9


@cache
def pair(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    eager = BY_NAME[name].build()
    return eager, fa_serve.patch(copy.deepcopy(eager))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert ((actual - expected).abs().max() / expected.abs().max()).item() < 5e-5


def packed(ids: Tensor, how: str) -> dict[str, Any]:
    """Two sequences of FIRST and 24 - FIRST tokens in a batch of 1."""
    starts = torch.tensor([0, FIRST, 24], dtype=torch.int32)
    words: dict[str, Any] = {"input_ids": torch.cat([ids[:1, :FIRST], ids[1:2, FIRST:]], dim=1)}
    positions = torch.cat([torch.arange(FIRST), torch.arange(24 - FIRST)])[None]
    if how == "starts":
        lengths = {"max_length_q": 15, "max_length_k": 15}
        return words | {"position_ids": positions, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, **lengths}
    return words | {"position_ids": positions, "use_cache": False}


@pytest.mark.parametrize("family", HYBRIDS, ids=lambda family: family.name)
@torch.no_grad()
def test_padding_and_packing_change_no_sequence(family: Family) -> None:
    eager, ours = pair(family.name)
    assert all(isinstance(x.forward, SeatedMixer) for x in find_state_modules(ours))
    ids = tokens(3, 24)
    mask = padding_mask("left")
    expected = eager(input_ids=ids, attention_mask=mask).logits
    assert_near(ours(input_ids=ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()])
    alone = torch.cat([eager(input_ids=ids[:1, :FIRST]).logits, eager(input_ids=ids[1:2, FIRST:]).logits], dim=1)
    assert_near(ours(**packed(ids, "starts")).logits, alone)
    if family.name != "granite-hybrid":  # which drops use_cache, so that transformers takes the tokens for one sequence
        assert_near(ours(**packed(ids, "positions")).logits, alone)
    # nothing stays behind
    assert_near(ours(input_ids=ids[:1]).logits, eager(input_ids=ids[:1]).logits)


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "jamba", "lfm2", "mamba"])
@torch.no_grad()
def test_generate_with_a_cache(name: str) -> None:
    """Left padding, right padding, and a prompt that goes on with a cache."""
    eager, ours = pair(name)
    ids = tokens(3, 24)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = padding_mask("left")
    answers = [x.generate(ids, attention_mask=mask, **options) for x in (eager, ours)]
    assert torch.equal(*answers)
    right = padding_mask("right")
    expected = eager(input_ids=ids, attention_mask=right).logits[right.bool()]
    assert_near(ours(input_ids=ids, attention_mask=right).logits[right.bool()], expected)
    logits = []
    for model in (eager, ours):
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :11], use_cache=True, **cached(model, cache))
        logits.append(model(input_ids=ids[:, 11:], use_cache=True, **cached(model, cache)).logits)
    assert_near(logits[1], logits[0])


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "jamba", "lfm2"])
def test_gradients_are_those_of_transformers(name: str) -> None:
    eager, ours = (copy.deepcopy(model).train() for model in pair(name))
    ids = tokens(2, 24)
    for model in (eager, ours):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for (label, mine), other in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if other.grad is not None:
            assert mine.grad is not None, label
            largest = other.grad.abs().max().clamp(min=1e-3)
            assert ((mine.grad - other.grad).abs().max() / largest).item() < 1e-3, label


@torch.no_grad()
def test_packed_sequences_without_a_seat_are_refused() -> None:
    """As a model that was loaded with the name of the implementation, whose weights were not there when it was made."""
    _, ours = pair("jamba")
    loaded = copy.deepcopy(ours)
    unseat_states(loaded)
    ids = tokens(3, 24)
    assert_near(loaded(input_ids=ids).logits, ours(input_ids=ids).logits)
    with pytest.raises(UnsupportedModelError, match=r"packed sequences in Jamba.* need fa_serve.patch\(model\) after"):
        loaded(**packed(ids, "starts"))
    with pytest.raises(
        UnsupportedModelError, match="packed sequences need a batch of 1 that holds them end to end, got a batch"
    ):
        ours(input_ids=ids, position_ids=torch.arange(24).remainder(9).expand(3, -1), use_cache=False)
