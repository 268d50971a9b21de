"""A draft model changes no answer, draws what the large model draws where they agree, and keeps its keys in the same pages."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sampled_cases import each_nth
from speculation_cases import CASES, SAMPLED, TIGHT, check_answers, check_case
from tiny_models import make_model, make_tokenizer, random_prompts

from fa_serve.engine import Engine, EngineConfig, RequestOutput, SamplingParams
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.speculation.draft_model import DraftCache, DraftModel
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear
from fa_serve.spec import ParameterError


def save(folder: Path, noise: float, family: str = "llama", **settings: object) -> str:
    """A draft model: the large model with noise on its weights, so that it is right sometimes."""
    model = make_model(family)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * weight.std() * torch.randn_like(weight)
    for name, value in settings.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return f"draft={folder}"


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("draft"), 0.1)


@pytest.fixture(scope="module")
def twin(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("twin"), 0.0)


@pytest.fixture
def check(make_engine, draft) -> Callable[..., Engine]:
    """Answers with a draft model are those without it."""

    def check(params: SamplingParams, *, depth: int = 1, speculative: str | None = None, **given: object) -> Engine:
        return check_answers(make_engine, speculative or draft, params, depth, **given)

    return check


@pytest.mark.parametrize("case", each_nth(3, list(CASES)))  # test_drafts.py runs them all
def test_no_parameter_changes_what_is_generated(check, case) -> None:
    check_case(check, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "given"),
    [(0, TIGHT), (1, TIGHT), (1, {"prefix_caching": False}), (1, {"family": "mistral", **TIGHT}), (0, {"max_num_seqs": 2})],
    ids=["preempted-at-once", "preempted", "no-cache", "window", "queue"],
)
def test_no_setting_changes_what_is_generated(check, depth, given) -> None:
    params = replace(CASES["penalties"], max_tokens=20, logprobs=0)
    engine = check(params, depth=depth, **given)
    assert engine.stats().speculation.num_draft_tokens > 0
    if "num_pages" in given:
        assert engine.stats().num_preemptions > 0


@pytest.mark.slow
def test_stop_strings_and_stop_tokens(check, make_engine) -> None:
    found = make_engine().generate(random_prompts(4), SAMPLED)
    stop = next(each.text[5:8] for each in found if len(each.text) > 8)
    ends = tuple({each.token_ids[7] for each in found})
    for params in (
        replace(SAMPLED, stop=(stop,), min_tokens=3),
        replace(SAMPLED, stop_token_ids=ends, logprobs=0),
        replace(SAMPLED, max_tokens=6),
    ):
        check(params)


@pytest.mark.slow
def test_deterministic_mode_is_bitwise_the_same(make_engine, draft) -> None:
    params = replace(CASES["penalties"], logprobs=2, max_tokens=12)
    prompts = random_prompts(3)
    expected = make_engine(deterministic=True).generate(prompts, params)
    engine = make_engine(deterministic=True, speculative=draft)
    assert engine.generate(prompts, params) == expected
    assert engine.stats().speculation.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("params", [CASES["greedy"], CASES["sampled"]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("given", [{}, TIGHT], ids=["", "preempted"])
def test_an_equal_model_is_always_right(check, twin, params, given) -> None:
    """Its draws have the same random numbers, and its keys are right after preemptions and with shared prefixes."""
    engine = check(replace(params, max_tokens=30), speculative=twin, **given)
    found = engine.stats().speculation
    assert found.num_accepted_tokens == found.num_draft_tokens > 60
    longest = engine.generate([random_prompts(4)[0]] * 3, replace(params, max_tokens=30, n=2))
    assert {each.finish_reason for each in longest} == {"length"}
    again = engine.stats().speculation
    assert again.num_accepted_tokens == again.num_draft_tokens


def test_an_equal_model_saves_steps(make_engine, twin) -> None:
    params = SamplingParams(max_tokens=33, temperature=0.0)
    plain = make_engine()
    engine = make_engine(speculative=twin, num_speculative_tokens=7)
    [expected] = plain.generate([[3, 4, 5]], params)
    assert engine.generate([[3, 4, 5]], params) == [expected]
    assert (plain.stats().num_steps, engine.stats().num_steps) == (33, 5), "a prompt, and four times eight tokens"


@pytest.mark.slow
def test_requests_come_and_are_aborted(make_engine, draft) -> None:
    draw = random.Random(0)
    prompts = random_prompts(12)
    expected = make_engine().generate(prompts, SAMPLED)
    engine = make_engine(speculative=draft, max_num_seqs=4, num_pages=48)
    engine._steps.depth = 1
    outputs: dict[str, RequestOutput] = {}
    aborted = set()
    for step in range(400):
        if step % 3 == 0 and step // 3 < 12:
            engine.add_request(str(step // 3), prompts[step // 3], SAMPLED)
        given = engine.step()
        if draw.random() < 0.05 and (name := str(draw.randrange(12))) not in aborted:
            ended = engine.abort(name)
            given += ended
            aborted |= {name} if ended else set()
        for output in given:
            if output.request_id in outputs:
                outputs[output.request_id].absorb(output)
            else:
                outputs[output.request_id] = output
        engine.check_integrity()
    assert not engine.has_unfinished()
    assert 0 < len(aborted) < 12
    for index, completion in enumerate(expected):
        tokens = outputs[str(index)].token_ids
        assert tokens == completion.token_ids[: len(tokens)]
        assert len(tokens) == 20 or str(index) in aborted
    assert engine._scheduler.speculation.drafter._caches == {}


def test_a_request_turns_it_off(make_engine, draft) -> None:
    engine = make_engine(speculative=draft)
    off = replace(SAMPLED, speculative=False)
    assert engine.generate(random_prompts(2), off) == make_engine().generate(random_prompts(2), off)
    assert engine.stats().speculation.num_drafts == 0


def test_a_long_prompt_is_taken_in_over_several_steps(make_engine, twin) -> None:
    """Others draft meanwhile: who lacks few tokens comes first."""
    engine = make_engine(speculative=twin, max_num_seqs=2)
    engine._scheduler.speculation.drafter._max_tokens = 16
    engine._steps.depth = 1
    taken: list[tuple[str, int]] = []
    launch = engine._runner.draft.launch

    def watch(batch):
        assert batch.num_tokens <= 16
        taken.extend((chunk.sequence.request.request_id, chunk.length) for chunk in batch.chunks if chunk.length > 1)
        return launch(batch)

    engine._runner.draft.launch = watch
    params = SamplingParams(max_tokens=40, temperature=0.0)
    engine.add_request("long", list(range(100, 150)), params)
    engine.add_request("short", [5, 6, 7], params)
    outputs: dict[str, list[int]] = {"long": [], "short": []}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] += output.token_ids
    expected = make_engine().generate([list(range(100, 150)), [5, 6, 7]], params)
    assert [outputs["long"], outputs["short"]] == [each.token_ids for each in expected]
    assert taken[0] == ("short", 4)
    assert [name for name, _ in taken[:4]].count("long") >= 2
    found = engine.stats().speculation
    assert found.num_accepted_tokens == found.num_draft_tokens > 40
    assert engine.stats().num_steps < 22, "taking a prompt in is no failure, after which a sequence would pause"


def test_a_short_draft_model_stops_at_its_length(tmp_path, make_engine) -> None:
    model = save(tmp_path, 0.0, max_position_embeddings=24)
    engine = make_engine(speculative=model)
    params = SamplingParams(max_tokens=40, temperature=0.0)
    assert engine.generate([[3, 4, 5]], params) == make_engine().generate([[3, 4, 5]], params)
    assert 0 < engine.stats().speculation.num_draft_tokens <= 24
    long = SequenceState(Request("long", [0] * 23, SamplingParams(), 9))
    drafter = engine._scheduler.speculation.drafter
    assert not drafter.promises(long), "it does not wait for drafts that never come"
    assert drafter.promises(SequenceState(Request("short", [0] * 22, SamplingParams(), 9)))


def test_a_failure_of_the_draft_model_ends_no_request(make_engine, draft, monkeypatch, caplog) -> None:
    engine = make_engine(speculative=draft)
    launch = engine._runner.draft.launch
    calls: list[int] = []

    def fail(batch):
        calls.append(1)
        if len(calls) == 9:
            raise torch.OutOfMemoryError("no memory for drafts")
        return launch(batch)

    monkeypatch.setattr(engine._runner.draft, "launch", fail)
    assert engine.generate(random_prompts(4), SAMPLED) == make_engine().generate(random_prompts(4), SAMPLED)
    assert len(calls) == 9, "it is not asked again"
    assert "speculative decoding is disabled, because the draft model failed" in caplog.text
    assert not engine._scheduler.speculation.drafter.promises(SequenceState(Request("a", [0], SamplingParams(), 9)))
    engine.check_integrity()


@pytest.mark.slow
def test_a_token_that_the_sampler_did_not_find_ends_a_draft(make_engine, draft, monkeypatch) -> None:
    engine = make_engine(speculative=draft)
    model = engine._runner.draft.model
    forward = model.forward

    def broken(*arguments, **options):
        output = forward(*arguments, **options)
        output.logits[:] = float("nan")
        return output

    monkeypatch.setattr(model, "forward", broken)
    assert engine.generate(random_prompts(2), SAMPLED) == make_engine().generate(random_prompts(2), SAMPLED)
    assert engine.stats().speculation.num_draft_tokens == 0


def test_what_a_cache_holds() -> None:
    sequence = SequenceState(Request("a", [1, 2, 3], SamplingParams(), 9))
    for token in (4, 5, 6):
        sequence.tokens.append(token)
    assert DraftCache([], 0).num_known(sequence) == 0
    assert DraftCache([], 4, [5, 7]).num_known(sequence) == 5, "the second draft was wrong"
    assert DraftCache([], 4, [5, 6, 8]).num_known(sequence) == 5, "the last token is always computed"
    assert DraftCache([], 4, [9, 6]).num_known(sequence) == 4


def test_another_vocabulary_is_refused(tmp_path, make_engine) -> None:
    model = make_model()
    model.resize_token_embeddings(310)
    model.save_pretrained(tmp_path / "smaller")
    make_tokenizer().save_pretrained(tmp_path / "smaller")
    rule = (
        r"speculative must name a draft model with the same vocabulary: it computes logits for 310 tokens, but .* for 320, got "
    )
    with pytest.raises(ParameterError, match=rule) as error:
        make_engine(speculative=f"draft={tmp_path / 'smaller'}")
    assert error.value.field == "speculative"
    other = make_tokenizer()
    other.add_tokens(["more"])
    make_model().save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ParameterError, match="its tokenizer's differs from that of "):
        make_engine(speculative=f"draft={tmp_path / 'other'}")
    with pytest.raises(ParameterError, match=r"speculative must name a draft model: .*existing folder"):
        make_engine(speculative=f"draft={tmp_path / 'nowhere'}")


@pytest.mark.parametrize("name", ["draft=", "draft", "eagle", "eagle3=", ""])
def test_a_draft_model_needs_a_name(make_engine, name) -> None:
    with pytest.raises(ParameterError, match="speculative must be None, ngram, draft=MODEL or eagle3=HEAD, got"):
        make_engine(speculative=name)


def test_the_cache_of_both_models_fits_the_memory(make_engine, draft) -> None:
    """A page takes the memory of its keys in both caches."""
    plain = make_engine()
    engine = make_engine(speculative=draft)
    assert engine._runner.bytes_per_page == 2 * plain._runner.bytes_per_page
    assert [len(engine._runner.draft.kv_caches), len(engine._runner.draft.kv_caches[0][0])] == [2, 128]


def test_drafts_by_graphs(make_engine, twin, replays, monkeypatch) -> None:
    """Each draft is a step of one token, which replays a graph."""
    params = SamplingParams(max_tokens=17, temperature=0.0)
    expected = make_engine().generate([[3, 4, 5]], params)
    monkeypatch.setattr("fa_serve.engine.runner.model_runner.StepGraphs.capture_largest", lambda graphs: None)
    engine = make_engine(speculative=twin)
    for runner in (engine._runner, engine._runner.draft):
        runner.eager = False
    assert engine._runner.make_graphs()
    assert engine.generate([[3, 4, 5]], params) == expected
    assert len(replays) >= 2 * 6
    found = engine.stats().speculation
    assert found.num_accepted_tokens == found.num_draft_tokens


def test_the_drafter_is_one_for_the_engine(make_engine, draft) -> None:
    assert isinstance(make_engine(speculative=draft)._scheduler.speculation.drafter, DraftModel)


def test_the_draft_model_keeps_the_weights_of_its_checkpoint(make_engine, draft, tmp_path) -> None:
    """`quantization` is the model's affair: a draft model that is quantised already must not be refused for it."""
    large = save(tmp_path / "large", 0.0).removeprefix("draft=")
    engine = Engine(EngineConfig(model=large, device="cpu", num_pages=64, quantization="fp8", speculative=draft))
    models = (engine._runner.model, engine._runner.draft.model)
    assert [any(isinstance(x, QuantizedLinear) for x in model.modules()) for model in models] == [True, False]
