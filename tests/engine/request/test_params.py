"""Every parameter, from the request to the tokens: the engine against a plain loop over the eager model."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from tiny_models import VOCAB, greedy, make_model

from fa_serve.engine import SamplingParams, StructuredOutput
from fa_serve.engine.request.params import MAX_STRUCTURED, adapter_of_each, params_of_each, schema_length
from fa_serve.engine.request.request import Request
from fa_serve.engine.runner.sampler import sampling_arrays
from fa_serve.spec import ParameterError

PROMPT = [5, 6, 7, 8, 9, 5, 6]


def plain_loop(prompt: list[int], params: SamplingParams) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens under penalties and biases, and the log-probabilities of the model before each of them."""
    model = make_model()
    tokens = list(prompt)
    logprobs = []
    while len(tokens) - len(prompt) < params.max_tokens:
        with torch.no_grad():
            raw = model(torch.tensor([tokens])).logits[0, -1]
        logprobs.append(raw.log_softmax(-1))
        logits = raw.clone()
        answer = tokens[len(prompt) :]
        for token in set(tokens):
            logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
        for token in set(answer):
            logits[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        logits[list(params.bad_token_ids)] = float("-inf")
        if len(answer) < params.min_tokens:
            logits[list(params.stop_token_ids)] = float("-inf")
        if params.allowed_token_ids is not None:
            kept = list(params.allowed_token_ids)
            logits = torch.full_like(logits, float("-inf")).index_copy(0, torch.tensor(kept), logits[kept])
        tokens.append(int(logits.argmax()))
        if tokens[-1] in params.stop_token_ids:
            break
    return tokens[len(prompt) :], logprobs


PLAIN = greedy(make_model(), PROMPT, 16)
CASES = {
    "presence": {"presence_penalty": 2.0},
    "negative presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.8},
    "all penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {PLAIN[0]: -100.0, 11: 4.0, 300: 2.5}},
    "bad": {"bad_token_ids": tuple(PLAIN[:3])},
    "allowed": {"allowed_token_ids": (4, 9, 40, 41, 42)},
    "allowed and biased": {"allowed_token_ids": (4, 9, 40, 41, 42), "bad_token_ids": (9,), "logit_bias": {4: 3.0}},
    "stop id": {"stop_token_ids": (PLAIN[4],)},
    "min_tokens": {"stop_token_ids": (PLAIN[4],), "min_tokens": 9},
}


def params_of(case: str) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=0.0, **CASES[case])


@functools.cache
def expected_of(case: str) -> list[int]:
    return plain_loop(PROMPT, params_of(case))[0]


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_the_plain_loop(make_engine, case) -> None:
    assert expected_of(case) != PLAIN, "the case should change something"
    assert make_engine().generate([PROMPT], params_of(case))[0].token_ids == expected_of(case)


@pytest.mark.parametrize("settings", [{}, {"num_pages": 16, "max_model_len": 48, "max_num_seqs": 5}], ids=["", "preempted"])
def test_greedy_tokens_are_those_in_a_batch_with_every_other_parameter(make_engine, settings) -> None:
    engine = make_engine(**settings)
    completions = engine.generate([PROMPT] * len(CASES), [params_of(case) for case in CASES])
    tokens = {case: completion.token_ids for case, completion in zip(CASES, completions, strict=True)}
    assert tokens == {case: expected_of(case) for case in CASES}
    assert not settings or engine.stats().num_preemptions > 0


def test_what_each_step_goes_through_is_bounded() -> None:
    for name in ("allowed_token_ids", "bad_token_ids", "stop_token_ids"):
        SamplingParams(**{name: tuple(range(1024))})
        with pytest.raises(ValueError, match=f"{name} must hold at most 1024 token ids, got 1025"):
            SamplingParams(**{name: tuple(range(1025))})
    for bias in (dict.fromkeys(range(1025), 1.0), [1]):
        with pytest.raises(ValueError, match="logit_bias must be a mapping of at most 1024 token ids"):
            SamplingParams(logit_bias=bias)


def test_stop_strings_wait_for_min_tokens(make_engine, tokenizer) -> None:
    free = make_engine().generate([PROMPT], SamplingParams(max_tokens=16, temperature=0.0))[0]
    stop = tuple(dict.fromkeys(free.text))[:16]  # as many as a request may have
    held = make_engine().generate([PROMPT], SamplingParams(max_tokens=16, temperature=0.0, min_tokens=9, stop=stop))[0]
    assert held.finish_reason == "stop"
    assert held.token_ids == free.token_ids[: len(held.token_ids)]
    assert len(held.token_ids) == 10
    assert held.text == tokenizer.decode(free.token_ids[:9])


@pytest.mark.parametrize("temperature", [1e-45, 1e-7])
def test_a_temperature_near_zero_is_greedy(make_engine, temperature) -> None:
    both = [SamplingParams(max_tokens=16, temperature=value, seed=1) for value in (temperature, 1.0)]
    assert make_engine().generate([PROMPT, [3]], both)[0].token_ids == PLAIN
    requests = [Request("a", [1], values, 4) for values in both]
    assert sampling_arrays(requests, [1, 1], VOCAB)["temperature"].tolist() == [0.0, 1.0]


def test_a_slot_forgets_the_tokens_of_its_last_request(make_engine) -> None:
    engine = make_engine(max_num_seqs=1)
    params = SamplingParams(max_tokens=16, temperature=0.0, presence_penalty=2.0, repetition_penalty=1.5)
    completions = engine.generate([[30, 31, 32], PROMPT], params)
    assert completions[1].token_ids == plain_loop(PROMPT, params)[0]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_those_of_the_model(make_engine, count) -> None:
    asked = SamplingParams(max_tokens=16, temperature=0.0, logprobs=count, presence_penalty=1.0)
    expected, exact = plain_loop(PROMPT, asked)
    others = [SamplingParams(max_tokens=8, temperature=0.0), SamplingParams(max_tokens=8, seed=1, logprobs=20)]
    completions = make_engine(max_num_batched_tokens=9).generate([[3, 4], PROMPT, [1] * 12], [others[0], asked, others[1]])
    assert completions[0].logprobs is None
    assert [len(x.top) for x in completions[2].logprobs] == [20] * 8
    got = completions[1].logprobs
    assert [x.token_id for x in got] == completions[1].token_ids == expected
    for entry, truth in zip(got, exact, strict=True):
        assert entry.logprob == pytest.approx(truth[entry.token_id].item(), abs=1e-3)
        values, ids = truth.topk(count)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {-1: 0.0}),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (-1,)),
        ("bad_token_ids", (-1,)),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", "text"),
        ("stop_token_ids", (-1,)),
        ("max_tokens", True),
        ("top_k", 1.0),
        ("temperature", "1"),
        ("temperature", True),
        ("n", 0),
        ("best_of", 0),
        ("stop", (1,)),
        ("stop_token_ids", (1.0,)),
        ("stop_token_ids", 3),
        ("logit_bias", {"1": 2.0}),
        ("logit_bias", {1: "2"}),
        ("structured", "{}"),
        ("seed", 1.0),
        ("prompt_logprobs", 21),
        ("logprobs", 1.0),
        ("allowed_token_ids", "12"),
        ("detokenize", 0),
    ],
)
def test_bad_values_name_the_field(field, value) -> None:
    with pytest.raises(ParameterError) as error:
        SamplingParams(**{field: value})
    assert (error.value.field, error.value.code) == (field, "invalid_value")


def test_stop_strings_need_the_text() -> None:
    with pytest.raises(ValueError, match="detokenize must be True with stop strings, got False"):
        SamplingParams(stop=("\n",), detokenize=False)


def test_more_tokens_than_allowed_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="min_tokens must be between 0 and max_tokens, got 5"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_a_huge_top_k_keeps_all_and_harms_nobody(make_engine) -> None:
    huge, neighbour = make_engine().generate(
        [PROMPT, PROMPT], [SamplingParams(max_tokens=4, top_k=10**30, seed=1), SamplingParams(max_tokens=4, temperature=0.0)]
    )
    assert (huge.error, neighbour.error) == (None, None)
    assert neighbour.token_ids == PLAIN[:4]
    assert huge.token_ids == make_engine().generate([PROMPT], SamplingParams(max_tokens=4, seed=1))[0].token_ids


def test_a_tiny_temperature_is_greedy(make_engine) -> None:
    tiny = make_engine().generate([PROMPT], SamplingParams(max_tokens=8, temperature=1e-40, top_p=0.9, seed=1))[0]
    assert tiny.token_ids == PLAIN[:8]


def test_structured_outputs_are_bounded_before_anything_reads_them() -> None:
    long = "x" * (MAX_STRUCTURED + 1)
    values = {"json_schema": {"enum": [1] * MAX_STRUCTURED}, "regex": long, "choice": ("a", long), "grammar": long}
    for name, value in values.items():
        with pytest.raises(ParameterError, match=f"{name} must have at most 262144 characters"):
            StructuredOutput(**{name: value})
    with pytest.raises(ParameterError, match="json_schema must have"):
        StructuredOutput(json_schema=long)
    StructuredOutput(regex=long[1:])


def test_the_length_of_a_schema_is_at_most_that_of_its_json_and_is_not_counted_beyond_a_limit() -> None:
    for schema in ({}, {"a": [1, 2.5, True, None, "text"]}, {"properties": {"a": {"type": "string", "enum": ["b", "c"]}}}):
        written = len(json.dumps(schema, separators=(",", ":")))
        assert 0.6 * written <= schema_length(schema, 1000) <= written + 3
    counted = []

    class Text(str):
        def __len__(self) -> int:
            counted.append(self)
            return 3

    assert schema_length({"enum": [Text("abc")] * 1000}, 100) > 100
    assert not counted, "the number of the texts is enough"
    assert schema_length({str(i): [Text("abc")] for i in range(1000)}, 6000) > 6000
    assert len(counted) < 1000


def test_other_numbers_are_checked_and_the_rest_is_not_checked_again(monkeypatch) -> None:
    params = SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=(7, 8), logit_bias={3: 1.0}, n=2)
    monkeypatch.setattr(SamplingParams, "_check_tokens", None)
    other = params.with_numbers(max_tokens=3, n=1)
    assert (other.max_tokens, other.n, other.min_tokens, other.stop_token_ids) == (3, 1, 2, (7, 8))
    assert (params.max_tokens, params.n) == (5, 2)
    assert params.with_numbers(max_tokens=5) is params
    with pytest.raises(ParameterError, match="min_tokens must be between 0 and max_tokens"):
        params.with_numbers(max_tokens=1)


@pytest.mark.parametrize("given", [{"max_tokens": 3}, [{"max_tokens": 3}], 3])
def test_params_of_prompts_are_sampling_params(given) -> None:
    with pytest.raises(ParameterError, match="params must be one SamplingParams, or one for each of 1 prompts") as caught:
        params_of_each([PROMPT], given, SamplingParams())
    assert caught.value.value is given


def test_one_adapter_or_one_for_each_prompt() -> None:
    assert [*adapter_of_each([PROMPT] * 2, "french")] == ["french"] * 2
    assert [*adapter_of_each([PROMPT] * 2, ["french", None])] == ["french", None]
    for given in (3, ["french"]):
        with pytest.raises(ParameterError, match="adapter must be one name, or one for each of 2 prompts"):
            adapter_of_each([PROMPT] * 2, given)
