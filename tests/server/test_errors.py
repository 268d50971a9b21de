"""What a client reads when a value is bad: short, whatever the value is."""

import time

import pytest
from fa_serve.server.errors import bad_request
from fa_serve.server.schemas import CompletionRequest
from pydantic import ValidationError


def complaint(value) -> str:
    try:
        CompletionRequest(model="m", prompt="x", n=value)
    except ValidationError as error:
        return bad_request([{**e, "loc": ("body", *e["loc"])} for e in error.errors()]).message
    raise AssertionError(f"{value!r} passed")


def test_a_huge_value_is_neither_written_out_nor_sent_back():
    deep = ["x"]
    for _ in range(500):
        deep = [deep]
    for value in ("x" * 10_000_000, [{"a": "b" * 1000}] * 1_000_000, deep, {str(i): i for i in range(100_000)}):
        begin = time.perf_counter()
        text = complaint(value)
        assert time.perf_counter() - begin < 0.2, "repr of the whole would take longer"
        assert len(text) < 700
        assert text.startswith("n: ")


@pytest.mark.parametrize("name", ["foo-bar", "str", "", "beam width"])
def test_an_unknown_field_is_named_whatever_its_name_is(name):
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({"model": "m", "prompt": "p", name: 1})
    error = bad_request([each | {"loc": ("body", *each["loc"])} for each in refused.value.errors()])
    assert (error.param or "", error.code) == (name, "unknown_parameter")


def test_a_small_value_is_shown():
    assert complaint("three").endswith("got 'three'.")
