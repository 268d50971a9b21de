"""An EAGLE-3 head changes no answer, guesses what its equation says, and finds the model's hidden states in the pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from eagle3_heads import HIDDEN, copying_head, quiet_model, reference_drafts, save_head
from sampled_cases import each_nth
from speculation_cases import CASES, SAMPLED, TIGHT, check_answers, check_case
from tiny_models import VOCAB, random_prompts

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.runner.padded_steps import Shape, padding
from fa_serve.engine.runner.transfer import send
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.start.start_up import warm_up
from fa_serve.hf.surgery.fuse.layer import FusedLayer
from fa_serve.launching.compilations import Compilers
from fa_serve.spec import ParameterError

LOUDNESS = 0.005
NOISE = 0.1
TOKENS = [token for token in range(VOCAB) if token % 8 != 2]


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    """A head that is right sometimes, with a vocabulary without some of the tokens."""
    return copying_head(quiet_model(), NOISE, TOKENS)


@pytest.fixture(scope="module")
def head(tmp_path_factory, tensors) -> str:
    return save_head(tmp_path_factory.mktemp("head"), tensors)


@pytest.fixture(scope="module")
def right_head(tmp_path_factory) -> str:
    """A head that draws what a quiet model draws."""
    return save_head(tmp_path_factory.mktemp("right"), copying_head(quiet_model()))


@pytest.fixture
def make_quiet(make_engine) -> Callable[..., Engine]:
    def make(family: str = "llama", loudness: float = LOUDNESS, **settings: object) -> Engine:
        return make_engine(model=quiet_model(family, loudness), **settings)

    return make


@pytest.fixture
def check(make_quiet, head) -> Callable[..., Engine]:
    """Answers with a head are those without it."""

    def check(params: SamplingParams, *, depth: int = 1, speculative: str | None = None, **given: object) -> Engine:
        return check_answers(make_quiet, speculative or head, params, depth, **given)

    return check


@pytest.mark.parametrize("case", each_nth(3, list(CASES)))  # test_drafts.py runs them all
def test_no_parameter_changes_what_is_generated(check, case) -> None:
    check_case(check, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [{"depth": 0, **TIGHT}, TIGHT, {"prefix_caching": False}, {"family": "mistral", **TIGHT}, {"family": "qwen3"}],
    ids=["at-once", "preempted", "no-cache", "window", "other-family"],
)
def test_no_setting_changes_what_is_generated(check, given) -> None:
    engine = check(replace(CASES["penalties"], max_tokens=20, logprobs=0), **given)
    assert engine.stats().speculation.num_draft_tokens > 0
    if "num_pages" in given:
        assert engine.stats().num_preemptions > 0


def test_answers_end_inside_a_draft(check, make_quiet, right_head) -> None:
    found = make_quiet(loudness=0.0).generate(random_prompts(4), SAMPLED)
    stop = next(each.text[5:8] for each in found if len(each.text) > 8)
    ends = tuple({each.token_ids[7] for each in found})
    for params in (replace(SAMPLED, stop=(stop,), min_tokens=3), replace(SAMPLED, stop_token_ids=ends, logprobs=0)):
        check(params, loudness=0.0, speculative=right_head)


@pytest.mark.slow
@pytest.mark.parametrize("params", [CASES["greedy"], CASES["sampled"]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("given", [{}, TIGHT], ids=["", "preempted"])
def test_a_right_head_is_always_right(check, right_head, params, given) -> None:
    """Its draws have the request's random numbers, and its keys are right after preemptions and with shared prefixes."""
    engine = check(replace(params, max_tokens=30), speculative=right_head, loudness=0.0, **given)
    found = engine.stats().speculation
    assert found.num_accepted_tokens == found.num_draft_tokens > 60
    engine.generate([random_prompts(4)[0]] * 3, replace(params, max_tokens=30, n=2))
    again = engine.stats().speculation
    assert again.num_accepted_tokens == again.num_draft_tokens > found.num_draft_tokens


def test_a_right_head_saves_steps(make_quiet, right_head) -> None:
    params = SamplingParams(max_tokens=33, temperature=0.0)
    plain = make_quiet(loudness=0.0)
    engine = make_quiet(loudness=0.0, speculative=right_head, num_speculative_tokens=7)
    [expected] = plain.generate([[3, 4, 5]], params)
    assert engine.generate([[3, 4, 5]], params) == [expected]
    assert (plain.stats().num_steps, engine.stats().num_steps) == (33, 5), "a prompt, and four times eight tokens"
    assert engine.stats().speculation.accepted_at == (4,) * 7


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, TIGHT, {"deterministic": True}], ids=["", "preempted", "deterministic"])
def test_drafts_are_those_of_the_equation(make_quiet, tmp_path, monkeypatch, given) -> None:
    """With prefixes from the cache, whose hidden states were computed for another request, and with fused layers."""
    tensors = copying_head(quiet_model(), 2 * NOISE, TOKENS, focus=2.5)
    head = save_head(tmp_path, tensors)
    monkeypatch.setattr("fa_serve.engine.speculation.drafts.MAX_PAUSE", 1)
    engine = make_quiet(speculative=head, num_speculative_tokens=3, **given)
    engine._steps.depth = 1
    assert engine._runner.fuses == isinstance(engine._runner.model.model.layers[0].forward, FusedLayer)
    drafter = engine._scheduler.speculation.drafter
    propose = drafter.propose
    seen: list[tuple[list[int], list[int]]] = []

    def watch(sequence: SequenceState, count: int) -> list[int]:
        drafts = propose(sequence, count)
        if drafts:
            seen.append((list(sequence.tokens), drafts))
        return drafts

    monkeypatch.setattr(drafter, "propose", watch)
    prompts = random_prompts(4)
    params = SamplingParams(max_tokens=24, temperature=0.0)
    for again in (False, True):
        completions = engine.generate(prompts, params)
        assert (max(each.num_cached_tokens for each in completions) > 0) >= again
    assert engine.stats().num_preemptions > 0 or "num_pages" not in given
    found = engine.stats().speculation
    assert found.num_accepted_tokens > 5, "keys of right drafts are computed again"
    model = quiet_model(loudness=LOUDNESS)
    for tokens, drafts in seen[::5]:
        assert drafts == reference_drafts(model, tensors, tokens, len(drafts)), f"after {len(tokens)} tokens"


def test_a_request_for_tokens_that_the_head_does_not_know(check, make_quiet, head, monkeypatch) -> None:
    """It draws nothing then, as when a model leaves no token, and the sequence waits for drafts less and less often."""
    unknown = replace(SAMPLED, allowed_token_ids=(2, 10, 18))
    assert check(unknown).stats().speculation.num_drafts == 0
    engine = make_quiet(speculative=head)
    engine._steps.depth = 1
    launched: list[int] = []
    launch = engine._runner.draft.launch
    monkeypatch.setattr(engine._runner.draft, "launch", lambda batch: launched.append(1) or launch(batch))
    engine.generate([[3, 4, 5]], unknown)
    assert 0 < len(launched) <= 4 * 7, "after tokens 1, 3, 7 and 15"


def test_deterministic_mode_is_bitwise_the_same(make_quiet, head) -> None:
    params = replace(CASES["penalties"], logprobs=2, max_tokens=12)
    prompts = random_prompts(3)
    expected = make_quiet(deterministic=True).generate(prompts, params)
    engine = make_quiet(deterministic=True, speculative=head)
    assert engine.generate(prompts, params) == expected
    assert engine.stats().speculation.num_accepted_tokens > 0


def test_aborted_requests_leave_nothing_behind(make_quiet, right_head) -> None:
    engine = make_quiet(loudness=0.0, speculative=right_head, num_speculative_tokens=3)
    engine._steps.depth = 1
    prompts = random_prompts(3)
    expected = [each.token_ids for each in make_quiet(loudness=0.0).generate(prompts, SAMPLED)]
    got: dict[str, list[int]] = {"0": [], "1": [], "2": []}
    for step in range(40):
        if step < 3:
            engine.add_request(str(step), prompts[step], SAMPLED)
        for output in engine.abort("1") if step == 4 else engine.step():
            got[output.request_id] += output.token_ids
        engine.check_integrity()
    assert not engine.has_unfinished()
    assert 0 < len(got["1"]) < 20
    assert [got[name] for name in "02"] == [expected[0], expected[2]]
    assert engine._scheduler.speculation.drafter._caches == {}


def test_a_request_turns_it_off(make_quiet, head) -> None:
    engine = make_quiet(speculative=head)
    off = replace(SAMPLED, speculative=False)
    assert engine.generate(random_prompts(2), off) == make_quiet().generate(random_prompts(2), off)
    assert engine.stats().speculation.num_drafts == 0


def test_a_failure_of_the_head_ends_no_request(make_quiet, head, monkeypatch, caplog) -> None:
    engine = make_quiet(speculative=head)
    monkeypatch.setattr(engine._runner.draft.model, "lm_head", None)
    assert engine.generate(random_prompts(4), SAMPLED) == make_quiet().generate(random_prompts(4), SAMPLED)
    assert "speculative decoding is disabled, because the draft model failed" in caplog.text
    assert engine.stats().speculation.num_drafts == 0


def test_drafts_by_graphs(make_quiet, right_head, replays, monkeypatch) -> None:
    """Each draft is a step of one token, which replays a graph; the model's graphs keep its hidden states."""
    params = SamplingParams(max_tokens=17, temperature=0.0)
    prompts = random_prompts(3)
    expected = make_quiet(loudness=0.0).generate(prompts, params)
    monkeypatch.setattr("fa_serve.engine.runner.model_runner.StepGraphs.capture_largest", lambda graphs: None)
    engine = make_quiet(loudness=0.0, speculative=right_head)
    for runner in (engine._runner, engine._runner.draft):
        runner.eager = False
    assert engine._runner.make_graphs()
    assert engine.generate(prompts, params) == expected
    assert len(replays) >= 2 * 6
    found = engine.stats().speculation
    assert found.num_accepted_tokens == found.num_draft_tokens > 30


@torch.inference_mode()
def test_padding_writes_nothing(make_quiet, head) -> None:
    """Neither features nor outputs that belong to a sequence: its slots are -1, and its sequences have no keys."""
    engine = make_quiet(speculative=head)
    kept = engine._runner.draft.kept._features
    outputs = engine._runner.draft._last_outputs
    for tensor in (kept, outputs):
        tensor.fill_(7.0)
    for runner in (engine._runner, engine._runner.draft):
        runner._forward(runner._inputs(send(padding(Shape(4, 3, 1, 64)), runner.device), 1, 64))
    assert (kept[:-1] == 7.0).all()
    assert (kept[-1] != 7.0).any()
    assert (outputs[:-1] == 7.0).all()
    assert (outputs[-1] != 7.0).any()


def test_a_page_has_room_for_features(make_quiet, head) -> None:
    plain = make_quiet()._runner.bytes_per_page
    engine = make_quiet(speculative=head)
    assert engine._runner.bytes_per_page == plain + plain // 2 + 4 * HIDDEN * 4, "a layer of two, and four tokens of float32"
    kept = engine._runner.draft.kept
    assert kept._features.shape == (128 * 4 + 1, HIDDEN)


def test_the_warm_up_runs_the_head(model_folder, head, caplog) -> None:
    """From folders, as a server loads both. The forwards of few layers keep nothing, because they have not all states."""
    config = EngineConfig(model=model_folder, device="cpu", num_pages=64, max_num_seqs=4, max_model_len=32, speculative=head)
    engine = Engine(replace(config, max_num_batched_tokens=32))
    warm_up(engine._runner, engine.config, engine.config.max_model_len, Compilers())
    # the folder names no end token, of which the start warns
    assert [record for record in caplog.records if not record.message.startswith("No token ends an answer")] == []
    assert (engine._runner.draft.kept._features == 0).all()
    [found] = engine.generate(["the quick"], SamplingParams(max_tokens=8, temperature=0.0))
    assert len(found.token_ids) == 8
    assert engine.stats().speculation.num_draft_tokens > 0


def test_all_pages_stay_for_a_head(make_quiet, head) -> None:
    """A model with windows gives pages back, but a head attends to all tokens."""
    assert make_quiet("mistral")._scheduler.window == 8
    assert make_quiet("mistral", speculative=head)._scheduler.window is None


def test_refusals(make_quiet, tmp_path, tensors) -> None:
    """Each in one sentence, before the engine starts."""
    for changes, reason in (
        ({"hidden_size": 16}, "each hidden state that it takes has the size 16, but the size in the model is 32"),
        ({"vocab_size": 400}, "its vocabulary has the size 400, but the size in the model is 320"),
        ({"architectures": ["LlamaForCausalLM"]}, "its config says LlamaForCausalLM instead of LlamaForCausalLMEagle3"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "Eagle3Head cannot run on a paged cache"),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"it reads hidden states after 2, 1, -1 layers, but .* has 2"),
    ):
        speculative = save_head(tmp_path / "head", tensors, **changes)
        with pytest.raises(ParameterError, match=f"speculative must name an EAGLE-3 head of fa-serve-demo: {reason}") as error:
            make_quiet(speculative=speculative)
        assert error.value.field == "speculative"
    with pytest.raises(ParameterError, match=r"name an EAGLE-3 head of .*existing folder"):
        make_quiet(speculative=f"eagle3={tmp_path / 'nowhere'}")
    with pytest.raises(ParameterError, match="ngram with tensor_parallel above 1"):
        EngineConfig(speculative="eagle3=head", tensor_parallel=2)
    with pytest.raises(ParameterError, match="or eagle3=HEAD: transformers does not load the weights of MTP layers"):
        EngineConfig(speculative="mtp")
