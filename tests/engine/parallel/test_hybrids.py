"""Models with states on two ranks, each with its heads and their states: the tokens of transformers' `generate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from generated_hybrids import expected, generated, model_of, prompts
from hybrids import HYBRIDS
from sampled_cases import each_nth
from tiny_models import make_tokenizer

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.start import loading

pytestmark = pytest.mark.usefixtures("warm_followers")

GREEDY = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
DIVIDED = [family.name for family in HYBRIDS if family.name != "zamba"]
"""Zamba's scan is called once for each of its few heads, which are not divided."""


def save(name: str, folder: Path) -> Path:
    model_of(name).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def start(folder: Path, **settings: Any) -> Engine:
    sizes = {"device": "cpu", "dtype": "float32", "seed": 3, "page_size": 4, "max_model_len": 96, "tensor_parallel": 2}
    return Engine(EngineConfig(**sizes | {"model": folder} | settings))


def close(engine: Engine) -> None:
    """The follower has checked its integrity as well, and ends without an error."""
    engine.check_integrity()
    assert engine.stats().num_states_used == 0
    [link] = engine._ranks._links
    engine.close()
    assert link.process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", each_nth(8, DIVIDED))  # hf/surgery/divide has the mixers of all
def test_two_ranks_write_the_tokens_of_generate(tmp_path: Path, name: str) -> None:
    """In chunks and in padded batches, short of pages and states, then from the prefix cache."""
    engine = start(save(name, tmp_path), max_num_batched_tokens=23, num_pages=24, num_states=6, max_model_len=64)
    given = prompts(6)
    assert [x.token_ids for x in engine.generate(given, GREEDY)] == expected(name, given)
    assert engine.stats().num_preemptions > 0
    one = given[0]
    engine.generate([one], GREEDY)
    [again] = engine.generate([one], GREEDY)
    assert again.token_ids == generated(name, tuple(one))
    assert again.num_cached_tokens == (len(one) - 1) // 4 * 4
    close(engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", each_nth(3, ["nemotron-h", "qwen3-next", "kimi-linear"]))
def test_two_ranks_draw_speculate_and_fork_as_one(tmp_path: Path, name: str) -> None:
    """Several answers of a prompt, drafts that are accepted and dropped, and aborted requests, twice."""
    folder = save(name, tmp_path)
    repeated = [[5, 6, 7, 8] * 6, [9, 8, 7] * 5]
    few = dict.fromkeys((5, 6, 7), 20.0)  # which of them, the model says
    given = [*prompts(2, seed=2), *repeated]
    params = [
        replace(GREEDY, n=2),
        SamplingParams(max_tokens=14, temperature=1.0, seed=3, n=3, ignore_eos=True),
        replace(GREEDY, max_tokens=40, logit_bias=few),
        SamplingParams(max_tokens=40, temperature=0.2, seed=5, ignore_eos=True, logit_bias=few),
    ]
    results = []
    for size in (1, 2):
        engine = start(folder, tensor_parallel=size, speculative="ngram", num_speculative_tokens=5, max_num_batched_tokens=23)
        tokens = [x.token_ids for _ in range(2) for x in engine.generate(given, params)]
        engine.add_request("aborted", given[0], GREEDY)
        for _ in range(3):
            engine.step()
        engine.abort("aborted")
        tokens += [x.token_ids for x in engine.generate(given[:1], GREEDY)]
        results.append((tokens, engine.stats().speculation.num_accepted_tokens, engine.stats().num_states_kept))
        assert 0 < engine.stats().speculation.num_accepted_tokens < engine.stats().speculation.num_draft_tokens
        if size == 2:
            close(engine)
        else:
            engine.close()
    assert results[0] == results[1]
    assert results[0][0][:2] == [generated(name, tuple(given[0]))] * 2


@pytest.mark.slow
def test_a_conversation_continues_from_the_states_of_two_ranks(tmp_path: Path) -> None:
    engine = start(save("qwen3.5", tmp_path))
    history = prompts(1, seed=3)[0]
    known = 0
    for turn in range(3):
        [answer] = engine.generate([history], GREEDY)
        assert answer.token_ids == generated("qwen3.5", tuple(history))
        assert answer.num_cached_tokens >= known - 4 - 1  # the last token of an answer is not computed
        known = len(history) + len(answer.token_ids)
        history = [*history, *answer.token_ids, 7 + turn, 8]
    close(engine)


def test_states_are_divided_and_fit_the_rank_with_the_least_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has half of the heads of each state. Both have as many states as the one with the least room."""
    folder = save("qwen3-next", tmp_path)
    one = start(folder, tensor_parallel=1)
    whole = one._runner.state_memory.bytes_per_state
    one.close()
    monkeypatch.setattr(loading, "find_room", lambda runner, config, length: (500, 5000))  # of rank 0 alone
    two = start(folder)
    assert 2 * two._runner.state_memory.bytes_per_state == whole
    assert two.config.num_states is not None
    assert two.config.num_states < 5000, "the other rank has room for fewer"
    close(two)
