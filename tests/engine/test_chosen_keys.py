"""Models whose queries choose keys (DeepSeek V3.2, GLM-DSA, A.X-K2, HY V4) in the engine: tokens are those of `generate`."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hf_families import BY_NAME, VOCAB
from tiny_models import random_prompts

from fa_serve import ops
from fa_serve.engine import SamplingParams
from fa_serve.spec import ParameterError

NAMES = ["deepseek-v3.2", "glm-moe-dsa", "a.x-k2", "hy-v4"]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def prompts() -> list[list[int]]:
    """Most are longer than the 6 keys that a query chooses."""
    return [[token % (VOCAB - 3) + 3 for token in prompt] for prompt in random_prompts(6, longest=24)]


@cache
def expected(name: str) -> list[list[int]]:
    """What transformers generates with eager attention."""
    model = BY_NAME[name].build()
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": 8}
    return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts()]


@pytest.mark.parametrize(
    ("name", "fusion"), [*[pytest.param(name, True, id=name) for name in NAMES], pytest.param(NAMES[0], False, id="no-fusion")]
)
def test_tokens_are_those_of_generate(make_engine, name, fusion, monkeypatch) -> None:
    """In chunks, with preemption, and behind a cached prefix, whose keys to choose by are in its pages."""
    rows: list[int] = []
    attend = ops.sparse_attention
    monkeypatch.setattr(ops, "sparse_attention", lambda q, *rest, **options: rows.append(len(q)) or attend(q, *rest, **options))
    settings = {"num_pages": 10, "max_model_len": 40, "max_num_batched_tokens": 11, "fusion": fusion}
    engine = make_engine(model=BY_NAME[name].build(), **settings)
    assert engine._runner.kv_caches[0][0].shape[2:] == ((1, 24 + 8) if fusion else (4, 16 + 8))
    asked = prompts()
    tokens = expected(name)
    assert [c.token_ids for c in engine.generate(asked, GREEDY)] == tokens
    assert engine.stats().num_preemptions > 0
    assert {1, 11} <= set(rows), "chunks and single tokens attended to chosen keys"
    longest = max(range(len(asked)), key=lambda i: len(asked[i]))
    first, hit = (engine.generate([asked[longest]], GREEDY)[0] for _ in range(2))
    assert hit.num_cached_tokens > 0
    assert first.token_ids == hit.token_ids == tokens[longest]
    engine.check_integrity()


def test_pages_hold_latent_keys_and_those_of_indexers(make_engine) -> None:
    """GLM's second layer has no indexer."""
    for name, indexers in (("deepseek-v3.2", [-3, -2, -1]), ("glm-moe-dsa", [-3, -1])):
        runner = make_engine(model=BY_NAME[name].build())._runner
        assert runner.bytes_per_page == runner.page_size * 4 * (3 * (24 + 8) + len(indexers) * 16)
        assert sorted(runner.kv_caches) == [*indexers, 0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"deterministic": True}, "deterministic must be False for DeepseekV32ForCausalLM", id="deterministic"),
        pytest.param({"kv_cache_dtype": "fp8"}, 'kv_cache_dtype must be "auto" for DeepseekV32ForCausalLM', id="float8"),
    ],
)
def test_what_such_models_do_not_have_is_refused(make_engine, settings, message) -> None:
    with pytest.raises(ParameterError, match=message):
        make_engine(model=BY_NAME["deepseek-v3.2"].build(), **settings)
