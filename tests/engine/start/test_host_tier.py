"""Engines with a host tier: evicted pages and states come back, and every token is that of an engine without one."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from hf_families import FAMILIES, Family
from hybrids import BY_NAME
from latent_families import LATENT
from tiny_models import VOCAB, make_model
from transformers import GenerationConfig, PreTrainedModel

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.runner import host_memory
from fa_serve.engine.runner.host_memory import HostMemory
from fa_serve.engine.start import host_tier
from fa_serve.engine.start.host_tier import look_ahead
from fa_serve.spec import ParameterError

GREEDY = SamplingParams(max_tokens=3, temperature=0.0)
MEBIBYTE = 1 << 20
CHOOSING = next(family for family in FAMILIES if family.name == "deepseek-v3.2")


def prompts(count: int, length: int = 29, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for _ in range(count)]


def hybrid() -> PreTrainedModel:
    model = BY_NAME["qwen3.5"].build(vocab_size=VOCAB)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=-1)
    return model


def answers(engine: Engine, given: list[list[int]]) -> list[list[int]]:
    """One after the other, so that the pages of the first are evicted by the last."""
    return [engine.generate([prompt], GREEDY)[0].token_ids for prompt in given]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(make_model, {}, id="llama"),
        pytest.param(make_model, {"kv_cache_dtype": "fp8"}, id="float8"),
        pytest.param(make_model, {"deterministic": True}, id="deterministic"),
        pytest.param(make_model, {"speculative": "ngram"}, id="drafts"),
        pytest.param(lambda: make_model("mistral"), {}, id="window"),
        pytest.param(lambda: LATENT[0].build(vocab_size=VOCAB), {}, id="latent"),
        pytest.param(lambda: CHOOSING.build(vocab_size=VOCAB), {}, id="keys of indexers"),
        pytest.param(hybrid, {"num_states": 5}, id="states"),
    ],
)
def test_tokens_are_those_without_a_tier(make_engine, build, settings) -> None:
    """The other engine keeps all pages on the device: float8 keys that are cached differ from those just computed."""
    given = prompts(4)
    given = [*given, *given]
    model = build()
    plain = answers(make_engine(model=model, num_pages=200, **settings | {"num_states": None}), given)
    engine = make_engine(model=model, num_pages=18, kv_host_memory=MEBIBYTE, **settings)
    assert answers(engine, given) == plain
    stats = engine.stats()
    assert stats.host_tier.num_hits > 10
    assert stats.host_tier.num_failures == 0
    assert stats.num_cached_tokens >= stats.host_tier.num_hits * 4, "pages that have come back count as cached"
    assert stats.host_tier.num_bytes_used <= stats.host_tier.num_bytes <= MEBIBYTE
    engine.check_integrity()


def test_a_completion_says_how_many_tokens_have_come_back(make_engine) -> None:
    engine = make_engine(num_pages=18, kv_host_memory=MEBIBYTE)
    first, *others = prompts(4)
    answers(engine, [first, *others])
    assert engine.generate([first], GREEDY)[0].num_cached_tokens == 28


@pytest.mark.slow
def test_new_weights_read_nothing_from_the_host(make_engine) -> None:
    given = prompts(4)
    engine = make_engine(num_pages=18, kv_host_memory=MEBIBYTE)
    answers(engine, given)
    with torch.no_grad():
        changed = {name: parameter + 0.05 * torch.randn_like(parameter) for name, parameter in engine.model.named_parameters()}
    engine.update_weights(changed.items())
    assert engine.stats().host_tier.num_bytes_used == 0
    plain = make_engine(model=engine.model)
    assert answers(engine, given) == answers(plain, given)


@pytest.mark.slow
def test_an_engine_that_has_slept_begins_with_an_empty_tier(make_engine) -> None:
    given = prompts(4)
    engine = make_engine(num_pages=18, kv_host_memory=MEBIBYTE)
    before = answers(engine, given)
    engine.sleep(1)
    assert engine.stats().host_tier.num_bytes_used == 0
    engine.wake_up()
    assert answers(engine, given) == before
    assert answers(engine, given) == before, "the cache lies elsewhere now, and comes back to its new place"
    assert engine.stats().host_tier.num_hits > 10


def test_a_copy_that_fails_changes_no_token(make_engine, monkeypatch, caplog) -> None:
    given = prompts(4)
    given = [*given, *given]
    plain = answers(make_engine(num_pages=18), given)
    engine = make_engine(num_pages=18, kv_host_memory=MEBIBYTE)
    copies = engine._scheduler.tier.lanes[0].copies
    draw = random.Random(0)
    copy = copies._copy_at_once

    def fail_sometimes(*args: Any, **options: Any) -> None:
        copy(*args, **options)
        if draw.random() < 0.5:
            raise RuntimeError("planted")

    monkeypatch.setattr(copies, "_copy_at_once", fail_sometimes)
    with caplog.at_level(logging.WARNING, "fa_serve.engine"):
        assert answers(engine, given) == plain
    stats = engine.stats().host_tier
    assert stats.num_failures > 3
    assert stats.num_hits > 0
    told = [record for record in caplog.records if record.name == "fa_serve.engine" and "copy" in record.getMessage()]
    assert len(told) == 1, "the first failure is told"
    engine.check_integrity()


def test_a_scheduler_that_has_failed_leaves_the_memory_to_the_next_one(make_engine, monkeypatch) -> None:
    given = prompts(4)
    engine = make_engine(num_pages=18, kv_host_memory=MEBIBYTE)
    before = answers(engine, given)
    monkeypatch.setattr(engine._scheduler, "schedule", lambda: 1 / 0)
    assert engine.generate([given[0]], GREEDY)[0].finish_reason == "error"
    assert engine.stats().host_tier.num_bytes_used == 0
    assert answers(engine, [*given, *given]) == [*before, *before]
    assert engine.stats().host_tier.num_hits > 10


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"prefix_caching": False}, "be 0 without prefix_caching"),
        ({"tensor_parallel": 2}, "be 0 with tensor_parallel above 1"),
        ({"speculative": "eagle3=head"}, "be 0 with an EAGLE-3 head"),
    ],
)
def test_settings_that_have_no_tier(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ParameterError, match=rule):
        EngineConfig(kv_host_memory=1, **settings)


def test_a_model_without_attention_has_no_tier(make_engine) -> None:
    model = BY_NAME["mamba"].build(vocab_size=VOCAB)
    with pytest.raises(ParameterError, match="be 0 for a model without attention layers"):
        make_engine(model=model, kv_host_memory=MEBIBYTE, num_pages=None)


def test_a_cache_that_cannot_be_copied_has_no_tier(make_engine) -> None:
    family = Family("llama", "LlamaForCausalLM", config={"head_dim": 6, "num_key_value_heads": 1, "num_attention_heads": 2})
    with pytest.raises(ParameterError, match="kv_host_memory must be 0 for this KV cache"):
        make_engine(model=family.build(vocab_size=VOCAB), kv_host_memory=MEBIBYTE, kv_cache_dtype="fp8", page_size=2)


@pytest.mark.parametrize(
    ("wanted", "items", "slots", "ahead"), [(1000, 5000, 100_000, 1000), (1000, 300, 100_000, 300), (1000, 5000, 400, 100)]
)
def test_copies_made_ahead_take_a_part_of_a_small_memory(wanted: int, items: int, slots: int, ahead: int) -> None:
    assert look_ahead(wanted, items, slots) == ahead
    assert look_ahead(wanted, items, 3) == 1


def test_a_small_memory_holds_what_the_device_has_lost(make_engine) -> None:
    """Two of the largest steps take more pages than the host holds, so all its copies were of what the device still had."""
    given = prompts(6)
    engine = make_engine(num_pages=18, kv_host_memory=20 * 2048, max_num_batched_tokens=64)
    tier = engine._scheduler.tier
    num_slots = tier.lanes[0].copies.num_slots
    assert tier.lanes[0].depth <= max(num_slots // 4, 1)
    for prompt in given:
        answers(engine, [prompt])
    host = engine._scheduler.pages.host
    lost = [each for each in host if not engine._scheduler.pages.has(each)]
    assert len(lost) >= num_slots // 2


def test_an_engine_whose_tier_gets_no_memory_serves(make_engine, monkeypatch, caplog) -> None:
    """What the machine does not have is told, for the pages and for the states; the requests find an empty tier."""
    given = prompts(4)
    model = hybrid()
    plain = answers(make_engine(model=model, num_pages=200), given)
    monkeypatch.setattr(host_memory, "reclaimable_memory", lambda: host_memory.SPARE_BYTES)
    engine = make_engine(model=model, num_pages=18, num_states=5, kv_host_memory=MEBIBYTE)
    told = [message for message in caplog.messages if message.startswith("kv_host_memory could not be allocated in full")]
    assert [next(name for name in ("pages", "states") if name in message) for message in told] == ["pages", "states"]
    assert answers(engine, given) == plain
    assert (engine.stats().host_tier.num_bytes, engine.stats().host_tier.num_hits) == (0, 0)
    engine.check_integrity()


def test_what_a_tier_may_take_is_left_by_the_cache_and_by_pages(make_engine, monkeypatch) -> None:
    """On a CPU, none of them may have been written to yet, so the system does not count them as taken."""
    opened: list[HostMemory] = []
    promised: list[int] = []

    def make(tensors, num_bytes, device, name, already) -> HostMemory:
        opened.append(HostMemory(tensors, num_bytes, device, name, already))
        promised.append(already)
        return opened[-1]

    monkeypatch.setattr(host_tier, "HostMemory", make)
    engine = make_engine(model=hybrid(), num_pages=18, num_states=5, kv_host_memory=MEBIBYTE)
    pages, states = opened
    cache = sum(x.nbytes for memory in opened for x in memory._tensors())
    assert promised == [cache, cache + pages.num_slots * pages.row_bytes]
    assert engine.stats().host_tier.num_bytes <= MEBIBYTE
    assert states.num_slots
