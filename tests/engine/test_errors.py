"""Errors are data: fields and codes for programs, messages for people. They survive pickling and the pipe of the worker."""

from __future__ import annotations

import pickle
from typing import get_args

import pytest
from tiny_models import VOCAB, make_model

import fa_serve
from fa_serve.engine import (
    Engine,
    EngineConfig,
    EngineDeadError,
    QueueFullError,
    RequestError,
    SamplingParams,
    StructuredOutput,
)
from fa_serve.engine.errors import EncoderError, RequestErrorCode, cause_of
from fa_serve.spec import FaServeError, ParameterCode, ParameterError

BAD_REQUESTS = [
    ("prompt", "invalid_value", [], {}),
    ("prompt", "invalid_value", [VOCAB], {}),
    ("prompt", "context_length_exceeded", [1] * 300, {}),
    ("prompt", "context_length_exceeded", "x" * 100_000, {}),
    ("logit_bias", "invalid_value", [1], {"logit_bias": {VOCAB: 1.0}}),
    ("stop_token_ids", "invalid_value", [1], {"stop_token_ids": (VOCAB,)}),
    ("allowed_token_ids", "invalid_value", [1], {"allowed_token_ids": (4,), "bad_token_ids": (4,)}),
    ("n", "invalid_value", [1], {"n": 5000}),
    ("best_of", "invalid_value", [1], {"best_of": 5000}),
    ("regex", "invalid_value", [1], {"structured": StructuredOutput(regex="[0-9")}),
    ("json_schema", "invalid_value", [1], {"structured": StructuredOutput(json_schema="{")}),
    ("grammar", "invalid_value", [1], {"structured": StructuredOutput(grammar="start: missing")}),
]


@pytest.mark.parametrize(("field", "code", "prompt", "params"), BAD_REQUESTS, ids=lambda x: str(x)[:20])
def test_a_bad_request_names_its_field(make_engine, field, code, prompt, params) -> None:
    engine = make_engine()
    for submit in (
        lambda: engine.add_request("bad", prompt, SamplingParams(**params)),
        lambda: engine.generate([[1], prompt], [SamplingParams(), SamplingParams(**params)]),
    ):
        with pytest.raises(ParameterError) as error:
            submit()
        assert (error.value.field, error.value.code) == (field, code)
        assert isinstance(error.value, ValueError)
    assert not engine.has_unfinished()


def test_other_arguments_are_named_too(make_engine) -> None:
    engine = make_engine()
    engine.add_request("twice", [1])
    for field, code, call in (
        ("timeout", "invalid_value", lambda: engine.add_request("a", [1], timeout=0.0)),
        ("request_id", "duplicate_request_id", lambda: engine.add_request("twice", [1])),
        ("prompts", "invalid_value", lambda: engine.generate("the quick")),
        ("params", "invalid_value", lambda: engine.generate([[1]], [SamplingParams()] * 2)),
    ):
        with pytest.raises(ParameterError) as error:
            call()
        assert (error.value.field, error.value.code) == (field, code)


def test_without_a_tokenizer_the_code_says_so() -> None:
    engine = Engine(EngineConfig(device="cpu", num_pages=32), model=make_model())
    for field, prompt, params in (
        ("prompt", "text", {}),
        ("stop", [1], {"stop": ("x",)}),
        ("structured", [1], {"structured": StructuredOutput(regex="a")}),
    ):
        with pytest.raises(ParameterError) as error:
            engine.add_request("a", prompt, SamplingParams(**params))
        assert (error.value.field, error.value.code) == (field, "no_tokenizer")


def test_errors_survive_pickling() -> None:
    original = ParameterError("prompt", "be short", [1] * 100, "context_length_exceeded")
    again = pickle.loads(pickle.dumps(original))
    assert (again.field, again.code, str(again)) == ("prompt", "context_length_exceeded", str(original))
    for code in get_args(RequestErrorCode):
        assert pickle.loads(pickle.dumps(RequestError(code, "why"))) == RequestError(code, "why")
    for error in (QueueFullError("full"), EngineDeadError("gone")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
    failed = EncoderError(RequestError("step_failed", "no memory"))
    again = pickle.loads(pickle.dumps(failed))
    assert (str(again), again.error) == ("no memory", failed.error)
    assert str(RequestError("timeout", "too late")) == "too late"


def test_the_cause_of_a_death_quotes_nothing() -> None:
    """Everybody who can reach the server may read it. The text of an exception may have a prompt in it."""
    assert cause_of(ValueError("a secret")) == "it raised ValueError"
    assert cause_of(EngineDeadError("rank 1 of 2 failed: a secret")) == "one of its ranks has failed"
    raised = EngineDeadError("the engine has ended: ValueError: a secret", "it raised ValueError")
    assert cause_of(raised) == "it raised ValueError"
    assert pickle.loads(pickle.dumps(raised)).cause == "it raised ValueError"
    assert EngineDeadError("the engine was shut down").cause == ""


def test_the_tree() -> None:
    assert issubclass(ParameterError, FaServeError)
    assert issubclass(QueueFullError, FaServeError)
    assert issubclass(EngineDeadError, FaServeError)
    assert not issubclass(RequestError, BaseException)
    assert {code for _, code, *_ in BAD_REQUESTS} <= set(get_args(ParameterCode))
    assert fa_serve.engine.QueueFullError is QueueFullError
