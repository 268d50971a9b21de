"""From a prompt and its parameters to requests: limits, seeds, end tokens and the place in the queue."""

from __future__ import annotations

import pytest
from tiny_models import VOCAB

from fa_serve.engine import EngineConfig, SamplingParams
from fa_serve.engine.request.input_processor import PRIORITY_SECONDS, InputProcessor
from fa_serve.spec import ParameterError

PROMPT = [5, 6, 7, 8, 9, 5, 6]


@pytest.fixture
def processor() -> InputProcessor:
    config = EngineConfig(max_model_len=20, max_num_seqs=3, max_waiting=1, seed=0)
    return InputProcessor(None, config, vocab_size=VOCAB, eos_ids=frozenset({2}))


def test_a_request_is_complete(processor) -> None:
    (first,) = processor.process("a", PROMPT, SamplingParams(max_tokens=5, seed=7, stop_token_ids=(9,)))
    assert (first.request_id, first.prompt, first.max_tokens, first.seed) == ("a", PROMPT, 5, 7)
    assert first.end_ids == {2, 9}
    (rest,) = processor.process("b", PROMPT, SamplingParams(ignore_eos=True))
    assert rest.max_tokens == 20 - len(PROMPT), "what the model's length leaves room for"
    assert rest.end_ids == frozenset()


def test_answers_have_seeds_in_a_row_that_wrap_around(processor) -> None:
    requests = processor.process("a", PROMPT, SamplingParams(n=3, seed=2**63 - 2))
    assert [request.seed for request in requests] == [2**63 - 2, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("salt", [1, b"salt", ["salt"]])
def test_a_salt_that_is_no_string_is_refused(processor, salt) -> None:
    """It would fail, or share nothing, when the pages of the prompt are hashed."""
    with pytest.raises(ParameterError, match="cache_salt must be None or a string, got "):
        processor.process("a", PROMPT, SamplingParams(), cache_salt=salt)


def test_a_priority_shifts_the_rank(processor) -> None:
    (now,), (later,) = (processor.process(name, PROMPT, SamplingParams(), priority=p) for name, p in (("a", 0), ("b", 2)))
    assert later.rank[0] - now.rank[0] >= 2 * PRIORITY_SECONDS
    assert later.arrival - now.arrival < PRIORITY_SECONDS


@pytest.mark.parametrize(("field", "params"), [("n", {"n": 5}), ("best_of", {"n": 2, "best_of": 5})])
def test_more_answers_than_the_queue_holds_are_refused(processor, field, params) -> None:
    with pytest.raises(ParameterError, match=r"at most 4.*got 5") as error:
        processor.process("a", PROMPT, SamplingParams(**params))
    assert error.value.field == field


def test_stop_strings_need_a_tokenizer(processor) -> None:
    with pytest.raises(ParameterError) as error:
        processor.process("a", PROMPT, SamplingParams(stop=("x",)))
    assert (error.value.field, error.value.code) == ("stop", "no_tokenizer")


@pytest.mark.parametrize(
    "values", [{"logit_bias": {VOCAB: 1.0}}, {"bad_token_ids": (VOCAB,)}, {"allowed_token_ids": (1, VOCAB)}], ids=str
)
def test_tokens_outside_the_vocabulary_are_refused(make_engine, values) -> None:
    with pytest.raises(ParameterError, match=f"below {VOCAB}.*got {VOCAB}") as error:
        make_engine().generate([[1]], SamplingParams(**values))
    assert error.value.field in values


@pytest.mark.parametrize(
    "values",
    [
        {"min_tokens": 2, "stop_token_ids": (4, 5)},
        {"bad_token_ids": (4, 5, 6)},
        {"min_tokens": 1, "stop_token_ids": (4,), "bad_token_ids": (5,)},
    ],
    ids=str,
)
def test_parameters_that_leave_no_token_are_refused(make_engine, values) -> None:
    engine = make_engine()
    with pytest.raises(ParameterError, match=r"allowed_token_ids must hold a token .*got \(4, 5\)"):
        engine.add_request("a", PROMPT, SamplingParams(allowed_token_ids=(4, 5), **values))
    assert not engine.has_unfinished()
    less = values | {"min_tokens": 0, "bad_token_ids": ()}
    assert engine.generate([PROMPT], SamplingParams(max_tokens=2, allowed_token_ids=(4, 5), **less))[0].error is None


def test_priority_goes_first_and_waiting_makes_up_for_it(make_engine, monkeypatch) -> None:
    engine = make_engine(max_num_seqs=1)
    now = [0.0]
    monkeypatch.setattr("fa_serve.engine.engine.time.monotonic", lambda: now[0])
    for name, priority, at in (("low", 1, 0.0), ("normal", 0, 1.0), ("late", 0, 11.0)):
        now[0] = at
        engine.add_request(name, [1], SamplingParams(max_tokens=1), priority=priority)
    assert [output.request_id for _ in range(3) for output in engine.step()] == ["normal", "low", "late"]


def test_prompts_of_one_request_share_what_is_made_of_the_tokens_in_its_parameters(processor) -> None:
    bias = {3: 1.0, 4: -1.0}
    params = SamplingParams(max_tokens=5, logit_bias=bias, stop_token_ids=(9,))
    (first,), (second,) = (
        processor.process(name, PROMPT, params.with_numbers(max_tokens=n)) for name, n in (("a", 5), ("b", 4))
    )
    assert second.biases is first.biases
    assert second.end_ids is first.end_ids == {2, 9}
    bias[3] = 2.0
    (changed,) = processor.process("c", PROMPT, params)
    assert changed.biases.late[1].tolist() == [2.0, -1.0]
    (other,) = processor.process("d", PROMPT, params.with_numbers(min_tokens=1))
    assert set(other.biases.early[0].tolist()) == {3, 4, 2, 9}
