"""Models that keep states through the plugin: no state leaks from padding or from one sequence into another."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from every_type import tiny_model
from hf_checks import LENGTHS, check_packed, ways_of_packing
from hf_families import BY_NAME as FAMILIES
from hf_families import Family, cached, padding_mask, tokens
from hybrids import BY_NAME, HYBRIDS
from sampled_cases import ALL
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import fa_serve
from fa_serve.hf.adapter import written_recurrences
from fa_serve.hf.adapter.packs import running
from fa_serve.hf.adapter.state_modules import PatchedMixer, find_state_modules
from fa_serve.hf.surgery.states import unpatch_states
from fa_serve.spec import UnsupportedModelError

FIRST = 9
LIKE_OTHERS = {"qwen3-next", "qwen3.5-moe", "olmo-hybrid", "falcon-h1", "lfm2-moe", "zamba", "mamba2", "falcon-mamba"}
PACKED = [family for family in HYBRIDS if ALL or family.name not in LIKE_OTHERS]
"""Those with another kind of state, or another way from the arguments of a forward to it."""


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


@pytest.mark.parametrize("family", PACKED, ids=lambda family: family.name)
@torch.no_grad()
def test_padding_and_packing_change_no_sequence(family: Family) -> None:
    eager, ours = pair(family.name)
    assert all(isinstance(x.forward, PatchedMixer) for x in find_state_modules(ours))
    ids = tokens(3, 24)
    mask = padding_mask("left")
    expected = eager(input_ids=ids, attention_mask=mask).logits
    assert_near(ours(input_ids=ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()])
    alone = torch.cat([eager(input_ids=ids[:1, :FIRST]).logits, eager(input_ids=ids[1:2, FIRST:]).logits], dim=1)
    assert_near(ours(**packed(ids, "starts")).logits, alone)
    if family.name == "granite-hybrid":  # which drops use_cache, so that transformers takes the tokens for one sequence
        with pytest.raises(UnsupportedModelError, match="position_ids that start again mean packed sequences"):
            ours(**packed(ids, "positions"))
    else:
        assert_near(ours(**packed(ids, "positions")).logits, alone)
    # nothing stays behind
    assert_near(ours(input_ids=ids[:1]).logits, eager(input_ids=ids[:1]).logits)


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "jamba", "lfm2", "mamba", "minimax", "recurrent-gemma"])
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
        cache = MiniMaxCache() if name == "minimax" else DynamicCache(config=model.config)
        model(input_ids=ids[:, :11], use_cache=True, **cached(model, cache))
        logits.append(model(input_ids=ids[:, 11:], use_cache=True, **cached(model, cache)).logits)
    assert_near(logits[1], logits[0])


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "jamba", "lfm2", "minimax", "recurrent-gemma"])
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
    unpatch_states(loaded)
    ids = tokens(3, 24)
    assert_near(loaded(input_ids=ids).logits, ours(input_ids=ids).logits)
    with pytest.raises(UnsupportedModelError, match=r"packed sequences in Jamba.* need fa_serve.patch\(model\) after"):
        loaded(**packed(ids, "starts"))
    with pytest.raises(
        UnsupportedModelError, match="packed sequences need a batch of 1 that holds them end to end, got a batch"
    ):
        ours(input_ids=ids, position_ids=torch.arange(24).remainder(9).expand(3, -1), use_cache=False)


def restarting() -> Tensor:
    return torch.cat([torch.arange(n) for n in LENGTHS])[None]


@pytest.mark.parametrize("name", ["stablelm", "bert", "roberta", "modernbert"])
@torch.no_grad()
def test_every_way_of_packing(name: str) -> None:
    """Decoders are in tests/hf/test_families.py."""
    check_packed(FAMILIES[name])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["stablelm", "gpt-oss", "qwen3.5", "jamba", "lfm2"])
def test_recomputed_layers_know_the_sequences(name: str, reentrant: bool) -> None:
    """Gradient checkpointing computes layers once more when the forward is over."""
    eager = (FAMILIES | BY_NAME)[name].build().train()
    ours = fa_serve.patch(copy.deepcopy(eager))
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ours.enable_input_require_grads()
    ids = tokens(1, sum(LENGTHS))
    alone = torch.cat([eager(part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    weights = torch.randn(alone.shape, generator=torch.Generator().manual_seed(1))
    (alone * weights).sum().backward()
    (ours(ids, **ways_of_packing(restarting())["both"]).logits * weights).sum().backward()
    for (label, mine), other in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if other.grad is not None:
            assert mine.grad is not None, label
            assert ((mine.grad - other.grad).abs().max() / other.grad.abs().max().clamp(min=1e-2)).item() < 1e-3, label


@pytest.mark.parametrize("name", ["stablelm", "nemotron"])
@torch.no_grad()
def test_a_class_that_hands_no_words_down(name: str) -> None:
    """Its masks tell the sequences; a static cache, whose masks do not, is refused."""
    eager = tiny_model(name)
    ours = fa_serve.patch(copy.deepcopy(eager))
    ids = tokens(1, sum(LENGTHS))
    alone = torch.cat([eager(part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    ways = ways_of_packing(restarting())
    for way in ("lengths", "lengths, with a cache", "both, with a cache"):
        assert_near(ours(ids, **ways[way]).logits, alone)
        ones = torch.ones_like(ids)
        assert_near(ours(ids, attention_mask=ones, **ways[way]).logits, alone)
    static = cached(ours, StaticCache(config=ours.config, max_cache_len=40))
    with pytest.raises(
        UnsupportedModelError,
        match=r"every layer must know where packed sequences begin, but .*Attention gets from its model neither "
        "cu_seq_lens_q",
    ):
        ours(ids, **ways["lengths"], **static)
    hidden = ones.clone()
    hidden[0, 3] = 0
    with pytest.raises(UnsupportedModelError, match="every layer must know where packed sequences begin"):
        ours(ids, attention_mask=hidden, **ways["lengths"])


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_that_hands_no_words_down() -> None:
    eager = FAMILIES["stablelm"].build(num_hidden_layers=1)
    ours = fa_serve.patch(copy.deepcopy(eager))
    ids = tokens(1, sum(LENGTHS))
    alone = torch.cat([eager(part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")

    @torch.no_grad()
    def compile_first() -> Tensor:
        found: Tensor = compiled(ids, **ways_of_packing(restarting())["both"]).logits
        return found

    with ThreadPoolExecutor(1) as thread:  # which has had no forward: guards on what a forward leaves behind would fail
        assert_near(thread.submit(compile_first).result(), alone)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lengths", "both"])
@torch.no_grad()
def test_a_compiled_model_with_states(way: str) -> None:
    eager = BY_NAME["nemotron-h"].build()
    ours = fa_serve.patch(copy.deepcopy(eager))
    ids = tokens(1, sum(LENGTHS))
    alone = torch.cat([eager(part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="eager")
    assert_near(compiled(ids, **ways_of_packing(restarting())[way]).logits, alone)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pegasus", "its forward takes no position_ids"),
        ("inkling_text", "it scales queries by their place in the row"),
        ("llama4_text", "it scales queries by their place in the row"),
        ("florence2", "its decoder and its encoder have sequences of different lengths"),
    ],
)
@torch.no_grad()
def test_models_that_cannot_follow(name: str, reason: str) -> None:
    changes = {"no_rope_layers": [1, 0]} if name == "llama4_text" else None
    ours = fa_serve.patch(tiny_model(name, changes))
    ids = tokens(1, sum(LENGTHS))
    assert ours(ids).logits.isfinite().all()
    with pytest.raises(UnsupportedModelError, match=f"cannot follow packed sequences, because {reason}"):
        ours(ids, **ways_of_packing(restarting())["both"])


@torch.no_grad()
def test_linear_attention_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_recurrences, "WRITTEN", ())
    ours = fa_serve.patch(BY_NAME["minimax"].build())
    reason = "its linear attention would carry the state of one sequence into the next"
    with pytest.raises(UnsupportedModelError, match=f"cannot follow packed sequences, because {reason}"):
        ours(tokens(1, sum(LENGTHS)), **ways_of_packing(restarting())["both"])


@torch.no_grad()
def test_blocks_of_keys_hold_several_sequences() -> None:
    ours = fa_serve.patch(tiny_model("minimax_m3_vl"))
    with pytest.raises(UnsupportedModelError, match="choose blocks of keys, which may hold keys of several packed sequences"):
        ours(tokens(1, sum(LENGTHS)), **ways_of_packing(restarting())["both"])


@torch.no_grad()
def test_positions_that_only_jump_or_repeat_are_one_sequence() -> None:
    """As transformers takes them beside a cache."""
    eager = FAMILIES["llama"].build()
    ours = fa_serve.patch(copy.deepcopy(eager))
    ids = tokens(1, 8)
    for positions in ([0, 1, 2, 2, 2, 3, 4, 5], [0, 1, 2, 9, 10, 11, 30, 31]):
        at = torch.tensor([positions])
        assert_near(ours(ids, position_ids=at).logits, eager(ids, position_ids=at).logits)
    again = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(UnsupportedModelError, match="position_ids that start again mean packed sequences"):
        ours(ids, position_ids=again)
    # the caller says that it is one
    ones = torch.ones_like(ids)
    assert_near(
        ours(ids, position_ids=again, attention_mask=ones).logits, eager(ids, position_ids=again, attention_mask=ones).logits
    )


@torch.no_grad()
def test_positions_on_three_axes() -> None:
    """Those of an image repeat on one axis, and are one sequence; texts start again on all of them."""
    eager = tiny_model("qwen2_5_vl")
    ours = fa_serve.patch(copy.deepcopy(eager))
    ids = tokens(1, 8)
    image = torch.tensor([[0, 1, 1, 1, 1, 3, 4, 5], [0, 1, 1, 2, 2, 3, 4, 5], [0, 1, 2, 1, 2, 3, 4, 5]])[:, None]
    assert_near(ours(ids, position_ids=image).logits, eager(ids, position_ids=image).logits)
    texts = torch.tensor([[[0, 1, 2, 3, 0, 1, 2, 3]]]).expand(3, -1, -1)
    with pytest.raises(UnsupportedModelError, match="position_ids that start again mean packed sequences"):
        ours(ids, position_ids=texts, use_cache=False)


@torch.no_grad()
def test_an_error_in_a_forward_leaves_nothing_behind() -> None:
    ours = fa_serve.patch(FAMILIES["stablelm"].build())
    with pytest.raises(UnsupportedModelError, match=r"packed sequences need a batch of 1 .* got a batch of 2 from StableLm"):
        ours(tokens(2, sum(LENGTHS)), **ways_of_packing(restarting())["lengths"])
    assert running.forward is None
    with pytest.raises(UnsupportedModelError):
        ours(tokens(1, sum(LENGTHS)), **ways_of_packing(restarting())["positions, with a cache"])
    assert running.forward is None
