"""Models that keep recurrent or convolution states, through the engine: every answer is that of transformers' `generate`."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import server_process
import torch
from generated_hybrids import expected, generated, model_of, prompts
from hf_families import Family
from hybrids import HYBRIDS
from sampled_cases import ALL, each_nth
from tiny_models import VOCAB, make_model, make_tokenizer

from fa_serve.engine import Engine, SamplingParams, StructuredOutput
from fa_serve.engine.cache.tensors import STATE_TOKENS
from fa_serve.engine.runner import cuda_graphs
from fa_serve.engine.runner.cuda_graphs import StepGraphs
from fa_serve.engine.speculation import drafts as speculation
from fa_serve.engine.speculation.drafts import NgramDrafter
from fa_serve.engine.start import loading
from fa_serve.engine.structured import grammars
from fa_serve.hf import plan_division
from fa_serve.spec import ParameterError, UnsupportedModelError

GREEDY = SamplingParams(max_tokens=14, temperature=0.0)
KINDS = ("qwen3.5", "kimi-linear", "nemotron-h", "jamba", "lfm2", "mamba", "minimax", "recurrent-gemma")
"""A family of each kind of state, and those with blocks that have none, and without attention."""
SERVED = [family for family in HYBRIDS if ALL or family.name in KINDS]
"""tests/hf/adapter/test_packed_forwards.py computes the layers of all families."""


@pytest.fixture
def make(make_engine) -> Callable[..., Engine]:
    def start(name: str = "qwen3.5", **settings: Any) -> Engine:
        return make_engine(model=copy.deepcopy(model_of(name)), **{"max_model_len": 96} | settings)

    return start


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
def test_greedy_tokens_are_those_of_generate(make, family: Family) -> None:
    """In chunks and padded batches; then again from the prefix cache, of which all but the last page is read."""
    engine = make(family.name, page_size=16, max_num_batched_tokens=27, max_num_seqs=3)
    given = prompts(4)
    first = engine.generate(given, GREEDY)
    assert [x.token_ids for x in first] == expected(family.name, given)
    assert {x.num_cached_tokens for x in first} == {0}
    again = engine.generate(given, GREEDY)
    assert [x.token_ids for x in again] == expected(family.name, given)
    assert [x.num_cached_tokens for x in again] == [(len(prompt) - 1) // 16 * 16 for prompt in given]
    engine.check_integrity()
    assert (engine.stats().num_pages_used, engine.stats().num_states_used) == (0, 0)
    assert engine.stats().num_states_kept > 0


@pytest.mark.parametrize("name", each_nth(2, KINDS))
def test_replayed_steps_give_the_same_tokens(make, replays: list[int], name: str) -> None:
    """Prompts and decoding through the buffers of CUDA graphs, with padding; prompts are captured when they come again."""
    engine = make(name, max_num_batched_tokens=64, max_num_seqs=5, prefix_caching=False)
    engine._runner.make_graphs()
    given = prompts(5)
    for _ in range(3):
        assert [x.token_ids for x in engine.generate(given, GREEDY)] == expected(name, given)
    graphs = engine._runner._graphs
    assert {shape.kind for shape in graphs._replays} == {"nothing", "prompts"}
    assert len(replays) > 30
    engine.check_integrity()


@pytest.mark.parametrize("room", [0, 99])
def test_a_step_with_more_pieces_than_a_graph_has_room_for_is_eager(make, replays: list[int], monkeypatch, room: int) -> None:
    engine = make(max_num_batched_tokens=64, max_num_seqs=5, prefix_caching=False)
    engine._runner.make_graphs()
    monkeypatch.setattr(cuda_graphs, "num_graph_pieces", lambda batch, tokens, prompts: room)
    run = StepGraphs.run
    kinds: list[str] = []
    monkeypatch.setattr(StepGraphs, "run", lambda graphs, shape: kinds.append(shape.kind) or run(graphs, shape))
    given = prompts(5)
    for _ in range(3):
        assert [x.token_ids for x in engine.generate(given, GREEDY)] == expected("qwen3.5", given)
    assert ("prompts" in kinds) == (room > 0)


@pytest.mark.parametrize("name", each_nth(2, KINDS[::-1]))
def test_sequences_that_are_preempted_and_short_of_states(make, name: str) -> None:
    engine = make(name, num_pages=24, num_states=6, max_num_batched_tokens=23, max_model_len=64)
    engine._steps.depth = 1
    given = prompts(8)
    assert [x.token_ids for x in engine.generate(given, GREEDY)] == expected(name, given)
    assert engine.stats().num_preemptions > 0
    engine.check_integrity()
    assert engine.stats().num_states_used == 0


def test_a_conversation_continues_from_its_last_page(make) -> None:
    """A turn computes its new tokens and at most a page of the history."""
    engine = make("qwen3.5", max_model_len=128)
    history = prompts(1, seed=3)[0]
    known = 0
    for turn in range(4):
        answer = engine.generate([history], GREEDY)[0]
        assert answer.token_ids == generated("qwen3.5", tuple(history))
        assert answer.num_cached_tokens >= known - 4 - 1  # the last token of an answer is not computed
        known = len(history) + len(answer.token_ids)
        history = [*history, *answer.token_ids, 7 + turn, 8]


def test_prompts_that_part_share_the_state_before(make) -> None:
    """The third prompt of a common beginning starts where the first two part."""
    engine = make("jamba")
    common = prompts(1, seed=5)[0][:1] + list(range(10, 33))
    given = [[*common, *[last] * 9] for last in (40, 50, 60)]
    cached = []
    for prompt in given:
        answer = engine.generate([prompt], GREEDY)[0]
        assert answer.token_ids == generated("jamba", tuple(prompt))
        cached.append(answer.num_cached_tokens)
    assert cached == [0, 0, 24]


def test_a_salt_isolates_states(make) -> None:
    engine = make("lfm2")
    prompt = list(range(3, 40))
    for salt, cached in (("a", 0), ("b", 0), ("a", 36), (None, 0)):
        engine.add_request("x", prompt, GREEDY, cache_salt=salt)
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
        assert [token for x in outputs for token in x.token_ids] == generated("lfm2", tuple(prompt))
        assert outputs[-1].num_cached_tokens == cached


@pytest.mark.parametrize("name", KINDS[::2])
def test_several_answers_share_the_state_of_their_prompt(make, name: str) -> None:
    engine = make(name)
    given = prompts(2, seed=2)
    params = replace(GREEDY, n=3)
    answers = engine.generate(given, params)
    assert [x.token_ids for x in answers] == [tokens for tokens in expected(name, given) for _ in range(3)]
    sampled = SamplingParams(max_tokens=14, temperature=1.0, seed=3, n=3)
    together = engine.generate(given[:1], sampled)
    assert len({tuple(x.token_ids) for x in together}) == 3
    alone = make(name, max_num_seqs=1, prefix_caching=False).generate(given[:1], sampled)
    assert [x.token_ids for x in together] == [x.token_ids for x in alone]


@pytest.mark.parametrize(("name", "depth"), [*((name, 1) for name in each_nth(2, KINDS)), ("qwen3.5", 0)])
def test_drafts_that_are_accepted_and_dropped(make, monkeypatch: pytest.MonkeyPatch, name: str, depth: int) -> None:
    """Drafts are the right tokens, a third of them replaced by others."""
    given = prompts(4, seed=1)
    right = {tuple(prompt): [*prompt, *generated(name, tuple(prompt))] for prompt in given}
    draw = random.Random(3)

    def propose(drafter: NgramDrafter, sequence: Any, count: int) -> list[int]:
        drafts = right[tuple(sequence.request.prompt)][len(sequence.tokens) :][:count]
        return [(token + 1) % VOCAB if draw.random() < 0.33 else token for token in drafts]

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    monkeypatch.setattr(speculation, "MAX_PAUSE", 1)
    engine = make(name, speculative="ngram", num_speculative_tokens=5)
    engine._steps.depth = depth
    for _ in range(2):
        assert [x.token_ids for x in engine.generate(given, GREEDY)] == expected(name, given)
    stats = engine.stats().speculation
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    engine.check_integrity()


STRUCTURED = {
    "regex": replace(GREEDY, max_tokens=30, structured=StructuredOutput(regex="[ab]{6}c{3,9}d")),
    "choice": replace(GREEDY, max_tokens=30, structured=StructuredOutput(choice=("the quick", "the slow"))),
}


@pytest.mark.parametrize("name", ["qwen3.5", "mamba"])
@pytest.mark.parametrize("kind", STRUCTURED)
def test_structured_answers(make, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    """They follow the grammar, and those whose masks come late, so that a token is computed again, are the same."""
    given = prompts(6, seed=4)
    answers = make(name).generate(given, STRUCTURED[kind])
    for answer in answers:
        assert re.fullmatch("[ab]{0,6}c{0,9}d?" if kind == "regex" else "the quick|the slow", answer.text)
    engine = make(name)
    engine._steps.depth = 1
    monkeypatch.setattr(grammars, "MASKS_SECONDS", 0.0)  # one mask in a step
    monkeypatch.setattr(grammars, "SLOW_STEP_SECONDS", -1.0)
    engine.grammars._one_by_one = True
    assert [x.token_ids for x in engine.generate(given, STRUCTURED[kind])] == [x.token_ids for x in answers]
    engine.check_integrity()


def test_log_probabilities_of_a_prompt_that_is_cached(make) -> None:
    engine = make("granite-hybrid")
    prompt = prompts(1, seed=6)[0]
    params = replace(GREEDY, prompt_logprobs=1, logprobs=1)
    first = engine.generate([prompt], params)[0]
    engine.generate([prompt], GREEDY)
    again = engine.generate([prompt], params)[0]
    assert again.num_cached_tokens == 0
    for one, other in zip(first.prompt_logprobs or [], again.prompt_logprobs or [], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    with torch.no_grad():
        logits = model_of("granite-hybrid")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    right = logits[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    found = torch.tensor([x.logprob for x in (first.prompt_logprobs or []) if x is not None])
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("depth", [0, 1])
def test_an_aborted_request_leaves_its_states(make, depth: int) -> None:
    engine = make("qwen3.5", max_num_batched_tokens=20)
    engine._steps.depth = depth
    given = prompts(3, seed=7)
    for number, prompt in enumerate(given):
        engine.add_request(str(number), prompt, GREEDY)
    for _ in range(6):
        engine.step()
    engine.abort("1")
    engine.check_integrity()
    while engine.has_unfinished():
        engine.step()
    assert [x.token_ids for x in engine.generate(given, GREEDY)] == expected("qwen3.5", given)
    engine.check_integrity()
    assert engine.stats().num_states_used == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_step_that_fails_half_way(make, monkeypatch: pytest.MonkeyPatch, depth: int, error: type[Exception]) -> None:
    """Its layers up to some have run. Out of memory, it is undone and computed again; otherwise its requests end."""
    engine = make("bamba", max_num_batched_tokens=20)
    engine._steps.depth = depth
    given = prompts(4, seed=8)
    right = expected("bamba", given)
    for number, prompt in enumerate(given):
        engine.add_request(str(number), prompt, GREEDY)
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(given))}
    head = engine._runner.model.lm_head
    for number in range(1000):
        if not engine.has_unfinished():
            break
        if number in (2, 6):

            def fail(*args: Any) -> None:
                raise error("the last layer has failed")

            hook = head.register_forward_pre_hook(fail)
            outputs = engine.step()
            hook.remove()
        else:
            outputs = engine.step()
        for output in outputs:
            answers[output.request_id] += output.token_ids
        engine.check_integrity()
    if error is torch.OutOfMemoryError:
        assert list(answers.values()) == right
    assert [x.token_ids for x in engine.generate(given, GREEDY)] == right
    assert engine.stats().num_states_used == 0


def test_states_that_are_not_finite_are_not_kept(make) -> None:
    engine = make("mamba2")
    prompt = prompts(1, seed=9)[0]
    first = engine._runner.model.backbone.layers[0]

    def spoil(module: Any, args: Any, output: Any) -> Any:
        return output * torch.nan

    hook = first.mixer.in_proj.register_forward_hook(spoil)
    assert engine.generate([prompt], GREEDY)[0].error is not None
    hook.remove()
    answer = engine.generate([prompt], GREEDY)[0]
    assert (answer.token_ids, answer.num_cached_tokens) == (generated("mamba2", tuple(prompt)), 0)


def test_a_draft_model_drafts_for_a_model_with_states(make, tmp_path: Path) -> None:
    """The draft model keeps none."""
    draft = make_model("llama")
    draft.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    engine = make("qwen3.5", speculative=f"draft={tmp_path}", num_speculative_tokens=3)
    given = prompts(3, seed=10)
    assert [x.token_ids for x in engine.generate(given, GREEDY)] == expected("qwen3.5", given)
    assert engine.stats().speculation.num_drafts > 0


def test_few_pages_have_few_states_where_there_is_room_for_many(make, monkeypatch) -> None:
    monkeypatch.setattr(loading, "find_room", lambda *_: (10**6, 10**6))
    engine = make("qwen3.5", num_pages=24, page_size=16, num_states=None, max_num_seqs=4)
    memory = engine._runner.state_memory
    assert engine.config.num_states == memory.enough_states(24) == memory.least_states + 16 + 24 * 16 // STATE_TOKENS


def test_what_is_not_built_is_refused(make, make_engine, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="deterministic must be False for Qwen3_5ForCausalLM, which keeps states"):
        make("qwen3.5", deterministic=True)
    model_of("lfm2").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ParameterError, match="a draft model that keeps no states, unlike Lfm2ForCausalLM"):
        make_engine(speculative=f"draft={tmp_path}")
    with pytest.raises(ParameterError, match="num_states must be None for a model that keeps no states"):
        make_engine(num_states=8)
    with pytest.raises(ParameterError, match=r"num_states must be at most \d+: a state takes .* MiB in all layers, 100000"):
        make("lfm2", num_states=10**11)
    refusal = (
        r"cannot be divided between 2 ranks: model.layers.0.mamba \(ZambaMambaMixer\) keeps its state in a form that cannot be"
    )
    with pytest.raises(UnsupportedModelError, match=refusal):
        plan_division(model_of("zamba"), 2)


@pytest.mark.slow
def test_a_real_server_answers_from_the_prefix_cache(tmp_path: Path) -> None:
    model_of("qwen3.5").save_pretrained(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    server = server_process.start_warm(str(tmp_path), "--page-size", "16", "--max-model-len", "96", "--dtype", "float32")
    try:
        prompt = prompts(1, seed=11)[0][:40] + list(range(20, 30))
        body = {"model": tmp_path.name, "prompt": prompt, "max_tokens": 14, "temperature": 0.0, "return_token_ids": True}
        cached = []
        for _ in range(2):
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            assert answer["choices"][0]["text"] == tokenizer.decode(generated("qwen3.5", tuple(prompt)))
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, (len(prompt) - 1) // 16 * 16]
    finally:
        server.end()
